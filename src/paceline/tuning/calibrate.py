"""Calibration of a job on this machine, measured or taken from the cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.cluster import Cluster, Emulate, Host
from paceline.cluster.discover import discover
from paceline.errors import ClusterError, PlanError
from paceline.files import scratch_folder
from paceline.job.job import Job
from paceline.launch.local import launch
from paceline.launch.place import places_on
from paceline.launch.probe import launch_to_look
from paceline.launch.seed import wait_for_imports
from paceline.planner.calibrate import (
    AXES,
    Axis,
    Calibration,
    CalibrationPoint,
    Collective,
    PassTiming,
    as_tuples,
    cache_file,
    keep,
    kept,
    key_of,
    machine_of,
    reference_time_s,
)
from paceline.planner.check.check_plan import check_plan
from paceline.plans.plan import Plan
from paceline.units import percent

Say = Callable[[str], object]
# within a host, where tcp is shared memory under another name
TRANSPORTS = ("shm", "gloo")
_MOST_RANKS = 8  # on the cores of a host
# seconds for measuring other work on the cores, before the ranks start
_LOOK_S = 0.2
# do not cache results measured while other processes used more than a quarter of the cores
_MOST_OTHER_WORK = 0.25


def calibrate(
    job: Job,
    cluster: Cluster | None = None,
    say: Say = str,
    *,
    precisions: Sequence[str] = (),
    axes: Sequence[Axis] = AXES,
    again: bool = False,
) -> Calibration:
    """Calibration of the job on this machine, new or cached.

    `say` is told which, and why it was measured again. Emulated hosts share this machine's cores, so its measurements hold for
    them. Their links are known by rate; the overhead of TCP is measured once, between two such hosts.

    Args:
        precisions: besides the job's own.
        axes: axes along which plans may divide the work; fewer take less time. A calibration that lacks some is measured again.
        again: measure even if a cached calibration is valid.

    Raises:
        ClusterError: the cluster is not this machine, or has GPUs.
        LaunchError: the ranks failed; with the reason.
    """
    wait_for_imports()
    found = _on_this_machine(job, _this_host(cluster), say, precisions, axes, again)
    if cluster is None or cluster.emulate is None or found.collective("tcp", "all_reduce") is not None:
        return found
    extended = replace(found, collectives=(*found.collectives, *_between_hosts()))
    if cache_file(found.key).is_file():
        keep(extended)
    return extended


def _on_this_machine(job: Job, host: Host, say: Say, precisions: Sequence[str], axes: Sequence[Axis], again: bool) -> Calibration:
    wanted = tuple(dict.fromkeys((job.precision, *precisions)))
    key, reference_s = key_of(job, host), reference_time_s()
    if not again:
        found, why = kept(key, host, reference_s=reference_s)
        if found is not None and _covers(found, wanted, axes):
            say(f"calibration of {time.strftime('%Y-%m-%d %H:%M', time.localtime(found.created))}, as measured before")
            return found
        if why is not None:
            say(f"{why}; measuring again")
        # a calibration that lacks something is extended, not replaced
        if found is not None:
            wanted = tuple(dict.fromkeys((*wanted, *found.precisions)))
            axes = [axis for axis in AXES if axis in axes or any(a.axis == axis for a in found.points)]
    ranks = max(1, min(host.physical_cores, _MOST_RANKS))
    say(f"calibrating: the parts of the model, {'updates and messages' if ranks > 1 else 'and updates'}, once for this machine")
    started = time.monotonic()
    busy = psutil.cpu_percent(_LOOK_S) / 100
    values = _measure(job, host, ranks, wanted, [axis for axis in axes if axis == "none" or ranks > 1])
    made = Calibration(
        key=key,
        machine=machine_of(host),
        created=time.time(),
        reference_s=min(reference_s, reference_time_s()),
        cores=host.physical_cores,
        ranks=ranks,
        global_batch=job.global_batch,
        seconds=time.monotonic() - started,
        **values,
    )
    kept_where = keep(made) if busy <= _MOST_OTHER_WORK else f"not kept, as other work took {percent(busy, 0)} of the cores"
    say(f"calibrated in {made.seconds:.1f} s, {kept_where}")
    return made


def _between_hosts() -> tuple[Collective, ...]:
    """Collectives over our own TCP, between two emulated hosts. Their link is as fast as the machine."""
    from paceline.comm.measure.collectives import read

    cluster = Cluster(name="two hosts", emulate=Emulate(hosts=2))
    with scratch_folder() as folder, places_on(cluster, 2) as places:
        file = Path(folder, "links.json")
        ranks = ["paceline.comm.measure.collectives:run_rank", "tcp", str(file)]
        launch(ranks, ranks=2, places=places, threads=1, pin_cores=None, deadline_s=60, saves=False)
        return read(file)


def _this_host(cluster: Cluster | None) -> Host:
    host = discover().hosts[0]
    if cluster is None:
        return host
    if cluster.kind != "cpu":
        raise ClusterError("a calibration measures CPUs; what GPUs do is predicted from the catalogue and measured by the run itself")
    if cluster.emulate is None and len(cluster.hosts) > 1:
        raise ClusterError(f"{cluster.name} has {len(cluster.hosts)} hosts, and only this machine can be calibrated from here")
    if cluster.hosts[0].cpu != host.cpu:
        raise ClusterError(f"{cluster.name} has another CPU ({cluster.hosts[0].cpu}) than this machine ({host.cpu}): calibrate there")
    return host.model_copy(update={"gpus": ()})


def _covers(found: Calibration, precisions: Sequence[str], axes: Sequence[Axis]) -> bool:
    known = {point.axis for point in found.points} | {note.partition("=")[0] for note in found.notes}
    return set(precisions) <= set(found.precisions) and (found.ranks == 1 or set(axes) <= known)


def _measure(job: Job, host: Host, ranks: int, precisions: Sequence[str], axes: Sequence[Axis]) -> dict[str, Any]:
    """Start the ranks, and read their results."""
    here = Cluster(name="this machine", hosts=(host,))
    possible, notes = [], []
    for axis in axes:
        reasons = _reasons_against(axis, job, here, ranks)
        if reasons:
            notes.append(f"{axis}={ranks}: {reasons[0]}")
        else:
            possible.append(axis)
    with scratch_folder() as folder:
        wanted = {"cores": host.physical_cores, "precisions": precisions, "axes": possible, "transports": TRANSPORTS}
        Path(folder, "wanted.json").write_text(json.dumps(wanted))
        Path(folder, "job.yaml").write_text(job.to_yaml())
        Path(folder, "cluster.yaml").write_text(here.to_yaml())
        launch_to_look(["paceline.tuning.calibrate_ranks:run_rank", str(folder)], job, here, Plan(dp=ranks))
        values = json.loads(Path(folder, "found.json").read_text())
    return {
        "parameters": values["parameters"],
        "segments": tuple(values["segments"]),
        "timings": tuple(PassTiming(**as_tuples(v)) for v in values["timings"]),
        "points": tuple(CalibrationPoint(**v) for v in values["points"]),
        "collectives": tuple(Collective(**as_tuples(v)) for v in values["collectives"]),
        "optimizer_s": values["optimizer_s"],
        "baseline_bytes": values["baseline_bytes"],
        "notes": (*notes, *values["notes"]),
    }


def _reasons_against(axis: Axis, job: Job, cluster: Cluster, ranks: int) -> list[str]:
    """Reasons why the model cannot be divided along the axis at all. The batch is not checked, as the ranks take one that divides."""
    if axis == "none":
        return []
    plan = Plan(**{axis: ranks}, microbatches=2 if axis == "pp" else 1)  # type: ignore[arg-type]
    enough = job.model_copy(update={"global_batch": max(1, job.global_batch // (4 * ranks)) * 4 * ranks})
    try:
        return check_plan(plan, enough, cluster)
    except PlanError as error:
        return [str(error)]
