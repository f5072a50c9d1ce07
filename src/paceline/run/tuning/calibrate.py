"""Calibration of predictions, on this machine or with measured runs.

Measured runs come from tables, run directories, and logs of other systems. `operations_of` profiles a plan's ranks.
"""

from __future__ import annotations

import base64
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.cluster.host import Emulate, Host
from paceline.elastic.attempt import places_on
from paceline.elastic.forkserver import wait_for_imports
from paceline.elastic.run_on_ranks import run_on_plan, run_on_ranks
from paceline.errors import ClusterError, PacelineError, PlanError, RunError
from paceline.extensions import ExtensionPoint
from paceline.files import scratch_folder
from paceline.job.job import Job, base_precision
from paceline.planning.arguments import AnyCluster, cluster_of
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
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.cost.estimate import step_time_s
from paceline.planning.history import other_work
from paceline.planning.machines import Adjustment, adjustment
from paceline.planning.plan import Plan, cores_of
from paceline.planning.prediction import layout_of
from paceline.planning.sync_info import BETWEEN_HOSTS, TRANSPORTS, carriers, sync_info
from paceline.planning.tables import layouts as tables
from paceline.planning.tables.layouts import Row, Skipped
from paceline.run.record.run import WARM_UP_STEPS, Run
from paceline.units import count, percent

if TYPE_CHECKING:
    from paceline.engine.engine import RankEngine


Say = Callable[[str], object]
_MOST_RANKS = 8  # maximum number of ranks in a calibration


