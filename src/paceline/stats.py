"""Medians with 95 % intervals that are valid for few repeats, and their comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_REPEATS = 3  # with fewer values, an interval is meaningless, and no difference is claimed
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of t, by the number of values


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.4f} ({self.low:.4f} to {self.high:.4f})"

    def overlaps(self, other: Interval) -> bool:
        """Return True if two intervals have a common value, so that no difference is claimed."""
        return self.low <= other.high and other.low <= self.high

    def times(self, factor: float) -> Interval:
        """Return the interval multiplied by a positive factor."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of positive `values` and its confidence interval.

    The interval holds the true median in at least 95 of 100 cases.

    With 6 or more values, its ends are two of the ordered values, for any distribution (Thompson, 1936): P(Binomial(n,
    1/2) < k) is at most 2.5 % on each side. With 2 to 5 values, no pair of values has this coverage; the interval is
    then Student's t of the logarithms, which is valid if the logarithms are normally distributed. A single value has no
    interval, so both ends equal the value.
    """
    ordered, middle, n = sorted(values), statistics.median(values), len(values)
    if n in _STUDENT and ordered[0] > 0:
        logs = [math.log(v) for v in values]
        centre, half = statistics.fmean(logs), _STUDENT[n] * statistics.stdev(logs) / math.sqrt(n)
        return Interval(min(middle, math.exp(centre - half)), middle, max(middle, _exp(centre + half)))
    below = _ranks_outside(n)
    return Interval(ordered[below], middle, ordered[n - 1 - below])


def _ranks_outside(n: int) -> int:
    """Return how many of n sorted values are outside of the interval on each side."""
    outside, tail = 0, 0.5**n
    while outside + 1 < n / 2 and (tail := tail + math.comb(n, outside + 1) * 0.5**n) <= 0.025:
        outside += 1
    return outside


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def differ(one: Interval, other: Interval, *, repeats: int) -> bool:
    """Return True if the intervals are disjoint, with at least 3 repeats each."""
    return repeats >= LEAST_REPEATS and not one.overlaps(other)
