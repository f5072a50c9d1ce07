"""Suggestions measured here, in turn with the run's own plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline import units
from paceline.cluster.discover import discover
from paceline.errors import LaunchError, RunError
from paceline.job.stop import StopSpec
from paceline.planning.history import hardware_of
from paceline.planning.knobs import HEADING, Trial
from paceline.planning.plan import Plan
from paceline.planning.shortlist import Forecast
from paceline.planning.sync_info import SyncSpec
from paceline.report.diagnosis.diagnosis import Diagnosis
from paceline.report.diagnosis.predicted import is_one_device, one_device_plan
from paceline.report.diagnosis.suggestions import Suggestion
from paceline.report.words import named
from paceline.run.record.run import Run
from paceline.run.tuning.measure import measure, reason_of
from paceline.run.tuning.result import TuningResult
from paceline.stats import Interval

_ENDLESS = StopSpec(steps=10**9)  # what is measured here is asked for, however short the run was


@dataclass(frozen=True)
class Tried:
    """Result of measuring suggestions.

    Attributes:
        lines: for people.
        advice: the suggestion with the largest measured gain whose interval excludes zero; None if there is none.
    """

    lines: list[str]
    advice: Suggestion | None


def try_suggestions(diagnosis: Diagnosis, most: int, say: Callable[[str], object]) -> Tried:
    """Measure the best suggestions that are plans, and one device.

    Args:
        say: is told of each row while it is measured.

    Raises:
        RunError: the run was on other machines, or its plan cannot be tried in a few steps.
        LaunchError: the run's own plan could not be measured.
    """
    run = diagnosis.run
    _must_be_here(run.run)
    _must_be_short(run.plan)
    tried = [one for one in diagnosis.suggestions if one.plan is not None and _is_short(one.plan)][:most]
    alone = one_device_plan(run)
    predicted = {str(one.plan): run.step_s / (1 + one.gain) for one in tried if one.gain is not None}
    predicted |= {str(alone): diagnosis.one.step_s} if diagnosis.one is not None else {}
    plans = dict.fromkeys([str(run.plan), *(str(one.plan) for one in tried), str(alone)])
    forecasts = [Forecast(plan, run.step_s, predicted.get(plan, run.step_s)) for plan in plans]
    told = 0

    def tell(rows: list[Trial]) -> None:
        nonlocal told
        for row in rows[told:]:
            say(replace(row, predicted_s=predicted.get(row.knob)).line())
        told = max(told, len(rows))

    say(HEADING)
    begin = TuningResult(str(run.plan), str(run.plan), forecasts=forecasts, knobs=False)
    job = run.run.job.model_copy(update={"stop": _ENDLESS})
    try:
        rows = measure(job, run.run.cluster, begin, tell).tried
    except LaunchError as error:
        raise LaunchError(f"plan {run.plan} could not be measured: {reason_of(error)}") from error
    ratios = _ratios(rows)
    faster = [one for one in tried if str(one.plan) in ratios and ratios[str(one.plan)].high < 1]
    advice = min(faster, key=lambda one: ratios[str(one.plan)].middle, default=None)
    return Tried([*_results(diagnosis, tried, alone, rows, advice)], advice)


def _results(
    diagnosis: Diagnosis, tried: list[Suggestion], alone: Plan, rows: list[Trial], advice: Suggestion | None
) -> Iterator[str]:
    ratios = _ratios(rows)
    own = rows[0].step_s
    if own is not None:
        recorded = units.seconds(diagnosis.run.speed.step_s)
        yield f"measured now: plan {rows[0].knob} {units.seconds(own)} a step; the run has recorded {recorded}"
    for one in tried:
        expected = f"predicted {one.gain_words}, " if one.known == "predicted" else ""
        yield f"  {one.what}: {expected}{_measured(str(one.plan), ratios, rows)}"
    yield f"advice: {advice.what if advice else 'none; no measured change is faster than the plan of the run'}"
    if is_one_device(diagnosis.run):
        return
    if str(alone) not in ratios:
        yield f"  one device ({named(alone)}): {_measured(str(alone), ratios, rows)}"
        return
    # the time of one device over that of the run is the run's speedup
    speedup, predicted = ratios[str(alone)], diagnosis.speedup
    beside = "" if predicted is None else f"; {units.digits(predicted)} × was to be expected"
    yield f"  one device ({named(alone)}): the run's plan is {_interval(speedup)} as fast{beside}"


def _ratios(rows: list[Trial]) -> dict[str, Interval]:
    """Step time of each plan over that of the first one.

    Each was measured beside the plan that was the best then.
    """
    best = Interval(1.0, 1.0, 1.0)
    found = {rows[0].knob: best}
    for row in rows[1:]:
        if row.ratio is not None:
            ratio = row.ratio
            found[row.knob] = Interval(ratio.low * best.low, ratio.middle * best.middle, ratio.high * best.high)
            best = found[row.knob] if row.verdict == "kept" else best
    return found


def _measured(plan: str, ratios: dict[str, Interval], rows: list[Trial]) -> str:
    if plan not in ratios:
        return next((row.verdict for row in rows if row.knob == plan), "not tried")
    ratio = ratios[plan]
    low, middle, high = (_signed(1 / value - 1) for value in (ratio.high, ratio.middle, ratio.low))
    verdict = "faster" if ratio.high < 1 else "slower" if ratio.low > 1 else "no difference"
    interval = f" (95 % interval {low} to {high})" if ratio.low < ratio.high else ""
    return f"measured {middle}{interval}: {verdict}"


def _interval(ratio: Interval) -> str:
    interval = f" ({units.digits(ratio.low)} to {units.digits(ratio.high)} ×)" if ratio.low < ratio.high else ""
    return f"{units.digits(ratio.middle)} ×{interval}"


def _signed(gain: float) -> str:
    return f"{'+' if gain >= 0 else chr(0x2212)}{units.percent(abs(gain))}"


def _must_be_here(run: Run) -> None:
    """Refuse to measure where the run was not."""
    here = discover()
    if run.cluster.emulate is None and hardware_of(run.cluster) != hardware_of(here):
        raise RunError(
            f"{run.path} ran on {run.cluster.describe()}, and this is {here.describe()}: measure there, or leave "
            "--try out"
        )


def _must_be_short(plan: Plan) -> None:
    if not _is_short(plan):
        raise RunError(
            f"sync={plan.sync} exchanges less often than in every step, which a few steps in turn do not show: "
            "compare whole runs with `paceline bench --plans`"
        )


def _is_short(plan: Plan) -> bool:
    """True if every step is alike, so that a few of them can be compared."""
    spec = SyncSpec.parse(plan.sync)
    return spec.period == 1 and not spec.info.served
