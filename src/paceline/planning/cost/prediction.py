"""Predicted cost of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
class Interval:
    """Interval that holds a measured step time with a probability of 80 %.

    Attributes:
        low_s, high_s: its ends, in seconds.
        rests_on: what it rests on, for people.
    """

    low_s: float
    high_s: float
    rests_on: str

    @property
    def relative(self) -> float:
        """Half of its width, relative to its middle (the geometric mean of its ends)."""
        return math.sqrt(self.high_s / self.low_s) - 1

    def __contains__(self, seconds: float) -> bool:
        """True if a time is inside."""
        return self.low_s <= seconds <= self.high_s

    def times(self, factor: float) -> Interval:
        """The interval of a time that is multiplied."""
        return replace(self, low_s=self.low_s * factor, high_s=self.high_s * factor)


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
        interval: that of the step time; None in the middle of a search.
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
    interval: Interval | None = None

    def times(self, factor: float) -> Prediction:
        """The prediction with all times multiplied."""
        if factor == 1.0:
            return self
        return replace(
            self,
            step_time_s=self.step_time_s * factor,
            throughput=self.throughput / factor,
            mfu=None if self.mfu is None else self.mfu / factor,
            cost_per_run=None if self.cost_per_run is None else self.cost_per_run * factor,
            breakdown={part: seconds * factor for part, seconds in self.breakdown.items()},
            interval=None if self.interval is None else self.interval.times(factor),
        )
