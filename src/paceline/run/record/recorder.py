"""Records of each rank, and events of a run."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from paceline.cluster.health import counters_of, throttle_reasons
from paceline.cluster.probe import Energy, cpu_energy, telemetry_of
from paceline.device import Memory, is_accelerator, memory
from paceline.engine.engine import LateResult, RankEngine, StepResult
from paceline.engine.memory import measured_parts, tensor_bytes
from paceline.engine.meter import PARTS, Timing
from paceline.errors import RunError
from paceline.job.stop import Epochs
from paceline.run.record.progress import PlainProgress
from paceline.run.record.run import JsonLines, Run
from paceline.run.record.slow_ranks import SlowRanks
from paceline.run.trackers.services import TensorBoard
from paceline.split.layout import local
from paceline.sync.rule import Traffic


@dataclass(slots=True)
class StepInfo:
    """A finished step, with the facts that parts of the loop need.

    Attributes:
        result: the engine's result.
        epoch: epoch of the step, 0-based.
        local_samples: number of samples in this rank's share of the global batch.
        lr: learning rate of the step.
        ending: why the run ends after this step; None if it continues.
        busy_s: busy seconds of every rank before the step's reduction; empty if the step has no reduction.
        ended_at: Unix time of the step's end if the step is recorded later; None means now.
        counts: further numbers of this rank's batch, by name; see `Position`.
    """

    result: StepResult
    epoch: int
    local_samples: int
    lr: float
    ending: str | None = None
    busy_s: list[float] = field(default_factory=list)
    ended_at: float | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the step as JSON values without times, for ranks that were interrupted."""
        told = asdict(self) | {"busy_s": []}
        told["result"]["timing"] = None
        return told

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """Restore a step from `as_json`."""
        return cls(**told | {"result": StepResult(**told["result"])})


# A format string is faster than a JSON encoder, which matters for steps of a few milliseconds.
_STEP = '"step":%d,"epoch":%d,"time":%.6f,"loss":%s,"samples":%d,"local_samples":%d,"lr":%.6g,"grad_norm":%s'
_TIMES = ',"step_s":%.6f,' + ",".join(f'"{name}_s":%.6f' for name in PARTS)

USE_EVERY_S = 1.0  # seconds between readings of resource use; a reading takes about 0.2 ms
# maximum share of the time for reading the proportional set size, which takes milliseconds in large processes
_PSS_SHARE = 0.001
# seconds before TensorBoard is imported, so that the import takes at most 1% of the elapsed time
_FIRST_EVENTS_S = 10.0
_LONGEST_LINE = 2**14


class StepRecorder:
    """Writer of `steps/rank-R.jsonl`, one line per step.

    If a step's times are only known one step later, the step's line waits for them.

    Args:
        board: TensorBoard writer for the first rank's numbers; None creates one, which the recorder closes.
    """

    def __init__(self, run: Path, engine: RankEngine, *, epochs: Epochs, board: Board | None = None) -> None:
        self.engine = engine
        self.lines = JsonLines(run / "steps" / f"rank-{engine.group.rank}.jsonl", lossy=True)
        self.epochs = epochs
        self.use = ResourceUse(engine)
        self._first = engine.group.rank == 0
        self._board, self._owns_board = board or Board(run), board is None
        self._waiting: dict[int, str] = {}

    def on_step(self, info: StepInfo) -> None:
        """Record a step."""
        result, lr = info.result, info.lr
        step, timing = result.step, result.timing
        # a late norm may take as long to compute as the update, so only about one line per second has the norm
        norm = math.nan if isinstance(result, LateResult) and not self.use.due else result.grad_norm
        start = _STEP % (
            step,
            self.epochs.of(step),
            time.time() if info.ended_at is None else info.ended_at,
            json_number(result.loss),
            result.samples,
            info.local_samples,
            lr,
            json_number(norm),
        )
        if info.counts:
            start += f',"data":{json.dumps(info.counts)}'
        if timing is not None and timing.step == step:
            self._append(start, timing)
        else:
            self._waiting[step] = start
            if timing is not None:
                self._write(timing)
        if self._first and self.use.fresh:
            self._to_tensorboard(result, lr)

    def complete(self, info: StepInfo) -> None:
        """Write a step that only other ranks have completed, unless the file has it."""
        if self._first and _last_step(self.lines.path) < info.result.step:
            self.on_step(info)
            self._write(Timing(info.result.step))  # write at once: readers take the last line for the newest step

    @property
    def last_step(self) -> int:
        """Number of the last step in the file; -1 if there is none."""
        return _last_step(self.lines.path)

    def close(self) -> None:
        """Write the steps that still wait for their times, and close the files."""
        for step in sorted(self._waiting):
            self._write(Timing(step))
        self.lines.close()
        if self._owns_board:
            self._board.close()

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write validation metrics to TensorBoard; the run's record has them as an event."""
        if self._first:
            self._board.scalars(step, {f"held_out/{name}": value for name, value in metrics.items()})

    def _write(self, timing: Timing) -> None:
        start = self._waiting.pop(timing.step, None)
        if start is not None:
            self._append(start, timing)

    def _append(self, start: str, timing: Timing) -> None:
        self.lines.write("{" + start + _TIMES % (sum(timing.parts_s), *timing.parts_s) + self.use.read() + "}")

    def _to_tensorboard(self, result: StepResult, lr: float) -> None:
        self.use.fresh = False
        values = {"train/loss": result.loss, "train/lr": lr, "train/grad_norm": result.grad_norm}
        if result.timing is not None and result.timing.step_s > 0:
            values["speed/samples_per_s"] = result.samples / result.timing.step_s
            values |= {f"step_s/{name}": seconds for name, seconds in zip(PARTS, result.timing.parts_s, strict=True)}
        self._board.scalars(result.step, values)


