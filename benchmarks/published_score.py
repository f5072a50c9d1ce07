"""What is said of predictions of a table.

Errors of time and memory, bias, rank correlation, the regret of choosing by them, and how often intervals hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from paceline.planning.cost.layout import Interval
from paceline.planning.cost.memory import SPREAD
from published_rows import Row

# plans that are predicted this near to each other, relative, are a tie
TIE = 1e-3
_Z80 = 1.2816


@dataclass(frozen=True)
class Predicted:
    """A row, and what was predicted of it.

    Attributes:
        seconds: as corrected by its table's set-aside rows.
        cold_s: with constants that no row of its source was used for.
        cold_interval: its 80 % interval.
        baseline_s, baseline_cold_s: the same by the baseline.
        null_s: by the null model.
        memory_gib: as the row counts it, activations alone or all.
    """

    row: Row
    seconds: float
    cold_s: float
    cold_interval: Interval
    baseline_s: float
    baseline_cold_s: float
    null_s: float
    memory_gib: float
    fits: bool
    interval: Interval

    @property
    def measured_s(self) -> float:
        """Measured seconds; NaN where there are none."""
        return self.row.seconds or math.nan

    @property
    def error(self) -> float:
        """Of the time, relative, without its sign."""
        return abs(self.seconds / self.measured_s - 1)


@dataclass(frozen=True)
class Score:
    """Figures over some rows; NaN where there is nothing to compare.

    Attributes:
        bias: the median of predicted / measured.
        cold_regret, baseline_regret: the mean regret of cold predictions and of the baseline's.
        cold_error, cold_bias: the same of predictions without the table.
        regret: for groups of different plans for equal work: measured time of the plan predicted fastest / of the
            fastest − 1, mean and worst. Of plans in a tie the mean counts; `ties` is the number of such groups.
        memory_coverage: part of the measured memories inside their 80 % interval.
        coverage, cold_coverage: part of the measured times inside their 80 % interval, calibrated and cold.
        out_of_memory: rows that ran out of memory; `oom_missed` of them were predicted to fit, and `oom_false` others
            not to.
    """

    rows: int
    mean_error: float
    median_error: float
    p90_error: float
    bias: float
    cold_regret: float
    cold_error: float
    cold_bias: float
    rank_correlation: float
    groups: int
    ties: int
    mean_regret: float
    worst_regret: float
    coverage: float
    cold_coverage: float
    baseline_error: float
    baseline_p90_error: float
    baseline_cold_error: float
    baseline_regret: float
    null_mean_error: float
    null_mean_regret: float
    memory_rows: int
    memory_median_error: float
    memory_coverage: float
    out_of_memory: int
    oom_missed: int
    oom_false: int


def score(predicted: Sequence[Predicted]) -> Score:
    """Over the given rows."""
    timed = [each for each in predicted if each.row.seconds]
    measured = [each.measured_s for each in timed]
    errors = [each.error for each in timed]
    by_place = {each.row.place: each for each in timed}
    groups = [[by_place[row.place] for row in group] for group in grouped([each.row for each in timed])]
    regrets = [regret(group, lambda each: each.seconds) for group in groups]
    weighed = [each.memory_gib / each.row.memory_gib for each in predicted if each.row.memory_gib]
    burst = [each for each in predicted if each.row.out_of_memory]
    return Score(
        rows=len(timed),
        mean_error=mean(errors),
        median_error=quantile(errors, 0.5),
        p90_error=quantile(errors, 0.9),
        bias=quantile([each.seconds / each.measured_s for each in timed], 0.5),
        cold_regret=mean([regret(group, lambda each: each.cold_s)[0] for group in groups]),
        cold_error=mean([abs(each.cold_s / each.measured_s - 1) for each in timed]),
        cold_bias=quantile([each.cold_s / each.measured_s for each in timed], 0.5),
        rank_correlation=_rank_correlation([each.seconds for each in timed], measured),
        groups=len(regrets),
        ties=sum(tied for _, tied in regrets),
        mean_regret=mean([lost for lost, _ in regrets]),
        worst_regret=max((lost for lost, _ in regrets), default=math.nan),
        coverage=mean([float(each.measured_s in each.interval) for each in timed]),
        cold_coverage=mean([float(each.measured_s in each.cold_interval) for each in timed]),
        baseline_error=mean([abs(each.baseline_s / each.measured_s - 1) for each in timed]),
        baseline_p90_error=quantile([abs(each.baseline_s / each.measured_s - 1) for each in timed], 0.9),
        baseline_cold_error=mean([abs(each.baseline_cold_s / each.measured_s - 1) for each in timed]),
        baseline_regret=mean([regret(group, lambda each: each.baseline_s)[0] for group in groups]),
        null_mean_error=mean([abs(each.null_s / each.measured_s - 1) for each in timed]),
        null_mean_regret=mean([regret(group, lambda each: each.null_s)[0] for group in groups]),
        memory_rows=len(weighed),
        memory_median_error=quantile([abs(ratio - 1) for ratio in weighed], 0.5),
        memory_coverage=mean([float(abs(math.log(ratio)) <= _Z80 * SPREAD) for ratio in weighed]),
        out_of_memory=len(burst),
        oom_missed=sum(each.fits for each in burst),
        oom_false=sum(not each.fits for each in timed),
    )


def regret(group: Sequence[Predicted], seconds: Callable[[Predicted], float]) -> tuple[float, bool]:
    """Slowdown of the plan that the predictions choose, against the group's best, and whether it was a tie.

    Chosen among those predicted to fit, if there are any.
    """
    able = [each for each in group if each.fits] or list(group)
    least = min(seconds(each) for each in able)
    chosen = [each for each in able if seconds(each) <= least * (1 + TIE)]
    best = min(each.measured_s for each in group)
    plans = {each.row.plan for each in chosen}
    return mean([each.measured_s for each in chosen]) / best - 1, len(plans) > 1


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of equal work on equal machines that have different plans."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    return [group for group in groups.values() if len({row.plan for row in group}) > 1]


def mean(values: Sequence[float]) -> float:
    """Mean; NaN of nothing."""
    return float(np.mean(values)) if values else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile; NaN of nothing."""
    return float(np.quantile(values, share)) if values else math.nan


def _rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return float(spearmanr(predicted, measured).statistic) if len(measured) > 2 else math.nan
