"""Choice of the plans and settings that are worth measuring, and comparisons of their times.

`halving.py` searches their combinations. Neither module needs torch.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.data import Digits, Synthetic
from paceline.job.job import Job
from paceline.planning.check.rules import reasons_against
from paceline.planning.history import correction
from paceline.planning.plan import DEGREES, Plan, threads_on
from paceline.stats import LEAST_REPEATS, Interval, median_interval
from paceline.units import seconds

# number of plans to measure, including the first
MOST_PLANS = 4
# seconds until the ranks of a trial have started and measured the first plan
START_S = 4.0
# seconds of a run, or of the runs so far, below which measuring does not pay off
WORTH_S = 60.0
# relative error of a prediction compared with another prediction for the same job
DOUBT, DOUBT_UNCALIBRATED = 0.15, 0.5
# how much slower than the best a plan's prediction may be for the plan to be measured
_NEAR = 0.5
# number of pairs of predicted and measured times that are equivalent to a calibration
_PAIRS = 3
# one rank on one core, without other threads that wait
ONE_CORE = Plan(threads=1)
# share of a single rank's step that all cores must save to be used: synchronizing threads wait for other processes
_THREADS_SAVE = 0.2
# images in scikit-learn's data set
_DIGITS = 1797


@dataclass(frozen=True)
class Forecast:
    """A plan and its predicted step time.

    Attributes:
        plan: the plan as text.
        raw_s: step time predicted by the cost model, in seconds.
        step_s: predicted step time after correction by earlier measurements on this hardware, in seconds.
        calibrated: True if the cost model used measurements of the machines.
        fits: True if the plan fits the memory.
        pairs: number of measurements of similar plans that the correction uses.
    """

    plan: str
    raw_s: float
    step_s: float
    calibrated: bool = False
    fits: bool = True
    pairs: int = 0

    @property
    def doubt(self) -> float:
        """Expected relative error of the prediction."""
        return DOUBT if self.calibrated or self.pairs >= _PAIRS else DOUBT_UNCALIBRATED


def recorrected(forecasts: Iterable[Forecast], job: Job, cluster: Cluster) -> list[Forecast]:
    """Return the forecasts, corrected by the current history of this hardware."""
    found = []
    for forecast in forecasts:
        known = correction(job, cluster, Plan.parse(forecast.plan), calibrated=forecast.calibrated)
        found.append(replace(forecast, step_s=forecast.raw_s * known.factor, pairs=known.pairs))
    return found


def shortlist(job: Job, cluster: Cluster, default: Plan, forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Choose the plans to measure. The first is the default plan if it fits.

    The plans with the shortest predicted time follow. Of several plans with the same degrees, only the best is chosen.
    A plan is left out if its predicted time exceeds the best time by more than the error of predictions. A plan with a
    single rank has priority; it uses one core if additional cores hardly help. All plans keep the precision and the
    result of a step.
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
    """Keep one of the two forecasts for a single rank: one core, or all cores."""
    times = {forecast.plan: forecast.step_s for forecast in forecasts}
    one, all_of_them = str(ONE_CORE), str(Plan())
    if not {one, all_of_them} <= set(times):
        return list(forecasts)
    left_out = one if times[all_of_them] < (1 - _THREADS_SAVE) * times[one] else all_of_them
    return [forecast for forecast in forecasts if forecast.plan != left_out]


def keeps_the_result(plan: Plan, job: Job) -> bool:
    """True if the plan computes the job's result up to rounding.

    Such a plan keeps the job's precision and has no inexact choices.
    """
    return not plan.inexact and plan.precision_for(job) == job.precision


def startable(listed: Sequence[Forecast]) -> tuple[int, list[Forecast]]:
    """Return the number of ranks in a trial, and the plans that fit them.

    A plan that divides the model must use all ranks or a single rank.
    """
    plans = {forecast.plan: Plan.parse(forecast.plan) for forecast in listed}
    ranks = max(plan.ranks for plan in plans.values())
    return ranks, [f for f in listed if not plans[f.plan].splits or plans[f.plan].ranks in (1, ranks)]


def steps_per_epoch(job: Job) -> int:
    """Return the number of steps per epoch, or 0 if it is unknown."""
    data = job.data
    samples = data.samples if isinstance(data, Synthetic) else _DIGITS if isinstance(data, Digits) else 0
    if data.limit is not None:
        samples = min(samples, data.limit)
    apart = data.held_out + (data.test if isinstance(data.test, float) else 0.0)
    return -(-round(samples * (1 - apart)) // job.global_batch)


def saved_share(listed: Sequence[Forecast]) -> float:
    """Return the fraction of the first plan's step time that the best plan saves."""
    return 1 - min(f.step_s for f in listed) / listed[0].step_s if listed else 0.0


