"""Every reason why a plan cannot run is said before a rank starts, with the value that would work.

Else jobs fail late, or train something else.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _simulate_comms_compute
from torch.distributed.pipelining.stage import _PipelineStageBase

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.check.rules import reasons_against
from paceline.planning.limits import microbatches_fit
from paceline.planning.plan import Plan
from paceline.planning.search.space import legal_plans
from planner_jobs import job_on_digits, job_on_tokens

LAPTOP = Cluster(
    name="this machine", hosts=(Host(name="a", cores=2, memory_bytes=2**34, cpu="Old CPU", cpu_bf16=False),)
)
CPUS = Cluster(name="this machine", hosts=(Host(name="a", cores=8, memory_bytes=2**34),))
GPUS = tuple(Device(index=i, name="T4", memory_bytes=2**34, bf16=False) for i in range(8))
SERVERS, LARGE_SERVERS = (
    Cluster(hosts=tuple(Host(name=name, cores=8, memory_bytes=2**36, gpus=GPUS[:count]) for name in "ab"))
    for count in (4, 8)
)
LINEAR = {"model": {"factory": "torch.nn:Linear", "args": {"in_features": 4, "out_features": 4}}, "loss": "mse"}
RESNET = {"model": "resnet50", "data": "digits"}
LARGE = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "context": 1024}  # 1.3 billion parameters
job, tokens = job_on_digits, job_on_tokens


def assert_refused(plan: Plan, job: Job, cluster: Cluster, remedy: str, world: int | None = None) -> None:
    """There is one reason against the plan; it names the plan and the remedy."""
    (reason,) = reasons_against(plan, job, cluster, world)
    assert reason.startswith(f"plan {plan} ")
    assert remedy in reason


@pytest.mark.parametrize(
    ("plan", "work", "cluster"),
    [
        ("dp=1", job(), LAPTOP),
        ("dp=2 microbatches=4 transport=shm balance=on", job(), LAPTOP),
        ("memory_format=channels_last fused=on pin=on compile=on transport=gloo", job(), LAPTOP),
        ("precision=fp64", job(), LAPTOP),
        # ranks of tp and pp read the same samples
        ("tp=4 pp=2 microbatches=2", job(model="gpt", global_batch=2), SERVERS),
        # a model of the user's own may take images
        ("memory_format=channels_last", job(model="torchvision.models:resnet18"), LAPTOP),
        ("memory_format=channels_last", job(model="my_models:net"), LAPTOP),
        ("dp=2 fsdp=2 tp=2 cp=2", tokens(), LARGE_SERVERS),
        ("fsdp=2 zero=1 offload=on", tokens(), LARGE_SERVERS),
        ("tp=4 sequence=on cp=2 pp=2 schedule=interleaved microbatches=4", tokens(), LARGE_SERVERS),
        ("pp=4 schedule=gpipe", tokens(), LARGE_SERVERS),
        ("pp=2 schedule=zero-bubble cut=blocks.1,blocks.2,blocks.3 microbatches=2", tokens(), LARGE_SERVERS),
        ("pp=2 schedule=dualpipe cut=blocks.1,blocks.2,blocks.3 microbatches=4", tokens(), LARGE_SERVERS),
        ("pp=3 cut=blocks.0.mlp,norm microbatches=3", tokens(), LARGE_SERVERS),
        (
            "pp=4 schedule=interleaved cut=blocks.0,blocks.1,blocks.2,blocks.2.mlp,blocks.3,norm,head microbatches=4",
            tokens(),
            LARGE_SERVERS,
        ),
        ("fsdp=2 tp=2 compile=on remat=block precision=bf16", tokens(), LARGE_SERVERS),
        ("ep=4 fsdp=2 tp=2", tokens(model="moe"), LARGE_SERVERS),
        ("fsdp=2 tp=2", tokens(loss="contrastive"), LARGE_SERVERS),
        ("pp=2 microbatches=2 cp=2", tokens(optimizer="lamb"), LARGE_SERVERS),
        ("fsdp=2 pp=2 microbatches=2", tokens(**RESNET), LARGE_SERVERS),
        ("cp=2 tp=2", tokens(model="bert"), LARGE_SERVERS),
        ("remat=selective", tokens(), LARGE_SERVERS),
        ("fsdp=2", tokens(nonfinite="skip", batch_norm="sync", clip_norm=1.0), LARGE_SERVERS),
    ],
)
def test_a_plan_that_fits_has_no_reason_against_it(plan: str, work: Job, cluster: Cluster) -> None:
    assert plan_errors(work, Plan.parse(plan), cluster=cluster) == []


@pytest.mark.parametrize(
    ("plan", "changes", "remedy"),
    [
        ("dp=999", {"global_batch": 999}, "has room for 64 and cores for 2: dp=2."),
        ("balance=on", {}, "there is only one: dp=2 or more, or balance=auto."),
        ("dp=2 sync=local:8 balance=on", {}, "(sync=local:8): balance=auto."),
        ("dp=2 balance=on", {"partition": "hierarchical"}, "(partition: hierarchical): balance=auto."),
        ("compile=reduce-overhead", {}, "compile=on."),
        ("dp=2", {"global_batch": 1}, "dp is at most 1, or the job's global_batch at least 2."),
        ("dp=2 microbatches=5", {}, "the smallest share is 4 samples: microbatches is at most 4."),
        ("dp=2 microbatches=3", {"partition": {"weights": [3, 1]}}, "2 samples: microbatches is at most 2."),
        ("dp=2", {"partition": {"weights": [99, 1]}}, "a global_batch of 100 is enough."),
        ("dp=1", {"partition": {"weights": [1, 1]}}, "dp=2, or 1 weight in the job would fit."),
        ("dp=2", {"partition": {"weights": [1, 1, 1]}}, "one per replica: 2 weights in the job would fit."),
        ("microbatches=2", {"loss": "contrastive"}, "microbatches=1."),
        ("fused=on", {"optimizer": "lamb"}, "torch has one of sgd, adam, adamw only: fused=off."),
        ("fused=on", {"optimizer": "lars"}, "torch has one of sgd, adam, adamw only: fused=off."),
        ("memory_format=channels_last", {"model": "gpt"}, "memory_format=contiguous."),
    ],
)
def test_a_plan_that_does_not_fit_is_told_what_would(plan: str, changes: dict[str, Any], remedy: str) -> None:
    assert_refused(Plan.parse(plan), job(**changes), LAPTOP, remedy)


@pytest.mark.parametrize(
    ("plan", "changes", "remedy"),
    [
        ("dp=9", {}, "has 8 devices: dp is at most 8."),
        ("dp=9", {"partition": {"weights": [1] * 9}}, "has 9 weights, one per data-parallel rank: at most 8"),
        ("dp=3 fsdp=3", {}, "needs 9 ranks (dp=3 · fsdp=3); this cluster has 8 devices: dp is at most 2."),
        ("tp=3 pp=3 microbatches=3", {}, "has 8 devices: degrees that multiply to at most 8."),
        ("transport=shm", {}, "transport=auto."),
    ],
)
def test_no_two_ranks_share_a_gpu(plan: str, changes: dict[str, Any], remedy: str) -> None:
    assert_refused(Plan.parse(plan), job(**({"global_batch": 9} | changes)), SERVERS, remedy)


def test_graphs_are_refused_before_the_start_where_torch_has_none_for_the_accelerator() -> None:
    plan = Plan.parse("compile=reduce-overhead")

    def on_npu(graphs: bool | None) -> Cluster:
        gpu = Device(index=0, kind="npu", name="Ascend 910B", memory_bytes=2**34, graphs=graphs)
        return Cluster(hosts=(Host(name="a", cores=2, memory_bytes=2**34, gpus=(gpu,)),))

    assert_refused(plan, job(), on_npu(graphs=False), "compile=on.")
    assert reasons_against(plan, job(), on_npu(graphs=True)) == []
    assert reasons_against(plan, job(), on_npu(graphs=None)) == [], "it was not asked, so the rank will"


def test_memory_is_shared_within_a_host_only() -> None:
    two = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**34) for name in "ab"))
    assert plan_errors(job(), Plan.parse("dp=2 transport=shm"), cluster=two) == []
    assert_refused(Plan.parse("dp=3 transport=shm"), job(), two, "they are on 2 hosts: transport=auto.")


def test_every_reason_is_named_at_once_and_then_one_plan_that_heeds_them_all() -> None:
    plan = Plan.parse("dp=9 microbatches=2 fused=on memory_format=channels_last transport=gloo")
    *reasons, proposed = plan_errors(job(model="bert", loss="contrastive", optimizer="lars"), plan, cluster=SERVERS)
    assert len(reasons) == 6
    assert proposed == "Nearest plan that works: dp=8."


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        ("dp=2 tp=2", "needs 4 ranks (dp=2 · tp=2), but 6 were started: dp=3 here."),
        ("tp=4", "needs 4 ranks, but 6 were started: degrees that multiply to 6."),
        ("dp=2 fsdp=4", "needs 8 ranks (dp=2 · fsdp=4), but 6 were started: degrees that multiply to 6."),
    ],
)
def test_degrees_multiply_to_the_ranks_that_were_started(plan: str, remedy: str) -> None:
    """As many devices as the launcher found are its own matter: this machine may have fewer."""
    work = job(model="gpt", global_batch=64)
    assert_refused(Plan.parse(plan), work, SERVERS, remedy, world=6)
    assert reasons_against(Plan.parse("dp=6 tp=2"), work, SERVERS, world=12) == []


@pytest.mark.parametrize(
    ("plan", "changes", "remedy"),
    [
        ("dp=2 fsdp=2", {"global_batch": 3}, "dp × fsdp × ep is at most 3, or the job's global_batch at least 4."),
        ("fsdp=2 tp=2 microbatches=5", {}, "the smallest share is 4 samples: microbatches is at most 4."),
        ("dp=2 fsdp=2", {"partition": {"weights": [1, 1]}}, "dp=1, or 4 weights in the job would fit."),
        ("fsdp=2", {"partition": {"weights": [99, 1]}}, "a global_batch of 100 is enough."),
    ],
)
def test_a_batch_is_dealt_to_the_ranks_that_read_apart(plan: str, changes: dict[str, Any], remedy: str) -> None:
    assert_refused(Plan.parse(plan), job(**({"model": "gpt"} | changes)), SERVERS, remedy)


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
    reasons = plan_errors(work, plan, cluster=cluster)
    if not reasons:
        dealt = Partition(
            work.partition, samples=global_batch, global_batch=global_batch, seed=0, replica=0, replicas=dp
        )
        assert min(dealt.shares(0)) >= microbatches
    elif reasons[-1].startswith("Nearest plan that works: "):
        proposal = reasons[-1].removeprefix("Nearest plan that works: ").removesuffix(".")
        assert plan_errors(work, Plan.parse(proposal), cluster=cluster) == []
    else:
        assert weights


def test_a_loss_that_compares_samples_is_refused_in_parts_whoever_computes_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\n\n"
        "class Pairs(nn.Linear):\n    def forward(self, x, labels=None, return_loss=None): ...\n\n\n"
        "def triplets(output, target): ...\n\n\ntriplets.whole_batch = True\n"
    )
    model = {"factory": f"{tmp_path}/own.py:Pairs", "args": {"in_features": 2, "out_features": 2}}
    models_own, own = job(model=model, loss="model"), job(loss=f"{tmp_path}/own.py:triplets")
    assert_refused(Plan(dp=2), models_own, LAPTOP, "the model's own loss compares")
    assert reasons_against(Plan(), models_own, LAPTOP) == reasons_against(Plan(dp=2), own, LAPTOP) == []
    assert_refused(Plan(dp=2, microbatches=2), own, LAPTOP, "microbatches=1.")


# Plans that divide the model


@pytest.mark.parametrize(
    ("plan", "changes", "remedy"),
    [
        ("zero=2", {}, "fsdp is 1: fsdp=2, or leave out zero."),
        ("offload=on", {}, "fsdp is 1: fsdp=2, or leave out offload."),
        ("sequence=on", {}, "tp is 1: tp=2, or leave out sequence."),
        ("schedule=gpipe", {}, "pp is 1: pp=2, or leave out schedule."),
        ("cut=blocks.1", {}, "pp is 1: pp=2, or leave out cut."),
        ("pp=4 microbatches=3", {}, "1f1b needs at least one for each: microbatches is one of 4, 5."),
        ("pp=2 schedule=interleaved microbatches=5", {}, "microbatches is one of 4, 6."),
        ("pp=5 microbatches=5", {}, "pp is at most 4, or cut names the modules where stages begin."),
        ("pp=3 schedule=interleaved microbatches=3", {}, "schedule=1f1b, pp is at most 2, or cut names"),
        (
            "pp=2 schedule=interleaved virtual=3 microbatches=4",
            {},
            "virtual is at most 2, schedule=1f1b, pp=1, or cut names",
        ),
        ("pp=2 virtual=3 microbatches=2", {}, "schedule=interleaved, or leave out virtual."),
        ("pp=2 schedule=dualpipe microbatches=3", {}, "microbatches is one of 4, 5."),
        ("pp=2 microbatches=2", LINEAR, "has 1 weight matrix: pp=1, or cut names"),
        ("pp=2 cut=block.2 microbatches=2", {}, 'Did you mean "blocks.2"?'),
        ("pp=3 cut=norm,norm microbatches=3", {}, "a stage begins at norm once only."),
        ("pp=4 cut=blocks.2 microbatches=4", {}, "cut=blocks.1,blocks.2,blocks.3."),
        ("pp=2 schedule=zero-bubble cut=blocks.2 microbatches=2", {}, "cut=blocks.1,blocks.2,blocks.3."),
        ("tp=3", {}, "attention heads (4) by 3, which leaves a remainder: tp is one of 1, 2, 4."),
        ("tp=3", {"model": f"{__file__}:few_keys"}, "heads of keys and values (2) by 3, which leaves a remainder"),
        ("tp=4", {"model": f"{__file__}:few_fused_keys"}, "heads in model.layers.0.self_attn (2, 4) by 4"),
        ("ep=2", {}, "ep=1 (fsdp=2 shards any model)."),
        ("ep=3", {"model": "moe"}, "divides 8 experts over 3 ranks: ep is one of 1, 2, 4, 8."),
        ("cp=5", {}, "cp is one of 1, 2, 3, 4, 6, 8, 12, 24, or sequences of 20 or 30 tokens in the job's data."),
        ("tp=4 cp=4 sequence=on", {}, "tp is one of 1, 2, 3, 6, or sequences of 16 or 32 tokens in the job's data."),
        ("tp=2 sequence=on", RESNET, "sequence=off."),
        ("cp=2", RESNET, "cp=1."),
        ("pp=2 cp=2 schedule=gpipe", {"loss": "contrastive"}, "pp=1 cp=1."),
        ("fsdp=2 tp=2", {"optimizer": "lars"}, "sgd, adam, adamw work, or fsdp=1 tp=1."),
        ("fsdp=2 memory_format=channels_last", RESNET, "memory_format=contiguous."),
        ("fsdp=2 compile=reduce-overhead", {}, "inside a divided model: compile=on."),
        ("remat=block", LINEAR, "remat=none."),
        (
            "pp=2 schedule=zero-bubble microbatches=2 compile=on",
            {},
            "(zero-bubble), which PyTorch cannot do with compiled stages: compile=off, or schedule=interleaved.",
        ),
    ],
)
def test_what_cannot_be_divided_is_told_what_can(plan: str, changes: dict[str, Any], remedy: str) -> None:
    assert_refused(Plan.parse(plan), tokens(**changes), LARGE_SERVERS, remedy)


def test_a_model_that_numbers_its_own_tokens_may_be_divided_but_is_not_proposed_to_be() -> None:
    numbered = tokens(model=f"{__file__}:OwnPositions")
    assert reasons_against(Plan(cp=2), numbered, LARGE_SERVERS) == []
    assert Plan(cp=2) not in legal_plans(numbered, LARGE_SERVERS, 2)


@pytest.mark.parametrize(
    ("plan", "cluster", "reason"),
    [
        ("tp=2", CPUS, "of 19.6 GiB in the memory of a host that has 16 GiB: more memory, or"),
        ("fsdp=2", LARGE_SERVERS, None),
        ("fsdp=2 precision=fp64", LARGE_SERVERS, "of 19.6 GiB on a GPU that has 16 GiB: fsdp=4 is enough."),
        ("fsdp=8 zero=1 precision=fp64", LARGE_SERVERS, "of 22.1 GiB on a GPU that has 16 GiB: fsdp=8 zero=3 is"),
        ("fsdp=2 precision=fp64 offload=on", LARGE_SERVERS, None),
        ("tp=2 pp=2 microbatches=2 precision=fp64", LARGE_SERVERS, None),
    ],
)
def test_a_state_beyond_the_memory_is_refused_with_its_size(plan: str, cluster: Cluster, reason: str | None) -> None:
    """By shapes alone: parameters, gradients and Adam's two moments, 4 or 8 bytes each."""
    said = reasons_against(Plan.parse(plan), tokens(model={"zoo": "gpt", "args": LARGE}), cluster)
    assert [reason in line for line in said if reason] == [True] * bool(reason), said


