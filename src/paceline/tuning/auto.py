"""`--plan auto`: predict, measure the few best plans and their knobs where that repays, take the fastest, and remember what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.errors import LaunchError, PacelineError
from paceline.job.job import Job
from paceline.planner.auto import auto_plan
from paceline.planner.history import Pair, remember
from paceline.planner.knobs import HEADING, SHARE_OF_RUN, Tried, knobs, longest_run_s, shown_s, steps_are_too_few
from paceline.planner.shortlist import (
    Forecast,
    certain,
    recorrected,
    share_to_spend,
    shortlist,
    steps_per_epoch,
    why_not_measured,
)
from paceline.plans.plan import Plan
from paceline.tuning import plan_cache as kept
from paceline.tuning.findings import Findings
from paceline.tuning.forecast import forecast
from paceline.tuning.measure import measure, reason_of
from paceline.units import percent

if TYPE_CHECKING:
    from paceline.planner.calibrate import Calibration
    from paceline.training.record.run import Run

Say = Callable[[str], None]
CALIBRATION_S = 20.0  # what calibrating takes; worth a part of the share of a long run
_LOOK_S = 0.2  # for other work on the cores, before the ranks start
_MOST_OTHER_WORK = 0.25  # of all cores; what is measured beside more must not be taken for true ever after
_LEAST_STEPS = 30  # of a run, for its step time to say what a prediction was worth


@dataclass(frozen=True)
class Choice:
    """The plan that `auto` stands for, and why.

    Attributes:
        plan: the fastest that was found, or the one to begin with.
        lines: what was tried and what won, for people.
        gain: step time of the plan over that of the plan to begin with, by the ratios measured in turn; 1 where nothing was better.
        seconds: what measuring took now, the start of the ranks included; 0 where nothing was measured.
        from_cache: whether an earlier start had measured it.
        forecast: what was predicted of the plan; None where nothing was, or where knobs were added that no prediction knows.
    """

    plan: Plan
    lines: list[str] = field(default_factory=list)
    gain: float = 1.0
    seconds: float = 0.0
    from_cache: bool = False
    forecast: Forecast | None = None


def choose(job: Job, cluster: Cluster, say: Say | None = None, *, runs: int = 1) -> Choice:
    """Choose the plan for a job on this machine; `say` gets the lines as they arise.

    What is found is kept in a file of the user's cache, and holds for the same work on the same hardware and torch.

    Args:
        runs: how many runs will have the plan.

    Raises:
        PlanError: no plan of `auto` can run the job here.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
    """
    default = auto_plan(job, cluster)
    lines = _Lines(say)
    too_few = steps_are_too_few(job)
    if too_few and cluster.kind == "cpu":  # on GPUs, where models are large, it is still asked whether the plan has the memory
        lines.add(f"plan auto: {default}; nothing is measured: {too_few}")
        return Choice(default, lines.all)
    file = kept.file_of(job, cluster, default)
    known = kept.read(file, job, cluster)
    if known and known.measured and (too_few or kept.enough(known, job)):
        lines.all += [HEADING, *(row.line() for row in known.tried)]  # said once is enough on a screen; a report wants them
        lines.add(f"plan auto: {_result(known)}, as measured before ({file}; delete it to measure again)")
        return Choice(Plan.parse(known.best), lines.all, known.gain, from_cache=True, forecast=known.forecast_of(known.best))
    return _Search(job, cluster, default, lines, file, runs).choose(known, too_few)


def remember_run(choice: Choice, job: Job, cluster: Cluster, run: Run) -> None:
    """Keep what the steps of a run took beside what was predicted, for the next prediction."""
    steps = len(run.steps())
    if choice.forecast is None or steps < _LEAST_STEPS or not run.throughput:
        return
    measured_s = job.global_batch / run.throughput
    remember(_pair(job, cluster, choice.forecast, measured_s), cluster)


class _Lines:
    """The lines so far, each told as it comes."""

    def __init__(self, say: Say | None) -> None:
        self.all: list[str] = []
        self._say = say
        self._rows = 0

    def add(self, line: str) -> None:
        self.all.append(line)
        if self._say:
            self._say(line)

    def rows(self, tried: list[Tried]) -> None:
        """The rows of the table that are new."""
        if tried and not self._rows:
            self.add(HEADING)
        for row in tried[self._rows :]:
            self.add(row.line())
        self._rows = len(tried)


@dataclass
class _Search:
    """One choice that was not made before."""

    job: Job
    cluster: Cluster
    default: Plan
    lines: _Lines
    file: Path
    runs: int
    before_s: float = 0.0

    def choose(self, known: Findings | None, too_few: str | None) -> Choice:
        """Predict, or take what an earlier start predicted; then measure, or not: `too_few` steps are a reason."""
        self.before_s = known.before_s if known else 0.0
        calibration = _kept_calibration(self.job, self.cluster)
        if known and (calibration is None or any(forecast.calibrated for forecast in known.forecasts)):
            forecasts = recorrected(known.forecasts, self.job, self.cluster)
        else:
            forecasts = self._forecasts(calibration)
        listed = shortlist(self.job, self.cluster, self.default, forecasts)
        run_s = self._run_s(listed)
        why = too_few or why_not_measured(listed, None if run_s is None else run_s * self.runs, self.before_s)
        begin = Plan.parse(listed[0].plan) if listed else self.default
        if not why and len(listed) < 2 and all(knob.untried for knob in knobs(self.job, self.cluster, begin)):
            why = "no other plan and no knob can help here"
        if why:
            return self._unmeasured(forecasts, listed, run_s or 0.0, why)
        if calibration is None and run_s is not None and SHARE_OF_RUN * run_s > 3 * CALIBRATION_S:
            calibration = self._calibrated()
            if calibration is not None:
                forecasts = self._forecasts(calibration)
                listed = shortlist(self.job, self.cluster, self.default, forecasts)
        return self._measured(forecasts, listed, self._run_s(listed))

    def _forecasts(self, calibration: Calibration | None) -> list[Forecast]:
        """What the plans are predicted to take; [] where that cannot be said, which is told."""
        try:
            return forecast(self.job, self.cluster, self.default, calibration)
        except PacelineError as error:
            self.lines.add(f"the plans could not be predicted ({reason_of(error)}); going on from plan {self.default}")
            return []

    def _calibrated(self) -> Calibration | None:
        from paceline.tuning.calibrate import calibrate

        try:
            return calibrate(self.job, self.cluster, lambda line: self.lines.add(f"plan auto: {line}"))
        except PacelineError as error:
            self.lines.add(f"the machine could not be calibrated ({reason_of(error)})")
            return None

    def _run_s(self, listed: Sequence[Forecast]) -> float | None:
        """The longest that a run can take, as far as the job and the predictions tell."""
        return longest_run_s(self.job, listed[0].step_s, steps_per_epoch(self.job)) if listed else None

    def _unmeasured(self, forecasts: list[Forecast], listed: list[Forecast], run_s: float, why: str) -> Choice:
        best = certain(listed)
        if best is None:
            self.lines.add(f"plan auto: {self.default}; nothing is measured: {why}")
            return Choice(self.default, self.lines.all)
        others = ", ".join(f"{f.plan} {shown_s(f.step_s)}" for f in sorted(listed, key=lambda f: f.step_s) if f is not best)
        than = f" ({others})" if others else ""
        self.lines.add(f"plan auto: {best.plan}, predicted {shown_s(best.step_s)} a step{than}; not measured: {why}")
        found = Findings(str(self.default), best.plan, forecasts=forecasts, before_s=self.before_s + run_s * self.runs, complete=False)
        kept.write(self.file, found)
        return Choice(Plan.parse(best.plan), self.lines.all, forecast=best)

    def _measured(self, forecasts: list[Forecast], listed: list[Forecast], run_s: float | None) -> Choice:
        started = time.monotonic()
        begin = Plan.parse(listed[0].plan) if listed else self.default
        others_s = self.before_s + (run_s or 0.0) * (self.runs - 1)
        busy = psutil.cpu_percent(_LOOK_S) / 100
        self.lines.add("plan auto: measuring plans and knobs for this job, once for all starts")
        found = Findings(str(begin), str(begin), forecasts=listed, share=share_to_spend(listed, run_s, others_s))
        try:
            found = measure(self.job, self.cluster, found, self.lines.rows)
        except LaunchError as error:
            self.lines.add(f"nothing could be measured ({reason_of(error)}); going on with plan {begin}")
            return Choice(begin, self.lines.all, seconds=time.monotonic() - started)
        seconds = time.monotonic() - started
        found.forecasts = forecasts
        if busy > _MOST_OTHER_WORK:
            where = f"not kept, as other work took {percent(busy, 0)} of the cores"
        else:
            where = kept.write(self.file, found)
            self._remember(found)
        self.lines.add(f"plan auto: {_result(found)}; measured in {seconds:.1f} s, {where}")
        return Choice(Plan.parse(found.best), self.lines.all, found.gain, seconds, forecast=found.forecast_of(found.best))

    def _remember(self, found: Findings) -> None:
        """Keep the pairs of predicted and measured."""
        for row in found.tried:
            forecast = found.forecast_of(row.knob)
            if forecast is not None and row.step_s is not None:
                remember(_pair(self.job, self.cluster, forecast, row.step_s.middle), self.cluster)


def _pair(job: Job, cluster: Cluster, forecast: Forecast, measured_s: float) -> Pair:
    plan = Plan.parse(forecast.plan)
    return Pair.of(job, cluster, plan, predicted_s=forecast.raw_s, measured_s=measured_s, calibrated=forecast.calibrated)


def _kept_calibration(job: Job, cluster: Cluster) -> Calibration | None:
    """What an earlier time measured of the machine, if it still holds."""
    from paceline.planner.calibrate import cache_file, kept, key_of, tempo_s

    host = discover().hosts[0] if cluster.emulate else cluster.hosts[0]
    if cluster.kind != "cpu" or not cache_file(key := key_of(job, host)).is_file():
        return None
    return kept(key, host, tempo=tempo_s())[0]


def _result(found: Findings) -> str:
    if found.best == found.default:
        return f"{found.best}, and nothing that was tried is faster"
    return f"{found.best}, whose step takes {found.gain:.2f} of that of {found.default}"
