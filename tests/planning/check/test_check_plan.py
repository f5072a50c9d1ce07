"""Every reason why a plan cannot run is said before a rank starts, with the value that would work.

Else jobs fail late.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.job.partition import Partition
from paceline.planning.check.check_plan import check_plan
from paceline.planning.check.rules import reasons_against
from paceline.planning.plan import Plan
from planner_jobs import job_on_digits as job

LAPTOP = Cluster(
    name="this machine", hosts=(Host(name="a", cores=2, memory_bytes=2**34, cpu="Old CPU", cpu_bf16=False),)
)
GPUS = tuple(Device(index=i, name="T4", memory_bytes=2**34, bf16=False) for i in range(4))
SERVERS = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**36, cpu_bf16=True, gpus=GPUS) for name in "ab"))


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=2 microbatches=4 transport=shm balance=on",
        "memory_format=channels_last fused=on pin=on compile=on transport=gloo",
        "precision=fp64",
    ],
)
def test_a_plan_that_fits_has_no_reason_against_it(plan: str) -> None:
    assert check_plan(Plan.parse(plan), job(), LAPTOP) == []


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        (
            "dp=999",
            {"global_batch": 999},
            (
                "needs 999 ranks, for which torch alone takes 250 GiB of memory; this machine has room for 64 and "
                "cores for 2: dp=2."
            ),
        ),
        (
            "balance=on",
            {},
            "moves samples from slow replicas to fast ones, and there is only one: dp=2 or more, or balance=auto.",
        ),
        (
            "dp=2 sync=local:8 balance=on",
            {},
            "cannot move samples between replicas that take steps of their own (sync=local:8): balance=auto.",
        ),
        (
            "dp=2 balance=on",
            {"partition": "hierarchical"},
            "cannot move samples between hosts that read their own part (partition: hierarchical): balance=auto.",
        ),
        ("compile=reduce-overhead", {}, "replays graphs of kernels, and this machine has no GPU that can: compile=on."),
        (
            "dp=2",
            {"global_batch": 1},
            (
                "has 2 replicas for a global batch of 1, and each needs a sample: dp is at most 1, or the job's "
                "global_batch at least 2."
            ),
        ),
        (
            "dp=2 microbatches=5",
            {},
            (
                "cuts a replica's share of the global batch into 5 parts, but the smallest share is 4 samples: "
                "microbatches is at most 4."
            ),
        ),
        (
            "dp=2 microbatches=3",
            {"partition": {"weights": [3, 1]}},
            (
                "cuts a replica's share of the global batch into 3 parts, but the smallest share is 2 samples: "
                "microbatches is at most 2."
            ),
        ),
        (
            "dp=2",
            {"partition": {"weights": [99, 1]}},
            (
                "deals a global batch of 8 by the job's weights, which leave a replica no sample: a global_batch "
                "of 100 is enough."
            ),
        ),
        (
            "dp=1",
            {"partition": {"weights": [1, 1]}},
            (
                "has 1 replica, but the job's partition has 2 weights, one per replica: dp=2, or 1 weight in the "
                "job would fit."
            ),
        ),
        (
            "dp=2",
            {"partition": {"weights": [1, 1, 1]}},
            "has 2 replicas, but the job's partition has 3 weights, one per replica: 2 weights in the job would fit.",
        ),
        (
            "microbatches=2",
            {"loss": "contrastive"},
            (
                "computes a share in 2 parts, but the contrastive loss compares all samples of a batch with each "
                "other: microbatches=1."
            ),
        ),
        (
            "fused=on",
            {"optimizer": "lamb"},
            "needs a fused step of lamb; torch has one of sgd, adam, adamw only: fused=off.",
        ),
        (
            "fused=on",
            {"optimizer": "lars"},
            "needs a fused step of lars; torch has one of sgd, adam, adamw only: fused=off.",
        ),
        (
            "memory_format=channels_last",
            {"model": "gpt"},
            "is for images, and the model (gpt) takes none: memory_format=contiguous.",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_told_what_would(plan: str, changes: dict[str, Any], reason: str) -> None:
    assert reasons_against(Plan.parse(plan), job(**changes), LAPTOP) == [f"plan {plan} {reason}"]


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        ("dp=9", {}, "needs 9 ranks; this cluster has 8 devices: dp is at most 8."),
        (
            "dp=9",
            {"partition": {"weights": [1] * 9}},
            "needs 9 ranks; this cluster has 8 devices. The job's partition has 9 weights, "
            "one per data-parallel rank: at most 8 can work here.",
        ),
        ("dp=3 fsdp=3", {}, "needs 9 ranks (dp=3 · fsdp=3); this cluster has 8 devices: dp is at most 2."),
        (
            "tp=3 pp=3 microbatches=3",
            {"model": "cifar_cnn"},
            "needs 9 ranks (tp=3 · pp=3); this cluster has 8 devices: degrees that multiply to at most 8.",
        ),
        (
            "transport=shm",
            {},
            "names a transport between CPUs, but the GPUs of this cluster talk over torch's own: transport=auto.",
        ),
    ],
)
def test_no_two_ranks_share_a_gpu(plan: str, changes: dict[str, Any], reason: str) -> None:
    assert reasons_against(Plan.parse(plan), job(**({"global_batch": 9} | changes)), SERVERS) == [
        f"plan {plan} {reason}"
    ]


def test_graphs_are_refused_before_the_start_where_torch_has_none_for_the_accelerator() -> None:
    plan = Plan.parse("compile=reduce-overhead")

    def reasons(graphs: bool | None) -> list[str]:
        gpu = Device(index=0, kind="npu", name="Ascend 910B", memory_bytes=2**34, graphs=graphs)
        return reasons_against(plan, job(), Cluster(hosts=(Host(name="a", cores=2, memory_bytes=2**34, gpus=(gpu,)),)))

    [reason] = reasons(graphs=False)
    assert reason == f"plan {plan} replays graphs of kernels, and this cluster has no GPU that can: compile=on."
    assert reasons(graphs=True) == []
    assert reasons(graphs=None) == [], "it was not asked, so the rank will"


def test_memory_is_shared_within_a_host_only() -> None:
    two = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**34) for name in "ab"))
    assert check_plan(Plan.parse("dp=2 transport=shm"), job(), two) == []
    reason = "plan dp=3 transport=shm needs all ranks on one host, but they are on 2 hosts: transport=auto."
    assert check_plan(Plan.parse("dp=3 transport=shm"), job(), two) == [reason, "Nearest plan that works: dp=3."]


def test_every_reason_is_named_at_once_and_then_one_plan_that_heeds_them_all() -> None:
    plan = Plan.parse("dp=9 microbatches=2 fused=on memory_format=channels_last transport=gloo")
    reasons = check_plan(plan, job(model="bert", loss="contrastive", optimizer="lars"), SERVERS)
    assert len(reasons) == 7
    assert reasons[-1] == "Nearest plan that works: dp=8."
    assert [line for line in reasons if "Nearest plan" in line] == reasons[-1:]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("dp=2 tp=2", "needs 4 ranks (dp=2 · tp=2), but 6 were started: dp=3 here."),
        ("tp=4", "needs 4 ranks, but 6 were started: degrees that multiply to 6."),
        ("dp=2 fsdp=4", "needs 8 ranks (dp=2 · fsdp=4), but 6 were started: degrees that multiply to 6."),
    ],
)
def test_degrees_multiply_to_the_ranks_that_were_started(plan: str, reason: str) -> None:
    """As many devices as the launcher found are its own matter: this machine may have fewer."""
    assert reasons_against(Plan.parse(plan), job(model="gpt", global_batch=64), SERVERS, world=6) == [
        f"plan {plan} {reason}"
    ]
    assert reasons_against(Plan.parse("dp=6 tp=2"), job(model="gpt", global_batch=64), SERVERS, world=12) == []


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        (
            "dp=2 fsdp=2",
            {"global_batch": 3},
            "has 4 data-parallel ranks (dp=2 · fsdp=2) for a global batch of 3, and each needs a sample: "
            "dp × fsdp × ep is at most 3, or the job's global_batch at least 4.",
        ),
        (
            "fsdp=2 tp=2 microbatches=5",
            {},
            "cuts a data-parallel rank's share of the global batch into 5 parts, but the smallest share is 4 samples: "
            "microbatches is at most 4.",
        ),
        (
            "dp=2 fsdp=2",
            {"partition": {"weights": [1, 1]}},
            "has 4 data-parallel ranks (dp=2 · fsdp=2), but the job's partition has 2 weights, one per "
            "data-parallel rank: "
            "dp=1, or 4 weights in the job would fit.",
        ),
        (
            "fsdp=2",
            {"partition": {"weights": [99, 1]}},
            (
                "deals a global batch of 8 by the job's weights, which leave a data-parallel rank no sample: a "
                "global_batch of 100 is enough."
            ),
        ),
    ],
)
def test_a_batch_is_dealt_to_the_ranks_that_read_apart(plan: str, changes: dict[str, Any], reason: str) -> None:
    assert reasons_against(Plan.parse(plan), job(**({"model": "gpt"} | changes)), SERVERS) == [f"plan {plan} {reason}"]


def test_ranks_that_read_the_same_samples_need_no_share_of_their_own() -> None:
    assert check_plan(Plan.parse("tp=4 pp=2 microbatches=2"), job(model="gpt", global_batch=2), SERVERS) == []


@pytest.mark.parametrize("factory", ["torchvision.models:resnet18", "my_models:net"])
def test_a_model_of_the_users_own_may_take_images(factory: str) -> None:
    assert check_plan(Plan(memory_format="channels_last"), job(model=factory), LAPTOP) == []


@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 24),
    st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_what_passes_can_be_dealt_and_what_is_proposed_passes(
    dp: int, microbatches: int, global_batch: int, weights: list[float] | None, cores: int
) -> None:
    work = job(global_batch=global_batch, partition={"weights": weights})
    gpus = tuple(Device(index=i, name="T4", memory_bytes=2**34) for i in range(cores))
    cluster = Cluster(hosts=(Host(name="a", cores=cores, memory_bytes=1, gpus=gpus),))
    plan = Plan(dp=dp, microbatches=microbatches)
    reasons = check_plan(plan, work, cluster)
    if not reasons:
        dealt = Partition(
            work.partition, samples=global_batch, global_batch=global_batch, seed=0, replica=0, replicas=dp
        )
        assert min(dealt.shares(0)) >= microbatches
    elif reasons[-1].startswith("Nearest plan that works: "):
        proposal = reasons[-1].removeprefix("Nearest plan that works: ").removesuffix(".")
        assert check_plan(Plan.parse(proposal), work, cluster) == []
    else:
        assert weights


def test_a_loss_that_compares_samples_is_refused_in_parts_whoever_computes_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\n\nclass Pairs(nn.Linear):\n    def forward(self, x, labels=None, "
        "return_loss=None): ...\n\n\n"
        "def triplets(output, target): ...\n\n\ntriplets.whole_batch = True\n"
    )
    own = job(
        model={"factory": f"{tmp_path}/own.py:Pairs", "args": {"in_features": 2, "out_features": 2}}, loss="model"
    )
    assert (
        "dp=2 computes a batch in 2 parts, but the model's own loss compares"
        in reasons_against(Plan(dp=2), own, LAPTOP)[0]
    )
    assert reasons_against(Plan(), own, LAPTOP) == []
    own = job(loss=f"{tmp_path}/own.py:triplets")
    assert reasons_against(Plan(dp=2), own, LAPTOP) == []
    (reason,) = reasons_against(Plan(dp=2, microbatches=2), own, LAPTOP)
    assert "the triplets loss compares all samples of a batch with each other: microbatches=1." in reason
