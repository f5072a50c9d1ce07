"""What cannot be divided is refused before a rank starts, with the value that would work.

Else jobs fail late, or train something else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.planning.check.check_plan import check_plan
from paceline.planning.check.rules import reasons_against
from paceline.planning.legal_plans import legal_plans
from paceline.planning.limits import microbatches_fit
from paceline.planning.plan import Plan
from planner_jobs import job_on_tokens as job

GPUS = tuple(Device(index=i, name="T4", memory_bytes=2**34, bf16=False) for i in range(8))
SERVERS = Cluster(hosts=tuple(Host(name=name, cores=8, memory_bytes=2**36, gpus=GPUS) for name in "ab"))
CPUS = Cluster(name="this machine", hosts=(Host(name="a", cores=8, memory_bytes=2**34),))
LARGE = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "context": 1024}  # 1.3 billion parameters


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ("dp=2 fsdp=2 tp=2 cp=2", {}),
        ("fsdp=2 zero=1 offload=on", {}),
        ("tp=4 sequence=on cp=2 pp=2 schedule=interleaved microbatches=4", {}),
        ("pp=4 schedule=gpipe", {}),
        ("pp=2 schedule=zero-bubble cut=blocks.1,blocks.2,blocks.3 microbatches=2", {}),
        ("pp=2 schedule=dualpipe cut=blocks.1,blocks.2,blocks.3 microbatches=4", {}),
        ("pp=3 cut=blocks.0.mlp,norm microbatches=3", {}),
        ("fsdp=2 tp=2 compile=on remat=block precision=bf16", {}),
        ("ep=4 fsdp=2 tp=2", {"model": "moe"}),
        ("fsdp=2 tp=2", {"loss": "contrastive"}),
        ("pp=2 microbatches=2 cp=2", {"optimizer": "lamb"}),
        ("fsdp=2 pp=2 microbatches=2", {"model": "resnet50", "data": "digits"}),
        ("cp=2 tp=2", {"model": "bert"}),
        ("pp=4 schedule=interleaved cut=blocks.0,blocks.1,blocks.2,blocks.2.mlp,blocks.3,norm,head microbatches=4", {}),
        ("remat=selective", {}),
        ("fsdp=2", {"nonfinite": "skip", "batch_norm": "sync", "clip_norm": 1.0}),
    ],
)
def test_what_can_be_divided_is(plan: str, changes: dict[str, Any]) -> None:
    assert check_plan(Plan.parse(plan), job(**changes), SERVERS) == []


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        ("zero=2", {}, "has zero=2, which is about fsdp, but fsdp is 1: fsdp=2, or leave out zero."),
        ("offload=on", {}, "has offload=on, which is about fsdp, but fsdp is 1: fsdp=2, or leave out offload."),
        ("sequence=on", {}, "has sequence=on, which is about tp, but tp is 1: tp=2, or leave out sequence."),
        ("schedule=gpipe", {}, "has schedule=gpipe, which is about pp, but pp is 1: pp=2, or leave out schedule."),
        ("cut=blocks.1", {}, "has cut=blocks.1, which is about pp, but pp is 1: pp=2, or leave out cut."),
        (
            "pp=4 microbatches=3",
            {},
            "has 3 microbatches for 4 pipeline ranks; 1f1b needs at least one for each: microbatches is one of 4, 5.",
        ),
        (
            "pp=2 schedule=interleaved microbatches=5",
            {},
            (
                "has 5 microbatches for 2 pipeline ranks; interleaved needs equal rounds of 2 or a few more: "
                "microbatches is one of 4, 6."
            ),
        ),
        (
            "pp=5 microbatches=5",
            {},
            (
                "makes 5 stages, but the model has 4 repeated blocks: pp is at most 4, or cut names the modules "
                "where stages begin."
            ),
        ),
        (
            "pp=3 schedule=interleaved microbatches=3",
            {},
            "makes 6 stages, but the model has 4 repeated blocks: schedule=1f1b, pp is at most 2, "
            "or cut names the modules where stages begin.",
        ),
        (
            "pp=2 schedule=interleaved virtual=3 microbatches=4",
            {},
            "makes 6 stages, but the model has 4 repeated blocks: virtual is at most 2, schedule=1f1b, pp=1, "
            "or cut names the modules where stages begin.",
        ),
        (
            "pp=2 virtual=3 microbatches=2",
            {},
            "has virtual=3, the number of stages of a rank with schedule=interleaved, but the schedule is 1f1b: "
            "schedule=interleaved, or leave out virtual.",
        ),
        (
            "pp=2 schedule=dualpipe microbatches=3",
            {},
            "has 3 microbatches for 2 pipeline ranks; dualpipe needs at least two for each: microbatches is one of "
            "4, 5.",
        ),
        (
            "pp=2 microbatches=2",
            {"model": {"factory": "torch.nn:Linear", "args": {"in_features": 4, "out_features": 4}}, "loss": "mse"},
            "makes 2 stages, but the model has 1 weight matrix: pp=1, or cut names the modules where stages begin.",
        ),
        (
            "pp=2 cut=block.2 microbatches=2",
            {},
            'cuts at block.2: there is no module "block.2" in the model. Did you mean "blocks.2"?',
        ),
        ("pp=3 cut=norm,norm microbatches=3", {}, "cuts at norm, norm: a stage begins at norm once only."),
        (
            "pp=4 cut=blocks.2 microbatches=4",
            {},
            "cuts at blocks.2: 4 stages have 3 cuts between them, and there are 1: cut=blocks.1,blocks.2,blocks.3.",
        ),
        (
            "pp=2 schedule=zero-bubble cut=blocks.2 microbatches=2",
            {},
            (
                "cuts at blocks.2: 4 stages (schedule=zero-bubble) have 3 cuts between them, and there are 1: "
                "cut=blocks.1,blocks.2,blocks.3."
            ),
        ),
        ("tp=3", {}, "divides the model's attention heads (4) by 3, which leaves a remainder: tp is one of 1, 2, 4."),
        (
            "tp=3",
            {"model": f"{__file__}:few_keys"},
            "divides the model's heads of keys and values (2) by 3, which leaves a remainder: tp is one of 1, 2, 6.",
        ),
        (
            "tp=4",
            {"model": f"{__file__}:few_fused_keys"},
            "divides the model's heads in model.layers.0.self_attn (2, 4) by 4, which leaves a remainder: tp is one of "
            "1, 2.",
        ),
        (
            "ep=2",
            {},
            "divides experts, but the model has no mixture of experts in one tensor: ep=1 (fsdp=2 shards any model).",
        ),
        ("ep=3", {"model": "moe"}, "divides 8 experts over 3 ranks: ep is one of 1, 2, 4, 8."),
        (
            "cp=5",
            {},
            "divides sequences of 24 tokens among 5 ranks: cp is one of 1, 2, 3, 4, 6, 8, 12, 24, "
            "or sequences of 20 or 30 tokens in the job's data.",
        ),
        (
            "tp=4 cp=4 sequence=on",
            {},
            (
                "divides sequences of 24 tokens among 16 ranks: tp is one of 1, 2, 3, 6, or sequences of 16 or 32 "
                "tokens in the job's data."
            ),
        ),
        (
            "tp=2 sequence=on",
            {"model": "resnet50", "data": "digits"},
            (
                "divides the tokens between matrices, but the model has no blocks with attention over tokens: "
                "sequence=off."
            ),
        ),
        (
            "cp=2",
            {"model": "resnet50", "data": "digits"},
            "divides the tokens of a sequence, but the model has no attention over tokens: cp=1.",
        ),
        (
            "pp=2 cp=2 schedule=gpipe",
            {"loss": "contrastive"},
            "never has all outputs of a batch on one rank (pp, cp), and the contrastive loss compares all "
            "samples of a batch with each "
            "other: pp=1 cp=1.",
        ),
        (
            "fsdp=2 tp=2",
            {"optimizer": "lars"},
            "divides layers (fsdp, tp), and lars scales each layer's step by the norm of the whole layer: sgd, "
            "adam, adamw work, "
            "or fsdp=1 tp=1.",
        ),
        (
            "fsdp=2 memory_format=channels_last",
            {"model": "resnet50", "data": "digits"},
            "divides the model, whose parts keep the ordinary layout of memory: memory_format=contiguous.",
        ),
        (
            "fsdp=2 compile=reduce-overhead",
            {},
            "replays graphs of kernels, which cannot hold the communication inside a divided model: compile=on.",
        ),
        (
            "remat=block",
            {"model": {"factory": "torch.nn:Linear", "args": {"in_features": 4, "out_features": 4}}, "loss": "mse"},
            "recomputes blocks instead of keeping their activations, but the model has no repeated blocks: remat=none.",
        ),
        (
            "pp=2 schedule=zero-bubble microbatches=2 compile=on",
            {},
            "computes gradients of inputs and of weights apart (zero-bubble), which PyTorch cannot do with "
            "compiled stages: "
            "compile=off, or schedule=interleaved.",
        ),
    ],
)
def test_what_cannot_be_divided_is_told_what_can(plan: str, changes: dict[str, Any], reason: str) -> None:
    said = reasons_against(Plan.parse(plan), job(**changes), SERVERS)
    assert said == [f"plan {Plan.parse(plan)} {reason}"]


def test_a_model_that_numbers_its_own_tokens_may_be_divided_but_is_not_proposed_to_be() -> None:
    numbered = job(model=f"{__file__}:OwnPositions")
    assert reasons_against(Plan(cp=2), numbered, SERVERS) == []
    assert Plan(cp=2) not in legal_plans(numbered, SERVERS, 2)


@pytest.mark.parametrize(
    ("plan", "cluster", "reason"),
    [
        (
            "tp=2",
            CPUS,
            (
                "keeps parameters, gradients and optimizer state of 19.6 GiB in the memory of a host that has 16 "
                "GiB: more memory, or"
            ),
        ),
        ("fsdp=2", SERVERS, None),
        (
            "fsdp=2 precision=fp64",
            SERVERS,
            "keeps parameters, gradients and optimizer state of 19.6 GiB on a GPU that has 16 GiB: fsdp=4 is enough.",
        ),
        ("fsdp=8 zero=1 precision=fp64", SERVERS, "of 22.1 GiB on a GPU that has 16 GiB: fsdp=8 zero=3 is enough."),
        ("fsdp=2 precision=fp64 offload=on", SERVERS, None),
        ("tp=2 pp=2 microbatches=2 precision=fp64", SERVERS, None),
    ],
)
def test_a_state_beyond_the_memory_is_refused_with_its_size(plan: str, cluster: Cluster, reason: str | None) -> None:
    """By shapes alone: parameters, gradients and Adam's two moments, 4 or 8 bytes each."""
    said = reasons_against(Plan.parse(plan), job(model={"zoo": "gpt", "args": LARGE}), cluster)
    assert [reason in line for line in said if reason] == [True] * bool(reason), said


def test_a_plan_of_1024_ranks_for_70_billion_parameters_is_checked_here() -> None:
    gpus = tuple(Device(index=i, name="H100", memory_bytes=80 * 2**30, bf16=True) for i in range(8))
    cluster = Cluster(hosts=tuple(Host(name=f"h{n}", cores=64, memory_bytes=2**40, gpus=gpus) for n in range(128)))
    model = {"zoo": "gpt", "args": {"layers": 80, "hidden": 8192, "heads": 64, "vocab": 128256, "context": 4096}}
    assert check_plan(Plan.parse("dp=16 fsdp=8 tp=8"), job(model=model, global_batch=1024), cluster) == []
    said = check_plan(Plan.parse("dp=16 fsdp=8 tp=7"), job(model=model, global_batch=1024), cluster)
    assert said[-1] == "Nearest plan that works: dp=16 fsdp=8 tp=8."


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
    schedules._simulate_comms_compute(compute_and_messages, lambda stage: run.stage_index_to_group_rank[stage], 2 * pp)
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
