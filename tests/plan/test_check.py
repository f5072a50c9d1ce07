"""Every reason why a plan cannot run is said before a rank starts, with the value that would work; else jobs fail late."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster, Device, Host
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.plan.plan import Plan

LAPTOP = Cluster(name="this machine", hosts=(Host(name="a", cores=2, memory_bytes=2**34, cpu="Old CPU", cpu_bf16=False),))
GPUS = tuple(Device(index=i, name="T4", memory_bytes=2**34, bf16=False) for i in range(4))
SERVERS = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**36, cpu_bf16=True, gpus=GPUS) for name in "ab"))


def job(**changes: Any) -> Job:
    common = {"model": "cifar_cnn", "data": "digits", "loss": "cross_entropy", "optimizer": "sgd", "global_batch": 8, "stop": {"steps": 1}}
    return Job(**(common | changes))


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=2 microbatches=4 transport=shm",
        "memory_format=channels_last fused=on pin=on compile=on transport=gloo",
        "precision=fp64",
    ],
)
def test_a_plan_that_fits_has_no_reason_against_it(plan: str) -> None:
    assert Plan.parse(plan).check(job(), LAPTOP) == []
    assert Plan.parse(plan).warnings(job(), LAPTOP) == []


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        (
            "dp=999",
            {"global_batch": 999},
            "needs 999 ranks, for which torch alone takes 250 GiB of memory; this machine has room for 64 and cores for 2: dp=2.",
        ),
        ("compile=reduce-overhead", {}, "replays CUDA graphs, and this machine has no GPU: compile=on."),
        (
            "dp=2",
            {"global_batch": 1},
            "has 2 replicas for a global batch of 1, and each needs a sample: dp is at most 1, or the job's global_batch at least 2.",
        ),
        (
            "dp=2 microbatches=5",
            {},
            "cuts a replica's share of the global batch into 5 parts, but the smallest share is 4 samples: microbatches is at most 4.",
        ),
        (
            "dp=2 microbatches=3",
            {"partition": {"weights": [3, 1]}},
            "cuts a replica's share of the global batch into 3 parts, but the smallest share is 2 samples: microbatches is at most 2.",
        ),
        (
            "dp=2",
            {"partition": {"weights": [99, 1]}},
            "deals a global batch of 8 by the job's weights, which leave a replica no sample: a global_batch of 100 is enough.",
        ),
        (
            "dp=1",
            {"partition": {"weights": [1, 1]}},
            "has 1 replica, but the job's partition has 2 weights, one per replica: dp=2, or 1 weight in the job would fit.",
        ),
        (
            "dp=2",
            {"partition": {"weights": [1, 1, 1]}},
            "has 2 replicas, but the job's partition has 3 weights, one per replica: 2 weights in the job would fit.",
        ),
        (
            "microbatches=2",
            {"loss": "contrastive"},
            "computes a share in 2 parts, but the contrastive loss compares all samples of a batch with each other: microbatches=1.",
        ),
        ("fused=on", {"optimizer": "lamb"}, "needs a fused step of lamb; torch has one of sgd, adam, adamw only: fused=off."),
        ("fused=on", {"optimizer": "lars"}, "needs a fused step of lars; torch has one of sgd, adam, adamw only: fused=off."),
        ("memory_format=channels_last", {"model": "gpt"}, "is for images, and the model (gpt) takes none: memory_format=contiguous."),
    ],
)
def test_a_plan_that_does_not_fit_is_told_what_would(plan: str, changes: dict[str, Any], reason: str) -> None:
    assert Plan.parse(plan).check(job(**changes), LAPTOP) == [f"plan {plan} {reason}"]


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        ("dp=9", {}, "needs 9 ranks; this cluster has 8 devices. Plans that fit: dp=8 · dp=7 · dp=6."),
        (
            "dp=9",
            {"partition": {"weights": [1] * 9}},
            "needs 9 ranks; this cluster has 8 devices. The job's partition has 9 weights, one per replica: at most 8 can work here.",
        ),
        ("transport=shm", {}, "names a transport between CPUs, but the GPUs of this cluster talk over NCCL: transport=auto."),
    ],
)
def test_no_two_ranks_share_a_gpu(plan: str, changes: dict[str, Any], reason: str) -> None:
    assert Plan.parse(plan).check(job(**({"global_batch": 9} | changes)), SERVERS) == [f"plan {plan} {reason}"]


def test_memory_is_shared_within_a_host_only() -> None:
    two = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**34) for name in "ab"))
    assert Plan.parse("dp=2 transport=shm").check(job(), two) == []
    reason = "plan dp=3 transport=shm needs memory that all ranks share, but they are on 2 hosts: transport=auto."
    assert Plan.parse("dp=3 transport=shm").check(job(), two) == [reason]


def test_every_reason_is_named_at_once_and_the_plans_that_fit_heed_them_all() -> None:
    plan = Plan.parse("dp=9 microbatches=2 fused=on memory_format=channels_last transport=gloo")
    reasons = plan.check(job(model="bert", loss="contrastive", optimizer="lars"), SERVERS)
    assert len(reasons) == 6
    assert reasons[0].endswith("Plans that fit: dp=8 · dp=7 · dp=6.")


def test_plans_that_fit_keep_what_can_be_kept() -> None:
    reasons = Plan.parse("dp=10 microbatches=2 pin=on").check(job(global_batch=10), SERVERS)
    assert reasons[0].endswith("Plans that fit: dp=8 pin=on · dp=7 pin=on · dp=6 pin=on.")


@pytest.mark.parametrize("factory", ["torchvision.models:resnet18", "my_models:net"])
def test_a_model_of_the_users_own_may_take_images(factory: str) -> None:
    assert Plan(memory_format="channels_last").check(job(model=factory), LAPTOP) == []


@settings(deadline=None)
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
    reasons = plan.check(work, cluster)
    if not reasons:
        dealt = Partition(work.partition, samples=global_batch, global_batch=global_batch, seed=0, replica=0, replicas=dp)
        assert min(dealt.shares(0)) >= microbatches
    elif "Plans that fit: " in reasons[0]:
        proposals = reasons[0].partition("Plans that fit: ")[2].removesuffix(".").split(" · ")
        assert [Plan.parse(text).check(work, cluster) for text in proposals] == [[] for _ in proposals]


@pytest.mark.parametrize(
    ("plan", "cluster", "changes", "warnings"),
    [
        ("dp=2 threads=2", LAPTOP, {}, ["plan dp=2 threads=2 runs 2 × 2 threads on a host with 2 cores; threads=1 fits."]),
        (
            "precision=bf16",
            LAPTOP,
            {},
            ["plan precision=bf16 computes in bf16, which Old CPU does only in software; precision=fp32 is likely faster there."],
        ),
        (
            "dp=5",
            SERVERS,
            {"precision": "bf16"},
            ["plan dp=5 computes in bf16, which T4 does only in software; precision=fp32 is likely faster there."],
        ),
        (
            "dp=8 pin=on",
            SERVERS,
            {},
            ["plan dp=8 pin=on pins 4 ranks to 2 cores of a host, so that some share one; pin=off lets them move."],
        ),
        ("dp=5 threads=2", SERVERS, {}, ["plan dp=5 threads=2 runs 4 × 2 threads on a host with 2 cores; threads=1 fits."]),
        ("dp=4", SERVERS, {}, []),
        (
            "dp=4",
            LAPTOP,
            {},
            [
                "plan dp=4: 4 ranks share 2 cores, 0.50 of a core each, and every rank keeps a copy of the model. "
                "dp=2, with a core for each rank, is likely faster."
            ],
        ),
        (
            "dp=3",
            LAPTOP,
            {"partition": {"weights": [1, 1, 1]}},
            ["plan dp=3: 3 ranks share 2 cores, 0.67 of a core each, and every rank keeps a copy of the model."],
        ),
    ],
)
def test_a_plan_that_runs_slower_than_need_be_is_warned_of(
    plan: str, cluster: Cluster, changes: dict[str, Any], warnings: list[str]
) -> None:
    assert Plan.parse(plan).check(job(**changes), cluster) == []
    assert Plan.parse(plan).warnings(job(**changes), cluster) == warnings
