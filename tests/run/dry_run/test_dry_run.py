"""Dry runs.

If these failed, a plan for a thousand ranks would be called good and fail on them, or be said to need memory it does
not.
"""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.backend import joined
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.sync_info import RULES, SyncInfo
from paceline.run.build import build_engine, built
from paceline.run.dry_run.dry_run import DryRun, MemoryWatch, run_dry
from paceline.split.layout import StateBytes, held_bytes
from paceline.sync.averaging import Averaging
from paceline.sync.rule import Replica
from ranks import Ranks
from refusals import raises

LAYERS, HIDDEN, TOKENS, VOCAB = 4, 64, 16, 64
GPT = {"zoo": "gpt", "args": {"layers": LAYERS, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "context": TOKENS}}
MOE = {"zoo": "moe", "args": {**GPT["args"], "experts": 4, "top_k": 2}}  # type: ignore[dict-item]
SENTENCES = {"kind": "synthetic", "samples": 2048, "shape": [TOKENS], "vocab": VOCAB, "held_out": 0}


def job(model: Any = GPT, data: Any = SENTENCES, global_batch: int = 128) -> Job:
    return Job(
        name="small",
        model=model,
        data=data,
        loss="cross_entropy",
        optimizer="adamw",
        global_batch=global_batch,
        stop={"steps": 1},
    )


def dry(text: str, **changes: Any) -> DryRun:
    return run_dry(job(**changes), Plan.parse(text))


def bytes_of_weights() -> int:
    with torch.device("meta"):
        return sum(p.nbytes for p in job().model.build().parameters())


def test_one_process_runs_a_plan_of_1024_ranks_dry() -> None:
    [stage] = dry("dp=16 fsdp=8 tp=8").stages
    assert stage.rank == 0
    assert stage.stopped_by is None
    assert stage.asked == []
    # norms are not divided by tp
    assert bytes_of_weights() / 64 <= stage.state.parameters < 1.2 * bytes_of_weights() / 64
    assert stage.state.gradients == stage.state.parameters
    assert stage.peak_bytes > stage.state.total
    assert stage.sent_bytes["dp"] == pytest.approx(2 * 15 / 16 * stage.state.gradients, rel=0.02)
    # gathered twice, but for what is left over
    assert stage.sent_bytes["fsdp"] == pytest.approx(3 * 7 * stage.state.parameters, rel=0.2)
    stream = TOKENS * HIDDEN * 4  # of the one sample
    assert stage.sent_bytes["tp"] == pytest.approx(
        2 * 7 / 8 * (4 * LAYERS + 2) * stream, rel=0.1
    )  # 2 sums a block each way, and at both ends


@pytest.mark.slow
def test_every_stage_of_a_pipeline_of_64_ranks_takes_its_part() -> None:
    found = dry("dp=4 fsdp=2 tp=2 pp=4 microbatches=4")
    assert [stage.stage for stage in found.stages] == [0, 1, 2, 3]
    assert [stage.rank for stage in found.stages] == [0, 4, 8, 12]
    assert sum(stage.state.parameters for stage in found.stages) == pytest.approx(bytes_of_weights() / 4, rel=0.1)
    assert all(stage.sent_bytes["pp"] > 0 for stage in found.stages)
    assert found.stages[0].peak_bytes > found.stages[2].peak_bytes, (
        "of 1f1b, the first stage keeps the most microbatches"
    )
    assert any("cut evenly" in note for note in found.notes)