def calibrate(
    job: Job,
    cluster: Cluster | None = None,
    say: Say = str,
    *,
    precisions: Sequence[str] = (),
    axes: Sequence[Axis] = AXES,
) -> Calibration:
    """Return the cached calibration of a job on this machine, or measure it.

    `say` is called with lines that explain what is measured and why. Emulated hosts share this machine's cores, so the
    calibration is valid for them. The rates of their links are known, but the overhead of TCP is measured once, between
    two emulated hosts.

    Args:
        precisions: precisions to measure in addition to the job's precision.
        axes: axes along which plans may divide the work; fewer axes take less time. If a cached calibration lacks an
            axis, everything is measured again.

    Raises:
        ClusterError: the cluster is not this machine, or has GPUs.
        LaunchError: the ranks failed; the message has the reason.
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
    wanted = tuple(dict.fromkeys(map(base_precision, (job.precision, *precisions))))
    key, reference_s = key_of(job, host), reference_time_s()
    found, why = kept(key, host, reference_s=reference_s)
    if found is not None and _covers(found, wanted, axes):
        say(f"calibration of {time.strftime('%Y-%m-%d %H:%M', time.localtime(found.created))}, as measured before")
        return found
    if why is not None:
        say(f"{why}; measuring again")
    if found is not None:  # measure both what the cached calibration covers and what it lacks
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
    """Measure collectives over paceline's TCP transport between two emulated hosts.

    The rate of their link is not limited.
    """
    from paceline.comm.measure.calls import measure_on_rank

    with places_on(Cluster(name="two hosts", emulate=Emulate(hosts=2)), 2) as places:
        return run_on_ranks(measure_on_rank, BETWEEN_HOSTS, places=places)[0]


def _this_host(cluster: Cluster | None) -> Host:
    host = discover().hosts[0]
    if cluster is None:
        return host
    if cluster.has_accelerators:
        raise ClusterError(
            "calibrate.gpus",
            "only CPUs can be calibrated. The speed of GPUs is predicted from the catalogue and measured by the "
            "run itself.",
        )
    if cluster.emulate is None and len(cluster.hosts) > 1:
        raise ClusterError(
            "calibrate.several_hosts",
            "{cluster} has {hosts} hosts, but only this machine can be calibrated from here",
            cluster=cluster.name,
            hosts=len(cluster.hosts),
        )
    if cluster.hosts[0].cpu != host.cpu:
        raise ClusterError(
            "calibrate.other_cpu",
            "{cluster} has a different CPU ({cpu}) than this machine ({here}). Calibrate on that machine.",
            cluster=cluster.name,
            cpu=cluster.hosts[0].cpu,
            here=host.cpu,
        )
    return host.model_copy(update={"gpus": ()})


def _covers(found: Calibration, precisions: Sequence[str], axes: Sequence[Axis]) -> bool:
    known = {point.axis for point in found.points} | {note.partition("=")[0] for note in found.notes}
    tried = {one.transport for one in found.collectives} | {failed_transport(note) for note in found.notes}
    packages = set(carriers(several_hosts=False)) - set(TRANSPORTS.built_in)
    return set(precisions) <= set(found.precisions) and (found.ranks == 1 or (set(axes) <= known and packages <= tried))


def _measure(job: Job, host: Host, ranks: int, precisions: tuple[str, ...], axes: Sequence[Axis]) -> Measurements:
    here = Cluster(name="this machine", hosts=(host,))
    against = {axis: _reason_against(axis, job, here, ranks) for axis in axes}
    possible = tuple(axis for axis, reason in against.items() if reason is None)
    request = job, here, host.physical_cores, precisions, possible
    found = run_on_plan(_calibrated, request, job=job, cluster=here, plan=Plan(dp=ranks))[0]
    notes = [f"{axis}={ranks}: {reason}" for axis, reason in against.items() if reason is not None]
    return replace(found, notes=(*notes, *found.notes))


def _calibrated(request: tuple[Job, Cluster, int, tuple[str, ...], tuple[Axis, ...]]) -> Measurements:
    from paceline.comm.backend import joined
    from paceline.run.tuning.calibrate_ranks import RankCalibration
    from paceline.run.tuning.trial import ignore_views

    ignore_views()
    job, here, cores, precisions, axes = request
    with joined(deadline_s=job.deadline_s) as group, scratch_folder() as folder:
        rank = RankCalibration(job, here, group, folder, cores, precisions, axes)
        found = rank.run(carriers(several_hosts=False))
        group.barrier()
        return found


def _reason_against(axis: Axis, job: Job, cluster: Cluster, ranks: int) -> str | None:
    """Return the reason why the model cannot be divided along an axis, or None.

    The batch size is not checked, because the ranks choose a divisible batch size.
    """
    if axis == "none":
        return None
    plan = Plan(**{axis: ranks}, microbatches=2 if axis == "pp" else 1)  # type: ignore[arg-type]
    enough = job.model_copy(update={"global_batch": max(1, job.global_batch // (4 * ranks)) * 4 * ranks})
    try:
        problems = plan_errors(enough, plan, cluster=cluster)
    except PlanError as error:
        return str(error)
    return problems[0].text if problems else None


_LOGS = (".log", ".out", ".txt")
_FORMS = (
    "a table of runs (.csv, in the columns of docs/how-to/calibrate.md), a run directory of paceline, a "
    "log of Megatron-LM or torchtitan, or a folder of such"
)
_MOST_REASONS, _MOST_PLACES = 8, 6  # maximum numbers of printed reasons, and of printed places per reason


@dataclass(frozen=True)
class LogReader:
    """Reader of another system's logs.

    Attributes:
        read: function that takes a log file and the cluster of its run, and returns the run. The function raises
            PlanError if the file is not a log of this system, or lacks facts about the run.
    """

    read: Callable[[Path, Cluster | None], Row]


LOG_READERS = ExtensionPoint[LogReader]("reader of logs", "paceline.log_readers", LogReader, {}, PlanError)


class Runs(NamedTuple):
    """Measured runs, and the reasons why other rows or files cannot be used."""

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]


def calibrate_on(
    paths: Iterable[Path | str] | Path | str, *, cluster: AnyCluster | None = None, say: Say = str
) -> Adjustment:
    """Return the factors by which measured runs differ from predictions.

    Args:
        paths: one or several paths: tables of runs (CSV), run directories, logs of Megatron-LM or torchtitan, or
            folders of these.
        cluster: a `Cluster`, its file or its name. Logs need it, because they do not name the cluster of their run.
            None if there are no logs.
        say: function that is called with a line of text for each reason why data was not used, and with a line that
            states the factors.

    Returns:
        The factors, to be passed as `calibration` to `paceline.plan` and `paceline.estimate`.

    Raises:
        PlanError: a path does not exist or cannot be read, or no run can be used; the message has the reasons.

    Example:
        >>> factors = paceline.calibrate_on(["runs.csv", "runs/"], say=print)
        >>> paceline.plan("job.yaml", cluster="8xH100-SXM", calibration=factors)
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    runs = read_runs(files, None if cluster is None else cluster_of(cluster))
    for line in _not_used(runs.skipped):
        say(line)
    if not runs.rows:
        raise PlanError(
            "calibrate.no_usable_run",
            "--calibrate-on {files}: none of their runs can be used\n{reasons}",
            files=list(files),
            reasons="\n".join(_not_used(runs.skipped) or [f"nothing was found. It takes {_FORMS}"]),
        )
    found = adjustment(runs.rows)
    say(_summary(runs, found))
    return found


