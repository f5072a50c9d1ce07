"""Have ranks measure plans and their knobs. What fails is left out with its reason, and the others are measured all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.errors import LaunchError, PacelineError
from paceline.files import scratch_folder
from paceline.job.job import Job
from paceline.launch.probe import launch_to_look
from paceline.planner.knobs import SHARE_OF_RUN, Tried, knobs
from paceline.planner.shortlist import START_S, Forecast, startable
from paceline.plans.plan import Plan
from paceline.stats import Interval
from paceline.tuning.findings import BEGINNING, Findings

Tell = Callable[[list[Tried]], None]
_MOST_FAILURES = 2  # plans or knobs that may fail before the others are left out: each costs another start of the ranks
_HANGS_S = 120.0  # a plan that is only tried need not be waited for as long as a run
_APART = 0.97  # of the best time: what is measured in another start must be faster by more than starts differ


def measure(job: Job, cluster: Cluster, found: Findings, tell: Tell) -> Findings:
    """What ranks find who begin with `found`: its plan, then the other forecasts, then the knobs of the best.

    A plan that divides the model takes all ranks of a start, so one with fewer ranks has a start of its own, where there is time for it.

    Args:
        tell: gets all rows so far, whenever there may be new ones.

    Raises:
        LaunchError: the plan to begin with failed.
        ClusterError: the cluster's hosts cannot be emulated here.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
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
    """What happened, without which of the ranks it was first."""
    return re.sub(r"^rank \d+ \(.*?\) raised[^:]*: ", "", str(error).partition("\n")[0])


def _started(job: Job, cluster: Cluster, found: Findings, ranks: int, tell: Tell) -> Findings:
    with scratch_folder() as folder:
        file = Path(folder, "findings.json")
        Path(folder, "job.yaml").write_text(job.to_yaml())
        Path(folder, "cluster.yaml").write_text(cluster.to_yaml())
        found.write(file)
        failures = 0
        while True:
            try:
                rank = ["paceline.tuning.trial:run_rank", str(folder)]
                launch_to_look(rank, job, cluster, Plan(dp=ranks), on_tick=lambda: tell(Findings.read(file).tried))
                found = Findings.read(file)
                tell(found.tried)
                return found
            except LaunchError as error:
                found = Findings.read(file)
                if found.under_way in (None, BEGINNING):
                    raise
                failures += 1
                _leave_out(found, reason_of(error))
                if failures >= _MOST_FAILURES:
                    _give_up(job, cluster, found)
                found.write(file)
                tell(found.tried)
                if failures >= _MOST_FAILURES:
                    return found


def _leave_out(found: Findings, reason: str) -> None:
    """Note the failure of what was under way."""
    what = str(found.under_way)
    forecast = found.forecast_of(what)
    found.tried.append(Tried(what, f"failed: {reason}", predicted_s=forecast.step_s if forecast else None))
    found.under_way = None


def _give_up(job: Job, cluster: Cluster, found: Findings) -> None:
    """Note all that was not tried for the failures of others."""
    known = {row.knob for row in found.tried}
    left = [(f.plan, f.step_s) for f in found.forecasts] + [(str(knob), None) for knob in knobs(job, cluster, Plan.parse(found.best))]
    found.tried += [Tried(what, "not tried: others failed", predicted_s=predicted_s) for what, predicted_s in left if what not in known]


def _apart(job: Job, cluster: Cluster, found: Findings, forecast: Forecast) -> Tried:
    """Measure a plan in a start of its own; where it is clearly faster than the best so far, it takes its place."""
    if found.run_s is not None and SHARE_OF_RUN * found.run_s < found.spent_s + 2 * START_S:
        return Tried(forecast.plan, "not tried: the time for measuring was used", predicted_s=forecast.step_s)
    alone = Findings(forecast.plan, forecast.plan, forecasts=[forecast], knobs=False)
    try:
        own = _started(job, cluster, alone, Plan.parse(forecast.plan).ranks, lambda rows: None).tried[0].step_s
    except LaunchError as error:
        return Tried(forecast.plan, f"failed: {reason_of(error)}", predicted_s=forecast.step_s)
    best = _best_step(found)
    if own is None or best is None:
        return Tried(forecast.plan, "not kept: it was not measured to its end", predicted_s=forecast.step_s)
    ratio = Interval(own.low / best.high, own.middle / best.middle, own.high / best.low)
    wins = ratio.high < _APART
    if wins:
        found.best, found.gain = forecast.plan, found.gain * ratio.middle
    verdict = "kept" if wins else "not kept: slower" if ratio.low > 1 else "not kept: no difference"
    return Tried(forecast.plan, verdict, own, ratio, forecast.step_s, best)


def _best_step(found: Findings) -> Interval | None:
    """The step time of the best plan so far, as it was measured when it became that."""
    return next((row.step_s for row in reversed(found.tried) if row.verdict == "kept"), found.tried[0].step_s)
