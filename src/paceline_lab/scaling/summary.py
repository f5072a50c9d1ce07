"""Results of a benchmark: figures of one run, and of all repeats of a setting."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import psutil

from paceline.cluster.host import Host
from paceline.elastic.forkserver import cpu_s
from paceline.engine.meter import PARTS
from paceline.errors import RunError
from paceline.files import write_whole
from paceline.planning.plan import Plan
from paceline.planning.shortlist import Trial
from paceline.report.figures import TARGETS, combined, figures_of, per_step
from paceline.report.run_record import typical, typical_parts
from paceline.run.record.memory import MemoryTable, predicted_parts, table_of
from paceline.run.record.run import WARM_UP_STEPS, JsonLines, Run, Speed, differences, read_lines
from paceline.run.record.utilization import utilization
from paceline.stats import Interval, differ, median_interval
from paceline.storage.url import is_url
from paceline_lab.scaling.result import Curve, MeasuredSetting, RankUse, Setting

PROOF_STEPS = (
    60  # number of first steps whose losses are compared between settings; later losses diverge by rounding alone
)
FINAL_STEPS = 10  # number of last steps whose losses are averaged, since the loss of a single batch is noisy
_CURVE_POINTS = 300


@dataclass(frozen=True)
class FinishedRun:
    """One run of a benchmark, stored as a line of `measured.jsonl`.

    The line contains all data that the report needs, so the run's directory may be deleted.

    Attributes:
        samples: median number of samples per step, which is below the global batch if the data set is smaller.
        other_cores: mean number of cores that other processes kept busy during the run; None if unknown.
        losses: training loss of each of the first 60 steps.
        final_loss: mean training loss of the last 10 steps; None if one of these losses was not finite.
        mfu: model FLOPs utilization; None if the peak of the devices is unknown.
        memory: predicted and measured memory of the rank with the largest peak; None if no rank recorded its memory.
    """

    setting: str
    round: int
    run: str
    step_time_s: float
    samples: float
    steps: int
    training_time_s: float
    reason: str
    reached: bool
    other_cores: float | None
    energy_joules: float | None
    synthetic: bool
    ranks: list[RankUse]
    losses: list[float | None]
    curve: Curve
    final_loss: float | None = None
    mfu: float | None = None
    memory: MemoryTable | None = None


def finished(run: Run, setting: Setting, round_: int, name: str, other_cores: float | None) -> FinishedRun:
    """Return the measurements of a finished run.

    Raises:
        RunError: the run ended during the warm-up steps, so no step was measured.
    """
    per_rank = [run.steps(rank) for rank in range(setting.plan.ranks)]
    steps = per_rank[0]
    speed = Speed.of(steps)
    if speed is None:
        raise RunError(
            "bench.run_too_short",
            "the run of {label} ended after {steps} steps ({reason}), but the first {warm_up} are warm-up. Measure "
            "with --steps 60.",
            label=setting.label,
            steps=len(steps),
            reason=run.reason,
            warm_up=WARM_UP_STEPS,
        )
    reason = run.reason or ""
    energy = [joules for lines in per_rank if (joules := per_step(lines, "energy_joules")) is not None]
    return FinishedRun(
        setting=setting.key,
        round=round_,
        run=name,
        step_time_s=speed.step_s,
        samples=speed.samples,
        steps=len(steps),
        training_time_s=run.training_time_s,
        reason=reason,
        reached=reason.startswith(TARGETS),
        other_cores=other_cores,
        energy_joules=sum(energy) if energy else None,
        synthetic=any(event.get("synthetic") for event in run.events()),
        ranks=[_use_of(lines) for lines in per_rank],
        losses=[s["loss"] for s in steps[:PROOF_STEPS]],
        curve=_curve(steps),
        final_loss=_final_loss(steps),
        mfu=utilization(run.events(), speed),
        memory=table_of(
            dict(enumerate(per_rank)), run.events(), run.plan, predicted_parts(run.job, run.cluster, run.plan)
        ),
    )


def measured(
    setting: Setting,
    runs: Sequence[FinishedRun],
    one: Sequence[FinishedRun],
    *,
    cores: int,
    tokens_per_sample: float | None = None,
) -> MeasuredSetting:
    """Summarize all repeats of a setting, and compare them with the runs on one device.

    Args:
        one: runs on one device; may be empty, and the result then has no speedup.
        cores: number of cores that paceline may use, from which the effect of other load is estimated.
    """
    stolen = _stolen(runs, setting.devices, cores)
    step_time_s = _times([run.step_time_s for run in runs], stolen)
    samples = statistics.median(run.samples for run in runs)
    to_stop = [run.training_time_s for run in runs] if setting.steps is None else []
    reached = to_stop and all(run.reached for run in runs)
    typical = min(runs, key=lambda run: abs(run.step_time_s - step_time_s.middle))
    energy = [run.energy_joules for run in runs if run.energy_joules is not None]
    result = MeasuredSetting(
        label=setting.label,
        plan=str(setting.plan),
        devices=setting.devices,
        scaling=setting.scaling,
        global_batch=setting.global_batch,
        step_time_s=step_time_s,
        throughput=Interval(samples / step_time_s.high, samples / step_time_s.middle, samples / step_time_s.low),
        training_time_s=_times(to_stop, stolen) if to_stop else None,
        time_to_target_s=_times(to_stop, stolen) if reached else None,
        energy_joules=statistics.median(energy) if energy else None,
        tokens_per_sample=tokens_per_sample,
        ranks=_all_repeats([run.ranks for run in runs], [run.step_time_s for run in runs]),
        curve=typical.curve,
        runs=[run.run for run in runs],
        final_loss=_median([run.final_loss for run in runs]),
        mfu=_median([run.mfu for run in runs]),
        memory=max((run.memory for run in runs if run.memory), key=lambda table: table.total or 0.0, default=None),
        rounds_s=_by_round(runs),
    )
    return _compared(result, setting, runs, one, cores) if one and one[0].setting != setting.key else result


def _compared(
    result: MeasuredSetting, setting: Setting, runs: Sequence[FinishedRun], one: Sequence[FinishedRun], cores: int
) -> MeasuredSetting:
    """Add the speedup over one device to a result.

    If the runs train until the stop rule, the speedup compares training times. Otherwise it compares times per sample.
    """
    whole = setting.steps is None
    own, base = _comparable_times(runs, whole), _comparable_times(one, whole)
    pairs = [base[round_] / own[round_] for round_ in sorted(own.keys() & base.keys())]
    if not pairs:
        return result
    stolen, stolen_of_one = _stolen(runs, setting.devices, cores), _stolen(one, 1, cores)
    ratio = median_interval(pairs)
    speedup = Interval(ratio.low * (1 - stolen_of_one), ratio.middle, ratio.high / (1 - stolen))
    times = _times(list(own.values()), stolen), _times(list(base.values()), stolen_of_one)
    return dataclasses.replace(
        result,
        speedup=speedup,
        is_speedup=differ(*times, repeats=len(pairs)),
        efficiency=speedup.times(1 / setting.devices),
        pairs=pairs,
    )


def _by_round(runs: Sequence[FinishedRun]) -> list[float | None]:
    times = {run.round: run.step_time_s for run in runs}
    return [times.get(round_) for round_ in range(max(times) + 1)]


def _comparable_times(runs: Sequence[FinishedRun], whole: bool) -> dict[int, float]:
    """Return the seconds of each round for the whole training, or for one sample.

    Times per sample are compared instead of step times, since a step of weak scaling has more samples.
    """
    return {run.round: run.training_time_s if whole else run.step_time_s / run.samples for run in runs}


def _stolen(runs: Sequence[FinishedRun], devices: int, cores: int) -> float:
    known = [run.other_cores for run in runs if run.other_cores is not None]
    return stolen_share(statistics.median(known), devices=devices, cores=cores) if known else 0.0


def _times(seconds: Sequence[float], stolen: float) -> Interval:
    return undisturbed(median_interval(seconds), stolen)


# One run


def _use_of(lines: list[dict[str, Any]]) -> RankUse:
    return RankUse(typical_parts(lines) or dict.fromkeys(PARTS, 0.0), figures_of(lines))


def _final_loss(steps: list[dict[str, Any]]) -> float | None:
    last = [s["loss"] for s in steps[-FINAL_STEPS:]]
    return None if None in last else fmean(last)


def _curve(steps: list[dict[str, Any]]) -> Curve:
    started = steps[0]["time"] - steps[0]["step_s"]
    samples = 0
    points = []
    for step in steps:
        samples += step["samples"]
        points.append((step["step"], round(step["time"] - started, 3), samples, step["loss"]))
    every = -(-len(points) // _CURVE_POINTS)
    kept = points[::every] if (len(points) - 1) % every == 0 else [*points[::every], points[-1]]
    return Curve(*(list(column) for column in zip(*kept, strict=True)))


# All repeats


def _all_repeats(runs: Sequence[Sequence[RankUse]], step_times_s: Sequence[float]) -> list[RankUse]:
    """Combine each rank's use of time and resources over all repeats."""
    return [
        RankUse(typical([use.parts_s for use in uses], step_times_s), combined([use.figures for use in uses]))
        for uses in zip(*runs, strict=True)
    ]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