def why_not_measured(listed: Sequence[Forecast], run_s: float | None, before_s: float) -> str | None:
    """Return the reason why measuring does not pay off, or None if it may.

    Args:
        run_s: longest possible duration of the run; None if unknown.
        before_s: total duration of earlier runs of the job without measuring. It counts because measuring pays off for
            a job that is started repeatedly.
    """
    if run_s is None or run_s + before_s >= WORTH_S:
        return None
    # for the first plan; others are measured if there is time left
    cost_s = START_S + PLAN_S
    saved_s = (saved_share(listed) - listed[0].doubt / 2) * run_s
    if saved_s > cost_s:
        return None
    costs = f"measuring takes {cost_s:.0f} s or more to save about {max(saved_s, 0):.0f} s"
    return f"the predicted duration of the run is at most {run_s:.2g} s, and {costs}"


def share_to_spend(listed: Sequence[Forecast], run_s: float | None, others_s: float) -> float:
    """Return the fraction of a run that measuring may take.

    The fraction is half of the predicted saving, or a tenth of this run and of other runs that benefit, whichever is
    larger.
    """
    if run_s is None or not run_s:
        return SHARE_OF_RUN
    return max(SHARE_OF_RUN * (1 + others_s / run_s), saved_share(listed) / 2)


def certain(listed: Sequence[Forecast]) -> Forecast | None:
    """Return the plan to use without measuring: the first plan, or a clearly faster one."""
    if not listed:
        return None
    best = min(listed, key=lambda f: f.step_s)
    return best if best.step_s < (1 - best.doubt) * listed[0].step_s else listed[0]


def _shape(plan: Plan) -> tuple[object, ...]:
    return (*(getattr(plan, axis) for axis in DEGREES), plan.remat)


# the plan keys that change how a rank computes, but not its result
SETTINGS = ("memory_format", "fused", "pin", "onednn", "num_workers", "compile")
# budget for measuring combinations: seconds if steps are short, number of steps if they are long
BUDGET_S, _BUDGET_STEPS = 17.0, 150
# estimated seconds for measuring one more plan, if steps are short
PLAN_S = 3.0
# largest fraction of the longest possible run
SHARE_OF_RUN = 0.1
# rounds of a comparison; each of two plans runs once per round
LEAST_ROUNDS, MOST_ROUNDS = 6, 20
# minimum number of steps of a run, of which only a part may be spent
LEAST_STEPS = 400
# in a long run, measuring may take this many seconds or this share of the run, whichever is larger
_LONG_RUN_S, _LONG_SHARE = 17.0, 0.04
# largest fraction of a run that a change may add to the time before the first step
_START_SHARE = 0.05
# the ranks of a trial take seconds to start
LEAST_RUN_S = 30.0
# prefixes of verdicts about plans and settings that were left out or failed; the reason follows
NOT_TRIED, FAILED = "not tried: ", "failed: "
# time of torch.compile before the first step, on CPUs and GPUs alike
_COMPILE_S = 45.0
_HOPELESS = 3.0  # times the best step
# smallest relative gain of a step that justifies another word in the plan
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class PlanChange:
    """Change of a plan that may make its steps faster.

    Attributes:
        changes: maps plan keys to new values.
        untried: reason why the change cannot help here; None if it should be tried.
        cost_s: additional time before the first step, in seconds. The change is tried only if the run is long enough.
        hint: reason why the change is not applied even if it is faster. Such a change is measured last and only
            reported.
        of_ranks: True if the change sets the number of ranks, or the threads of a single rank.
    """

    changes: dict[str, Any]
    untried: str | None = None
    cost_s: float = 0.0
    hint: str | None = None
    of_ranks: bool = False

    @property
    def name(self) -> str:
        """Name of the setting: its plan key."""
        return list(self.changes)[-1]

    def __str__(self) -> str:
        return " ".join(f"{key}={'on' if value is True else value}" for key, value in self.changes.items())

    def on(self, plan: Plan) -> Plan:
        """Return the plan with this change."""
        return replace(plan, **self.changes)


