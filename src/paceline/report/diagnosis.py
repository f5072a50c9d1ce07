"""Diagnosis of a run: speed relative to one device, lost time, and suggestions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline import units
from paceline.cluster.discover import discover
from paceline.errors import LaunchError, PacelineError, RunError
from paceline.job.stop import StopSpec
from paceline.planning.history import hardware_of
from paceline.planning.plan import Plan
from paceline.planning.shortlist import HEADING, Forecast, Trial
from paceline.planning.sync_info import SyncSpec
from paceline.report.advice import (
    Measured,
    Model,
    Suggestion,
    from_parts,
    from_predictions,
    is_one_device,
    measured,
    model_of,
    named,
    one_device_plan,
    same_work,
)
from paceline.report.figures import PARTS
from paceline.report.run_record import ranks_of, where_it_goes
from paceline.run.record.memory import MemoryTable, predicted_parts, table_of
from paceline.run.record.run import Run
from paceline.run.tuning.auto import measure, reason_of
from paceline.run.tuning.result import TuningResult
from paceline.stats import Interval
from paceline.text import listed, on_cores

_LEAST = 0.005  # minimum fraction of a step that a part takes before it is named
_ALIKE = 0.02  # smallest difference of a ratio from 1 that counts as a difference
_DISTURBED = 1.1  # largest plausible speedup, as a multiple of the ideal speedup
_SLOW = 0.03  # fraction of a step; a longer wait indicates a slow rank


@dataclass(frozen=True)
class OneDevice:
    """One step of the run's work on a single device.

    Attributes:
        parts: seconds of each part of the step.
        doubt: estimated relative error of the step time; 0 if the step time was measured.
        source: text that says whether the times were measured or predicted.
    """

    parts: Mapping[str, float]
    doubt: float
    source: str

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Diagnosis:
    """Comparison of a run with one device, with suggestions for a faster run.

    Attributes:
        one: the same step on one device; None if unknown.
        suggestions: all changes that may make the run faster, largest gain first.
        unknown: sentences about results that could not be determined, with reasons.
        doubt: estimated relative error of predicted times; 0 if nothing was predicted.
        memory: predicted and measured memory of the rank with the largest peak; None if no rank recorded its memory.
    """

    run: Measured
    one: OneDevice | None
    suggestions: Sequence[Suggestion] = ()
    unknown: Sequence[str] = ()
    doubt: float = 0.0
    memory: MemoryTable | None = None

    @property
    def advice(self) -> list[Suggestion]:
        """Suggestions that almost certainly help: the interval of the predicted gain excludes zero."""
        return [one for one in self.suggestions if one.is_certain(self.doubt)]

    @cached_property
    def speedup(self) -> float | None:
        """Speed of the run relative to one device; None if unknown."""
        return None if self.one is None else self.one.step_s / self.run.step_s

    @property
    def sentences(self) -> list[str]:
        """Sentences that describe the diagnosis, without the suggestions."""
        run = self.run
        step = f"Plan {run.plan} takes {units.seconds(run.speed.step_s)} a step on {units.count(run.devices, 'device')}"
        found = [f"{step}: {self._parts()}.", *self._verdict(), *self._bound(), *self.unknown]
        return found if run.run.cluster.has_accelerators else [on_cores(sentence) for sentence in found]

    def _parts(self) -> str:
        if self.run.served:
            return "its workers record no parts, because they do not wait for each other"
        shares = {part: seconds / self.run.step_s for part, seconds in self.run.parts.items()}
        named = [part for part in sorted(shares, key=lambda part: -shares[part]) if shares[part] >= _LEAST]
        return listed([f"{units.percent(shares[part])} {PARTS[part].phrase}" for part in named])

    def _verdict(self) -> list[str]:
        """Compare the speed with the speed of one device, and describe where time is lost."""
        run, one = self.run, self.one
        if one is None or self.speedup is None or run.devices == 1:
            return []
        took = f"{units.seconds(one.step_s)} a step, {one.source}"
        low, high = self.speedup / (1 + one.doubt), self.speedup * (1 + one.doubt)
        sure = (
            f" ({units.digits(low)} to {units.digits(high)} × with the error of such predictions)" if one.doubt else ""
        )
        times = f"{units.digits(self.speedup)} ×{sure}"
        this = "This is probably" if low < 1 < high and one.doubt else "This is"
        if abs(self.speedup - 1) < _ALIKE:
            return [f"This is as fast as one device{sure}, which takes {took}.{self._lost()}"]
        if self.speedup < 1:
            return [
                f"{this} slower than one device: {units.digits(self.speedup)} × its speed{sure}. "
                f"One device takes {took}.{self._lost()}"
            ]
        ideal = f"the ideal is {run.devices} ×"
        if self.speedup > _DISTURBED * run.devices:
            return [
                f"This is {times} as fast as one device, which takes {took}: more than the "
                f"ideal {run.devices} ×, so other load disturbed one of the two. `--try 1` measures both in turn."
            ]
        return [f"{this} {times} as fast as one device, which takes {took}; {ideal}.{self._lost()}"]

    def _lost(self) -> str:
        """Describe by how much each part exceeds its ideal time."""
        if self.one is None or self.run.served:
            return ""
        lost = where_it_goes(self.one.parts, self.run.even_parts, self.run.devices)
        return f" {lost}" if lost else ""

    def _bound(self) -> list[str]:
        """Derive an upper bound on a single rank's step time from the run's measured parts."""
        run = self.run
        if run.plan.ranks == 1 or run.served or (self.one is not None and not self.one.doubt):
            return []
        parts = run.parts
        most_s = run.one_compute_s + parts["data"] * run.plan.data_ranks + parts["checkpoint"]
        most_s += parts["optimizer"] * run.plan.ranks / run.plan.dp  # each rank of a replica updates its own parameters
        ratio = most_s / run.step_s
        surely = (
            " The run is therefore slower than one rank, even if the predictions are wrong."
            if ratio < 1 - _ALIKE
            else ""
        )
        return [
            f"By the measured parts, one rank alone would take at most {units.seconds(most_s)} a step, so the run is "
            f"at most {units.digits(ratio)} × as fast as one rank.{surely}"
        ]


def diagnosis_of(run: Run, *, one: Run | None = None, predicts: bool = True) -> Diagnosis:
    """Diagnose a run.

    Args:
        one: run of the same job on one device, for comparison.
        predicts: whether to build the job's model and use the cost model. If False, only the record of the run is used.

    Raises:
        RunError: a run is too short, a run is federated, or the two runs did different work.
    """
    many = measured(run)
    unknown: list[str] = []
    alone, doubt = None, 0.0
    if one is not None:
        same_work(one, run)
        alone = OneDevice(measured(one).parts, 0.0, f"as measured in {one.path}")
    elif is_one_device(many):
        alone = OneDevice(many.parts, 0.0, "which is this run")
    suggestions = from_parts(many)
    if predicts:
        try:
            model = model_of(many)
            suggestions = [*suggestions, *from_predictions(model)]
            if model.why_not:
                unknown.append(f"Nothing is predicted: {model.why_not}.")
            else:
                doubt = model.doubt
                alone = alone or OneDevice(model.one_device(), doubt, f"as predicted ({_rests_on(model)})")
        except PacelineError as error:
            unknown.append(f"Nothing is predicted: {str(error).splitlines()[0]}.")
    predicted = predicted_parts(run.job, run.cluster, run.plan) if predicts else None
    memory = table_of({rank: run.steps(rank) for rank in ranks_of(run)}, run.events(), run.plan, predicted)
    return Diagnosis(many, alone, sorted(suggestions, key=lambda one: -one.order), unknown, doubt, memory)


def _rests_on(model: Model) -> str:
    how = {part: f"{factor:.2f} × for {part}" for part, factor in model.factors.items() if abs(factor - 1) > _ALIKE}
    corrected = f", corrected by this run: {listed(list(how.values()))}" if how else ""
    pace = " at the pace of its fastest rank" if model.run.even_parts["imbalance"] > _SLOW * model.run.step_s else ""
    basis = "from measurements of this machine" if model.calibration else "from the catalogue of devices"
    return f"{basis}{corrected}{pace}"


_ENDLESS = StopSpec(steps=10**9)  # replaces the job's stop rule, which may be too short for the measurement


@dataclass(frozen=True)
class Tried:
    """Result of measuring the suggestions.

    Attributes:
        lines: the results as lines of text.
        advice: the suggestion with the largest gain among those whose measured interval excludes zero; None if there is
            no such suggestion.
    """

    lines: list[str]
    advice: Suggestion | None


def try_suggestions(diagnosis: Diagnosis, most: int, say: Callable[[str], object]) -> Tried:
    """Measure the best suggested plans, and the plan on one device.

    Args:
        most: maximum number of suggestions to measure.
        say: function that is called with the table's heading and with each row.

    Raises:
        RunError: the run used other machines, or its plan cannot be measured in a few steps.
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
            say(replace(row, predicted_s=predicted.get(row.change)).line())
        told = max(told, len(rows))

    say(HEADING)
    begin = TuningResult(str(run.plan), str(run.plan), forecasts=forecasts, settings=False)
    job = run.run.job.model_copy(update={"stop": _ENDLESS})
    try:
        rows = measure(job, run.run.cluster, begin, tell).tried
    except LaunchError as error:
        raise LaunchError(
            "report.plan_not_measured",
            "plan {plan} could not be measured: {reason}",
            plan=run.plan,
            reason=reason_of(error),
        ) from error
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
        yield f"measured now: plan {rows[0].change} takes {units.seconds(own)} a step; the run recorded {recorded}"
    for one in tried:
        expected = f"predicted {one.gain_words}, " if one.known == "predicted" else ""
        yield f"  {one.what}: {expected}{_measured(str(one.plan), ratios, rows)}"
    yield f"advice: {advice.what if advice else 'none; no measured change is faster than the plan of the run'}"
    if is_one_device(diagnosis.run):
        return
    if str(alone) not in ratios:
        yield f"  one device ({named(alone)}): {_measured(str(alone), ratios, rows)}"
        return
    # the run's speedup is the step time on one device divided by the run's step time
    speedup, predicted = ratios[str(alone)], diagnosis.speedup
    beside = "" if predicted is None else f"; {units.digits(predicted)} × expected"
    yield f"  one device ({named(alone)}): the run's plan is {_interval(speedup)} as fast{beside}"


