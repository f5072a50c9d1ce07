"""`--plan auto`: predict plans, measure the best if worthwhile, and take the fastest.

If a plan or setting fails, the reason is recorded, and the others are still measured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.elastic.forkserver import wait_for_imports
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import BatchError, JobError, LaunchError, PacelineError
from paceline.job.job import Job
from paceline.planning import history as cache
from paceline.planning.arguments import plan_of
from paceline.planning.calibrate import Calibration
from paceline.planning.check.plan_errors import auto_plan, plan_errors
from paceline.planning.history import Pair, remember
from paceline.planning.plan import Plan
from paceline.planning.shortlist import (
    FAILED,
    HEADING,
    NOT_TRIED,
    ONE_CORE,
    SHARE_OF_RUN,
    START_S,
    Forecast,
    Trial,
    certain,
    longest_run_s,
    plan_changes,
    recorrected,
    share_to_spend,
    shortlist,
    startable,
    steps_are_too_few,
    steps_per_epoch,
    why_not_measured,
)
from paceline.run.tuning import result as kept
from paceline.run.tuning.result import BEGINNING, TuningResult
from paceline.stats import Interval
from paceline.units import percent
from paceline.units import seconds as shown

if TYPE_CHECKING:
    from paceline.run.record.run import Run


Say = Callable[[str], None]
# expected duration of a calibration in seconds; only worthwhile for a long run
CALIBRATION_S = 20.0
# minimum number of steps for comparing a run's step time with the prediction
_LEAST_STEPS = 30
# if a step takes fewer seconds, exchanging gradients may take longer than it saves
_TINY_S = 0.005
# errors that only concern the prediction, so the job may still train
_OF_PREDICTION = {"model.forward_failed", "model.not_built_for_check"}


@dataclass(frozen=True)
class AutoChoice:
    """Plan that `auto` chooses, with the reasons.

    Attributes:
        plan: fastest plan found, or the default plan.
        lines: table of trials, and the result, as lines of text.
        gain: measured step time of `plan`, divided by the default plan's step time; 1 if nothing was faster.
        seconds: duration of the measurements, including the ranks' start; 0 if nothing was measured.
        forecast: prediction of `plan`; None if there is none, or if it does not cover added settings.
        tried: rows of the table: each plan and setting with its prediction or measurement.
    """

    plan: Plan
    lines: list[str] = field(default_factory=list)
    gain: float = 1.0
    seconds: float = 0.0
    forecast: Forecast | None = None
    tried: list[Trial] = field(default_factory=list)


def choose(job: Job, cluster: Cluster, say: Say | None = None, *, runs: int = 1) -> AutoChoice:
    """Choose the plan for a job on this machine.

    `say` is called with each line of the table of trials, and with the result.

    The result is cached in the user's cache folder. It is reused for the same work, hardware and torch version.

    Args:
        runs: number of runs that will use the plan.

    Raises:
        PlanError: no plan of `auto` can run the job here.
        LaunchError: an error that occurs under every plan, such as an unknown model or an unreadable sample.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    return _Search(job, cluster, say or (lambda line: None), runs).choose()


def remember_run(choice: AutoChoice, job: Job, cluster: Cluster, run: Run) -> None:
    """Record a run's measured and predicted step times, to correct later predictions."""
    steps = len(run.steps())
    if choice.forecast is None or steps < _LEAST_STEPS or not run.throughput:
        return
    measured_s = job.global_batch / run.throughput
    remember(_pair(job, cluster, choice.forecast, measured_s), cluster)