NOISE_CORES = 0.05  # number of cores kept busy by the background activity of an idle machine
WARN_CORES = 0.1
_MOST_STOLEN = 0.9


class OtherLoad:
    """Meter of the CPU load that other processes cause after the meter is created.

    Load on GPUs is not measured.
    """

    def __init__(self, host: Host) -> None:
        self.cores = [core for group in host.affinity for core in group]
        self._started = time.monotonic()
        self._all_s, self._own_s = self._busy_s(), _own_cpu_s()

    def busy_cores(self) -> float | None:
        """Return the mean number of cores that other processes keep busy; None if unknown.

        Only cores that paceline may use are counted. The CPU time of this process and its reaped children is
        subtracted. Time that a hypervisor gives to other virtual machines is included.
        """
        passed_s = time.monotonic() - self._started
        all_s, own_s = self._busy_s() - self._all_s, _own_cpu_s() - self._own_s
        if all_s < own_s / 2:  # some sandboxes report wrong CPU times
            return None
        return max(0.0, all_s - own_s) / passed_s

    def _busy_s(self) -> float:
        """Return the total seconds for which the cores were busy, without time in interrupts.

        Interrupts belong to no process, and most of them are caused by paceline's own network traffic.
        """
        times = psutil.cpu_times(percpu=True)
        if self.cores and max(self.cores) < len(times):
            times = [times[core] for core in self.cores]
        return float(sum(t.user + t.system + getattr(t, "nice", 0.0) + getattr(t, "steal", 0.0) for t in times))


