"""Correction of predictions by a few measured runs: one factor for each software and hardware, and what is left."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from scipy.stats import t as student

from paceline.planner.cost.layout import Layout
from paceline.planner.tables.rows import Row

# Standard deviations that are assumed of logarithms: of the factor of all runs, of a framework and of a device beside
# that, and of a run around its factor, of which one in some is far off (Student's t of so many degrees of freedom)
FACTOR_SPREADS, RUN_SPREAD, DEGREES = (0.12, 0.08, 0.05, 0.05), 0.14, 4.0
# Standard deviations of log(measured / predicted) that are assumed before any is seen, and for how many runs they
# count: with a factor, and without one (`benchmarks/published.py`, rows that no constant was fitted on)
SPREAD, COLD_SPREAD, SPREAD_RUNS = 0.085, 0.17, 3.0
COVERED = 0.8  # of measured times, inside of an interval

Key = tuple[str, ...]


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


@dataclass(frozen=True)
class Adjustment:
    """Factors found on measured runs; without any, predictions stay as they are.

    Attributes:
        logs: logarithm of measured / predicted, by what is alike: `()` for all runs, a framework, a framework on a
            device.
        errors: logarithms that are left after these.
    """

    logs: dict[Key, float] = field(default_factory=dict)
    errors: tuple[float, ...] = ()

    def factor(self, layout: Layout) -> float:
        """What a predicted step time is multiplied with."""
        found = next((self.logs[key] for key in reversed(_keys(layout)) if key in self.logs), 0.0)
        return math.exp(found)

    def interval(self, layout: Layout, step_time_s: float) -> Interval:
        """Interval of a corrected step time."""
        count = len(self.errors)
        spread = self.spread
        wide = float(student.ppf((1 + COVERED) / 2, SPREAD_RUNS + count)) * spread
        if not count:
            return Interval(step_time_s / math.exp(wide), step_time_s * math.exp(wide), "the cost model alone")
        own = _keys(layout)[-1] in self.logs
        alike = "of this software and hardware" if own else "of other software or hardware"
        about = f"{count} measured run{'s' * (count > 1)}, {'some' if own else 'all'} {alike}"
        return Interval(step_time_s / math.exp(wide), step_time_s * math.exp(wide), about)

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithms of what is left, with what is assumed of them."""
        assumed = SPREAD if self.errors else COLD_SPREAD
        squares = SPREAD_RUNS * assumed**2 + sum(error**2 for error in self.errors)
        return math.sqrt(squares / (SPREAD_RUNS + len(self.errors)))


def adjustment(runs: Iterable[Row], predicted_s: Callable[[Layout], float]) -> Adjustment:
    """Factors of some measured runs. A software and hardware with few runs stays near to what all runs say."""
    pairs = [(row.layout, math.log(row.seconds / predicted_s(row.layout))) for row in runs if row.seconds]
    if not pairs:
        return Adjustment()
    by_key: dict[Key, list[float]] = defaultdict(list)
    parents: dict[Key, Key] = {}
    for layout, log in pairs:
        for parent, key in pairwise([(), *_keys(layout)]):
            by_key[key].append(log)
            parents[key] = parent
    logs: dict[Key, float] = {}
    for key in sorted(by_key, key=len):
        above = logs[parents[key]] if key else 0.0
        alone = bool(key) and len(by_key[key]) == len(by_key[parents[key]])
        logs[key] = above if alone else _likeliest(by_key[key], above, FACTOR_SPREADS[len(key)])
    return Adjustment(logs, tuple(_left(pairs, logs)))


def _likeliest(logs: Sequence[float], around: float, spread: float) -> float:
    """The likeliest logarithm of a factor that is assumed to be near to another, of runs some of which are far off."""

    def unlikely(value: float) -> float:
        far = sum(math.log1p(((log - value) / RUN_SPREAD) ** 2 / DEGREES) for log in logs)
        return (DEGREES + 1) / 2 * far + ((value - around) / spread) ** 2 / 2

    starts = [around, median(logs), *logs]
    best = min(starts, key=unlikely)
    step = spread
    while step > 1e-4:
        nearer = min((best - step, best, best + step), key=unlikely)
        step = step if nearer != best else step / 2
        best = nearer
    return best


def _left(pairs: Sequence[tuple[Layout, float]], logs: dict[Key, float]) -> Iterable[float]:
    """Logarithms that are left, larger by what each run itself moved its factor."""
    counts: dict[Key, int] = defaultdict(int)
    for layout, _ in pairs:
        counts[_keys(layout)[-1]] += 1
    for layout, log in pairs:
        key = _keys(layout)[-1]
        yield (log - logs[key]) * math.sqrt((counts[key] + 1) / counts[key])


def _keys(layout: Layout) -> list[Key]:
    """What a run is alike in, from all runs to the same software, hardware and precision."""
    framework, device = layout.framework.name, layout.machines.device.name
    return [(), (framework,), (framework, device), (framework, device, layout.products or layout.precision)]
