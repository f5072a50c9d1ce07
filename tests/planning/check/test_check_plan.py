"""Every reason why a plan cannot run is said before a rank starts, with the value that would work.

Else jobs fail late, or train something else.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def assert_refused(
    plan: Plan | str, job: Job, cluster: Cluster, code: str, fields: Mapping[str, Any] = {}, world: int | None = None
) -> None:
    """There is one reason against the plan, of this code; it names the plan, and has these fields."""
    (problem,) = plan_errors(job, plan, cluster=cluster, world=world)
    assert (problem.code, problem.fields) == (f"plan.{code}", {**problem.fields, **fields, "plan": str(plan)})
    assert problem.text.startswith(f"plan {plan} ")


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
        ("fsdp=2 tp=2 pp=2 microbatches=2 remat=block offload_activations=on", tokens(), LARGE_SERVERS),
        ("fsdp=2", tokens(nonfinite="skip", batch_norm="sync", clip_norm=1.0), LARGE_SERVERS),
    ],
)
def test_a_plan_that_fits_has_no_reason_against_it(plan: str, work: Job, cluster: Cluster) -> None:
    assert plan_errors(work, plan, cluster=cluster) == []


@pytest.mark.parametrize(
    ("plan", "changes", "code", "fields"),
    [
        ("dp=999", {"global_batch": 999}, "too_many_ranks_for_memory", {"room": 64, "devices": 2, "works": "dp=2"}),
        ("balance=on", {}, "balance_needs_replicas", {}),
        ("dp=2 sync=local:8 balance=on", {}, "balance_of_local_steps", {"sync": "local:8"}),
        ("dp=2 balance=on", {"partition": "hierarchical"}, "balance_of_host_parts", {}),
        ("compile=reduce-overhead", {}, "no_graphs", {}),
        ("dp=2", {"global_batch": 1}, "too_few_samples", {"limited": "dp", "global_batch": 1, "data_ranks": 2}),
        ("dp=2 microbatches=5", {}, "too_many_microbatches", {"share": 4}),
        ("dp=2 microbatches=3", {"partition": {"weights": [3, 1]}}, "too_many_microbatches", {"share": 2}),
        ("dp=2", {"partition": {"weights": [99, 1]}}, "weights_leave_no_sample", {"enough": 100}),
        ("dp=1", {"partition": {"weights": [1, 1]}}, "other_number_of_weights", {"works": "dp=2, or 1 weight"}),
        ("dp=2", {"partition": {"weights": [1, 1, 1]}}, "other_number_of_weights", {"works": "2 weights"}),
        ("microbatches=2", {"loss": "contrastive"}, "whole_batch_in_parts", {}),
        ("fused=on", {"optimizer": "lamb"}, "no_fused_step", {"choices": ["sgd", "adam", "adamw", "adagrad"]}),
        ("fused=on", {"optimizer": "lars"}, "no_fused_step", {"optimizer": "lars"}),
        ("memory_format=channels_last", {"model": "gpt"}, "no_images", {}),
    ],
)
def test_a_plan_that_does_not_fit_is_told_what_would(
    plan: str, changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    assert_refused(plan, job(**changes), LAPTOP, code, fields)


@pytest.mark.parametrize(
    ("plan", "changes", "code", "fields"),
    [
        ("dp=9", {}, "too_few_devices", {"devices": 8, "works": "dp is at most 8"}),
        ("dp=9", {"partition": {"weights": [1] * 9}}, "too_many_weights", {"weights": "9 weights", "devices": 8}),
        ("dp=3 fsdp=3", {}, "too_few_devices", {"ranks": 9, "devices": 8, "works": "dp is at most 2"}),
        ("tp=3 pp=3 microbatches=3", {}, "too_few_devices", {"works": "degrees that multiply to at most 8"}),
        ("transport=shm", {}, "transport_of_gpus", {}),
    ],
)
def test_no_two_ranks_share_a_gpu(plan: str, changes: dict[str, Any], code: str, fields: dict[str, Any]) -> None:
    assert_refused(plan, job(**({"global_batch": 9} | changes)), SERVERS, code, fields)


def test_graphs_are_refused_before_the_start_where_torch_has_none_for_the_accelerator() -> None:
    plan = Plan.parse("compile=reduce-overhead")

    def on_npu(graphs: bool | None) -> Cluster:
        gpu = Device(index=0, kind="npu", name="Ascend 910B", memory_bytes=2**34, graphs=graphs)
        return Cluster(hosts=(Host(name="a", cores=2, memory_bytes=2**34, gpus=(gpu,)),))

    assert_refused(plan, job(), on_npu(graphs=False), "no_graphs")
    assert reasons_against(plan, job(), on_npu(graphs=True)) == []
    assert reasons_against(plan, job(), on_npu(graphs=None)) == [], "it was not asked, so the rank will"


def test_memory_is_shared_within_a_host_only() -> None:
    two = Cluster(hosts=tuple(Host(name=name, cores=2, memory_bytes=2**34) for name in "ab"))
    assert plan_errors(job(), "dp=2 transport=shm", cluster=two) == []
    assert_refused("dp=3 transport=shm", job(), two, "transport_of_one_host", {"hosts": 2})


def test_every_reason_is_named_at_once_and_then_one_plan_that_heeds_them_all() -> None:
    plan = "dp=9 microbatches=2 fused=on memory_format=channels_last transport=gloo"
    problems = plan_errors(job(model="bert", loss="contrastive", optimizer="lars"), plan, cluster=SERVERS)
    assert len({problem.code for problem in problems}) == 6
    assert problems.nearest == Plan(dp=8)
    error = problems.error()
    assert (error.problems, error.nearest) == (tuple(problems), Plan(dp=8))
    assert str(error).splitlines() == [*(problem.text for problem in problems), "Nearest plan that works: dp=8."]


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        ("dp=2 tp=2", {"need": "4 ranks (dp=2 · tp=2)", "started": 6, "works": "dp=3 here"}),
        ("tp=4", {"need": "4 ranks", "works": "degrees that multiply to 6"}),
        ("dp=2 fsdp=4", {"need": "8 ranks (dp=2 · fsdp=4)", "works": "degrees that multiply to 6"}),
    ],
)
def test_degrees_multiply_to_the_ranks_that_were_started(plan: str, fields: dict[str, Any]) -> None:
    """As many devices as the launcher found are its own matter: this machine may have fewer."""
    work = job(model="gpt", global_batch=64)
    assert_refused(plan, work, SERVERS, "other_number_of_ranks", fields, world=6)
    assert reasons_against(Plan.parse("dp=6 tp=2"), work, SERVERS, world=12) == []


@pytest.mark.parametrize(
    ("plan", "changes", "code", "fields"),
    [
        ("dp=2 fsdp=2", {"global_batch": 3}, "too_few_samples", {"limited": "dp × fsdp × ep", "data_ranks": 4}),
        ("fsdp=2 tp=2 microbatches=5", {}, "too_many_microbatches", {"share": 4}),
        ("dp=2 fsdp=2", {"partition": {"weights": [1, 1]}}, "other_number_of_weights", {"works": "dp=1, or 4 weights"}),
        ("fsdp=2", {"partition": {"weights": [99, 1]}}, "weights_leave_no_sample", {"enough": 100}),
    ],
)
def test_a_batch_is_dealt_to_the_ranks_that_read_apart(
    plan: str, changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    assert_refused(plan, job(**({"model": "gpt"} | changes)), SERVERS, code, fields)


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
    problems = plan_errors(work, plan, cluster=cluster)
    if not problems:
        dealt = Partition(
            work.partition, samples=global_batch, global_batch=global_batch, seed=0, replica=0, replicas=dp
        )
        assert min(dealt.shares(0)) >= microbatches
    elif problems.nearest is not None:
        assert plan_errors(work, problems.nearest, cluster=cluster) == []
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
    assert_refused(Plan(dp=2), models_own, LAPTOP, "models_loss_in_parts")
    assert reasons_against(Plan(), models_own, LAPTOP) == reasons_against(Plan(dp=2), own, LAPTOP) == []
    assert_refused(Plan(dp=2, microbatches=2), own, LAPTOP, "whole_batch_in_parts", {"microbatches": 2})


# Plans that divide the model


@pytest.mark.parametrize(
    ("plan", "changes", "code", "fields"),
    [
        ("zero=2", {}, "key_without_its_degree", {"key": "zero", "value": 2, "degree": "fsdp"}),
        ("offload=on", {}, "key_without_its_degree", {"key": "offload", "value": "on", "degree": "fsdp"}),
        ("sequence=on", {}, "key_without_its_degree", {"key": "sequence", "degree": "tp"}),
        ("schedule=gpipe", {}, "key_without_its_degree", {"key": "schedule", "degree": "pp"}),
        ("cut=blocks.1", {}, "key_without_its_degree", {"key": "cut", "degree": "pp"}),
        ("pp=4 microbatches=3", {}, "microbatches_do_not_fit", {"schedule": "1f1b", "choices": [4, 5]}),
        ("pp=2 schedule=interleaved microbatches=5", {}, "microbatches_do_not_fit", {"choices": [4, 6]}),
        ("pp=5 microbatches=5", {}, "too_many_stages", {"stages": 5, "places": 4, "choices": ["pp is at most 4"]}),
        (
            "pp=3 schedule=interleaved microbatches=3",
            {},
            "too_many_stages",
            {"stages": 6, "choices": ["schedule=1f1b", "pp is at most 2"]},
        ),
        (
            "pp=2 schedule=interleaved virtual=3 microbatches=4",
            {},
            "too_many_stages",
            {"stages": 6, "choices": ["virtual is at most 2", "schedule=1f1b", "pp=1"]},
        ),
        ("pp=2 virtual=3 microbatches=2", {}, "virtual_without_interleaving", {"virtual": 3}),
        ("pp=2 schedule=dualpipe microbatches=3", {}, "microbatches_do_not_fit", {"choices": [4, 5]}),
        ("pp=2 microbatches=2", LINEAR, "too_many_stages", {"places": 1, "choices": ["pp=1"]}),
        ("pp=2 cut=block.2 microbatches=2", {}, "wrong_cuts", {"unknown": ["block.2"], "meant": ["blocks.2"]}),
        ("pp=3 cut=norm,norm microbatches=3", {}, "wrong_cuts", {"unknown": [], "twice": ["norm"]}),
        ("pp=4 cut=blocks.2 microbatches=4", {}, "wrong_cuts", {"even": ["blocks.1", "blocks.2", "blocks.3"]}),
        ("pp=2 schedule=zero-bubble cut=blocks.2 microbatches=2", {}, "wrong_cuts", {"stages": 4}),
        ("tp=3", {}, "heads_not_divisible", {"tp": 3, "heads": [4], "choices": [1, 2, 4]}),
        ("tp=3", {"model": f"{__file__}:few_keys"}, "heads_not_divisible", {"heads": [2, 6], "choices": [1, 2, 6]}),
        ("tp=4", {"model": f"{__file__}:few_fused_keys"}, "heads_not_divisible", {"heads": [2, 4], "choices": [1, 2]}),
        ("ep=2", {}, "no_experts", {"ep": 2}),
        ("ep=3", {"model": "moe"}, "experts_not_divisible", {"experts": [8], "choices": [1, 2, 4, 8]}),
        ("cp=5", {}, "tokens_not_divisible", {"choices": [1, 2, 3, 4, 6, 8, 12, 24], "lengths": [20, 30]}),
        ("tp=4 cp=4 sequence=on", {}, "tokens_not_divisible", {"choices": [1, 2, 3, 6], "lengths": [16, 32]}),
        ("tp=2 sequence=on", RESNET, "no_sequence_to_divide", {}),
        ("cp=2", RESNET, "no_attention", {}),
        (
            "pp=2 cp=2 schedule=gpipe",
            {"loss": "contrastive"},
            "whole_batch_loss_over_stages",
            {"divided": ["pp", "cp"]},
        ),
        ("dp=2 sync=server", {"optimizer": "muon"}, "matrices_on_servers", {}),
        ("fsdp=2 tp=2", {"optimizer": "Adafactor"}, "updates_of_whole_parameters", {"divided": ["fsdp", "tp"]}),
        ("fsdp=2 memory_format=channels_last", RESNET, "channels_last_of_divided_models", {}),
        ("fsdp=2 compile=reduce-overhead", {}, "graphs_of_divided_models", {}),
        ("remat=block", LINEAR, "no_blocks_to_recompute", {}),
        ("offload_activations=on", LINEAR, "no_blocks_to_offload", {}),
        ("remat=selective offload_activations=on", {}, "offload_of_unsaved_tensors", {"works": "remat=block"}),
        ("offload_activations=on compile=on", {}, "offload_of_unsaved_tensors", {"works": "compile=off"}),
        (
            "pp=2 schedule=zero-bubble microbatches=2 compile=on",
            {},
            "compiled_v_schedule",
            {"schedule": "zero-bubble"},
        ),
    ],
)
def test_what_cannot_be_divided_is_told_what_can(
    plan: str, changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    assert_refused(plan, tokens(**changes), LARGE_SERVERS, code, fields)


def test_a_model_that_numbers_its_own_tokens_may_be_divided_but_is_not_proposed_to_be() -> None:
    numbered = tokens(model=f"{__file__}:OwnPositions")
    assert reasons_against(Plan(cp=2), numbered, LARGE_SERVERS) == []
    assert Plan(cp=2) not in legal_plans(numbered, LARGE_SERVERS, 2)


@pytest.mark.parametrize(
    ("plan", "cluster", "fields"),
    [
        ("tp=2", CPUS, {"shortage": "19.6 GiB in the memory of a host that has 16 GiB"}),
        ("fsdp=2", LARGE_SERVERS, None),
        ("fsdp=2 precision=fp64", LARGE_SERVERS, {"works": "fsdp=4 is enough"}),
        ("fsdp=8 zero=1 precision=fp64", LARGE_SERVERS, {"works": "fsdp=8 zero=3 is enough"}),
        ("fsdp=2 precision=fp64 offload=on", LARGE_SERVERS, None),
        ("tp=2 pp=2 microbatches=2 precision=fp64", LARGE_SERVERS, None),
    ],
)
def test_a_state_beyond_the_memory_is_refused_with_its_size(
    plan: str, cluster: Cluster, fields: dict[str, Any] | None
) -> None:
    """By shapes alone: parameters, gradients and Adam's two moments, 4 or 8 bytes each."""
    work = tokens(model={"zoo": "gpt", "args": LARGE})
    if fields is None:
        assert plan_errors(work, plan, cluster=cluster) == []
    else:
        assert_refused(plan, work, cluster, "state_beyond_memory", fields)


