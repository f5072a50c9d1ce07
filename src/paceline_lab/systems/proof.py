"""Check that a system does the same work, based on its losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.modules.dropout import _DropoutNd

from paceline.cluster.cluster import Cluster
from paceline.device import DEVICE_VARIABLE
from paceline.errors import RunError
from paceline.job.job import EvaluateSpec, Job
from paceline.job.stop import StopSpec
from paceline.sync.batchnorm import has_batch_norm
from paceline.units import count

AGREE = 1e-3  # losses count as equal up to this relative difference
# A step is compared only if rounding alone moves its loss by at most this fraction of `AGREE`.
_SURE = 0.1


@dataclass(frozen=True)
class Reference:
    """Single-process training that serves as the reference for the losses of a system.

    Attributes:
        batch: samples per step; None for the batch size of the comparison.
        parts: number of parts into which a batch is split; batch normalization is computed separately in each part.
        disturbed: whether rounding errors are added to the initial weights, to show how rounding affects the losses.
    """

    batch: int | None = None
    parts: int = 1
    disturbed: bool = False


@dataclass(frozen=True)
class Proof:
    """Largest relative difference between the first losses of a system and of one process.

    Attributes:
        steps: number of compared steps; None if all steps were compared. Later steps are left out if rounding alone
            can explain their differences. One step is inconclusive, since no gradient has affected its loss.
    """

    apart: float
    steps: int | None = None

    @property
    def same(self) -> bool:
        """True if the system's losses equal the losses of one process, up to rounding."""
        return self.apart <= AGREE and not self.is_open

    @property
    def is_open(self) -> bool:
        """True if rounding affects the losses too early for the comparison to be conclusive."""
        return self.steps is not None and self.steps < 2

    def __str__(self) -> str:
        if self.is_open:
            return (
                f"losses that differ by up to {self.apart:.1%}, as they may by rounding alone: what it computes is open"
            )
        if not self.same:
            return f"OTHER losses, by up to {self.apart:.1%}"
        if self.steps is None:
            return f"the same losses (to {self.apart:.0e})"
        return (
            f"the same losses (to {self.apart:.0e}) in the first {self.steps} steps; later ones are moved by rounding "
            "alone"
        )


class References:
    """Losses of single-process trainings; each reference is trained when it is first needed.

    Args:
        take: trains one reference and returns the loss of each step.
    """

    def __init__(self, take: Callable[[Reference], list[float]]) -> None:
        self._take = take
        self._taken: dict[Reference, list[float]] = {}

    def prove(self, losses: list[float], batch: int | None, parts: int) -> Proof:
        """Compare losses with one process, in the steps that rounding does not dominate."""
        wanted = self._losses(Reference(batch, parts))
        apart = difference(losses, wanted)
        if apart <= AGREE:
            return Proof(apart)
        moved = self._losses(Reference(batch, parts, disturbed=True))
        pairs = zip(wanted, moved, strict=True)
        sure = next((n for n, pair in enumerate(pairs) if difference(pair[:1], pair[1:]) > _SURE * AGREE), len(wanted))
        if sure == len(wanted):
            return Proof(apart)
        compared = difference(losses[:sure], wanted[:sure])
        return Proof(apart, sure) if sure < 2 and compared <= AGREE else Proof(compared, sure if sure > 1 else None)

    def _losses(self, reference: Reference) -> list[float]:
        if reference not in self._taken:
            self._taken[reference] = self._take(reference)
        return self._taken[reference]


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two loss curves; infinity if one is not finite."""
    worst = 0.0
    for loss, other in zip(losses, reference, strict=False):
        apart = abs(loss - other) / max(abs(other), 1e-12)
        worst = max(worst, apart) if apart == apart else float("inf")
    return worst


def as_compared(job: Job, steps: int, ranks: int) -> Job:
    """Return the job limited to a number of steps, each with a full batch.

    Raises:
        RunError: the other systems cannot train this job in the same way; the error names the key to change.
    """
    if job.global_batch % ranks:
        raise RunError(
            "compare.batch_uneven",
            "global_batch {global_batch} cannot be divided evenly over {ranks}, and the other systems need equal "
            "parts. Set global_batch to {choice}.",
            global_batch=job.global_batch,
            ranks=count(ranks, "rank"),
            choice=job.global_batch // ranks * ranks or ranks,
        )
    if job.precision != "fp32":
        raise RunError(
            "compare.precision",
            "systems are compared in fp32, but the job sets precision: {precision}. Remove this key.",
            precision=job.precision,
        )
    if keys := job.beyond_plain_steps:
        raise RunError(
            "compare.job_keys_unsupported",
            "other systems do not support {keys}. Remove them from the job to compare systems.",
            keys=list(keys),
        )
    stop = {"stop": StopSpec(steps=steps), "evaluate": EvaluateSpec(every_steps=steps), "drop_last": True}
    return job.model_copy(update={**stop, "trackers": ()})


def grown(job: Job, ranks: int) -> Job:
    """Return the job with its global batch multiplied by the number of ranks.

    Raises:
        RunError: there is only one rank, the training set is smaller than the batch, or the work per sample depends on
            the batch size.
    """
    if ranks == 1:
        raise RunError(
            "compare.weak_of_one",
            "weak scaling compares several ranks with one, but only one rank is available. Remove --weak.",
        )
    if job.loss.is_over_whole_batch:
        raise RunError(
            "compare.weak_joint_loss",
            "the loss {loss} compares all samples of a batch with each other, so {ranks} times the batch is more "
            "than {ranks} times the work. Remove --weak.",
            loss=job.loss.name,
            ranks=ranks,
        )
    batch = ranks * job.global_batch
    train: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    samples = len(train)
    if samples < batch:
        raise RunError(
            "compare.weak_too_few_samples",
            "with --weak, each of {ranks} has a batch of {global_batch}, so {needed} samples are needed, but the "
            "training set has {samples} samples. Provide more data, or use a smaller global_batch.",
            ranks=count(ranks, "rank"),
            global_batch=job.global_batch,
            needed=batch,
            samples=samples,
        )
    return job.model_copy(update={"global_batch": batch})


def must_draw_nothing(job: Job) -> None:
    """Refuse a job with dropout, since every system draws different dropout masks.

    Raises:
        RunError: the model uses dropout; the error names the first such layer.
    """
    for name, module in job.model.build().named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise RunError(
                "compare.dropout",
                'the layer "{name}" uses dropout (p={p:g}), and every system draws different masks, so their '
                "losses cannot be compared. Set the dropout probability to 0 in model.args.",
                name=name,
                p=module.p,
            )


def must_be_cpus_of_this_machine(cluster: Cluster) -> None:
    """Refuse clusters on which paceline and the other systems would use different devices.

    Raises:
        RunError: the cluster has accelerators or several real hosts.
    """
    if cluster.has_accelerators:
        raise RunError(
            "compare.accelerators",
            "systems can be compared only on CPUs, but {cluster}. Set {variable}=cpu to compare them on the CPUs.",
            cluster=cluster.describe(),
            variable=DEVICE_VARIABLE,
        )
    if len(cluster.hosts) > 1 and cluster.emulate is None:
        raise RunError(
            "compare.several_hosts",
            "systems can be compared only on this machine, or on hosts that it emulates (--cluster), not on other "
            "hosts",
        )


def normalises_apart(job: Job) -> bool:
    """Return True if each replica computes batch normalization over its own part of a batch."""
    return job.batch_norm == "local" and has_batch_norm(job.model.build())