def stolen_share(other_cores: float | None, *, devices: int, cores: int) -> float:
    """Return an upper bound on the fraction of a run's time that other processes cost.

    All ranks wait for the slowest rank, so the bound is the share of one core that other processes use. Load on cores
    that the run leaves free costs nothing.
    """
    stolen = (other_cores or 0.0) - max(0, cores - devices)
    return min(stolen, _MOST_STOLEN) if stolen > NOISE_CORES else 0.0


def undisturbed(time_s: Interval, stolen: float) -> Interval:
    """Extend a time interval downwards by the fraction that other processes may have cost.

    Without other load, the runs might have been shorter, but not longer. No measurement is discarded.
    """
    return Interval(time_s.low * (1 - stolen), time_s.middle, time_s.high)


def _own_cpu_s() -> float:
    # The forkserver is the parent of the ranks and is reaped only at the end, so its CPU time is added.
    times = os.times()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.user + times.system + children.ru_utime + children.ru_stime + cpu_s()


PROTOCOL, MEASURED, REPORT = "protocol.json", "measured.jsonl", "report.json"


@contextmanager
def kept_at(out: str | Path | None, say: Callable[[str], object]) -> Iterator[Path | None]:
    """Open the directory of a benchmark. If `out` is a URL, the files are uploaded while the block runs.

    Raises:
        RunError: the directory contains a run, another benchmark uses it, or the final upload is incomplete.
        StorageError: the object store cannot be used.
    """
    if not is_url(out):
        yield None if out is None else Path(out)
        return
    from paceline.run.object_store import Kind, RemoteRun

    with RemoteRun(out, say, resume=True, kind=Kind("benchmark", PROTOCOL, MEASURED)) as remote:
        say(f"benchmark {remote.url} · its working directory is {remote.path}")
        yield remote.path
        remote.check()


