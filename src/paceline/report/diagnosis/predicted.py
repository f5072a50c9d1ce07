"""Predicted steps of other plans, with the run's own measured parts as calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from paceline.engine.meter import PARTS
from paceline.errors import PacelineError, PlanError
from paceline.job.job import Job
from paceline.planning.axes import DEGREES
from paceline.planning.check.check_plan import check_plan
from paceline.planning.cost.layout import Prediction
from paceline.planning.plan import Plan, on_devices, spelled_out
from paceline.planning.predict import modelled
from paceline.planning.shortlist import DOUBT, DOUBT_UNCALIBRATED
from paceline.report.diagnosis.measured import Measured
from paceline.run.tuning.auto import kept_calibration

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration

# The measured part that each predicted one falls into. The overhead of a step is in all measured parts.
_MEASURED_AS = {
    "compute": ("compute", "recompute", "launch", "tp", "cp", "ep", "fsdp"),
    "bubble": ("bubble", "pp"),
    "comm": ("dp",),
    "optimizer": ("optimizer",),
}
# A prediction that is further off, either way, is of something else.
_MOST = 5.0
_TOP = 8  # plans with different degrees
_DIVIDES = (*DEGREES, "zero", "offload", "sequence", "schedule", "virtual", "cut", "remat", "microbatches")


@dataclass(frozen=True)
class Model:
    """The cost model, held to what a run measured.

    Attributes:
        factors: measured over predicted seconds of the run's plan, by measured part.
        beside_s: what is added to a part where no factor can be told.
        calibration: measurements of the machine that it rests on as well; None if there are none.
        doubt: relative error that a predicted time may have.
        why_not: reason why nothing is predicted from the run; empty if it is.
    """

    run: Measured
    factors: Mapping[str, float]
    beside_s: Mapping[str, float]
    calibration: Calibration | None
    doubt: float
    why_not: str = ""

    def parts_of(self, plan: Plan, job: Job | None = None) -> dict[str, float]:
        """Predicted seconds of each measured part under a plan.

        Waiting for data and checkpoints stay those of the run, a slow rank stays slow.

        Raises:
            PacelineError: it cannot be predicted.
        """
        run = self.run
        job = job or run.run.job
        prediction = modelled(job, run.run.cluster, plan, self.calibration)
        if not prediction.fits:
            raise PlanError(f"plan {plan} needs more memory than there is")
        return self.held(plan, prediction, job.global_batch / run.run.job.global_batch)

    def held(self, plan: Plan, prediction: Prediction, batches: float = 1.0) -> dict[str, float]:
        """A prediction's parts as measured ones, corrected by the run.

        Args:
            batches: how many times the run's global batch it is of.
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
        """Predicted parts of a step on one device.

        There is no more compute than the ranks of the run did together.
        """
        parts = self.parts_of(one_device_plan(self.run))
        if not self.run.served:
            parts["compute"] = min(parts["compute"], self.run.one_compute_s)
        return parts


def model_of(run: Measured) -> Model:
    """The cost model held to a run.

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
                "device may not be as in the catalogue, or other programs may have kept it busy. `paceline plan` "
                "measures this machine, and later predictions rest on that"
            )
            return Model(run, {}, {}, calibration, doubt, why_not)
        elif part in predicted:
            beside_s[part] = own_s - expected_s
    return Model(run, factors, beside_s, calibration, doubt)


def one_device_plan(run: Measured) -> Plan:
    """The run's plan without its divisions, on CPUs with one thread."""
    return on_devices(_plain(undivided(run.plan)), 1, run.run.cluster)


def is_one_device(run: Measured) -> bool:
    """True if the run itself used the plan of one device."""
    return spelled_out(run.plan, run.run.cluster) == one_device_plan(run)


def undivided(plan: Plan) -> Plan:
    """The plan with the keys that do not divide the work, for one rank."""
    whole: dict[str, Any] = {field.name: field.default for field in fields(Plan) if field.name in _DIVIDES}
    return replace(plan, **whole)


def other_plans(model: Model) -> list[tuple[Plan, dict[str, float]]]:
    """The best other plans with their predicted parts, the fastest first.

    Raises:
        PacelineError: nothing can be searched.
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
    """The plan without keys of replicas that agree, if it has only one."""
    usual = Plan()
    alone = replace(plan, sync=usual.sync, compress=usual.compress, balance=usual.balance)
    return alone if plan.dp == 1 else plan


def predicted_or_why(model: Model, plan: Plan, job: Job | None = None) -> dict[str, float] | str:
    """Predicted parts of a plan, or the reason why there are none."""
    run = model.run.run
    if reasons := check_plan(plan, job or run.job, run.cluster):
        return reasons[0]
    try:
        return model.parts_of(plan, job)
    except PacelineError as error:
        return str(error).splitlines()[0]


def _as_measured(prediction: Prediction) -> dict[str, float]:
    breakdown = prediction.breakdown
    return {part: sum(breakdown.get(name, 0.0) for name in names) for part, names in _MEASURED_AS.items()}
