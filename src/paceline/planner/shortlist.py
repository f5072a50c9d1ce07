"""Which plans are worth measuring: the few best different ones of a search, if the run is long enough to repay it. Does without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.cluster import Cluster
from paceline.job.data import Digits, Synthetic
from paceline.job.job import Job
from paceline.planner.check.case import DEGREES
from paceline.planner.history import correction
from paceline.planner.knobs import PLAN_S, SHARE_OF_RUN
from paceline.plans.plan import Plan
from paceline.plans.sync_info import SyncSpec

MOST_PLANS = 4  # that are measured, the one to begin with among them
START_S = 4.0  # of the ranks of a trial, until they have measured the first plan
WORTH_S = 60.0  # of a run, or of the runs so far: one that is shorter is over before measuring repays
DOUBT, DOUBT_UNCALIBRATED = 0.15, 0.5  # by what part of its time a prediction may be wrong, beside another one of the same job
_NEAR = 0.5  # of the best time: as much slower a plan may be predicted, and is still measured
_PAIRS = 3  # of predicted and measured, that are worth a calibration
_DIGITS = 1797  # images in scikit-learn's set


@dataclass(frozen=True)
class Forecast:
    """A plan and its predicted step time.

    Attributes:
        plan: its text.
        raw_s: as the cost model has it, `step_s` corrected by what was measured on this hardware before.
        calibrated: whether the cost model knew measurements of the machines.
        fits: whether there is memory for it.
        pairs: on how many measurements of such plans the correction rests.
    """

    plan: str
    raw_s: float
    step_s: float
    calibrated: bool = False
    fits: bool = True
    pairs: int = 0

    @property
    def doubt(self) -> float:
        """By what part of its time it may be wrong."""
        return DOUBT if self.calibrated or self.pairs >= _PAIRS else DOUBT_UNCALIBRATED


def recorrected(forecasts: Iterable[Forecast], job: Job, cluster: Cluster) -> list[Forecast]:
    """The forecasts by what is known now of such predictions on this hardware."""
    found = []
    for forecast in forecasts:
        known = correction(job, cluster, Plan.parse(forecast.plan), calibrated=forecast.calibrated)
        found.append(replace(forecast, step_s=forecast.raw_s * known.factor, pairs=known.pairs))
    return found


def shortlist(job: Job, cluster: Cluster, default: Plan, forecasts: Sequence[Forecast]) -> list[Forecast]:
    """The few plans to measure, the one to begin with first: the default unless there is no memory for it, then the best by prediction.

    Of plans with the same degrees only the best is taken, and none that is slower than the best by more than predictions are wrong; one
    rank alone goes before others. All change neither the precision nor what a step computes.
    """
    order = sorted((f for f in forecasts if f.fits and keeps_the_result(Plan.parse(f.plan), job)), key=lambda f: f.step_s)
    if not order:
        return []
    begin = next((f for f in order if f.plan == str(default)), order[0])
    limit = order[0].step_s * (1 + max(_NEAR, 2 * order[0].doubt))
    near = [forecast for forecast in order if forecast.step_s <= limit]
    alone = [forecast for forecast in near if Plan.parse(forecast.plan) == Plan()]
    chosen: dict[tuple[object, ...], Forecast] = {}
    for forecast in (begin, *near[:1], *alone, *near):
        if len(chosen) < MOST_PLANS:
            chosen.setdefault(_shape(Plan.parse(forecast.plan)), forecast)
    first, *others = chosen.values()
    return [first, *sorted(others, key=lambda f: f.step_s)]


def keeps_the_result(plan: Plan, job: Job) -> bool:
    """Whether the plan computes what the job says, but for rounding: its precision, in every step the whole batch, nothing left out."""
    exact = SyncSpec.parse(plan.sync).agrees_every_step and plan.compress == "none"
    return exact and plan.precision_for(job) == job.precision


def startable(listed: Sequence[Forecast]) -> tuple[int, list[Forecast]]:
    """How many ranks a trial starts, and the plans that can run on these or a part of them: one that divides the model takes all or one."""
    plans = {forecast.plan: Plan.parse(forecast.plan) for forecast in listed}
    ranks = max(plan.ranks for plan in plans.values())
    return ranks, [f for f in listed if not plans[f.plan].splits or plans[f.plan].ranks in (1, ranks)]


def steps_per_epoch(job: Job) -> int:
    """Where the job itself says how many samples there are; else 0."""
    data = job.data
    samples = data.samples if isinstance(data, Synthetic) else _DIGITS if isinstance(data, Digits) else 0
    if data.limit is not None:
        samples = min(samples, data.limit)
    return -(-round(samples * (1 - data.held_out)) // job.global_batch)


def saved_share(listed: Sequence[Forecast]) -> float:
    """What part of the step of the first plan the best one is predicted to save."""
    return 1 - min(f.step_s for f in listed) / listed[0].step_s if listed else 0.0


def why_not_measured(listed: Sequence[Forecast], run_s: float | None, before_s: float) -> str | None:
    """Why measuring would cost more than it saves, or None where it may repay.

    Args:
        run_s: the longest that the run can take; None where nobody knows.
        before_s: the same of earlier runs of the job, in which nothing was measured: a job that is started again and again repays it.
    """
    if run_s is None or run_s + before_s >= WORTH_S:
        return None
    cost_s = START_S + PLAN_S  # for the first of them; of the others, as many as there is time for
    saved_s = (saved_share(listed) - listed[0].doubt / 2) * run_s
    if saved_s > cost_s:
        return None
    costs = f"measuring takes {cost_s:.0f} s or more to save about {max(saved_s, 0):.0f} s"
    return f"it runs for {run_s:.2g} s at most by prediction, and {costs}"


def share_to_spend(listed: Sequence[Forecast], run_s: float | None, others_s: float) -> float:
    """Of a run, what measuring may take: half of what it is predicted to save, or a tenth of it and of the other runs that it is for."""
    if run_s is None or not run_s:
        return SHARE_OF_RUN
    return max(SHARE_OF_RUN * (1 + others_s / run_s), saved_share(listed) / 2)


def certain(listed: Sequence[Forecast]) -> Forecast | None:
    """The plan to take unmeasured: the first one, or one that is predicted faster by more than predictions are wrong."""
    if not listed:
        return None
    best = min(listed, key=lambda f: f.step_s)
    return best if best.step_s < (1 - best.doubt) * listed[0].step_s else listed[0]


def _shape(plan: Plan) -> tuple[object, ...]:
    return (*(getattr(plan, axis) for axis in DEGREES), plan.remat)