class Board:
    """TensorBoard writer of a run, for all generations of this process.

    Numbers are kept in memory for the first seconds of a run, because importing the library takes as long as many short
    steps. If the disk is full, writing stops, because an incomplete record would make all later records unreadable.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._waiting: list[tuple[int, dict[str, float], float]] = []  # (step, values, Unix seconds)
        self._file: TensorBoard | None = None
        self._over = False

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write the values of a step, by tag."""
        if self._over:
            return
        self._waiting.append((step, values, time.time()))
        if self._file is not None or time.time() - self._waiting[0][2] > _FIRST_EVENTS_S:
            self._write()

    def close(self) -> None:
        """Write the numbers kept in memory, and close the file."""
        self._write()
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            for step, values, at in waiting:
                self._file = self._file or TensorBoard(self._folder)
                self._file.scalars(step, values, at)
        except ImportError:
            self._over = True
        except RunError as error:
            self._over = True
            print(f"{error} Training goes on without TensorBoard's file.", file=sys.stderr, flush=True)


class ResourceUse:
    """Resource use of this rank: CPU cores, memory, energy, GPU, network, sync traffic.

    All counters count from the previous reading. `network_…_bytes` is the traffic of the whole host. `reduced_bytes` is
    this rank's payload in reductions. `wire_bytes` is the number of bytes that the sync rule sent to other replicas.
    `saved_bytes` is the number of bytes that compression saved. `compression_error` is the L2 norm of the compression
    error, relative to the norm of the uncompressed data.

    The first reading follows the first step. The intervals then double, up to one second. So even a short run has
    readings, and the last reading is from its second half.

    Attributes:
        energy: energy counters that this rank reads.
    """

    def __init__(self, engine: RankEngine) -> None:
        self.group, self._engine = engine.group, engine
        self._tensors: dict[str, int] = {}
        self.process = psutil.Process()
        self.fresh = True  # True at first, so that TensorBoard gets the first step
        self._accelerator = engine.device if is_accelerator(engine.device) else None
        self._telemetry = telemetry_of(engine.device) if self._accelerator else None
        self.energy = self._energy_counters()
        self._joules = 0.0
        self._cpu_s, self._network, self._reduced = time.process_time(), psutil.net_io_counters(), 0
        self._traffic = Traffic()
        self._started = self._read_at = self._due = self._pss_due = time.monotonic()

    @property
    def due(self) -> bool:
        """True if `read` returns a reading now."""
        return time.monotonic() >= self._due

    def read(self) -> str:
        """Return a reading as a JSON member, or "" if none is due."""
        now = time.monotonic()
        if now < self._due:
            return ""
        passed_s = now - self._read_at
        self._read_at, self._due, self.fresh = now, now + min(USE_EVERY_S, now - self._started), True
        cpu_s, network = time.process_time(), psutil.net_io_counters()
        counted = None if self._accelerator is None else memory(self._accelerator)
        use: dict[str, Any] = {
            "cpu_cores": round((cpu_s - self._cpu_s) / passed_s, 3),
            "memory_bytes": self.process.memory_info().rss,
            **kernel_bytes("status", {"VmHWM": "peak_memory_bytes"}),
            **self._shared_by_its_share(now),
            **self._by_part(counted),
            "network_sent_bytes": network.bytes_sent - self._network.bytes_sent,
            "network_received_bytes": network.bytes_recv - self._network.bytes_recv,
            "reduced_bytes": self.group.bytes_reduced - self._reduced,
            **self._sent_by_the_rule(),
            **self._used_energy(),
        }
        if counted is not None:
            use |= {"gpu_memory_bytes": counted.allocated, "gpu_peak_memory_bytes": counted.peak}
        if self._telemetry is not None and (percent := self._telemetry.percent()) is not None:
            use["gpu_percent"] = percent
        self._cpu_s, self._network, self._reduced = cpu_s, network, self.group.bytes_reduced
        return f',"use":{json.dumps(use)}'

    def _shared_by_its_share(self, now: float) -> dict[str, int]:
        """Return `pss_bytes` (proportional set size), unless reading would take too much time."""
        if now < self._pss_due:
            return {}
        found = kernel_bytes("smaps_rollup", {"Pss": "pss_bytes"})
        self._pss_due = now + (time.monotonic() - now) / _PSS_SHARE
        return found

    def _by_part(self, counted: Memory | None) -> dict[str, int]:
        """Return the parts of this rank's peak memory, such as `weights_bytes`.

        There are none before the first step. The bytes of the tensors do not change after that step.
        """
        if not self._tensors and self._engine.step_count > 0:
            self._tensors = tensor_bytes(self._engine)
        found = measured_parts(self._tensors, counted) if self._tensors else {}
        return {f"{part}_bytes": size for part, size in found.items()}

    def _sent_by_the_rule(self) -> dict[str, float]:
        before, now = self._traffic, self._engine.replica.traffic
        self._traffic = replace(now)
        sent = now.sent_bytes - before.sent_bytes
        found: dict[str, float] = {"wire_bytes": sent, "saved_bytes": now.plain_bytes - before.plain_bytes - sent}
        lost = Traffic(
            error_square=now.error_square - before.error_square, signal_square=now.signal_square - before.signal_square
        )
        if lost.signal_square > 0 and math.isfinite(lost.error_square):
            found["compression_error"] = float(f"{lost.relative_error:.4g}")
        return found

    def _energy_counters(self) -> list[Energy]:
        """Return the energy counters of this rank.

        If the accelerator has no counter, the list is empty, because the host's counter alone is not the total.
        """
        found = []
        if self._accelerator is not None:
            if self._telemetry is None or self._telemetry.energy.why_not is not None:
                return []
            found.append(self._telemetry.energy)
        if self.group.hosts.index(self.group.hosts[self.group.rank]) == self.group.rank:
            found.append(cpu_energy())  # the counter covers the whole host, so only the host's first rank reads it
        return [counter for counter in found if counter.why_not is None]

    def _used_energy(self) -> dict[str, float]:
        readings = [joules for counter in self.energy if (joules := counter.joules()) is not None]
        if not readings or len(readings) < len(self.energy):
            return {}
        before, self._joules = self._joules, sum(readings)
        return {"energy_joules": round(self._joules - before, 3)}


