"""Calibration of a job on this machine, measured or taken from the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Emulate, Host
from paceline.elastic.forkserver import wait_for_imports
from paceline.elastic.place import places_on
from paceline.elastic.run_on_ranks import run_on_plan, run_on_ranks
from paceline.errors import ClusterError, PlanError
from paceline.files import scratch_folder
from paceline.job.job import Job
from paceline.planning.calibrate import (
    AXES,
    Axis,
    Calibration,
    Collective,
    Measurements,
    cache_file,
    failed_transport,
    keep,
    kept,
    key_of,
    machine_of,
    reference_time_s,
)
from paceline.planning.check.check_plan import check_plan
from paceline.planning.history import other_work
from paceline.planning.plan import Plan
from paceline.planning.sync_info import BETWEEN_HOSTS, TRANSPORTS, carriers

Say = Callable[[str], object]
_MOST_RANKS = 8  # on the cores of a host


def calibrate(
    job: Job,
    cluster: Cluster | None = None,
    say: Say = str,
    *,
    precisions: Sequence[str] = (),
    axes: Sequence[Axis] = AXES,
) -> Calibration:
    """Calibration of the job on this machine, new or cached.

    `say` is told which, and why it was measured again. Emulated hosts share this machine's cores, so its measurements
    hold for them. Their links are known by rate; the overhead of TCP is measured once, between two such hosts.

    Args:
        precisions: besides the job's own.
        axes: axes along which plans may divide the work; fewer take less time. A calibration that lacks some is
            measured again.

    Raises:
        ClusterError: the cluster is not this machine, or has GPUs.
        LaunchError: the ranks failed; with the reason.
    """
    wait_for_imports()
    found = _on_this_machine(job, _this_host(cluster), say, precisions, axes)
    if cluster is None or cluster.emulate is None or found.collective(BETWEEN_HOSTS, "all_reduce") is not None:
        return found
    extended = replace(found, collectives=(*found.collectives, *_between_hosts()))
    if cache_file(found.key).is_file():
        keep(extended)
    return extended


def _on_this_machine(job: Job, host: Host, say: Say, precisions: Sequence[str], axes: Sequence[Axis]) -> Calibration:
    wanted = tuple(dict.fromkeys((job.precision, *precisions)))
    key, reference_s = key_of(job, host), reference_time_s()
    found, why = kept(key, host, reference_s=reference_s)
    if found is not None and _covers(found, wanted, axes):
        say(f"calibration of {time.strftime('%Y-%m-%d %H:%M', time.localtime(found.created))}, as measured before")
        return found
    if why is not None:
        say(f"{why}; measuring again")
    if found is not None:  # a calibration that lacks something is extended, not replaced
        wanted = tuple(dict.fromkeys((*wanted, *found.precisions)))
        axes = [axis for axis in AXES if axis in axes or any(a.axis == axis for a in found.points)]
    ranks = max(1, min(host.physical_cores, _MOST_RANKS))
    say(
        f"calibrating: the parts of the model, {'updates and messages' if ranks > 1 else 'and updates'}, once "
        "for this machine"
    )
    started = time.monotonic()
    busy = other_work()
    measured = _measure(job, host, ranks, wanted, [axis for axis in axes if axis == "none" or ranks > 1])
    made = Calibration(
        key=key,
        machine=machine_of(host),
        created=time.time(),
        reference_s=min(reference_s, reference_time_s()),
        cores=host.physical_cores,
        ranks=ranks,
        global_batch=job.global_batch,
        seconds=time.monotonic() - started,
        **vars(measured),
    )
    say(f"calibrated in {made.seconds:.1f} s, {keep(made, busy)}")
    return made


def _between_hosts() -> list[Collective]:
    """Collectives over our own TCP, between two emulated hosts. Their link is as fast as the machine."""
    from paceline.comm.measure.calls import measure_on_rank

    with places_on(Cluster(name="two hosts", emulate=Emulate(hosts=2)), 2) as places:
        return run_on_ranks(measure_on_rank, BETWEEN_HOSTS, places=places)[0]


def _this_host(cluster: Cluster | None) -> Host:
    host = discover().hosts[0]
    if cluster is None:
        return host
    if cluster.has_accelerators:
        raise ClusterError(
            "a calibration measures CPUs; what GPUs do is predicted from the catalogue and measured by the run itself"
        )
    if cluster.emulate is None and len(cluster.hosts) > 1:
        raise ClusterError(
            f"{cluster.name} has {len(cluster.hosts)} hosts, and only this machine can be calibrated from here"
        )
    if cluster.hosts[0].cpu != host.cpu:
        raise ClusterError(
            f"{cluster.name} has another CPU ({cluster.hosts[0].cpu}) than this machine ({host.cpu}): calibrate there"
        )
    return host.model_copy(update={"gpus": ()})


def _covers(found: Calibration, precisions: Sequence[str], axes: Sequence[Axis]) -> bool:
    known = {point.axis for point in found.points} | {note.partition("=")[0] for note in found.notes}
    tried = {one.transport for one in found.collectives} | {failed_transport(note) for note in found.notes}
    packages = set(carriers(several_hosts=False)) - set(TRANSPORTS.built_in)
    return set(precisions) <= set(found.precisions) and (found.ranks == 1 or (set(axes) <= known and packages <= tried))


@dataclass(frozen=True)
class _Request:
    """A job to measure on a machine with so many physical cores."""

    job: Job
    here: Cluster
    cores: int
    precisions: tuple[str, ...]
    axes: tuple[Axis, ...]


def _measure(job: Job, host: Host, ranks: int, precisions: tuple[str, ...], axes: Sequence[Axis]) -> Measurements:
    """Start the ranks, and return what they measure."""
    here = Cluster(name="this machine", hosts=(host,))
    against = {axis: _reasons_against(axis, job, here, ranks) for axis in axes}
    possible = tuple(axis for axis, reasons in against.items() if not reasons)
    request = _Request(job, here, host.physical_cores, precisions, possible)
    found = run_on_plan(_calibrated, request, job=job, cluster=here, plan=Plan(dp=ranks))[0]
    notes = [f"{axis}={ranks}: {reasons[0]}" for axis, reasons in against.items() if reasons]
    return replace(found, notes=(*notes, *found.notes))


def _calibrated(request: _Request) -> Measurements:
    """Measure as one of the ranks."""
    from paceline.comm.backend import joined
    from paceline.run.tuning.calibrate_ranks import RankCalibration
    from paceline.run.tuning.candidate import ignore_views

    ignore_views()
    job = request.job
    with joined(deadline_s=job.deadline_s) as group, scratch_folder() as folder:
        rank = RankCalibration(job, request.here, group, folder, request.cores, request.precisions, request.axes)
        found = rank.run(carriers(several_hosts=False))
        group.barrier()
        return found


def _reasons_against(axis: Axis, job: Job, cluster: Cluster, ranks: int) -> list[str]:
    """Reasons why the model cannot be divided along the axis at all.

    The batch is not checked, as the ranks take one that divides.
    """
    if axis == "none":
        return []
    plan = Plan(**{axis: ranks}, microbatches=2 if axis == "pp" else 1)  # type: ignore[arg-type]
    enough = job.model_copy(update={"global_batch": max(1, job.global_batch // (4 * ranks)) * 4 * ranks})
    try:
        return check_plan(plan, enough, cluster)
    except PlanError as error:
        return [str(error)]