@pytest.mark.parametrize(
    "schedule",
    ["gpipe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("interleaved", "zero-bubble"))],
)
def test_every_schedule_can_be_run_dry(schedule: str) -> None:
    found = dry(f"dp=32 pp=2 schedule={schedule} microbatches=2 remat=block precision=bf16")
    assert [stage.stopped_by for stage in found.stages] == [None, None]


def measured_on_a_rank(job: Job, text: str) -> tuple[StateBytes, int, int]:
    """What a real rank holds, has summed along tp, and had at most in a step."""
    torch.set_num_threads(1)
    plan = Plan.parse(text)
    with joined(deadline_s=30) as group:
        watch = MemoryWatch()
        with watch, watch.resizing():
            data = job.data.build(input_shape=None, seed=0)
            engine = build_engine(job, plan, built(job, plan), data, group)
            assert engine.split is not None
            tensors = engine.split.mesh.group("tp")
            batch = next(iter(engine.loader))
            engine.replica_state.due = math.inf  # comparing is no part of most steps, and so not of a dry run
            before = tensors.bytes_reduced
            watch.begin()
            engine.step(batch)
        held = held_bytes(engine.split.parameters.values(), engine.optimizer)
        engine.close()
        return held, tensors.bytes_reduced - before, watch.peak_bytes


@pytest.mark.parametrize("plan", [pytest.param("fsdp=2", marks=pytest.mark.slow), "tp=2 remat=block"])
def test_a_dry_run_finds_what_real_ranks_do(plan: str, ranks: Ranks) -> None:
    held, summed, peak_bytes = ranks(2, measured_on_a_rank, job(), plan)[0]
    [stage] = dry(plan).stages
    assert stage.state == held
    assert stage.sent_bytes.get("tp", 0) == (summed if "tp" in plan else 0)  # by two ranks, a sum sends each byte once
    assert stage.peak_bytes == pytest.approx(peak_bytes, rel=0.1)


def test_a_dry_run_counts_offloaded_activations_as_memory_of_the_host() -> None:
    tokens = 512  # a block's input has 2 MiB
    long = {
        "model": {"zoo": "gpt", "args": {**GPT["args"], "layers": 8, "context": tokens}},  # type: ignore[dict-item]
        "data": {**SENTENCES, "shape": [tokens]},
    }
    [kept, again, moved, least] = (
        dry(f"dp=8 {keys}", **long).stages[0]
        for keys in ("", "remat=block", "offload_activations=on", "remat=block offload_activations=on")
    )
    assert least.state == moved.state == kept.state
    assert moved.peak_bytes < 0.6 * kept.peak_bytes
    assert least.peak_bytes < again.peak_bytes


@pytest.mark.slow
def test_a_dry_run_shows_what_a_plan_saves() -> None:
    [kept] = dry("dp=8").stages
    [again] = dry("dp=8 remat=block").stages
    [shared] = dry("fsdp=8").stages
    assert again.peak_bytes < 0.8 * kept.peak_bytes
    assert again.state == kept.state
    assert shared.state.total == pytest.approx(kept.state.total / 8, rel=0.01)


def test_tokens_are_dealt_to_experts_that_are_elsewhere() -> None:
    found = dry("dp=4 fsdp=2 ep=4", model=MOE)
    [stage] = found.stages
    assert stage.stopped_by is None
    # bytes that leave the rank: of each token two rows, three of four
    away = 128 // 32 * TOKENS * 2 * HIDDEN * 4 * 3 / 4
    assert stage.sent_bytes["ep"] > 4 * LAYERS * away  # there and back, and so in the backward pass
    assert any("in turn" in note for note in found.notes)


def test_what_cannot_run_is_refused_with_every_reason() -> None:
    with raises(PlanError, "plan.heads_not_divisible", heads=[8], tp=3, what="attention heads (8)"):
        dry("dp=4 tp=3")
    with raises(PlanError, "plan.step_failed", kind="RuntimeError", rank=0, where="2"):
        dry("dp=4", model=f"{__file__}:of_other_widths", data=POINTS)
    assert not dist.is_initialized(), "the dry run leaves its group behind"
    dry("dp=4", model=f"{__file__}:looks_at_a_sum", data=POINTS)


POINTS = {"kind": "synthetic", "samples": 512, "shape": [6], "classes": 3, "held_out": 0}


def of_other_widths() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(7, 3))


class LooksAtASum(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output if output.sum() > 0 else output * 2


def looks_at_a_sum() -> nn.Module:
    return LooksAtASum(6, 3)


class KeepsPositive(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output + output[output > 0].mean()


def keeps_positive() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), KeepsPositive(6, 3))


def test_code_that_looks_at_values_is_named() -> None:
    [stage] = dry("dp=4", model=f"{__file__}:looks_at_a_sum", data=POINTS).stages
    assert stage.asked == ["LooksAtASum"]
    assert stage.stopped_by is None
    [stage] = dry("fsdp=4", model=f"{__file__}:keeps_positive", data=POINTS).stages
    assert stage.stopped_by is not None
    assert stage.stopped_by.startswith("1 needs the values of tensors")
    assert stage.state.parameters > 0, "what was divided is known all the same"


class Asking(Averaging):
    """A rule of another package that asks all ranks something when it begins."""

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        assert replica.dp.gather_json({"version": 2}) == [{"version": 2}] * replica.dp.size


ASKING = SyncInfo(f"{__name__}:Asking", exact=True, every_step=True, sends="gradients")


def test_a_rule_of_another_package_can_be_run_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends what it sends, without the comparison of every call, which nobody would answer."""
    monkeypatch.setitem(RULES.installed, "asking", EntryPoint("asking", f"{__name__}:ASKING", RULES.group))
    [own], [built_in] = dry("dp=4 sync=asking").stages, dry("dp=4 sync=averaging").stages
    assert own.stopped_by is None
    assert own.sent_bytes == built_in.sent_bytes


def test_a_watch_counts_what_is_alive() -> None:
    resize = torch.UntypedStorage.resize_
    watch = MemoryWatch()
    with watch, watch.resizing():
        first = torch.empty(1000)
        second = first.view(10, 100) + 1
        assert watch.live_bytes == 8000
        del first
        assert watch.live_bytes == 4000
        second.untyped_storage().resize_(0)
        assert watch.live_bytes == 0
        second.untyped_storage().resize_(4000)
        watch.begin()
        del second
    assert (watch.live_bytes, watch.peak_bytes) == (0, 4000)
    assert torch.UntypedStorage.resize_ is resize