def _ratios(rows: list[Trial]) -> dict[str, Interval]:
    """Return the ratio of each plan's step time to the first plan's step time."""
    found = {row.change: row.ratio for row in rows[1:] if row.ratio is not None}
    return {rows[0].change: Interval(1.0, 1.0, 1.0), **found}


def _measured(plan: str, ratios: dict[str, Interval], rows: list[Trial]) -> str:
    if plan not in ratios:
        return next((row.verdict for row in rows if row.change == plan), "not tried")
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
    """Refuse to measure on a machine that the run did not use."""
    here = discover()
    if run.cluster.emulate is None and hardware_of(run.cluster) != hardware_of(here):
        raise RunError(
            "report.other_machine",
            "{run} ran on {machine}, but this machine is {here}. Run the command on the run's machine, or omit --try.",
            run=run.path,
            machine=run.cluster.describe(),
            here=here.describe(),
        )


def _must_be_short(plan: Plan) -> None:
    if not _is_short(plan):
        raise RunError(
            "report.rule_not_measurable",
            "sync={sync} does not communicate in every step, so a few steps are not enough to measure its speed. "
            "Compare whole runs with `paceline bench scaling --plans`.",
            sync=plan.sync,
        )


def _is_short(plan: Plan) -> bool:
    """Return True if all steps do the same work.

    A few steps are then enough for a comparison.
    """
    spec = SyncSpec.parse(plan.sync)
    return spec.period == 1 and not spec.info.served
