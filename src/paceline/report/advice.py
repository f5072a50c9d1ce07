"""Typical step of a run, a cost model corrected with the run, and suggestions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from paceline import units
from paceline.engine.meter import PARTS
from paceline.errors import PacelineError, PlanError, RunError
from paceline.job.job import Job
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.layout import Prediction
from paceline.planning.explain.advice import INEXACT, WORTH
from paceline.planning.plan import DEGREES, Plan, on_devices, spelled_out
from paceline.planning.prediction import modelled
from paceline.planning.shortlist import DOUBT, DOUBT_UNCALIBRATED, plan_changes
from paceline.planning.sync_info import sync_info
from paceline.report.run_record import RunRecord, typical_parts
from paceline.run.record.run import WARM_UP_STEPS, Run, Speed, differences, timed, work_of_run
from paceline.run.tuning.auto import kept_calibration

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration


Parts = Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """Typical step of a run.

    Attributes:
        ranks: for each rank, the seconds of each part of its median step.
        samples: number of samples per step, summed over all ranks.
        local_samples: number of samples per step, by rank.
        speed: speed of the run, as shown on the report page.
    """

    run: Run
    ranks: Mapping[int, Parts]
    samples: float
    local_samples: Mapping[int, float]
    speed: Speed

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.run.plan

    @cached_property
    def served(self) -> bool:
        """True if parameter servers own the parameters.

        With parameter servers, only the first worker records steps, and its records have no parts.
        """
        return sync_info(self.plan.sync).served

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, averaged over the ranks."""
        return {part: fmean(parts[part] for parts in self.ranks.values()) for part in PARTS}

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    @property
    def devices(self) -> int:
        """Number of devices in use: accelerators, or the CPU cores of the ranks' threads."""
        plan, cluster = self.plan, self.run.cluster
        if cluster.has_accelerators:
            return plan.ranks
        host = cluster.hosts_in_use[0]
        threads = plan.threads_for(host, max(cluster.ranks_per_host(plan.ranks)))
        return min(plan.ranks * threads, sum(host.cores for host in cluster.hosts_in_use))

    @cached_property
    def compute_s(self) -> float:
        """Compute time of a typical rank in seconds, without the extra time of slow ranks.

        For data-parallel ranks, the value is the fastest rank's time per sample times the mean number of local samples.
        """
        if not self._alike:
            return self.parts["compute"]
        return self._pace_s * fmean(self.local_samples.values())

    @cached_property
    def even_parts(self) -> dict[str, float]:
        """Seconds of each part if every rank computed as fast as the fastest rank.

        The extra compute time of slower ranks counts as waiting.
        """
        lag_s = self.parts["compute"] - self.compute_s
        return self.parts | {"compute": self.compute_s, "imbalance": self.parts["imbalance"] + lag_s}

    @property
    def one_compute_s(self) -> float:
        """Compute time of a whole step in seconds if the ranks computed one after another.

        The value is an upper bound on the compute time of one device.
        """
        each = max(len(self.ranks), 1)
        if not self._alike:
            return sum(parts["compute"] for parts in self.ranks.values()) * self.plan.ranks / each
        return self._pace_s * self.samples

    @property
    def _alike(self) -> bool:
        """True if the ranks do the same work on different samples."""
        return self.plan.ranks == self.plan.data_ranks and all(self.local_samples.values())

    @property
    def _pace_s(self) -> float:
        return min(parts["compute"] / self.local_samples[rank] for rank, parts in self.ranks.items())


def measured(run: Run) -> Measured:
    """Compute the typical step of a run from its record.

    Raises:
        RunError: the run is federated or has too few steps.
    """
    record = RunRecord.read(run)
    if record.noun != "step":
        raise RunError(
            "report.federated_run",
            "{run} is a federated run, which has rounds instead of steps. This command needs a run that has recorded "
            "steps.",
            run=run.path,
        )
    found = {rank: (lines, typical_parts(lines)) for rank, lines in record.ranks.items()}
    ranks = {rank: parts for rank, (_, parts) in found.items() if parts is not None}
    if 0 not in ranks:
        raise RunError(
            "report.no_timed_steps",
            "{run} has recorded no step times after the {warm_up} warm-up steps, so it cannot be compared yet",
            run=run.path,
            warm_up=WARM_UP_STEPS,
        )
    lines = {rank: timed(found[rank][0]) for rank in ranks}
    local = {rank: median(float(line.get("local_samples", 0)) for line in of) for rank, of in lines.items()}
    speed = Speed.of(record.ranks[0], run.training_time_s)
    assert speed is not None, "rank 0 has steps that count"
    return Measured(run, ranks, speed.samples, local, speed)