def test_a_plan_of_1024_ranks_for_70_billion_parameters_is_checked_here() -> None:
    gpus = tuple(Device(index=i, name="H100", memory_bytes=80 * 2**30, bf16=True) for i in range(8))
    cluster = Cluster(hosts=tuple(Host(name=f"h{n}", cores=64, memory_bytes=2**40, gpus=gpus) for n in range(128)))
    args = {"layers": 80, "hidden": 8192, "heads": 64, "vocab": 128256, "context": 4096}
    work = tokens(model={"zoo": "gpt", "args": args}, global_batch=1024)
    assert plan_errors(work, Plan.parse("dp=16 fsdp=8 tp=8"), cluster=cluster) == []
    said = plan_errors(work, Plan.parse("dp=16 fsdp=8 tp=7"), cluster=cluster)
    assert said[-1] == "Nearest plan that works: dp=16 fsdp=8 tp=8."


# Sync rules


rule_job = partial(job_on_digits, model="mlp")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 sync=allreduce:ring",
        "dp=2 compress=topk:0.01+bf16",
        "dp=2 compress=auto",
        "dp=2 sync=local:4",
        "dp=2 fsdp=2 sync=server:servers=2",
        "dp=2 sync=server:staleness=inf",
        "dp=2 sync=server:staleness=inf compress=topk:0.01+bf16",
        "dp=2 sync=server compress=int8",
        "dp=2 sync=diloco:8,fragments=2,overlap=1 compress=int4",
        "dp=2 fsdp=2 sync=allreduce:hierarchical compress=powersgd:2",
    ],
)
def test_a_rule_that_can_work_has_no_reason_against_it(plan: str) -> None:
    assert plan_errors(rule_job(), Plan.parse(plan), cluster=CPUS) == []