@dataclass(frozen=True)
class Trial:
    """Result of a trial of one plan or setting.

    Attributes:
        change: text of the plan, or of the change that is applied to the best plan.
        verdict: text such as `kept`, `not kept: slower` or `not tried: …`.
        step_s: measured step time; None if it was not measured.
        ratio: `step_s` divided by `best_s`; None if the plan or setting was not compared.
        predicted_s: predicted step time of a plan, in seconds; None without a prediction.
        best_s: step time of the plan to compare with, in the same rounds, because the machine's speed may change. A
            plan is compared with the first plan, and a change with the best plan.
    """

    change: str
    verdict: str
    step_s: Interval | None = None
    ratio: Interval | None = None
    predicted_s: float | None = None
    best_s: Interval | None = None

    @property
    def tried(self) -> bool:
        """True if the plan or setting was tried."""
        return not self.verdict.startswith(NOT_TRIED)

    @property
    def failed(self) -> bool:
        """True if the plan or setting raised an error or ended its process."""
        return self.verdict.startswith(FAILED)

    def line(self) -> str:
        """Return the trial as one row of the table."""
        ratio = f"{self.ratio.middle:5.2f}" if self.ratio else ""
        if self.ratio and self.ratio.low < self.ratio.high:
            ratio += f" ({self.ratio.low:.2f} to {self.ratio.high:.2f})"
        ratio += f" of {seconds(self.best_s.middle)}" if self.best_s else ""
        predicted = seconds(self.predicted_s) if self.predicted_s else ""
        step = _shown(self.step_s) if self.step_s else ""
        return f"  {self.change:<60} {predicted:<10} {step:<30} {ratio:<38} {self.verdict}".rstrip()


HEADING = (
    f"  {'plan or setting':<60} {'predicted':<10} {'step (95 % interval)':<30} "
    f"{'ratio to the first, in the same rounds':<38} verdict"
)


def plan_changes(job: Job, cluster: Cluster, plan: Plan) -> list[PlanChange]:
    """Return the changes that may make `plan` faster.

    All changes keep the job's precision, except hints.
    """
    onednn = PlanChange({"onednn": True}, untried=_why_no_onednn(job))
    # torch's own products do not use AVX-512 on AMD's processors
    gains = any("AMD" in host.cpu and host.cpu_avx512 is not False for host in cluster.hosts)
    found = [
        *([onednn] if gains else []),
        PlanChange({"memory_format": "channels_last"}),
        *([] if plan.fuses(job, accelerators=cluster.has_accelerators) else [PlanChange({"fused": True})]),
        *_other_ranks(cluster, plan),
        PlanChange({"pin": True}, untried=_why_no_pinning(cluster, plan)),
        *([] if gains else [onednn]),
        PlanChange(_reading_ahead(cluster, plan), untried=_why_no_workers(job)),
        PlanChange({"compile": "on"}, untried=_why_no_compiler(), cost_s=_COMPILE_S),
        PlanChange({"compile": "reduce-overhead"}, untried=_why_no_compiler(), cost_s=_COMPILE_S),
        *_hints(job, cluster),
    ]
    new = [change for change in found if change.on(plan) != plan]
    return [replace(change, untried=_why_not(change.on(plan), plan, job, cluster) or change.untried) for change in new]


def _why_no_pinning(cluster: Cluster, plan: Plan) -> str | None:
    if cluster.has_accelerators:
        return "its ranks compute on GPUs"
    return "a single rank may use all cores" if plan.ranks == 1 else None


def _why_no_onednn(job: Job) -> str | None:
    return (
        None if job.precision == "fp32" else f"it affects products in float32, but the job computes in {job.precision}"
    )