def read_runs(paths: Iterable[Path], cluster: Cluster | None = None) -> Runs:
    """Read all runs with a measured step time.

    Raises:
        PlanError: a path does not exist, or has no supported form of runs.
    """
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for path in paths:
        for found in _found(path, cluster):
            if isinstance(found, Row):
                rows.append(found)
            else:
                skipped.append(found)
    return Runs(tuple(rows), tuple(skipped))


def _found(path: Path, cluster: Cluster | None) -> Iterator[Row | Skipped]:
    if not path.exists():
        raise PlanError(
            "calibrate.no_file",
            "--calibrate-on {path}: there is no such file. The option accepts {takes}",
            path=path,
            takes=_FORMS,
        )
    if not path.is_dir():
        yield from _of_file(path, cluster)
        return
    if (path / "job.yaml").is_file():
        yield _of_run(path)
        return
    for inside in sorted(path.iterdir()):
        if inside.is_dir() and (inside / "job.yaml").is_file():
            yield _of_run(inside)
        elif inside.is_file() and inside.suffix.lower() in (".csv", *_LOGS):
            yield from _of_file(inside, cluster)


def _of_file(file: Path, cluster: Cluster | None) -> Iterator[Row | Skipped]:
    if file.suffix.lower() != ".csv":
        reasons = []
        for reader in LOG_READERS.all().values():
            try:
                yield reader.read(file, cluster)
                return
            except PacelineError as error:
                reasons.append(str(error).splitlines()[0])
        yield Skipped(file.name, 0, "; ".join(reasons) or "no installed package reads logs")
        return
    try:
        rows, skipped = tables.read([file])
    except OSError as error:
        raise PlanError(
            "calibrate.unreadable",
            "--calibrate-on {file} cannot be read: {reason}",
            file=file,
            reason=error.strerror or error,
        ) from error
    if not rows and not skipped:
        yield Skipped(file.stem, 0, "it is no table of runs: it has no rows with the columns model and gpu")
    yield from skipped
    for row in rows:
        if row.seconds:
            yield row
        else:
            why = "it ran out of memory" if row.out_of_memory else "no time was measured"
            yield Skipped(row.table, row.number, why)


def _of_run(folder: Path) -> Row | Skipped:
    try:
        run = Run(folder)
        if not run.throughput:
            return Skipped(folder.name, 0, f"it has no step with a time after the first {WARM_UP_STEPS}")
        layout = layout_of(run.job, run.cluster, run.plan)
        return Row(folder.name, 0, {}, layout, run.job.global_batch / run.throughput, None, False)
    except PacelineError as error:
        return Skipped(folder.name, 0, str(error).splitlines()[0])


# Summary


def _summary(runs: Runs, found: Adjustment) -> str:
    places = ", ".join(dict.fromkeys(row.table for row in runs.rows))
    left = math.exp(found.spread) - 1
    return (
        f"calibrated on {count(len(runs.rows), 'run')} of {places}: measured steps take {_times(runs, found)} what is "
        f"predicted; ± {percent(left)} is left (standard deviation)"
    )


def _times(runs: Runs, found: Adjustment) -> str:
    """Return text with the mean ratio of corrected to uncorrected times, and its range."""
    ratios = []
    for row in runs.rows:
        corrected = step_time_s(row.layout, found.constants) * found.factor(row.layout)
        ratios.append(corrected / step_time_s(row.layout, {}))
    least, most = min(ratios), max(ratios)
    general = f"{geometric_mean(ratios):.2f} times"
    return general if most / least < 1.01 else f"{general} ({least:.2f} to {most:.2f})"


