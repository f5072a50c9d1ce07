"""`paceline check`: compare a plan with a single process before a long training."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.cluster.cluster import Cluster
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import LaunchError, PlanError
from paceline.files import scratch_folder
from paceline.job.job import Job, Precision
from paceline.planning.arguments import AnyCluster, AnyJob, AnyPlan, cluster_to_run_on, job_of, plan_or_auto
from paceline.planning.check.plan_errors import refuse
from paceline.planning.plan import Plan
from paceline.run.dry_run import refuse_what_cannot_divide
from paceline.run.parity import Compared, Parts, Reference, Steps
from paceline.run.tuning.auto import choose
from paceline.units import count, percent

Verdict = Literal["holds", "differs", "cannot tell"]


class Tolerance(NamedTuple):
    """Relative differences from a single process; for tensors, in the L2 norm."""

    loss: float
    gradient: float
    parameter: float
    buffer: float


TOLERANCES = {
    "fp64": Tolerance(1e-9, 1e-7, 1e-7, 1e-7),
    "fp32": Tolerance(1e-5, 1e-4, 1e-4, 1e-4),
    "bf16": Tolerance(5e-3, 1e-1, 1e-2, 1e-2),
    "fp16": Tolerance(5e-3, 1e-1, 1e-2, 1e-2),
    "fp8": Tolerance(1e-2, 2e-1, 2e-2, 2e-2),
}
# If rounding alone may change a job by more than this, a mistake, such as one rank's missing gradient, could look like
# rounding.
CAP = Tolerance(2e-2, 3e-1, 3e-2, 3e-2)
# A plan may differ by this multiple of the difference that a single process in the same precision shows. Some jobs
# amplify rounding from step to step.
ROUNDING = {"fp64": 10.0, "fp32": 10.0, "bf16": 4.0, "fp16": 4.0, "fp8": 4.0}
STEPS = 5


@dataclass(frozen=True)
class LargestDifference:
    """The tensor that differs most in a step, and the rank that holds it."""

    difference: float
    name: str
    rank: int


@dataclass(frozen=True)
class StepParity:
    """Comparison of a step under the plan with the same step in a single process."""

    loss: float
    reference_loss: float
    gradient: LargestDifference
    parameter: LargestDifference
    buffer: LargestDifference

    @property
    def loss_difference(self) -> float:
        """Relative difference of the loss from the reference."""
        return abs(self.loss - self.reference_loss) / (abs(self.reference_loss) or 1.0)

    @property
    def differences(self) -> Tolerance:
        """Largest relative difference of each quantity."""
        return Tolerance(
            self.loss_difference, self.gradient.difference, self.parameter.difference, self.buffer.difference
        )


@dataclass(repr=False)
class Parity:
    """Result of `check` for a plan.

    Attributes:
        tolerance: tolerance of the plan's precision; larger if a single process in that precision differs more.
        steps: comparisons of the steps, in order.
        parameters: largest gradient difference of each parameter over all steps.
        first_module: first module, in execution order, whose output differs in the first step; None if there is none,
            or with a pipeline.
        report: lines that describe what the plan divided.
        undecided: reason why the result is inconclusive; None if it is conclusive.
        reference_precision: precision of the single process; `fp32` only if the model cannot run in float64.
    """

    plan: Plan
    tolerance: Tolerance
    steps: list[StepParity]
    parameters: dict[str, float] = field(default_factory=dict)
    first_module: str | None = None
    report: list[str] = field(default_factory=list)
    undecided: str | None = None
    reference_precision: Precision = "fp64"

    @property
    def largest(self) -> Tolerance:
        """Largest difference of each quantity over all steps."""
        return Tolerance(*map(max, zip(*(step.differences for step in self.steps), strict=True)))

    @classmethod
    def of(cls, plan: Plan, found: Sequence[Compared], reference: Reference, tolerance: Tolerance) -> Parity:
        """Compare the results of the plan's ranks with the single process's results."""
        parity = cls(plan, tolerance, [_step(found, i, loss) for i, loss in enumerate(reference.losses)])
        parity.parameters = _largest(found)
        parity.report = found[0].report
        if reference.random is not None:
            parity.undecided = _drawn(reference.random)
        parity.undecided = _other_inputs(found, reference, plan) or parity.undecided
        if not parity.holds:
            parity.first_module = _first_difference(reference.outputs, found, tolerance[1])
        return parity

    def __repr__(self) -> str:
        """Return the verdict and the largest differences."""
        most = ", ".join(f"{name} {value:.2g}" for name, value in self.largest._asdict().items()) if self.steps else ""
        steps = count(len(self.steps), "step")
        return f"<Parity of plan {self.plan}: {self.verdict}; largest differences in {steps}: {most}>"

    @property
    def verdict(self) -> Verdict:
        """`holds` or `differs`; `cannot tell` if rounding or random numbers could hide a mistake."""
        if self.undecided is not None:
            return "cannot tell"
        # If rounding may move one quantity beyond its cap, it also affects the other quantities at random. Then only
        # differences beyond the caps are evidence.
        limits = self.tolerance if self.why_undecided is None else Tolerance(*map(max, self.tolerance, CAP))
        if any(found > limit for found, limit in zip(self.largest, limits, strict=True)):
            return "differs"
        return "holds" if self.why_undecided is None else "cannot tell"

    @property
    def holds(self) -> bool:
        """True if every step is within the tolerance, and the result is conclusive."""
        return self.verdict == "holds"

    @property
    def why_undecided(self) -> str | None:
        """Reason why a match could be a coincidence, with advice; None if conclusive."""
        if self.undecided is not None:
            return self.undecided
        beyond = [name for name, limit, cap in zip(Tolerance._fields, self.tolerance, CAP, strict=True) if limit > cap]
        if not beyond:
            return None
        amounts = ", ".join(f"{name} {percent(getattr(self.tolerance, name), 0)}" for name in beyond)
        return (
            f"rounding alone may move this job that far ({amounts}), so a mistake as large would pass for rounding. "
            "Check the plan with precision=fp64, over fewer steps (--steps 1), or with a smaller learning rate"
        )


def check(job: AnyJob, plan: AnyPlan = "auto", *, cluster: AnyCluster | None = None, steps: int = STEPS) -> Parity:
    """Train a few steps under a plan and in a single process, and compare them.

    Args:
        job: a `Job`, its YAML file, or the file's URL.
        plan: a `Plan`, its text, or `"auto"` for the plan that `train` would choose.
        cluster: a `Cluster`, or the YAML file of one; None means this machine.
        steps: number of optimizer steps to compare.

    Returns:
        The differences and the verdict; `parity.holds` is True if all differences are within rounding.

    Raises:
        PlanError: the plan cannot run the job here; the message lists every reason.
        LaunchError: a rank failed.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.

    Example:
        >>> paceline.check("job.yaml", "dp=2").holds
        True
    """
    job, cluster = job_of(job), cluster_to_run_on(cluster)
    asked = plan_or_auto(plan, job)
    job.model.must_be_at_hand()
    job.fetch()
    chosen = choose(job, cluster).plan if asked is None else asked
    with Checks(job, cluster, steps=steps).opened() as checks:
        return checks.check(chosen)


class Checks:
    """Parity checks of one job.

    Plans that divide batches in the same way are compared with the same reference.

    Attributes:
        reference_precision: precision of the single process: `fp64`, or `fp32` if the model cannot run in float64.
    """

    def __init__(self, job: Job, cluster: Cluster | None = None, *, steps: int = STEPS) -> None:
        self.job, self.cluster, self.steps = job, cluster_to_run_on(cluster), steps
        self.reference_precision: Precision = "fp64"
        self._references: dict[Parts, tuple[Path, Reference]] = {}
        self._roundings: dict[tuple[Parts, str], Tolerance] = {}
        self._perturbed: dict[Parts, list[StepParity]] = {}

    @contextmanager
    def opened(self) -> Iterator[Checks]:
        """Create a temporary folder for the files of the checks."""
        with scratch_folder() as folder:
            self._folder = Path(folder)
            yield self

    def check(self, plan: Plan) -> Parity:
        """Train the steps under the plan, and compare them with the reference.

        Raises:
            PlanError: the plan cannot run the job here; the message lists every reason.
            LaunchError: a rank failed.
        """
        refuse(self.job, plan, self.cluster)
        refuse_what_cannot_divide(self.job, plan, self.cluster)
        parts, precision = self._parts(plan), plan.precision_for(self.job)
        self._reference(parts)
        if precision != "fp64" and (parts, precision) not in self._roundings:
            alone = Plan(precision=precision, microbatches=parts.microbatches)
            self._roundings[parts, precision] = self._compared(alone, TOLERANCES[precision], parts).largest
        rounding = self._roundings.get((parts, precision), Tolerance(0.0, 0.0, 0.0, 0.0))
        factor = ROUNDING[precision]
        tolerance = Tolerance(*(max(t, factor * r) for t, r in zip(TOLERANCES[precision], rounding, strict=True)))
        parity = self._compared(plan, tolerance, parts)
        parity.reference_precision = self.reference_precision
        if parity.verdict == "differs" and precision == self.reference_precision:
            if parts not in self._perturbed:
                alone = Plan(precision=precision, microbatches=parts.microbatches)
                self._perturbed[parts] = self._compared(alone, tolerance, parts, perturbed=True).steps
            parity.undecided = _amplified(parity, self._perturbed[parts], factor)
            if parity.undecided is not None:
                parity.first_module = None
        return parity

    def _compared(self, plan: Plan, tolerance: Tolerance, parts: Parts, *, perturbed: bool = False) -> Parity:
        folder, reference = self._reference(parts)
        request = Steps(self.job, plan, self.steps, folder, parts, perturbed), reference
        found = run_on_plan(_compare, request, job=self.job, cluster=self.cluster, plan=plan, folder=folder)
        return Parity.of(plan, found, reference, tolerance)

    def _parts(self, plan: Plan) -> Parts:
        """Return the parts into which the single process must divide batches.

        The parts matter because batch norm couples the samples of a part, and because some layers, such as spectral
        norm, update their buffers in each microbatch.
        """
        from paceline.planning.model.model_info import model_info

        if model_info(self.job.model).normalises_batches:
            return Parts(plan.microbatches, plan.data_ranks, together=self.job.batch_norm == "sync")
        if plan.microbatches > 1 and self._reference(Parts(1, 1))[1].written:
            return Parts(plan.microbatches, plan.data_ranks, together=True)
        return Parts(1, 1)

    def _reference(self, parts: Parts) -> tuple[Path, Reference]:
        if parts not in self._references:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            self._references[parts] = folder, self._taken(folder, parts, self.reference_precision)
        return self._references[parts]

    def _taken(self, folder: Path, parts: Parts, precision: Precision) -> Reference:
        plan = Plan(precision=precision, microbatches=parts.microbatches)
        steps = Steps(self.job, plan, self.steps, folder, parts)
        try:
            return run_on_plan(_take_reference, steps, job=self.job, cluster=self.cluster, plan=plan, folder=folder)[0]
        except LaunchError:
            # Models that name float32 in their code fail in float64; float32 is then the most exact precision.
            if precision != "fp64" or self._references:
                raise
            reference = self._taken(folder, parts, "fp32")
            self.reference_precision = "fp32"
            return reference


def _take_reference(steps: Steps, folder: Path) -> Reference:
    from paceline.run.parity.ranks import take_reference

    return take_reference(replace(steps, folder=folder))


def _compare(request: tuple[Steps, Reference], folder: Path) -> Compared:
    from paceline.run.parity.ranks import compare

    steps, reference = request
    return compare(replace(steps, folder=folder), reference)


def check_all(
    job: Job,
    most_ranks: int,
    cluster: Cluster | None = None,
    *,
    steps: int = STEPS,
    say: Callable[[Plan, Parity | Exception], None],
) -> bool:
    """Check every legal plan of up to `most_ranks` ranks.

    `say` is called with each plan and its result; for a refused plan, the result is a `PlanError`.

    Returns True if the check holds for every plan that can run.
    """
    from paceline.errors import PacelineError
    from paceline.planning.search.space import legal_plans

    checks, hold = Checks(job, cluster, steps=steps), True
    with checks.opened():
        for plan in legal_plans(job, checks.cluster, range(min(2, most_ranks), most_ranks + 1)):
            try:
                found: Parity | Exception = checks.check(plan)
            except PacelineError as error:
                found = PlanError.of_error(error) if getattr(error, "rank_error", None) == "PlanError" else error
            hold = hold and (isinstance(found, PlanError) or (isinstance(found, Parity) and found.holds))
            say(plan, found)
    return hold


def _other_inputs(found: Sequence[Compared], reference: Reference, plan: Plan) -> str | None:
    """Return a reason if the ranks' inputs differ from the reference; None otherwise."""
    for compared in found:
        for step, (own, expected) in enumerate(zip(compared.inputs, reference.inputs, strict=True), 1):
            for index, digest in own.items():
                if expected.get(index) != digest:
                    return (
                        f"the inputs differ, so the numbers say nothing about the plan: sample {index} of "
                        f"{reference.dataset} in step {step} is not the same in two processes. Draw random numbers in "
                        "the data set from torch, numpy.random or random, not from os.urandom, the time or its own "
                        "generator: paceline seeds those three by the job's seed, the epoch and the index"
                    )
    if reference.collate_draws and plan.data_ranks > 1:
        return (
            f"the collate function draws random numbers, and each of {plan.data_ranks} data-parallel ranks draws for "
            "its own part of a batch, so the inputs differ from one process. Check the job with a collate function "
            "without random numbers"
        )
    return None