@pytest.mark.parametrize(
    ("plan", "changes", "reason", "nearest"),
    [
        ("dp=2 sync=local:4 compress=int8", {}, "compress=none", "dp=2 sync=local:4"),
        ("dp=2 sync=diloco:4 compress=auto", {}, "sync=diloco:4 does not take: compress=int8", "dp=2 sync=diloco:4"),
        ("dp=2 compress=int8 precision=fp64", {}, "compress=none", None),
        ("dp=2 sync=local:4", {"nonfinite": "rewind"}, "nonfinite: skip in the job, or sync=allreduce", "dp=2"),
        ("dp=2 sync=local:4", {"spike": "skip"}, "spike: off in the job, or sync=allreduce", "dp=2"),
        ("dp=2 sync=diloco:4", {"batch_norm": "sync"}, "batch_norm: local, or sync=allreduce", "dp=2"),
        ("dp=2 sync=server compress=auto", {}, "compress=int8", None),
        ("dp=2 sync=server:staleness=1 compress=powersgd:4", {}, "compress=topk:0.01", None),
        ("dp=2 sync=server:servers=3", {}, "servers=2 at most, or a staleness", None),
        ("dp=3 sync=server:staleness=inf", {"global_batch": 64}, "the global batch is 64: dp=2, for example", None),
        ("dp=2 sync=server:staleness=inf num_workers=1", {}, "without loader processes: num_workers=0", None),
        ("dp=2 sync=server:staleness=inf", {"nonfinite": "rewind"}, "nonfinite: skip in the job", None),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_what_would(
    plan: str, changes: dict[str, Any], reason: str, nearest: str | None
) -> None:
    reasons = plan_errors(rule_job(**changes), Plan.parse(plan), cluster=CPUS)
    assert any(reason in r for r in reasons), reasons
    if nearest is not None:
        assert reasons[-1] == f"Nearest plan that works: {nearest}."


# Schedules of torch


TORCHS_OWN = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleZBVZeroBubble,
    "dualpipe": schedules.ScheduleDualPipeV,
}


@pytest.mark.parametrize("schedule", TORCHS_OWN)
def test_microbatches_fit_where_the_schedule_of_torch_takes_them(schedule: str) -> None:
    """Taken, and with every receive sent: torch's own simulation of all ranks ends.

    It would interleave too few as well, to no use.
    """
    numbers = {(pp, n) for pp in (2, 3, 4) for n in range(pp if schedule == "interleaved" else 1, 14)}
    assert {key for key in numbers if taken_by_torch(schedule, *key)} == {
        key for key in numbers if microbatches_fit(schedule, *key)
    }
    assert not microbatches_fit("interleaved", 4, 3)


def taken_by_torch(schedule: str, pp: int, microbatches: int) -> bool:
    made: Any = TORCHS_OWN[schedule]
    try:
        if schedule in ("gpipe", "1f1b"):
            made(Stage(0, pp, pp), microbatches)
            return True
        second = pp if schedule == "interleaved" else 2 * pp - 1
        run = made([Stage(0, 2 * pp, pp), Stage(second, 2 * pp, pp)], microbatches)
    except ValueError:
        return False
    compute_and_messages = {
        rank: [
            part
            for action in actions
            if not any(word in str(action) for word in ("SHARD", "REDUCE_GRAD"))
            # a forward and a backward pass at once
            for part in (action.sub_actions or (action,))
        ]
        for rank, actions in run.pipeline_order_with_comms.items()
    }
    _simulate_comms_compute(compute_and_messages, lambda stage: run.stage_index_to_group_rank[stage], 2 * pp)
    return True


class Stage(_PipelineStageBase):
    """What the schedules ask of a stage while they are made."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size, self.group = 0, ranks, None
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(stages)}
        self.submod, self.has_backward = torch.nn.Identity(), True

    def _create_grad_recv_info(self, *args: Any) -> Any:
        raise NotImplementedError

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def few_keys() -> torch.nn.Module:
    """Six heads that share two heads of keys and values."""
    transformers.logging.set_verbosity_error()
    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 120}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    )


def few_fused_keys() -> torch.nn.Module:
    """Four heads that share two heads of keys and values, and one matrix for all."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 120}
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    )


class OwnPositions(torch.nn.Module):
    """Attention over tokens that counts them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.head = torch.nn.Linear(8, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Never run."""
        raise NotImplementedError