def same_work(one: Run, many: Run) -> None:
    """Check that a run on one device did the same work as another run.

    Raises:
        RunError: `one` has several ranks, or the jobs differ. The message lists the keys that differ.
    """
    if one.plan.ranks > 1:
        raise RunError(
            "report.not_one_rank",
            "{run} used plan {plan}, which has several ranks. For a comparison with one device, name a run "
            "with one rank.",
            run=one.path,
            plan=one.plan,
        )
    if differing := list(differences(work_of_run(many), work_of_run(one))):
        raise RunError(
            "report.other_work",
            "{run} trained a different job, so the runs cannot be compared: {differences}",
            run=one.path,
            differences="; ".join(differing),
        )


# Predicted parts that each measured part contains. The overhead of a step is spread over all measured parts.
_MEASURED_AS = {
    "compute": ("compute", "recompute", "launch", "tp", "cp", "ep", "fsdp"),
    "bubble": ("bubble", "pp"),
    "comm": ("dp",),
    "optimizer": ("optimizer",),
}
# Largest ratio between a measured and a predicted time, in either direction, that a factor may correct.
_MOST = 5.0
_TOP = 8  # number of plans to predict; their parallel degrees differ
_DIVIDES = (
    *DEGREES,
    *("zero", "offload", "sequence", "schedule", "virtual", "cut", "remat", "offload_activations", "microbatches"),
)


@dataclass(frozen=True)
class Model:
    """Cost model corrected by the measurements of a run.

    Attributes:
        factors: ratio of measured to predicted seconds for the run's plan, by measured part.
        beside_s: seconds to add to the predicted time of each part that has no factor.
        calibration: calibration of the machine, if the model uses one.
        doubt: estimated relative error of a predicted time.
        why_not: reason why no prediction is possible from the run; empty if predictions are possible.
    """

    run: Measured
    factors: Mapping[str, float]
    beside_s: Mapping[str, float]
    calibration: Calibration | None
    doubt: float
    why_not: str = ""

    def parts_of(self, plan: Plan, job: Job | None = None) -> dict[str, float]:
        """Predict how many seconds each measured part takes under a plan.

        The times for data and checkpoints are taken from the run. A slow rank is assumed to stay slow.

        Raises:
            PacelineError: the plan cannot be predicted.
        """
        run = self.run
        job = job or run.run.job
        prediction = modelled(job, run.run.cluster, plan, self.calibration)
        if not prediction.fits:
            raise PlanError("plan.out_of_memory", "plan {plan} needs more memory than is available", plan=plan)
        return self.held(plan, prediction, job.global_batch / run.run.job.global_batch)

    def held(self, plan: Plan, prediction: Prediction, batches: float = 1.0) -> dict[str, float]:
        """Convert predicted parts to measured parts, and correct them with the run's factors.

        Args:
            batches: ratio of the predicted global batch to the run's global batch.
        """
        parts = dict.fromkeys(PARTS, 0.0)
        for part, seconds in _as_measured(prediction).items():
            beside = self.beside_s.get(part, 0.0) if plan.ranks > 1 else 0.0
            parts[part] = max(seconds * self.factors.get(part, 1.0) + beside, 0.0)
        before = self.run.even_parts
        parts["data"] = before["data"] * batches * self.run.plan.data_ranks / plan.data_ranks
        parts["checkpoint"] = before["checkpoint"]
        if plan.ranks > 1:
            parts["imbalance"] = before["imbalance"] * batches
        return parts

    def one_device(self) -> dict[str, float]:
        """Predict the parts of a step on one device.

        The predicted compute time is capped at the total compute time of the run's ranks.
        """
        parts = self.parts_of(one_device_plan(self.run))
        if not self.run.served:
            parts["compute"] = min(parts["compute"], self.run.one_compute_s)
        return parts


def model_of(run: Measured) -> Model:
    """Fit the cost model to the measured times of a run.

    Raises:
        PacelineError: the run's own plan cannot be predicted.
    """
    calibration = kept_calibration(run.run.job, run.run.cluster)
    prediction = modelled(run.run.job, run.run.cluster, run.plan, calibration)
    doubt = max(
        DOUBT if calibration is not None else DOUBT_UNCALIBRATED,
        prediction.interval.relative if prediction.interval is not None else 0.0,
    )
    if run.served:
        return Model(run, {}, {}, calibration, doubt)
    predicted = _as_measured(prediction)
    factors, beside_s = {}, {}
    for part, own_s in run.even_parts.items():
        expected_s = predicted.get(part, 0.0)
        if expected_s > 0 and 1 / _MOST <= own_s / expected_s <= _MOST:
            factors[part] = own_s / expected_s
        elif part == "compute":
            why_not = (
                f"the run computes {own_s / max(expected_s, 1e-9):.3g} times as long as the cost model expects; the "
                "device may differ from its catalogue entry, or other programs kept it busy. `paceline plan` measures "
                "this machine and improves later predictions"
            )
            return Model(run, {}, {}, calibration, doubt, why_not)
        elif part in predicted:
            beside_s[part] = own_s - expected_s
    return Model(run, factors, beside_s, calibration, doubt)