class _Search:
    def __init__(self, job: Job, cluster: Cluster, say: Say, runs: int) -> None:
        self.job, self.cluster, self.say, self.runs = job, cluster, say, runs
        self.default = auto_plan(job, cluster)
        self.file = kept.file_of(job, cluster, self.default)
        self.known = kept.read(self.file, job, cluster)
        self.before_s = self.known.before_s if self.known else 0.0
        self.lines: list[str] = []
        self.tried: list[Trial] = []
        self._rows_told = 0

    def choose(self) -> AutoChoice:
        """Reuse an earlier measurement; otherwise predict, and measure if worthwhile."""
        too_few, known = steps_are_too_few(self.job), self.known
        if known and known.measured and (too_few or kept.enough(known, self.job)):
            # do not show the rows again; only a report includes them
            self.lines += [HEADING, *(row.line() for row in known.tried if row.tried)]
            self.tried = known.tried
            self._tell(f"plan auto: {_result(known)}, as measured before ({self.file}; delete it to measure again)")
            return self._choice(known.best, known.forecast_of(known.best), known.gain)
        # on GPUs, still check the plan's memory, because models are large
        if too_few and not self.cluster.has_accelerators:
            return self._of_few_steps(too_few)
        wait_for_imports()  # measure the machine's speed, and the load by other processes
        calibration = kept_calibration(self.job, self.cluster)
        if known and (calibration is None or any(forecast.calibrated for forecast in known.forecasts)):
            forecasts = recorrected(known.forecasts, self.job, self.cluster)
        else:
            forecasts = self._forecasts(calibration)
        listed = self._listed(forecasts)
        run_s = self._run_s(listed)
        why = too_few or why_not_measured(listed, None if run_s is None else run_s * self.runs, self.before_s)
        begin = Plan.parse(listed[0].plan) if listed else self.default
        if not why and len(listed) < 2 and all(one.untried for one in plan_changes(self.job, self.cluster, begin)):
            why = "no other plan and no setting can help here"
        if why:
            return self._unmeasured(forecasts, listed, run_s or 0.0, why)
        if calibration is None and run_s is not None and SHARE_OF_RUN * run_s > 3 * CALIBRATION_S:
            calibration = self._calibrated()
            if calibration is not None:
                forecasts = self._forecasts(calibration)
                listed = self._listed(forecasts)
        return self._measured(forecasts, listed, self._run_s(listed))

    def _of_few_steps(self, why: str) -> AutoChoice:
        """Return the plan for a short run on CPUs: usually the default plan.

        If a cached prediction shows a clearly faster plan, that plan is returned. A new prediction would take seconds,
        which is longer than all steps of a tiny model take.
        """
        listed = self._listed(recorrected(self.known.forecasts, self.job, self.cluster)) if self.known else []
        best = certain(listed)
        if best is None or best.plan == str(self.default):
            self._tell(f"plan auto: {self.default}; nothing is measured: {why}")
            return self._choice(self.default)
        self._tell(_predicted_line(best, listed, why))
        self.tried = _predicted_rows(best, listed)
        return self._choice(best.plan, best)

    def _forecasts(self, calibration: Calibration | None) -> list[Forecast]:
        try:
            return forecast(self.job, self.cluster, self.default, calibration)
        except PacelineError as error:
            _raise_if_of_any_plan(error)
            if getattr(error, "rank_error", None) == JobError.__name__ and error.code not in _OF_PREDICTION:
                raise
            self._tell(f"the plans could not be predicted ({reason_of(error)}); going on from plan {self.default}")
            return []

    def _listed(self, forecasts: list[Forecast]) -> list[Forecast]:
        return shortlist(self.job, self.cluster, self.default, forecasts)

    def _calibrated(self) -> Calibration | None:
        from paceline.run.tuning.calibrate import calibrate

        try:
            return calibrate(self.job, self.cluster, lambda line: self._tell(f"plan auto: {line}"))
        except PacelineError as error:
            _raise_if_of_any_plan(error)
            self._tell(f"the machine could not be calibrated ({reason_of(error)})")
            return None

    def _run_s(self, listed: Sequence[Forecast]) -> float | None:
        return longest_run_s(self.job, listed[0].step_s, steps_per_epoch(self.job)) if listed else None

    def _unmeasured(self, forecasts: list[Forecast], listed: list[Forecast], run_s: float, why: str) -> AutoChoice:
        best = certain(listed)
        if best is None:
            self._tell(f"plan auto: {self.default}; nothing is measured: {why}")
            return self._choice(self.default)
        self._tell(_predicted_line(best, listed, why))
        self.tried = _predicted_rows(best, listed)
        before_s = self.before_s + run_s * self.runs
        found = TuningResult(str(self.default), best.plan, forecasts=forecasts, before_s=before_s, complete=False)
        kept.write(self.file, found)
        return self._choice(best.plan, best)

    def _measured(self, forecasts: list[Forecast], listed: list[Forecast], run_s: float | None) -> AutoChoice:
        started = time.monotonic()
        if first := certain(listed):
            listed = [first, *(f for f in listed if f is not first)]
        begin = listed[0].plan if listed else str(self.default)
        others_s = self.before_s + (run_s or 0.0) * (self.runs - 1)
        busy = cache.other_work()
        self._tell("plan auto: measuring plans and settings for this job, once for all starts")
        found = TuningResult(begin, begin, forecasts=listed, share=share_to_spend(listed, run_s, others_s))
        try:
            found = measure(self.job, self.cluster, found, self._tell_rows)
        except LaunchError as error:
            _raise_if_of_any_plan(error)
            self._tell(f"nothing could be measured ({reason_of(error)}); going on with plan {begin}")
            return self._choice(begin, seconds=time.monotonic() - started)
        self.tried = found.tried
        untried: dict[str, list[str]] = {}
        for row in found.tried:
            if not row.tried:
                untried.setdefault(row.verdict.removeprefix(NOT_TRIED), []).append(row.change)
        for why, what in untried.items():
            self._tell(f"  not tried ({why}): {', '.join(what)}")
        seconds = time.monotonic() - started
        found.forecasts = forecasts
        where = kept.write(self.file, found, busy)
        if busy <= cache.MOST_OTHER_WORK:
            self._remember(found)
        self._tell(f"plan auto: {_result(found)}; measured in {seconds:.1f} s, {where}")
        return self._choice(found.best, found.forecast_of(found.best), found.gain, seconds)

    def _remember(self, found: TuningResult) -> None:
        for row in found.tried:
            forecast = found.forecast_of(row.change)
            if forecast is not None and row.step_s is not None:
                remember(_pair(self.job, self.cluster, forecast, row.step_s.middle), self.cluster)

    def _choice(
        self, plan: Plan | str, forecast: Forecast | None = None, gain: float = 1.0, seconds: float = 0.0
    ) -> AutoChoice:
        plan = plan_of(plan)
        return AutoChoice(plan, self.lines, gain, seconds, forecast, self.tried)

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        self.say(line)

    def _tell_rows(self, tried: list[Trial]) -> None:
        """Show new rows of the table, except settings that were not tried."""
        if tried and not self._rows_told:
            self._tell(HEADING)
        for row in tried[self._rows_told :]:
            if row.tried:
                self._tell(row.line())
        self._rows_told = len(tried)