def _not_used(skipped: Sequence[Skipped]) -> list[str]:
    lines = []
    reasons = list(dict.fromkeys(one.why for one in skipped))
    for why in reasons[:_MOST_REASONS]:
        places = [f"{one.table}:{one.number}" if one.number else one.table for one in skipped if one.why == why]
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        lines.append(f"not used: {', '.join(places[:_MOST_PLACES])}{more}: {why}")
    if (others := len(reasons) - _MOST_REASONS) > 0:
        lines.append(f"not used: further rows, for {count(others, 'other reason')}")
    return lines


# prefixes of the names of trace slices: steps, and phases of a step
STEP, PHASE = "paceline step ", "paceline "


@dataclass(frozen=True)
class RankOperations:
    """Compressed Chrome trace of one rank, exported by torch's profiler."""

    packed: str

    @classmethod
    def of(cls, text: str) -> RankOperations:
        """Compress a trace."""
        return cls(base64.b64encode(zlib.compress(text.encode(), 1)).decode())

    def trace(self) -> dict[str, Any]:
        """Return the decompressed trace."""
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(self.packed)))
        return found


def operations_of(job: Job, cluster: Cluster, plan: Plan, steps: int) -> list[RankOperations]:
    """Profile a few steps of a plan on real data, after a warm-up.

    Returns one trace per rank. The weights do not change.

    Raises:
        RunError: the plan has servers, or the cluster has several real hosts.
        LaunchError: the ranks failed; the message has the reason.
    """
    if sync_info(plan.sync).served:
        raise RunError(
            "calibrate.servers",
            "sync={sync}: workers of a parameter server do not step together, so their operations are not profiled",
            sync=plan.sync,
        )
    if len(cluster.hosts) > 1 and cluster.emulate is None:
        raise RunError(
            "calibrate.run_of_several_hosts",
            "operations are profiled on this machine, but the run used several hosts",
        )
    return run_on_plan(_profiled, (job, cluster, plan, steps), job=job, cluster=cluster, plan=plan)


def _profiled(request: tuple[Job, Cluster, Plan, int]) -> RankOperations:
    from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

    from paceline.comm.backend import joined
    from paceline.comm.checks import greatest
    from paceline.device import synchronize
    from paceline.files import scratch_folder
    from paceline.run.build import seed_all
    from paceline.run.tuning.trial import TrialCandidate, part_of

    job, cluster, plan, steps = request
    host = cluster.hosts[0]
    with joined(deadline_s=job.deadline_s) as group:
        seed_all(job.seed)
        data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        cores = set(cores_of(group.rank, plan.ranks, host)) if plan.pin else set(os.sched_getaffinity(0))
        here = max(cluster.ranks_per_host(plan.ranks))
        candidate = TrialCandidate(
            job, plan, data, part_of(group, plan), threads=plan.threads_for(host, here), cores=cores
        )
        candidate.is_warm(greatest(group, candidate.warm_up()))
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # without this, the profiler logs a missing GPU as an error
        assert candidate.engine is not None
        with profile(activities=supported_activities() or [ProfilerActivity.CPU]) as profiler:
            greatest(group, 0.0)  # wait until the profiler has started on all ranks
            for number in range(1, steps + 1):
                with record_function(f"{STEP}{number}"), _phases(candidate.engine):
                    candidate.step()
            synchronize(candidate.engine.device)
        candidate.close()
        with scratch_folder() as folder:
            profiler.export_chrome_trace(str(folder / "trace.json"))
            return RankOperations.of((folder / "trace.json").read_text())


@contextmanager
def _phases(engine: RankEngine) -> Iterator[None]:
    from torch.profiler import record_function

    before, under_way = engine.on_phase, list[Any]()

    def end() -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    def began(phase: Any, step: int) -> None:
        before(phase, step)
        end()
        under_way.append(record_function(f"{PHASE}{phase}"))
        under_way[-1].__enter__()

    engine.on_phase = began
    try:
        yield
    finally:
        end()
        engine.on_phase = before
