"""Shortlist of plans that are worth measuring.

Needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log2
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.cluster.cluster import Cluster
from paceline.job.data import Digits, Synthetic
from paceline.job.job import Job
from paceline.planning.axes import DEGREES
from paceline.planning.cost.layout import Layout
from paceline.planning.history import correction
from paceline.planning.knobs import PLAN_S, SHARE_OF_RUN
from paceline.planning.plan import Plan

# number of plans to measure, with the one to begin with
MOST_PLANS = 4
# seconds until the ranks of a trial have started and measured the first plan
START_S = 4.0
# seconds of a run, or of the runs so far, below which measuring does not repay
WORTH_S = 60.0
# relative error of a prediction against another one of the same job
DOUBT, DOUBT_UNCALIBRATED = 0.15, 0.5
# how much slower than the best a plan may be predicted to be measured all the same
_NEAR = 0.5
# number of pairs of predicted and measured times that are worth a calibration
_PAIRS = 3
# one rank on one core, which no other thread keeps waiting
ONE_CORE = Plan(threads=1)
# of a step of one rank, what all cores must save for it to use more than one: threads that meet wait for other work
_THREADS_SAVE = 0.2
# images in scikit-learn's data set
_DIGITS = 1797


@dataclass(frozen=True)
class Forecast:
    """A plan and its predicted step time.

    Attributes:
        plan: its text.
        raw_s: the cost model's step time; `step_s` is corrected by earlier measurements on this hardware.
        calibrated: True if the cost model used measurements of the machines.
        fits: True if there is memory for it.
        pairs: number of measurements of such plans behind the correction.
    """

    plan: str
    raw_s: float
    step_s: float
    calibrated: bool = False
    fits: bool = True
    pairs: int = 0

    @property
    def doubt(self) -> float:
        """Relative error that the prediction may have."""
        return DOUBT if self.calibrated or self.pairs >= _PAIRS else DOUBT_UNCALIBRATED


def recorrected(forecasts: Iterable[Forecast], job: Job, cluster: Cluster) -> list[Forecast]:
    """The forecasts, corrected by the current history of this hardware."""
    found = []
    for forecast in forecasts:
        known = correction(job, cluster, Plan.parse(forecast.plan), calibrated=forecast.calibrated)
        found.append(replace(forecast, step_s=forecast.raw_s * known.factor, pairs=known.pairs))
    return found


def shortlist(job: Job, cluster: Cluster, default: Plan, forecasts: Sequence[Forecast]) -> list[Forecast]:
    """The few plans to measure, starting with the default unless it does not fit.

    The best by prediction follow. Of plans with the same degrees only the best is taken, and none that is slower than
    the best by more than predictions err; one rank alone goes before others, on one core if further ones hardly help.
    All keep the precision and the result of a step.
    """
    order = sorted(
        (f for f in forecasts if f.fits and keeps_the_result(Plan.parse(f.plan), job)), key=lambda f: f.step_s
    )
    order = _on_one_core_or_all(order)
    if not order:
        return []
    begin = next((f for f in order if f.plan == str(default)), order[0])
    limit = order[0].step_s * (1 + max(_NEAR, 2 * order[0].doubt))
    near = [forecast for forecast in order if forecast.step_s <= limit]
    alone = [forecast for forecast in near if Plan.parse(forecast.plan) in (Plan(), ONE_CORE)]
    chosen: dict[tuple[object, ...], Forecast] = {}
    for forecast in (begin, *near[:1], *alone, *near):
        if len(chosen) < MOST_PLANS:
            chosen.setdefault(_shape(Plan.parse(forecast.plan)), forecast)
    first, *others = chosen.values()
    return [first, *sorted(others, key=lambda f: f.step_s)]


def _on_one_core_or_all(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Forecasts that keep one rank alone either on one core or on all."""
    times = {forecast.plan: forecast.step_s for forecast in forecasts}
    one, all_of_them = str(ONE_CORE), str(Plan())
    if not {one, all_of_them} <= set(times):
        return list(forecasts)
    left_out = one if times[all_of_them] < (1 - _THREADS_SAVE) * times[one] else all_of_them
    return [forecast for forecast in forecasts if forecast.plan != left_out]


def keeps_the_result(plan: Plan, job: Job) -> bool:
    """True if the plan computes the job's result but for rounding.

    It keeps the precision, every step has the whole batch, and nothing is dropped.
    """
    return not plan.inexact and plan.precision_for(job) == job.precision


def startable(listed: Sequence[Forecast]) -> tuple[int, list[Forecast]]:
    """Number of ranks of a trial, and the plans that they can run.

    A plan that divides the model takes all ranks or one.
    """
    plans = {forecast.plan: Plan.parse(forecast.plan) for forecast in listed}
    ranks = max(plan.ranks for plan in plans.values())
    return ranks, [f for f in listed if not plans[f.plan].splits or plans[f.plan].ranks in (1, ranks)]