def _predicted_rows(best: Forecast, listed: Sequence[Forecast]) -> list[Trial]:
    """Return rows of predicted, unmeasured plans; the chosen plan is first."""
    found = [Trial(best.plan, "chosen", predicted_s=best.step_s)]
    for forecast in sorted(listed, key=lambda one: one.step_s):
        if forecast is not best:
            slower = forecast.step_s > best.step_s
            verdict = "not chosen: slower by prediction" if slower else "not chosen: the predictions are too close"
            found.append(Trial(forecast.plan, verdict, predicted_s=forecast.step_s))
    return found


def _predicted_line(best: Forecast, listed: Sequence[Forecast], why: str) -> str:
    others = ", ".join(f"{f.plan} {shown(f.step_s)}" for f in sorted(listed, key=lambda f: f.step_s) if f is not best)
    than = f" ({others})" if others else ""
    faster = any(f.step_s < best.step_s for f in listed)
    within = f", alike within the ± {percent(best.doubt, 0)} of predictions" if faster else ""
    alone = why_one_process(Plan.parse(best.plan), best.step_s, max(Plan.parse(f.plan).ranks for f in listed))
    return f"plan auto: {best.plan}, predicted {shown(best.step_s)} a step{than}{within}{alone}; not measured: {why}"


def why_one_process(plan: Plan, step_s: float, ranks: int) -> str:
    """Explain why a plan with tiny steps has one process; return "" for other plans."""
    if plan.ranks > 1 or ranks == 1 or step_s > _TINY_S:
        return ""
    return f"; one process, because a step of {shown(step_s)} is too short to share among {ranks} processes"


def _pair(job: Job, cluster: Cluster, forecast: Forecast, measured_s: float) -> Pair:
    plan = Plan.parse(forecast.plan)
    return Pair.of(
        job, cluster, plan, predicted_s=forecast.raw_s, measured_s=measured_s, calibrated=forecast.calibrated
    )


