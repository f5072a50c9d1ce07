"""What is said of predictions of a table.

Errors of time and memory, bias, rank correlation, and the regret of choosing by them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from published_rows import Row


@dataclass(frozen=True)
class Predicted:
    """A row, and what was predicted of it; memory as the row counts it, activations alone or all."""

    row: Row
    seconds: float
    null_s: float
    memory_gib: float
    fits: bool

    @property
    def error(self) -> float:
        """Of the time, relative, without its sign."""
        assert self.row.seconds is not None
        return abs(self.seconds / self.row.seconds - 1)


@dataclass(frozen=True)
class Score:
    """Figures over some rows; NaN where there is nothing to compare.

    Attributes:
        bias: the median of predicted / measured.
        regret: for groups of rows of equal work: measured time of the plan predicted fastest / of the fastest − 1, mean
            and worst.
        out_of_memory: rows that ran out of memory; `oom_missed` of them were predicted to fit, and `oom_false` others
            not to.
    """

    rows: int
    mean_error: float
    median_error: float
    p90_error: float
    bias: float
    rank_correlation: float
    groups: int
    mean_regret: float
    worst_regret: float
    null_mean_error: float
    null_rank_correlation: float
    null_mean_regret: float
    memory_rows: int
    memory_median_error: float
    out_of_memory: int
    oom_missed: int
    oom_false: int


def score(predicted: Sequence[Predicted]) -> Score:
    """Over the given rows."""
    timed = [each for each in predicted if each.row.seconds]
    measured = [each.row.seconds or math.nan for each in timed]
    errors = [each.error for each in timed]
    null_errors = [abs(each.null_s / (each.row.seconds or math.nan) - 1) for each in timed]
    regrets = [regret(group, [each.seconds for each in group]) for group in _groups(timed)]
    null_regrets = [regret(group, [each.null_s for each in group]) for group in _groups(timed)]
    weighed = [abs(each.memory_gib / each.row.memory_gib - 1) for each in predicted if each.row.memory_gib]
    burst = [each for each in predicted if each.row.out_of_memory]
    return Score(
        rows=len(timed),
        mean_error=_mean(errors),
        median_error=_quantile(errors, 0.5),
        p90_error=_quantile(errors, 0.9),
        bias=_quantile([each.seconds / seconds for each, seconds in zip(timed, measured, strict=True)], 0.5),
        rank_correlation=_rank_correlation([each.seconds for each in timed], measured),
        groups=len(regrets),
        mean_regret=_mean(regrets),
        worst_regret=max(regrets, default=math.nan),
        null_mean_error=_mean(null_errors),
        null_rank_correlation=_rank_correlation([each.null_s for each in timed], measured),
        null_mean_regret=_mean(null_regrets),
        memory_rows=len(weighed),
        memory_median_error=_quantile(weighed, 0.5),
        out_of_memory=len(burst),
        oom_missed=sum(each.fits for each in burst),
        oom_false=sum(not each.fits for each in timed),
    )


def regret(group: Sequence[Predicted], seconds: Sequence[float]) -> float:
    """Slowdown of the plan that the predictions choose, against the group's best.

    Chosen among those predicted to fit, if there are any.
    """
    able = [pair for pair in zip(group, seconds, strict=True) if pair[0].fits] or list(zip(group, seconds, strict=True))
    chosen = min(able, key=lambda pair: pair[1])[0]
    best = min(each.row.seconds or math.inf for each in group)
    return (chosen.row.seconds or math.inf) / best - 1


def _groups(timed: Sequence[Predicted]) -> list[list[Predicted]]:
    groups: dict[tuple[str, ...], list[Predicted]] = defaultdict(list)
    for each in timed:
        groups[each.row.group].append(each)
    return [group for group in groups.values() if len(group) > 1]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else math.nan


def _rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return float(spearmanr(predicted, measured).statistic) if len(measured) > 2 else math.nan