def one_device_plan(run: Measured) -> Plan:
    """Return the run's plan on one device. On CPUs, a device is one core."""
    return on_devices(_plain(undivided(run.plan)), 1, run.run.cluster)


def is_one_device(run: Measured) -> bool:
    """Return True if the run itself used one device."""
    return spelled_out(run.plan, run.run.cluster) == one_device_plan(run)


def undivided(plan: Plan) -> Plan:
    """Return the plan with defaults for all keys that divide the work."""
    whole: dict[str, Any] = {field.name: field.default for field in fields(Plan) if field.name in _DIVIDES}
    return replace(plan, **whole)


def other_plans(model: Model) -> list[tuple[Plan, dict[str, float]]]:
    """Return the best other plans with their predicted parts, fastest first.

    Raises:
        PacelineError: the search fails, for example because no plan fits.
    """
    from paceline.planning.search.search import search

    run = model.run.run
    base = replace(undivided(model.run.plan), threads=0)
    found = search(run.job, run.cluster, top=_TOP, calibration=model.calibration, base=base)
    own = spelled_out(model.run.plan, run.cluster)
    others = [c for c in found.best if spelled_out(c.plan, run.cluster) != own]
    plans = [(_plain(c.plan), model.held(c.plan, c.prediction)) for c in others]
    return sorted(plans, key=lambda one: sum(one[1].values()))


def _plain(plan: Plan) -> Plan:
    """Reset the keys that apply to several replicas, if the plan has one replica."""
    usual = Plan()
    alone = replace(plan, sync=usual.sync, compress=usual.compress, balance=usual.balance)
    return alone if plan.dp == 1 else plan


def predicted_or_why(model: Model, plan: Plan, job: Job | None = None) -> dict[str, float] | str:
    """Predict the parts of a step, or return the reason why no prediction is possible."""
    run = model.run.run
    if reasons := plan_errors(job or run.job, plan, cluster=run.cluster):
        return reasons[0].text
    try:
        return model.parts_of(plan, job)
    except PacelineError as error:
        return str(error).splitlines()[0]


def _as_measured(prediction: Prediction) -> dict[str, float]:
    breakdown = prediction.breakdown
    return {part: sum(breakdown.get(name, 0.0) for name in names) for part, names in _MEASURED_AS.items()}


_LEAST_SHARE = 0.03  # minimum fraction of a step that a part takes before a suggestion is made
_MOST_PLANS = 4
_LEAST_INEXACT = 0.02  # minimum gain of a suggestion that changes the losses


@dataclass(frozen=True)
class Suggestion:
    """Change that may make a run faster.

    Attributes:
        what: the change, either as a plan's text or in words.
        gain: relative gain in throughput; None if it is not predicted.
        known: kind of the gain: `predicted`, `at most` (an upper bound from the run's parts) or `not predicted`.
        plan: plan that includes the change; None if `--try` cannot measure the change.
        but: drawback of the change, if any.
    """

    what: str
    gain: float | None
    known: Literal["predicted", "at most", "not predicted"]
    plan: Plan | None = None
    but: str = ""

    @property
    def order(self) -> float:
        """Sort key: suggestions with larger values are shown first."""
        return -1.0 if self.gain is None else self.gain

    def is_certain(self, doubt: float) -> bool:
        """Return True if the interval of the predicted gain excludes zero.

        Args:
            doubt: estimated relative error of a predicted time.
        """
        return self.known == "predicted" and self.gain is not None and self.gain > doubt

    @property
    def gain_words(self) -> str:
        """The gain as text, such as `at most +12 %`."""
        if self.gain is None:
            return self.known
        return f"{'at most ' if self.known == 'at most' else ''}+{units.percent(self.gain)}"

    def line(self) -> str:
        """Return the suggestion as one line of text."""
        return f"{self.gain_words}: {self.what}" + (f" ({self.but})" if self.but else "")