def _amplified(parity: Parity, perturbed: Sequence[StepParity], factor: float) -> str | None:
    """Return a text if amplified rounding explains the differences; None otherwise.

    Args:
        parity: result of a plan that differs.
        perturbed: steps of a single process whose initial weights were changed by one unit in the last place.
        factor: differences up to this multiple of the perturbed process's count as rounding.
    """
    moved = Tolerance(0.0, 0.0, 0.0, 0.0)
    for own, other in zip(parity.steps, perturbed, strict=True):
        moved = Tolerance(*map(max, moved, other.differences))
        limits = [max(t, factor * m) for t, m in zip(parity.tolerance, moved, strict=True)]
        if any(found > limit for found, limit in zip(own.differences, limits, strict=True)):
            return None
    amounts = ", ".join(
        f"{name} {m:.1e} (this plan: {found:.1e})"
        for name, found, m, tolerance in zip(Tolerance._fields, parity.largest, moved, parity.tolerance, strict=True)
        if found > tolerance
    )
    return (
        "the job amplifies rounding, and this explains the difference. If all weights of one process change by one "
        f"unit in the last place, its results change by this much: {amounts}. A mistake of this size cannot be told "
        "from rounding. Check fewer steps (--steps 1), a smaller learning rate, or more samples per batch norm"
    )


