"""What a plan is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass, field

PARTS = ("compute", "recompute", "launch", "tp", "cp", "ep", "fsdp", "pp", "bubble", "dp", "optimizer", "other")


@dataclass(frozen=True)
class Span:
    """One piece of the timeline of a pipeline: what a stage does from when to when, in seconds from the step's start."""

    stage: int
    what: str  # forward, backward, weight, wait
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """What a plan is predicted to cost.

    Attributes:
        step_time_s: of a whole step, all ranks together.
        memory_bytes: the most that one rank has at once on its device.
        throughput: samples per second.
        mfu: FLOPs of the model (without those computed again) over the peak of all devices; None where the peak is not known.
        cost_per_run: in the currency of the prices that the user gave; None without prices or without a known number of steps.
        breakdown: seconds of the step by `PARTS`; they sum to `step_time_s`.
        memory: bytes by what holds them; they sum to `memory_bytes`.
        fits: whether the memory is there.
        notes: what the prediction does not know, in words.
    """

    step_time_s: float
    memory_bytes: int
    throughput: float
    mfu: float | None
    breakdown: dict[str, float]
    memory: dict[str, float]
    fits: bool = True
    cost_per_run: float | None = None
    notes: tuple[str, ...] = field(default=())