def steps_per_epoch(job: Job) -> int:
    """Steps per epoch if the job itself tells the number of samples; else 0."""
    data = job.data
    samples = data.samples if isinstance(data, Synthetic) else _DIGITS if isinstance(data, Digits) else 0
    if data.limit is not None:
        samples = min(samples, data.limit)
    return -(-round(samples * (1 - data.held_out)) // job.global_batch)


def saved_share(listed: Sequence[Forecast]) -> float:
    """Predicted relative saving of the best plan's step over the first one's."""
    return 1 - min(f.step_s for f in listed) / listed[0].step_s if listed else 0.0


def why_not_measured(listed: Sequence[Forecast], run_s: float | None, before_s: float) -> str | None:
    """Reason why measuring would cost more than it saves, or None if it may repay.

    Args:
        run_s: longest possible duration of the run; None if unknown.
        before_s: that of earlier, unmeasured runs of the job: measuring repays in a job that is started again and
            again.
    """
    if run_s is None or run_s + before_s >= WORTH_S:
        return None
    # for the first plan; others are measured if there is time
    cost_s = START_S + PLAN_S
    saved_s = (saved_share(listed) - listed[0].doubt / 2) * run_s
    if saved_s > cost_s:
        return None
    costs = f"measuring takes {cost_s:.0f} s or more to save about {max(saved_s, 0):.0f} s"
    return f"it runs for {run_s:.2g} s at most by prediction, and {costs}"


def share_to_spend(listed: Sequence[Forecast], run_s: float | None, others_s: float) -> float:
    """Fraction of a run that measuring may take.

    It is half of the predicted saving, or a tenth of the run and of the other runs that profit from it.
    """
    if run_s is None or not run_s:
        return SHARE_OF_RUN
    return max(SHARE_OF_RUN * (1 + others_s / run_s), saved_share(listed) / 2)


def certain(listed: Sequence[Forecast]) -> Forecast | None:
    """The plan to take unmeasured: the first, or one that is predicted clearly faster."""
    if not listed:
        return None
    best = min(listed, key=lambda f: f.step_s)
    return best if best.step_s < (1 - best.doubt) * listed[0].step_s else listed[0]


def _shape(plan: Plan) -> tuple[object, ...]:
    return (*(getattr(plan, axis) for axis in DEGREES), plan.remat)


Floats = NDArray[np.float64]

# Standard deviations of logarithms: of what runs that are alike have in common beside their factor, and of each around
# that, of which one in some is far off (Student's t of so many degrees of freedom)
COMMON, OWN, FREEDOM = 0.10, 0.05, 4.0
# Doublings by which two runs differ to have e^-½ of it in common: of a microbatch's tokens and of ranks of tp, which
# make the shapes of products; of a sample's FLOPs; of stages, microbatches and ranks. Round values near those with
# which set-aside rows, each left out in turn, are predicted best by the others of their table
SHAPES, WORK, OTHERS = 0.6, 1.0, 4.0
_ROUNDS = 15


@dataclass(frozen=True, eq=False)
class Alike:
    """Errors of measured runs, to be asked for those of others.

    Attributes:
        places: of the runs, `_place` of each.
        frameworks: of the runs.
        left: of each run, the logarithm that the other runs do not explain.
    """

    places: Floats
    frameworks: tuple[str, ...]
    weights: Floats
    left: tuple[float, ...]

    def log(self, layout: Layout) -> float:
        """Logarithm of measured / predicted that is expected of a run beside its factor."""
        return float(_common([_place(layout)], [layout.framework.name], self.places, self.frameworks)[0] @ self.weights)


def alike(layouts: Sequence[Layout], logs: Sequence[float]) -> Alike:
    """Errors of measured runs, as those that are like them share these.

    Args:
        logs: logarithms of measured / predicted that factors leave. Only differences between runs of a framework count.
    """
    places, frameworks = np.array([_place(one) for one in layouts]), tuple(one.framework.name for one in layouts)
    by_framework: dict[str, list[float]] = defaultdict(list)
    for name, log in zip(frameworks, logs, strict=True):
        by_framework[name].append(log)
    errors = np.array([log - median(by_framework[name]) for name, log in zip(frameworks, logs, strict=True)])
    common, trust = _common(places, frameworks, places, frameworks), np.ones(len(errors))
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(common + np.diag(OWN**2 / trust))
        weights = inverse @ errors
        trust = (FREEDOM + 1) / (FREEDOM + ((errors - common @ weights) / OWN) ** 2)
    left = weights / np.diag(inverse)  # of each run, predicted by the others (the book's section 5.4.2)
    return Alike(places, frameworks, weights, tuple(left.tolist()))


def _common(places: ArrayLike, names: Sequence[str], others: ArrayLike, other_names: Sequence[str]) -> Floats:
    """Covariances of each of some runs with each of others."""
    apart = (np.asarray(places)[:, None] - np.asarray(others)) ** 2
    same = np.asarray(names)[:, None] == np.asarray(other_names)
    return np.asarray(COMMON**2 * np.exp(-0.5 * apart.sum(axis=-1)) * same)


def _place(layout: Layout) -> tuple[float, ...]:
    """Properties of a run, in lengths over which errors change."""
    shapes = log2(layout.samples * max(layout.trace.tokens, 1)), log2(layout.tp)
    others = log2(layout.pp), log2(layout.microbatches), log2(layout.ranks)
    return (
        *(value / SHAPES for value in shapes),
        log2(max(layout.trace.flops, 1.0)) / WORK,
        *(value / OTHERS for value in others),
    )
