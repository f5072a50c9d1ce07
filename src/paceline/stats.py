"""Medians with bootstrap intervals, and when two of them differ."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_REPEATS = 3  # with fewer, an interval says nothing, and no difference is claimed


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.4f} ({self.low:.4f} to {self.high:.4f})"

    def overlaps(self, other: Interval) -> bool:
        """Whether the two have a value in common: then no difference between them is claimed."""
        return self.low <= other.high and other.low <= self.high

    def times(self, factor: float) -> Interval:
        """The interval of `factor` (positive) times the value."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)


def median_interval(values: Sequence[float], resamples: int = 2000) -> Interval:
    """The median of `values` and the 2.5 % and 97.5 % quantiles of the medians of resamples (Efron, 1979)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return Interval(medians[int(0.025 * resamples)], statistics.median(values), medians[int(0.975 * resamples)])


def differ(one: Interval, other: Interval, *, repeats: int) -> bool:
    """Whether a difference may be claimed: the intervals have no value in common, and each comes from at least 3 repeats."""
    return repeats >= LEAST_REPEATS and not one.overlaps(other)
