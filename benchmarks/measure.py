"""What the benchmarks share: medians with a bootstrap interval, and the line that says where a figure was measured."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from paceline.cluster.discover import discover


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.4f} ({self.low:.4f} to {self.high:.4f})"


def median_interval(values: Sequence[float], resamples: int = 2000) -> Interval:
    """The median of `values` and the 2.5 % and 97.5 % quantiles of the medians of resamples (Efron, 1979)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return Interval(medians[int(0.025 * resamples)], statistics.median(values), medians[int(0.975 * resamples)])


def environment_line() -> str:
    """Machine, versions and load, in one line."""
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    return f"{discover().describe()}; Python {platform.python_version()}, torch {version('torch')}; load average {load}"