def kept_calibration(job: Job, cluster: Cluster) -> Calibration | None:
    """Return the cached calibration of this machine, if it is still valid."""
    from paceline.planning.calibrate import cache_file, kept, key_of, reference_time_s

    host = discover().hosts[0] if cluster.emulate else cluster.hosts[0]
    if cluster.has_accelerators or not cache_file(key := key_of(job, host)).is_file():
        return None
    return kept(key, host, reference_s=reference_time_s())[0]


def _result(found: TuningResult) -> str:
    if found.best == found.default:
        return f"{found.best}, and nothing that was tried is faster"
    alone = why_one_process(Plan.parse(found.best), found.step_s * found.gain, Plan.parse(found.default).ranks)
    return f"{found.best}, whose step takes {found.gain:.2f} of that of {found.default}{alone}"


# number of plans with different degrees to consider
_LOOKED_AT = 12


def forecast(job: Job, cluster: Cluster, default: Plan, calibration: Calibration | None) -> list[Forecast]:
    """Return predictions of the best plans, the default plan, and a single rank.

    On CPUs, a single rank on one core is added. Plans that cannot run are excluded.

    Raises:
        LaunchError: the cost model does not support the model or the machines; the message has the reason.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    here = cluster if cluster.emulate is None else discover()
    return run_on_plan(_forecasts, (job, cluster, default, calibration), job=job, cluster=here, plan=Plan())[0]


def _forecasts(request: tuple[Job, Cluster, Plan, Calibration | None]) -> list[Forecast]:
    from paceline.run.dry_run.preflight import LOOK_S, refused_of
    from paceline.run.tuning.trial import ignore_views

    ignore_views()
    job, *_ = request
    found = predicted(*request)
    # check in this process, because it has already imported torch and the model's code
    refused = refused_of(job, [Plan.parse(row.plan) for row in found], LOOK_S)
    return [row for row in found if Plan.parse(row.plan) not in refused]


def predicted(job: Job, cluster: Cluster, default: Plan, calibration: Calibration | None) -> list[Forecast]:
    """Return predictions computed in this process; raises the errors of `search`."""
    from paceline.planning.model.model_info import model_info
    from paceline.planning.prediction import modelled
    from paceline.planning.search.search import search

    found = search(job, cluster, top=_LOOKED_AT, calibration=calibration)
    predictions = {candidate.plan: candidate.prediction for candidate in found.best}
    alone = [Plan()] if cluster.has_accelerators else [Plan(), ONE_CORE]
    for plan in (default, *(plan.for_job(job) for plan in alone)):
        if plan not in predictions and not plan_errors(job, plan, cluster=cluster):
            predictions[plan] = modelled(job, cluster, plan, calibration)
    # with batch norm, exclude plans that normalize over fewer samples than the job
    if model_info(job.model).batch_norms:
        predictions = {
            plan: prediction
            for plan, prediction in predictions.items()
            if plan.microbatches <= job.gradient_accumulation_steps
        }
    calibrated = calibration is not None
    rows = [Forecast(str(plan), p.step_time_s, p.step_time_s, calibrated, p.fits) for plan, p in predictions.items()]
    return recorrected(rows, job, cluster)


Tell = Callable[[list[Trial]], None]
# number of failures that end the trial, because each costs another start of the ranks
_MOST_FAILURES = 2
# maximum deadline of a trial in seconds; runs have longer deadlines
_HANGS_S = 120.0
# a plan measured in another launch is only faster if its time is below this ratio of the best time
_APART = 0.97


def measure(job: Job, cluster: Cluster, found: TuningResult, tell: Tell) -> TuningResult:
    """Measure the default plan, then combinations of plans and settings.

    A plan that divides the model needs all ranks of a launch. If such a plan has fewer ranks, it is measured in its own
    launch if there is time.

    Args:
        tell: function that is called with all rows so far, whenever there may be new rows.

    Raises:
        LaunchError: the default plan failed.
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


# data errors that depend on the plan; other data errors occur under every plan
_DATA_ERRORS_OF_A_PLAN = {
    "data.batch_uncuttable",
    "data.host_files_counts",
    "data.host_without_files",
    "data.hosts_differ",
    "data.random_batch",
    "data.rows_unknown",
    "data.sequence_indivisible",
}