def kernel_bytes(file: str, names: Mapping[str, str]) -> dict[str, int]:
    """Read sizes in bytes from a /proc/self file; `names` maps its names to keys."""
    try:
        lines = Path("/proc/self", file).read_bytes().decode().splitlines()
    except OSError:
        return {}
    shown = dict(line.split(":", 1) for line in lines if ":" in line)
    return {ours: int(shown[theirs].split()[0]) * 1024 for theirs, ours in names.items() if theirs in shown}


def _last_step(path: Path) -> int:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _LONGEST_LINE))
        for line in reversed(file.read().splitlines()):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, LookupError, TypeError):  # a crash truncated the line
                continue
    return -1


def json_number(x: float) -> str:
    """Format a number as JSON with full precision; NaN and Inf become null."""
    return repr(x) if x - x == 0.0 else "null"


class Events:
    """Writer of a run's events; `progress` also shows them.

    Attributes:
        progress: progress line of the run; None if the launcher shows progress.
    """

    def __init__(self, run: Run, progress: PlainProgress | None, *, writes: bool) -> None:
        self.run, self.progress = run, progress
        self.lines = JsonLines(run.path / "events.jsonl", lossy=True) if writes else None

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        """Write and show an event."""
        if self.lines is not None:
            self.lines.event(event, details)
        if self.progress is not None:
            self.progress.event({"event": event, **details})

    def on_step(self, info: StepInfo) -> None:
        """Show a step."""
        if self.progress is not None:
            self.progress.step(info.result, info.epoch)

    def missing(self, *files: JsonLines) -> None:
        """When the disk is writable again, record how many lines were lost."""
        for lines in (*files, self.lines):
            if lines is not None and lines.missing and self.lines is not None and not self.lines.lost:
                lost, lines.missing = lines.missing, 0
                self("lines_lost", {"file": str(lines.path.relative_to(self.run.path)), "lines": lost})

    def close(self) -> None:
        """Close the file."""
        if self.lines is not None:
            self.lines.close()