def _reading_ahead(cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """Return the change that adds a loader process.

    If a rank has several threads, one of its cores is left to the loader process.
    """
    threads = threads_on(cluster, plan) - 1
    freed = {} if cluster.has_accelerators or threads < 1 else {"threads": threads}
    return freed | {"num_workers": 1}


def _why_no_workers(job: Job) -> str | None:
    return f"the job sets num_workers: {job.data.num_workers}" if job.data.num_workers else None


def steps_are_too_few(job: Job) -> str | None:
    """Return the reason why the job is too short for measuring, or None.

    The result depends only on the job's stop rule, not on its data.
    """
    stop = job.stop
    if stop.steps is not None and stop.steps < LEAST_STEPS:
        return (
            f"a run of {stop.steps} steps is too short to benefit from measured settings (at least {LEAST_STEPS} steps)"
        )
    if stop.seconds is not None and stop.seconds < LEAST_RUN_S:
        return (
            f"a run of {stop.seconds:g} s is too short to benefit from measured settings (at least {LEAST_RUN_S:g} s)"
        )
    return None


def longest_run_s(job: Job, step_s: float, steps_per_epoch: int) -> float | None:
    """Return the longest possible duration of a run in seconds; None if unbounded."""
    steps = job.stop.total_steps(steps_per_epoch)
    bounds = [b for b in (steps and steps * step_s, job.stop.seconds) if b]
    return min(bounds) if bounds else None


def budget_s(step_s: float, run_s: float | None, *, share: float = SHARE_OF_RUN) -> float:
    """Return the time that measuring may take, in seconds.

    Args:
        run_s: longest possible duration of the run; None if unknown.
        share: fraction of a short run that measuring may take; larger if other runs benefit as well.
    """
    wanted = max(BUDGET_S, _BUDGET_STEPS * step_s)
    if run_s is None:
        return wanted
    all_runs_s = run_s * share / SHARE_OF_RUN
    return min(wanted, max(min(share * run_s, _LONG_RUN_S), _LONG_SHARE * all_runs_s))


def why_not_now(change: PlanChange, *, run_s: float | None, left_s: float, comparison_s: float) -> str | None:
    """Return the reason why a setting is not tried now, or None."""
    if change.untried:
        return change.untried
    if change.cost_s and run_s is None:
        return (
            f"it takes about {change.cost_s:.0f} s to start, and the stop rule does not limit the duration of the run"
        )
    if change.cost_s and run_s is not None and change.cost_s > _START_SHARE * run_s:
        return f"it takes about {change.cost_s:.0f} s to start, and the run takes at most {run_s:.0f} s"
    if not change.cost_s and left_s < comparison_s:
        return "no time was left to measure it"
    return None


@dataclass
class Comparison:
    """Comparison of a plan (the challenger) with the first plan, or with the best plan so far.

    Each round adds the step time of both plans in seconds.
    """

    challenger: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)

    def add(self, challenger_s: float, best_s: float) -> None:
        """Add the step times of one round."""
        self.challenger.append(challenger_s)
        self.best.append(best_s)

    @property
    def ratios(self) -> list[float]:
        """Ratio of the challenger's step time to the best plan's, for each round."""
        return [c / b for c, b in zip(self.challenger, self.best, strict=True)]

    @property
    def ratio(self) -> Interval:
        """Median of the ratios, with its interval."""
        return median_interval(self.ratios)

    @property
    def decided(self) -> bool:
        """True if further rounds would not change the verdict.

        The verdict is final if enough rounds agree, after the maximum number of rounds, or if the challenger is
        hopeless.
        """
        ratios = self.ratios
        alike = all(r < 1 - 2 * _LEAST_GAIN for r in ratios) or all(r > 1 for r in ratios)
        return len(ratios) >= MOST_ROUNDS or (len(ratios) >= LEAST_ROUNDS and alike) or self.hopeless

    @property
    def hopeless(self) -> bool:
        """True if the challenger is so much slower that it can be rejected early."""
        return len(self.ratios) > 1 and all(r > _HOPELESS for r in self.ratios)

    @property
    def wins(self) -> bool:
        """True if the whole interval of the ratio lies clearly below 1."""
        return len(self.ratios) >= LEAST_ROUNDS and self.ratio.high < 1 - _LEAST_GAIN

    def tried(self, what: str, predicted_s: float | None = None, *, kept: bool | None = None, hint: str = "") -> Trial:
        """Return the trial of the challenger, with its verdict.

        Args:
            kept: whether the challenger was chosen from several plans. If None, a challenger that wins is kept.
            hint: reason why the challenger is not kept even if it wins.
        """
        ratio = self.ratio
        if hint:
            verdict = f"not taken: {hint}" if self.wins else "not taken: no faster"
        elif self.wins if kept is None else kept:
            verdict = "kept"
        elif ratio.low > 1:
            verdict = "not kept: slower"
        elif self.hopeless:
            verdict = f"not kept: slower, in each of {len(self.ratios)} rounds"
        elif kept is False and ratio.middle < 1 - _LEAST_GAIN:
            verdict = "not kept: another one is faster"
        else:
            verdict = "not kept: no difference"
        step, best = median_interval(self.challenger), median_interval(self.best)
        # compare medians alone, since few rounds give no useful interval
        if len(self.ratios) < LEAST_REPEATS:
            ratio, step, best = (Interval(i.middle, i.middle, i.middle) for i in (ratio, step, best))
        return Trial(what, verdict, step, ratio, predicted_s, best)