def _raise_if_of_any_plan(error: PacelineError) -> None:
    """Raise the error if it occurs under every plan."""
    of_data = error.code.startswith("data.") and error.code not in _DATA_ERRORS_OF_A_PLAN
    if of_data or getattr(error, "rank_error", None) == BatchError.__name__:
        raise error


def reason_of(error: PacelineError) -> str:
    """Return the first line of an error, without the rank's name."""
    return re.sub(r"^rank \d+ \(.*?\) raised[^:]*: ", "", str(error).partition("\n")[0])


def _started(job: Job, cluster: Cluster, found: TuningResult, ranks: int, tell: Tell) -> TuningResult:
    newest = found

    def note(so_far: TuningResult) -> None:
        nonlocal newest
        newest = so_far
        tell(newest.tried)

    failures = 0
    while True:
        try:
            request = job, cluster, newest
            run_on_plan(_try, request, job=job, cluster=cluster, plan=Plan(dp=ranks), on_partial=note)
            return newest
        except LaunchError as error:
            _raise_if_of_any_plan(error)
            if newest.under_way in (None, BEGINNING):
                raise
            failures += 1
            _leave_out(newest, reason_of(error))
            if failures >= _MOST_FAILURES:
                _give_up(job, cluster, newest)
            tell(newest.tried)
            if failures >= _MOST_FAILURES:
                return newest


def _try(request: tuple[Job, Cluster, TuningResult], report: Callable[[TuningResult], None]) -> TuningResult:
    from paceline.comm.backend import joined
    from paceline.run.tuning.trial import RankTrial, ignore_views

    ignore_views()
    job, cluster, found = request
    with joined(deadline_s=job.deadline_s) as group:
        return RankTrial(job, cluster, found, group, report).run()


def _leave_out(found: TuningResult, reason: str) -> None:
    what = str(found.under_way)
    forecast = found.forecast_of(what)
    found.tried.append(Trial(what, f"{FAILED}{reason}", predicted_s=forecast.step_s if forecast else None))
    found.under_way = None


def _give_up(job: Job, cluster: Cluster, found: TuningResult) -> None:
    """Choose from the measured plans, and add rows for plans and settings without a trial."""
    if not found.searched:
        wins = [plan for plan, comparison in found.compared.items() if comparison.wins]
        found.best = min(wins, key=lambda plan: found.compared[plan].ratio.middle, default=found.default)
        found.gain = found.compared[found.best].ratio.middle if wins else 1.0
        found.tried += [one.tried(plan, kept=plan == found.best) for plan, one in found.compared.items()]
    known = {row.change for row in found.tried}
    left = [(f.plan, f.step_s) for f in found.forecasts] + [
        (str(change), None) for change in plan_changes(job, cluster, Plan.parse(found.best))
    ]
    found.tried += [
        Trial(what, f"{NOT_TRIED}others failed", predicted_s=predicted_s)
        for what, predicted_s in left
        if what not in known
    ]


def _apart(job: Job, cluster: Cluster, found: TuningResult, forecast: Forecast) -> Trial:
    """Measure a plan in its own launch; choose it if it is clearly faster."""
    if found.run_s is not None and SHARE_OF_RUN * found.run_s < found.spent_s + 2 * START_S:
        return Trial(forecast.plan, f"{NOT_TRIED}there was no time left to measure it", predicted_s=forecast.step_s)
    alone = TuningResult(forecast.plan, forecast.plan, forecasts=[forecast], settings=False)
    try:
        own = _started(job, cluster, alone, Plan.parse(forecast.plan).ranks, lambda rows: None).tried[0].step_s
    except LaunchError as error:
        _raise_if_of_any_plan(error)
        return Trial(forecast.plan, f"{FAILED}{reason_of(error)}", predicted_s=forecast.step_s)
    first = found.tried[0].step_s
    if own is None or first is None:
        return Trial(forecast.plan, "not kept: it was not measured to its end", predicted_s=forecast.step_s)
    ratio = Interval(own.low / first.high, own.middle / first.middle, own.high / first.low)
    wins = ratio.high < _APART * found.gain
    if wins:
        found.best, found.gain = forecast.plan, ratio.middle
    verdict = "kept" if wins else "not kept: slower" if ratio.low > found.gain else "not kept: no difference"
    return Trial(forecast.plan, verdict, own, ratio, forecast.step_s, first)