class BenchmarkDirectory:
    """Directory of a benchmark, in which an interrupted benchmark can be continued.

    Raises:
        RunError: `path` is not empty and does not contain a benchmark.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / PROTOCOL
        try:
            self.protocol: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
            occupied = self.protocol is None and path.exists() and (not path.is_dir() or any(path.iterdir()))
        except (OSError, ValueError) as error:
            raise RunError(
                "bench.unreadable",
                "{file} cannot be read: {error}. Name another directory with --out.",
                file=file,
                error=error,
            ) from error
        if occupied:
            raise RunError(
                "bench.not_a_benchmark",
                "{path} is not a benchmark's directory: it has no {file}. Name a new or an empty directory with --out.",
                path=path,
                file=PROTOCOL,
            )

    def begun_with(self) -> tuple[Plan, list[Trial], str] | None:
        """Return the plan that `auto` chose, its trials and its reason; None without a benchmark.

        Raises:
            RunError: the files in the directory do not belong to a benchmark.
        """
        if self.protocol is None:
            return None
        try:
            tried = msgspec.convert(self.protocol["tried"], list[Trial])
            return Plan.parse(self.protocol["plan"]), tried, str(self.protocol["reason"])
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise RunError(
                "bench.protocol_invalid",
                "{path} does not belong to a benchmark ({error!r}). Name another directory with --out.",
                path=self.path / PROTOCOL,
                error=error,
            ) from error

    def begin(self, protocol: dict[str, Any]) -> None:
        """Start a benchmark with a protocol, or continue a benchmark that has the same protocol.

        Raises:
            RunError: the existing benchmark has another protocol, or the directory is not writable. The error lists all
                differences.
        """
        protocol = json.loads(json.dumps(protocol))
        if self.protocol is None:
            try:
                (self.path / "runs").mkdir(parents=True, exist_ok=True)
                write_whole(self.path / PROTOCOL, json.dumps(protocol, indent=1))
            except OSError as error:
                raise RunError(
                    "bench.directory_unwritable",
                    "the benchmark cannot be stored in {path}: {reason}. Name another directory with --out.",
                    path=self.path,
                    reason=error.strerror,
                ) from error
            self.protocol = protocol
        elif found := list(differences(self.protocol, protocol)):
            raise RunError(
                "bench.other_benchmark",
                "{path} belongs to another benchmark: {differences}. Name another directory with --out.",
                path=self.path,
                differences="; ".join(found),
            )

    def finished(self, settings: Sequence[Setting]) -> dict[str, list[FinishedRun]]:
        """Return the finished runs of each setting, in the order of their rounds."""
        found: dict[str, list[FinishedRun]] = {setting.key: [] for setting in settings}
        try:
            for line in read_lines(self.path / MEASURED):
                run = msgspec.convert(line, FinishedRun)
                found[run.setting].append(run)
        except (KeyError, msgspec.ValidationError) as error:
            raise RunError(
                "bench.line_invalid",
                "{path} has a line that does not describe a run of this benchmark: {error!r}",
                path=self.path / MEASURED,
                error=error,
            ) from error
        return {key: sorted(runs, key=lambda run: run.round) for key, runs in found.items()}

    def new_run(self, setting: Setting, round_: int) -> Path:
        """Return the directory of a new run, after removing any files of an unfinished run."""
        path = self.path / "runs" / f"{setting.key}-r{round_ + 1}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def add(self, run: FinishedRun) -> None:
        """Append a finished run to `measured.jsonl`."""
        lines = JsonLines(self.path / MEASURED)
        lines.write(json.dumps(dataclasses.asdict(run)))
        lines.close()
