"""Predicted cost of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# the parts of a predicted step, with their names for people
PART_NAMES: Mapping[str, str] = {
    "compute": "computing",
    "recompute": "computing again",
    "launch": "launching kernels",
    "tp": "tp: sums of layers",
    "cp": "cp: keys and values",
    "ep": "ep: tokens to experts",
    "fsdp": "fsdp: weights, gradients",
    "pp": "pp: between stages",
    "bubble": "pipeline bubble",
    "dp": "dp: gradients",
    "optimizer": "optimizer",
    "other": "overhead of a step",
}
PARTS = tuple(PART_NAMES)


@dataclass(frozen=True)
class Span:
    """One span of a pipeline's timeline, in seconds from the step's start."""

    stage: int
    # forward, backward, weight, wait
    what: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a plan.

    Attributes:
        step_time_s: seconds of a whole step, all ranks together.
        memory_bytes: peak memory of one rank on its device.
        throughput: samples per second.
        mfu: FLOPs of the model (without recomputation) over the peak of all devices; None if the peak is not known.
        cost_per_run: in the currency of the user's prices; None without prices or without a known number of steps.
        breakdown: seconds of the step by `PARTS`; they sum to `step_time_s`.
        memory: bytes by holder; they sum to `memory_bytes`.
        fits: True if there is enough memory.
        notes: sentences on what the prediction does not know.
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