def from_parts(run: Measured) -> list[Suggestion]:
    """Make suggestions whose largest possible gain follows from the run's parts."""
    if run.served:
        return []
    job, found = run.run.job, []
    shares = {part: seconds / run.step_s for part, seconds in run.parts.items()}
    if shares["data"] >= _LEAST_SHARE:
        now = run.plan.num_workers or job.data.num_workers
        plan = replace(run.plan, num_workers=now + 1)
        found.append(replace(_at_most(f"num_workers={now + 1}", shares["data"]), plan=plan))
    if shares["checkpoint"] >= _LEAST_SHARE:
        what = "checkpoints half as often (checkpoint.every_steps or every_seconds of the job)"
        found.append(_at_most(what, shares["checkpoint"] / 2, "more steps are repeated after a failure"))
    if shares["imbalance"] >= _LEAST_SHARE and len(run.ranks) > 1:
        found.append(_balance(run, shares["imbalance"]))
    return found


def _balance(run: Measured, share: float) -> Suggestion:
    """Suggest how to shorten the wait for slow ranks.

    The suggestion is either `balance=auto` or less load from other programs.
    """
    waits = {rank: parts["imbalance"] for rank, parts in run.ranks.items()}
    slow = min(waits, key=lambda rank: waits[rank])
    if run.plan.balance == "off" and run.plan.dp > 1:
        return _at_most("balance=auto", share)
    what = f"less other load beside rank {slow}, because the other ranks wait longest for it"
    return _at_most(what, share)


def _at_most(what: str, share: float, but: str = "") -> Suggestion:
    return Suggestion(what, share / (1 - share), "at most", but=but)


def from_predictions(model: Model) -> list[Suggestion]:
    """Suggest plans, batch sizes, sync rules and settings.

    The gains of settings are not predicted and need a measurement.
    """
    if model.why_not:
        plans = [replace(one, gain=None, known="not predicted") for one in _plans(model)]
        return [*plans, *_settings(model)]
    return [*_plans(model), *_batch(model), *_inexact(model), *_settings(model)]


def _plans(model: Model) -> list[Suggestion]:
    """Suggest plans that are predicted to be faster and do not change the training."""
    try:
        others = other_plans(model)
    except PacelineError:  # no other plan can run; the run's own plan has been predicted
        return []
    found = [Suggestion(named(plan), _gain(model, parts), "predicted", plan) for plan, parts in others]
    return [one for one in found if (one.gain or 0.0) >= WORTH or model.why_not][:_MOST_PLANS]


def _batch(model: Model) -> list[Suggestion]:
    run = model.run
    twice = 2 * run.run.job.global_batch
    parts = predicted_or_why(model, run.plan, run.run.job.model_copy(update={"global_batch": twice}))
    if isinstance(parts, str):
        return []
    gain = 2 * run.step_s / sum(parts.values()) - 1
    but = "samples a second; this changes the training: `paceline plan batch` predicts whether it learns as well"
    return [Suggestion(f"global_batch: {twice:,}", gain, "predicted", but=but)] if gain >= WORTH else []


def _inexact(model: Model) -> list[Suggestion]:
    """Suggest sync rules and codecs that change the losses."""
    run, found = model.run, []
    if run.plan.dp < 2 or run.plan.inexact:
        return []
    for values, but in INEXACT:
        plan = replace(run.plan, **values)
        if reasons_against(plan, run.run.job, run.run.cluster):
            continue
        parts = predicted_or_why(model, plan)
        if not isinstance(parts, str) and (gain := _gain(model, parts)) >= _LEAST_INEXACT:
            found.append(Suggestion(str(plan), gain, "predicted", plan, but))
    return sorted(found, key=lambda one: -one.order)[:2]


def _settings(model: Model) -> list[Suggestion]:
    """Suggest settings that leave the results unchanged and that the cost model does not cover."""
    run = model.run
    found = plan_changes(run.run.job, run.run.cluster, run.plan)
    tried = [change for change in found if not (change.untried or change.hint)]
    # `from_parts` suggests loader processes if the run waits for data
    told = {*DEGREES, "num_workers"}
    same = [change for change in tried if not change.cost_s and not set(change.changes) & told]
    plans = {str(change): change.on(run.plan) for change in same}
    return [Suggestion(what, None, "not predicted", plan) for what, plan in plans.items()]


def _gain(model: Model, parts: dict[str, float]) -> float:
    return model.run.step_s / sum(parts.values()) - 1


def named(plan: Plan) -> str:
    """Format a plan. The text of a one-rank plan begins with `dp=1`."""
    text = str(plan)
    return f"dp=1 {text}" if plan.ranks == 1 and text != "dp=1" else text