class Remarks:
    """Events about slow ranks, the sync rule and the loss, recorded after each step."""

    def __init__(
        self,
        engine: RankEngine,
        events: Events,
        at_even_shares: Callable[[StepInfo], Sequence[float]] = lambda i: i.busy_s,
    ) -> None:
        """Create the remarks; `at_even_shares` returns the busy times for comparing ranks."""
        self.engine, self.events, self.at_even_shares = engine, events, at_even_shares
        self.slow_ranks = SlowRanks(engine.plan, engine.group.hosts)
        # number of the sync rule's messages that are already recorded
        self._told = 0

    def after_step(self, info: StepInfo) -> None:
        """Record events about slow ranks; a slow accelerator is checked first."""
        group = self.engine.group
        for event, details in self.slow_ranks.step(info.result.step, self.at_even_shares(info)):
            if event == "slow_rank" and is_accelerator(group.device):
                is_slow = group.rank == details["rank"]
                details |= group.gather_json(self._checked(group.device) if is_slow else None)[details["rank"]]
            self.events(event, details)

    def _checked(self, device: torch.device) -> dict[str, Any]:
        from paceline.comm.measure.health import device_faults  # few runs need it

        reasons = [reason for _, reason in throttle_reasons(counters_of(device))]
        return {"device": device_faults(device), "lowers_clock": reasons}

    def tell(self) -> None:
        """Record new messages of the sync rule and the loss, and repaired corruption."""
        corruption = self.engine.replica_state.corruption
        found, corruption.found = corruption.found, []
        for details in found:
            self.events("corruption", details)
        said = self.engine.messages
        if len(said) > self._told:
            self.events("sync", {"said": said[self._told :]})
            self._told = len(said)
        if news := self.engine.compute.normalization.news():
            self.events("loss", {"said": news})
        if about := self.engine.about_weights:
            self.engine.about_weights = []
            self.events("weights", {"said": about})
        packed = self.engine.compute.packed
        if packed.remarks:
            said, packed.remarks = packed.remarks, []
            self.events("packed", {"said": said})


WITNESS = "PACELINE_WITNESS"  # environment variable with a folder; only `paceline chaos` sets it


class Witness:
    """Writer of one file per process for `paceline chaos`: weight addresses and steps.

    Args:
        writes_starts: whether this rank also records the steps from which the ranks continue.
    """

    def __init__(self, engine: RankEngine, *, writes_starts: bool) -> None:
        self.loader, self.writes_starts = engine.loader, writes_starts
        self.lines = JsonLines(Path(os.environ[WITNESS]) / f"{os.getpid()}.jsonl", lossy=True)
        weights = [local(parameter).detach() for parameter in engine.named_parameters().values()]
        places = [[tensor.data_ptr(), tensor.nbytes, tensor.element_size()] for tensor in weights]
        self.lines.write(json.dumps({"weights": places}))

    def on_start(self, step: int) -> None:
        """Record that training continues after this step."""
        if self.writes_starts:
            self.lines.write(json.dumps({"from": step, "time": time.time()}))

    def on_step(self, info: StepInfo) -> None:
        """Record a step's number and sample indices."""
        seen = {"step": info.result.step, "time": time.time(), "samples": self.loader.indices}
        self.lines.write(json.dumps(seen, default=str))

    def close(self) -> None:
        self.lines.close()