def bases_of(job: Job, cluster: Cluster, first: Plan, forecasts: Iterable[Forecast], *, settings: bool) -> list[Plan]:
    """Return the plans that are combined with settings; `first` comes first.

    With `settings`, these include plans with fewer ranks, and single ranks with one or all threads. Predictions are not
    exact enough to exclude any of them.
    """
    more = [change for change in plan_changes(job, cluster, first) if change.of_ranks and change.untried is None]
    plans = [first, *(Plan.parse(forecast.plan) for forecast in forecasts)]
    if settings:
        plans += [change.on(first) for change in more]
        plans += [replace(plan, threads=1) for plan in plans if _has_threads_to_spare(cluster, plan)]
    return list(dict.fromkeys(plans))


def _other_ranks(cluster: Cluster, plan: Plan) -> list[PlanChange]:
    """Return changes of the number of ranks, and of the threads of a single rank."""
    found = _other_divisions(cluster, plan)
    if _has_threads_to_spare(cluster, plan):
        found.append(PlanChange({"threads": 1}))
    elif plan.threads and _has_threads_to_spare(cluster, replace(plan, threads=0)):
        found.append(PlanChange({"threads": 0}))
    return [replace(change, of_ranks=True) for change in found]


def _other_divisions(cluster: Cluster, plan: Plan) -> list[PlanChange]:
    """Return changes to fewer ranks with more threads each, for CPUs only.

    Fewer ranks spend less time waiting for one another.
    """
    if cluster.has_accelerators or plan.splits:
        return []
    return [PlanChange({"dp": plan.dp >> shift}) for shift in range(1, plan.dp.bit_length())]


def _has_threads_to_spare(cluster: Cluster, plan: Plan) -> bool:
    return plan.ranks == 1 and not cluster.has_accelerators and threads_on(cluster, plan) > 1


def _hints(job: Job, cluster: Cluster) -> list[PlanChange]:
    if job.precision != "fp32":
        return []
    in_hardware = all(device.bf16 for host in cluster.hosts_in_use for device in host.devices)
    why_not = None if in_hardware else "this hardware is not known to support bf16 arithmetic"
    return [
        PlanChange({"precision": "bf16"}, untried=why_not, hint="the job sets fp32; set precision: bf16 to use bf16")
    ]


def _why_not(changed: Plan, plan: Plan, job: Job, cluster: Cluster) -> str | None:
    """Return the first new problem of a changed plan, or None.

    The text has neither the plan nor advice.
    """
    known = reasons_against(plan, job, cluster)
    problems = [problem for problem in reasons_against(changed, job, cluster) if problem not in known]
    if not problems:
        return None
    reason, advice, _ = problems[0].predicate.partition(". Use ")
    return reason if advice else reason.rpartition(": ")[0] or reason


def _why_no_compiler() -> str | None:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in wanted):
        return f"torch.compile needs a C++ compiler ({' or '.join(wanted)})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "torch.compile needs Python's headers (on Debian and Ubuntu: apt install python3-dev)"
    return None


def _shown(step_s: Interval) -> str:
    shown = seconds(step_s)
    return f"{shown}" if step_s.low == step_s.high else f"{shown} ({shown.interval})"
