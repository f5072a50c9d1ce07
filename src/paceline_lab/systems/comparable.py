"""Jobs and machines on which systems can be compared."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.dropout import _DropoutNd

from paceline.cluster.cluster import Cluster
from paceline.device import DEVICE_VARIABLE
from paceline.errors import RunError
from paceline.job.job import EvaluateSpec, Job
from paceline.job.stop import StopSpec
from paceline.sync.batchnorm import has_batch_norm
from paceline.units import count


def as_compared(job: Job, steps: int, ranks: int) -> Job:
    """The job of so many steps, each of a whole batch that is dealt evenly.

    Raises:
        RunError: systems would not do the same work; says what to change.
    """
    if job.global_batch % ranks:
        raise RunError(
            f"global_batch {job.global_batch} cannot be dealt evenly to {count(ranks, 'rank')}, as the other systems "
            f"need it: let it be {job.global_batch // ranks * ranks or ranks}"
        )
    if job.precision != "fp32":
        raise RunError(f"systems are compared in fp32, and the job says precision: {job.precision}: leave it out")
    stop = {"stop": StopSpec(steps=steps), "evaluate": EvaluateSpec(every_steps=steps), "drop_last": True}
    return job.model_copy(update={**stop, "trackers": ()})


def grown(job: Job, ranks: int) -> Job:
    """The job with its batch for each rank, as weak scaling has it.

    Raises:
        RunError: there is one rank, the data is too short, or the work would grow by another factor.
    """
    if ranks == 1:
        raise RunError("weak scaling compares several ranks with one, and there is one rank here: leave --weak out")
    if job.loss.is_over_whole_batch:
        raise RunError(
            f"the loss {job.loss.name} compares all samples of a batch with each other, so {ranks} times the batch is "
            "more than as many times the work: leave --weak out"
        )
    batch = ranks * job.global_batch
    train: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    samples = len(train)
    if samples < batch:
        raise RunError(
            f"with --weak each of {count(ranks, 'rank')} has a batch of {job.global_batch}, {batch} in all, and the "
            f"training set has {samples} samples: give more data, or a smaller global_batch"
        )
    return job.model_copy(update={"global_batch": batch})


def must_draw_nothing(job: Job) -> None:
    """Refuse dropout, of which every system draws its own.

    Raises:
        RunError: the model has some; names the first.
    """
    for name, module in job.model.build().named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise RunError(
                f'"{name}" of the model drops out with p={module.p:g}, and every system draws on its own, so their '
                "losses cannot be compared: set it to 0 in model.args"
            )


def must_be_cpus_of_this_machine(cluster: Cluster) -> None:
    """Refuse machines on which paceline would train elsewhere than the others do.

    Raises:
        RunError: they have accelerators, or are other hosts.
    """
    if cluster.has_accelerators:
        raise RunError(
            f"systems are compared on CPUs, and {cluster.describe()}: set {DEVICE_VARIABLE}=cpu to compare them there"
        )
    if len(cluster.hosts) > 1 and cluster.emulate is None:
        raise RunError("systems are compared on this machine, or on hosts that it emulates (--cluster): no other hosts")


def normalises_apart(job: Job) -> bool:
    """True if replicas normalise each its own part of a batch."""
    return job.batch_norm == "local" and has_batch_norm(job.model.build())
