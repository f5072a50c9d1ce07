"""Speed, memory and predictions for `gpu.py`: what is compared with what, at which size.

Models and batches are scaled to the devices' memory. A prediction is made before anything is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_loops import largest_difference
from gpu_ranks import Beside, Compared, Comparison, train_in_turn
from gpu_results import Described, Side, SpeedRow
from paceline.cluster.discover import discover
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks, warm_up_for
from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.plan import Plan
from paceline.planning.prediction import estimate
from paceline.run.record.run import Run
from paceline.stats import median_interval

GIB = 2**30
# Relative differences of the first losses. In fp32 convolutions and matrix products may be computed in TF32.
SAME = {"fp32": 5e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Size:
    """A model's size, and the batch of one device.

    Attributes:
        layers, hidden, heads, context, vocab: of the GPT.
        sequences, images: of one device in a step, of the GPT and the CNN.
    """

    layers: int
    hidden: int
    heads: int
    context: int
    vocab: int
    sequences: int
    images: int

    @property
    def gpt(self) -> dict[str, Any]:
        """The model, as a job has it."""
        fields = ("vocab", "context", "layers", "hidden", "heads")
        return {"zoo": "gpt", "args": {name: getattr(self, name) for name in fields}}


# GPT-2 small (124 million parameters) takes 2 GiB of state on each side, and about 1.2 GiB for each sequence at once.
_GPT2 = Size(12, 768, 12, 1024, 50304, 8, 512)
_SMALL = Size(6, 384, 6, 512, 32768, 4, 256)
_TINY = Size(2, 64, 2, 32, 128, 4, 16)


def size_for(described: Described) -> Size:
    """The size that devices of this memory have room for; the smallest where nothing is to be measured."""
    if described.mode != "accelerators":
        return _TINY
    gib = (described.memory_bytes or 8 * GIB) / GIB
    if gib < 10:
        return _SMALL
    return replace(_GPT2, sequences=max(s for s in (2, 4, 8, 16) if s * 1.2 + 6 < gib or s == 2))


@dataclass(frozen=True)
class SpeedCase:
    """Something to measure.

    Attributes:
        key: begins the names of its figures.
        job: without the batch of other numbers of devices.
        plan: ours.
    """

    key: str
    name: str
    beside: Beside
    job: Job
    plan: Plan
    compiled: bool = False

    @property
    def row(self) -> SpeedRow:
        """Its row before anything was measured."""
        precision = self.plan.precision_for(self.job)
        return SpeedRow(
            self.key,
            self.name,
            str(self.plan),
            self.beside,
            self.plan.ranks,
            self.job.global_batch,
            "not run",
            precision=precision,
            tokens=(self.job.data.shape or (0,))[0] if self.job.model.zoo == "gpt" else 0,  # type: ignore[union-attr]
        )


def speeds_on(devices: int, described: Described) -> Iterator[SpeedCase]:
    """What is measured, the most telling first."""
    size, bf16 = size_for(described), described.capabilities.get("bf16")
    precision: Any = "bf16" if bf16 and described.mode != "cpu" else "fp32"
    gpt, cnn = (lambda n: _gpt(size, n, precision)), (lambda n: _cnn(size, n))
    yield SpeedCase("gpt", "GPT, one device", "plain PyTorch", gpt(1), Plan())
    if devices > 1:
        yield SpeedCase("gpt_ddp", f"GPT, {devices} devices", "DDP", gpt(devices), Plan(dp=devices))
        yield SpeedCase("gpt_fsdp", f"GPT, {devices} devices", "FSDP2", gpt(devices), Plan(fsdp=devices))
    yield SpeedCase("cnn", "CNN, one device", "plain PyTorch", cnn(1), Plan())
    if devices > 1:
        yield SpeedCase("cnn_ddp", f"CNN, {devices} devices", "DDP", cnn(devices), Plan(dp=devices))
    if described.capabilities.get("fused_optimizers") and described.mode == "accelerators":
        plan = Plan(compile="on", fused=True)
        yield SpeedCase("gpt_compiled", "GPT, compiled", "plain PyTorch", gpt(1), plan, compiled=True)


def _gpt(size: Size, devices: int, precision: Any) -> Job:
    batch = size.sequences * devices
    data = {"kind": "synthetic", "samples": 16 * batch, "shape": [size.context], "vocab": size.vocab, "held_out": 0}
    return Job(**_job(size.gpt, data, batch, 3e-4), precision=precision)


def _cnn(size: Size, devices: int) -> Job:
    batch = size.images * devices
    return Job(**_job("cifar_cnn", {"kind": "synthetic", "samples": 16 * batch, "held_out": 0}, batch, 1e-4))


def _job(model: Any, data: dict[str, Any], batch: int, lr: float) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": lr},
        "global_batch": batch,
        "stop": {"steps": 10**9},
        "checkpoint": {"every_seconds": 1e6},
    }


def measured(case: SpeedCase, seconds: float) -> SpeedRow:
    """Predict, then measure for so many seconds beside the start. Raises what starting the ranks raises."""
    cluster, row = discover(), case.row
    if problems := plan_errors(case.job, case.plan, cluster=cluster):
        return replace(row, verdict="refused", about=" ".join(problem.text for problem in problems))
    row = _predicted(case, row)
    warm_up_for(case.job, case.plan)
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as folder:
        run = Run.create(Path(folder) / "run", case.job, cluster, case.plan)
        found = run_on_ranks(
            train_in_turn,
            Comparison(run.path, case.beside, case.compiled, seconds),
            places=on_this_machine(case.plan.ranks),
            threads=case.plan.threads_for(cluster.hosts[0], case.plan.ranks),
            deadline_s=120.0,
            start_deadline_s=120.0 + seconds,
        )
    return _row(row, found)


def _predicted(case: SpeedCase, row: SpeedRow) -> SpeedRow:
    """The row with its prediction, or with the reason why there is none."""
    try:
        prediction = estimate(case.job, case.plan, cluster=discover())
    except PacelineError as error:
        return replace(row, prediction_note=str(error))
    return replace(
        row,
        peak_share=None if prediction.mfu is None else prediction.mfu * prediction.step_time_s,
        predicted_step_s=prediction.step_time_s,
        predicted_memory_bytes=prediction.memory_bytes,
        prediction_note=" ".join(prediction.notes),
    )


def _row(row: SpeedRow, found: Sequence[Compared]) -> SpeedRow:
    """The row with what the ranks found: a block's time is that of its slowest rank."""
    worst = largest_difference(found[0].ours_losses, found[0].theirs_losses)
    about = f"first losses differ by {worst:.1e} of {SAME[row.precision]:.0e}"
    if worst > SAME[row.precision]:
        return replace(row, verdict="other losses", about=f"{about}, so the times are not compared")
    ours_s, theirs_s = ([max(block) for block in zip(*times, strict=True)] for times in _times(found))
    return replace(
        row,
        verdict="measured",
        about=about,
        ours=Side(median_interval(ours_s), _bytes([rank.ours_bytes for rank in found])),
        theirs=Side(median_interval(theirs_s), _bytes([rank.theirs_bytes for rank in found])),
        ratio=median_interval([b / a for a, b in zip(ours_s, theirs_s, strict=True)]),
    )


def _times(found: Sequence[Compared]) -> tuple[list[list[float]], list[list[float]]]:
    return [rank.ours_s for rank in found], [rank.theirs_s for rank in found]


def _bytes(of_ranks: Sequence[int]) -> int | None:
    return max(of_ranks) if min(of_ranks) >= 0 else None