def _drawn(module: str) -> str:
    return (
        f"{module} draws random numbers when it is called, and every rank draws others. Switch that off for the check "
        "(torch's own dropout, and what modules call drop, are off already)"
    )


def _step(found: Sequence[Compared], i: int, reference_loss: float) -> StepParity:
    gradient, parameter, buffer = (_worst(found, i, kind) for kind in ("gradient", "parameter", "buffer"))
    return StepParity(found[0].losses[i], reference_loss, gradient, parameter, buffer)


def _worst(found: Sequence[Compared], i: int, kind: str) -> LargestDifference:
    worst = LargestDifference(0.0, "", 0)
    for rank, compared in enumerate(found):
        for name, piece in compared.steps[i].items():
            if kind not in piece:
                continue
            difference = math.inf if math.isnan(piece[kind]) else piece[kind]
            if not worst.name or difference > worst.difference:
                worst = LargestDifference(difference, name, rank)
    return worst


def _largest(found: Sequence[Compared]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for compared in found:
        for pieces in compared.steps:
            for name, piece in pieces.items():
                if "gradient" in piece:
                    largest[name] = max(largest.get(name, 0.0), piece["gradient"])
    return largest


def _first_difference(reference: dict[str, list[float]], found: Sequence[Compared], tolerance: float) -> str | None:
    """Return the first module, in execution order, whose outputs' mean square differs."""
    for name, (number, _, square) in reference.items():
        ours = [compared.outputs[name] for compared in found if name in compared.outputs]
        if not ours or not number:
            continue
        expected, mean = square / number, sum(o[2] for o in ours) / (sum(o[0] for o in ours) or 1.0)
        if abs(mean - expected) > tolerance * (abs(expected) or 1.0):
            return name
    return None