def test_a_plan_of_1024_ranks_for_70_billion_parameters_is_checked_here() -> None:
    gpus = tuple(Device(index=i, name="H100", memory_bytes=80 * 2**30, bf16=True) for i in range(8))
    cluster = Cluster(hosts=tuple(Host(name=f"h{n}", cores=64, memory_bytes=2**40, gpus=gpus) for n in range(128)))
    args = {"layers": 80, "hidden": 8192, "heads": 64, "vocab": 128256, "context": 4096}
    work = tokens(model={"zoo": "gpt", "args": args}, global_batch=1024)
    assert plan_errors(work, "dp=16 fsdp=8 tp=8", cluster=cluster) == []
    assert plan_errors(work, "dp=16 fsdp=8 tp=7", cluster=cluster).nearest == Plan.parse("dp=16 fsdp=8 tp=8")


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
    assert plan_errors(rule_job(), plan, cluster=CPUS) == []


@pytest.mark.parametrize(
    ("plan", "changes", "code", "nearest"),
    [
        ("dp=2 sync=local:4 compress=int8", {}, "nothing_to_compress", "dp=2 sync=local:4"),
        ("dp=2 sync=diloco:4 compress=auto", {}, "nothing_to_try", "dp=2 sync=diloco:4"),
        ("dp=2 compress=int8 precision=fp64", {}, "compressed_fp64", None),
        ("dp=2 sync=local:4", {"nonfinite": "rewind"}, "rewind_of_local_steps", "dp=2"),
        ("dp=2 sync=local:4", {"spike": "skip"}, "spikes_of_local_steps", "dp=2"),
        ("dp=2 sync=diloco:4", {"batch_norm": "sync"}, "batch_norm_of_local_steps", "dp=2"),
        ("dp=2 sync=server compress=auto", {}, "codecs_tried_on_sums", None),
        ("dp=2 sync=server:staleness=1 compress=powersgd:4", {}, "codec_of_sums", None),
        ("dp=2 sync=server:servers=3", {}, "more_servers_than_replicas", None),
        ("dp=3 sync=server:staleness=inf", {"global_batch": 64}, "servers_and_batch", None),
        ("dp=2 sync=server:staleness=inf num_workers=1", {}, "servers_and_loader_processes", None),
        ("dp=2 sync=server:staleness=inf", {"nonfinite": "rewind"}, "rewind_of_local_steps", None),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_what_would(
    plan: str, changes: dict[str, Any], code: str, nearest: str | None
) -> None:
    problems = plan_errors(rule_job(**changes), plan, cluster=CPUS)
    assert f"plan.{code}" in [problem.code for problem in problems]
    if nearest is not None:
        assert str(problems.nearest) == nearest


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
