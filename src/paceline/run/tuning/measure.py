"""Measurement of plans and their knobs by ranks.

A plan or knob that fails is left out with its reason, and the others are measured all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import LaunchError, PacelineError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.shortlist import NOT_TRIED, SHARE_OF_RUN, START_S, Forecast, Trial, knobs, startable
from paceline.run.tuning.result import BEGINNING, TuningResult
from paceline.stats import Interval

Tell = Callable[[list[Trial]], None]
# number of failures that end the trial: each costs another start of the ranks
_MOST_FAILURES = 2
# deadline of a trial in seconds, shorter than that of a run
_HANGS_S = 120.0
# largest ratio to the best time at which a plan measured in another start is faster beyond doubt
_APART = 0.97


def measure(job: Job, cluster: Cluster, found: TuningResult, tell: Tell) -> TuningResult:
    """Measure the plan of `found`, then the other forecasts, then the knobs of the best.

    A plan that divides the model takes all ranks of a start, so one with fewer ranks has a start of its own, if there
    is time for it.

    Args:
        tell: gets all rows so far, whenever there may be new ones.

    Raises:
        LaunchError: the plan to begin with failed.
        ClusterError: the cluster's hosts cannot be emulated here.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    ranks, together = startable(found.forecasts) if found.forecasts else (Plan.parse(found.default).ranks, [])
    apart = [forecast for forecast in found.forecasts if forecast not in together]
    found.forecasts = together
    job = job.model_copy(update={"deadline_s": min(job.deadline_s, _HANGS_S)})
    found = _started(job, cluster, found, ranks, tell)
    for forecast in apart:
        found.tried.append(_apart(job, cluster, found, forecast))
        tell(found.tried)
    return found


def reason_of(error: PacelineError) -> str:
    """The error's first line, without the name of the rank."""
    return re.sub(r"^rank \d+ \(.*?\) raised[^:]*: ", "", str(error).partition("\n")[0])


@dataclass(frozen=True)
class _Request:
    """A trial to go on with."""

    job: Job
    cluster: Cluster
    found: TuningResult


def _started(job: Job, cluster: Cluster, found: TuningResult, ranks: int, tell: Tell) -> TuningResult:
    newest = found

    def note(so_far: TuningResult) -> None:
        nonlocal newest
        newest = so_far
        tell(newest.tried)

    failures = 0
    while True:
        try:
            run_on_plan(
                _try, _Request(job, cluster, newest), job=job, cluster=cluster, plan=Plan(dp=ranks), on_partial=note
            )
            return newest
        except LaunchError as error:
            if newest.under_way in (None, BEGINNING):
                raise
            failures += 1
            _leave_out(newest, reason_of(error))
            if failures >= _MOST_FAILURES:
                _give_up(job, cluster, newest)
            tell(newest.tried)
            if failures >= _MOST_FAILURES:
                return newest


def _try(request: _Request, report: Callable[[TuningResult], None]) -> TuningResult:
    """Try plans and knobs as one of the ranks."""
    from paceline.comm.backend import joined
    from paceline.run.tuning.candidate import ignore_views
    from paceline.run.tuning.trial import RankTrial

    ignore_views()
    with joined(deadline_s=request.job.deadline_s) as group:
        return RankTrial(request.job, request.cluster, request.found, group, report).run()


def _leave_out(found: TuningResult, reason: str) -> None:
    """Add a row for the failure of the current plan or knob."""
    what = str(found.under_way)
    forecast = found.forecast_of(what)
    found.tried.append(Trial(what, f"failed: {reason}", predicted_s=forecast.step_s if forecast else None))
    found.under_way = None


def _give_up(job: Job, cluster: Cluster, found: TuningResult) -> None:
    """Add rows for all that was not tried because others failed."""
    known = {row.knob for row in found.tried}
    left = [(f.plan, f.step_s) for f in found.forecasts] + [
        (str(knob), None) for knob in knobs(job, cluster, Plan.parse(found.best))
    ]
    found.tried += [
        Trial(what, f"{NOT_TRIED}others failed", predicted_s=predicted_s)
        for what, predicted_s in left
        if what not in known
    ]


def _apart(job: Job, cluster: Cluster, found: TuningResult, forecast: Forecast) -> Trial:
    """Measure a plan in a start of its own. It becomes the best if it is clearly faster."""
    if found.run_s is not None and SHARE_OF_RUN * found.run_s < found.spent_s + 2 * START_S:
        return Trial(forecast.plan, f"{NOT_TRIED}there was no time left to measure it", predicted_s=forecast.step_s)
    alone = TuningResult(forecast.plan, forecast.plan, forecasts=[forecast], knobs=False)
    try:
        own = _started(job, cluster, alone, Plan.parse(forecast.plan).ranks, lambda rows: None).tried[0].step_s
    except LaunchError as error:
        return Trial(forecast.plan, f"failed: {reason_of(error)}", predicted_s=forecast.step_s)
    best = _best_step(found)
    if own is None or best is None:
        return Trial(forecast.plan, "not kept: it was not measured to its end", predicted_s=forecast.step_s)
    ratio = Interval(own.low / best.high, own.middle / best.middle, own.high / best.low)
    wins = ratio.high < _APART
    if wins:
        found.best, found.gain = forecast.plan, found.gain * ratio.middle
    verdict = "kept" if wins else "not kept: slower" if ratio.low > 1 else "not kept: no difference"
    return Trial(forecast.plan, verdict, own, ratio, forecast.step_s, best)


def _best_step(found: TuningResult) -> Interval | None:
    """Step time of the best plan so far, measured when it became the best."""
    return next((row.step_s for row in reversed(found.tried) if row.verdict == "kept"), found.tried[0].step_s)
