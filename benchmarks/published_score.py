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
from paceline.planning.machines import Adjustment
from published_rows import Row

# plans that are predicted this near to each other, relative, are a tie
TIE = 1e-3
_Z80 = 1.2816


@dataclass(frozen=True)
class Predicted:
    """A row, and what was predicted of it.

    Attributes:
        seconds: as corrected by its table's set-aside rows.
        factor_s: the same by one factor for its software, hardware and precision, whatever else it is like.
        cold_s: with constants that no row of its table was used for.
        null_s: by the null model.
        memory_gib: as the row counts it, activations alone or all.
    """

    row: Row
    seconds: float
    factor_s: float
    cold_s: float
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
        factor_error, factor_regret: the mean error and regret by one factor alone.
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
    factor_error: float
    factor_regret: float
    cold_error: float
    cold_bias: float
    rank_correlation: float
    groups: int
    ties: int
    mean_regret: float
    worst_regret: float
    coverage: float
    cold_coverage: float
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
    groups = _groups(timed)
    regrets = [regret(group, lambda each: each.seconds) for group in groups]
    weighed = [each.memory_gib / each.row.memory_gib for each in predicted if each.row.memory_gib]
    burst = [each for each in predicted if each.row.out_of_memory]
    return Score(
        rows=len(timed),
        mean_error=mean(errors),
        median_error=quantile(errors, 0.5),
        p90_error=quantile(errors, 0.9),
        bias=quantile([each.seconds / each.measured_s for each in timed], 0.5),
        factor_error=mean([abs(each.factor_s / each.measured_s - 1) for each in timed]),
        factor_regret=mean([regret(group, lambda each: each.factor_s)[0] for group in groups]),
        cold_error=mean([abs(each.cold_s / each.measured_s - 1) for each in timed]),
        cold_bias=quantile([each.cold_s / each.measured_s for each in timed], 0.5),
        rank_correlation=_rank_correlation([each.seconds for each in timed], measured),
        groups=len(regrets),
        ties=sum(tied for _, tied in regrets),
        mean_regret=mean([lost for lost, _ in regrets]),
        worst_regret=max((lost for lost, _ in regrets), default=math.nan),
        coverage=mean([float(each.measured_s in each.interval) for each in timed]),
        cold_coverage=mean(
            [float(each.measured_s in Adjustment().interval(each.row.layout, each.cold_s)) for each in timed]
        ),
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


def _groups(timed: Sequence[Predicted]) -> list[list[Predicted]]:
    """Groups of equal work on equal machines that have different plans."""
    groups: dict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for each in timed:
        groups[each.row.group].append(each)
    return [group for group in groups.values() if len({each.row.plan for each in group}) > 1]


def mean(values: Sequence[float]) -> float:
    """Mean; NaN of nothing."""
    return float(np.mean(values)) if values else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile; NaN of nothing."""
    return float(np.quantile(values, share)) if values else math.nan


def _rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return float(spearmanr(predicted, measured).statistic) if len(measured) > 2 else math.nan
