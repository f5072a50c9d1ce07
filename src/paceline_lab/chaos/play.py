"""Execution of a schedule: start `paceline train`, inject faults, and resume the run when it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from paceline.cluster.cgroup import PREFIX
from paceline.errors import PacelineError
from paceline.files import private_folder
from paceline.planning.plan import Plan
from paceline.run.record.progress import NewLines
from paceline.run.record.recorder import WITNESS
from paceline.wire.status import RankStatus, StatusBoard
from paceline_lab.chaos.faults import Injected, Scene, inject
from paceline_lab.chaos.schedule import Fault, Schedule

STILL_SAVES = (
    "ranks that it started still save and end"  # printed by a command that resumes the run of a killed command
)
_AGAIN_S = 10.0  # seconds before another attempt to resume
_TICK_S = 0.01
_WAIT_FOR_PHASE = 0.08  # fraction of the steps for which a fault waits for its phase
_OFTEN = "1000000"  # number of rank failures allowed per hour; chaos causes more failures than usual
_GRACE_S = 40.0  # seconds for which ranks may outlive a killed launcher
_TEXT_BYTES = 2**16


@dataclass(frozen=True)
class Setting:
    """Settings shared by all runs of a chaos command.

    Attributes:
        job: job file, adapted for chaos.
        cluster: cluster file with emulated hosts; None without emulated hosts.
        quiet_s: seconds without progress after which a run counts as hanging.
    """

    job: Path
    cluster: Path | None
    quiet_s: float
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Ended:
    """Outcome of one command: its exit code, and the end of its output."""

    code: int
    text: str
    time: float


@dataclass
class Played:
    """What happened to a run under a schedule of faults.

    Attributes:
        not_made: faults that could not be injected before the run ended.
        ends: outcome of each command. Each command after the first one resumed the run.
        hung: description of the hang, if the run stopped making progress; otherwise None.
        left: processes and files that the run left behind.
        grown: resource use over time, of the command with the most samples.
    """

    schedule: Schedule
    run: Path
    witness: Path
    made: list[Injected] = field(default_factory=list)
    not_made: list[Fault] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)
    hung: str | None = None
    left: list[str] = field(default_factory=list)
    grown: list[Course] = field(default_factory=list)


def play(schedule: Schedule, setting: Setting, folder: Path, disk: Path) -> Played:
    """Train and inject the faults of a schedule until the run has ended.

    Args:
        folder: folder for the logs and the witness files of the run.
        disk: folder for the run, on the file system that the fault `disk-full` fills.
    """
    private_folder(folder / "witness")
    played = Played(schedule, disk / "run", folder / "witness")
    left = Left()
    with left.own_temporary_folder() as temporary:
        player = _Player(schedule, setting, played, temporary)
        most = 2 * len(schedule.faults) + 1
        while len(played.ends) < most and not played.hung:
            with player.command(resume=bool(played.ends)) as command:
                player.watch(command)
            if player.is_over():
                break
        played.not_made = player.waiting
        played.grown = courses(max((growth.samples for growth in player.growths), key=len))
        # files of a killed host or command are removed only at the next start
        switched_off = any(i.fault.kind == "kill" and i.fault.target in ("host", "command") for i in played.made)
        played.left = left.found(_GRACE_S, files=not switched_off)
    return played


class _Player:
    def __init__(self, schedule: Schedule, setting: Setting, played: Played, temporary: Path) -> None:
        self.schedule, self.setting, self.played, self.temporary = schedule, setting, played, temporary
        self.waiting = list(schedule.faults)
        self.lasting: list[Injected] = []
        self.progress = Progress(played.run, temporary)
        self.due_at: dict[Fault, float] = {}
        self.growths: list[Growth] = []  # one entry for each command

    @contextmanager
    def command(self, *, resume: bool) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command. At exit, revert faults and end all processes of the command."""
        schedule, setting, played = self.schedule, self.setting, self.played
        words = ["train", str(setting.job), "--plan", schedule.plan, "--run", str(played.run)]
        words += ["--restarts", str(len(schedule.faults) + 1), *(["--resume"] if resume else [])]
        words += ["--cluster", str(setting.cluster)] if setting.cluster else []
        settings = {"PACELINE_LOSSES_PER_HOUR": _OFTEN, **os.environ}
        settings |= {WITNESS: str(played.witness), "TMPDIR": str(self.temporary)}
        self.log = played.witness.parent / f"command-{len(played.ends)}.log"
        with open(self.log, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=settings,
            )
        try:
            yield process
        finally:
            self._take_back(everything=True)
            if process.poll() is None:
                end_tree(process)
            process.wait()

    def watch(self, command: subprocess.Popen[bytes]) -> None:
        """Inject faults when they are due, until the command has ended."""
        ranks = Plan.parse(self.schedule.plan).ranks
        scene = Scene(
            command.pid,
            ranks,
            self.schedule.hosts,
            self.progress.pids_of,
            self.played.run.parent,
            self.played.run / "checkpoints",
            self.played.witness,
        )
        self.progress.news += 1  # a new command counts as progress
        growth = Growth(command.pid, ranks, self.temporary)
        self.growths.append(growth)
        news, heard = -1, time.monotonic()
        while command.poll() is None:
            self.progress.read()
            growth.sample(self.progress.newest, self.progress.phases)
            if self.progress.news != news:
                news, heard = self.progress.news, time.monotonic()
            if time.monotonic() - heard > self.setting.quiet_s:
                self.played.hung = (
                    f"nothing was heard of the run for {self.setting.quiet_s:g} s at step {self.progress.newest}; "
                    f"ranks are in {', '.join(sorted(self.progress.phases())) or 'no phase'}"
                )
                return
            self._take_back()
            self._make_due(scene)
            time.sleep(0.001 if any(fault in self.due_at for fault in self.waiting[:1]) else _TICK_S)
        self.progress.read()
        text = self.log.read_bytes()[-_TEXT_BYTES:].decode(errors="replace")
        self.played.ends.append(Ended(command.returncode, text, time.time()))

    def is_over(self) -> bool:
        """Return True if the run has ended, or has failed without a fault."""
        *before, last = self.played.ends or [Ended(1, "", 0.0)]
        since = before[-1].time if before else 0.0
        if STILL_SAVES in last.text and len(before) < 2 * len(self.schedule.faults):
            time.sleep(_AGAIN_S)
            return False
        return last.code == 0 or not any(injected.time > since for injected in self.played.made)

    def _make_due(self, scene: Scene) -> None:
        for fault in list(self.waiting):
            if not self._is_due(fault):
                return  # all further faults are due later
            injected = inject(fault, scene)
            if injected is None:  # the fault is not possible at the moment
                continue
            self.waiting.remove(fault)
            injected.step = self.progress.newest
            self.played.made.append(injected)
            self.lasting.append(injected)
            self.setting.say(f"step {injected.step}: {fault}")

    def _is_due(self, fault: Fault) -> bool:
        done = self.progress.furthest / self.schedule.steps
        if fault.during == "start":
            return True
        if done < fault.at or not self.progress.furthest:
            return False
        since = self.due_at.setdefault(fault, done)
        if fault.during == "any" or done - since > _WAIT_FOR_PHASE:
            return True
        if fault.during == "recovery":
            return self.progress.recovers_since(self.played.made[-1].time if self.played.made else 0.0)
        return fault.during in self.progress.phases()

    def _take_back(self, *, everything: bool = False) -> None:
        for injected in list(self.lasting):
            if everything or time.monotonic() >= injected.until:
                self.lasting.remove(injected)
                with suppress(OSError, PacelineError):  # the target has already ended with the run
                    injected.undo()


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all processes that it started."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.send_signal(signal.SIGKILL)
    process.kill()


_TROUBLE = ("lost", "host_lost", "restart", "joins", "checkpoint_failed", "rewind")


class Progress:
    """Progress of an active run: its latest step, its phases and its events.

    Attributes:
        newest: step that was recorded last. After a restart, it may be lower than `furthest`.
        furthest: highest step that has been recorded so far.
        news: number of lines that have been read. A change means that the run made progress.
    """

    def __init__(self, run: Path, temporary: Path) -> None:
        self.run, self.temporary = run, temporary
        self.newest = self.furthest = 0
        self.news = 0
        self.trouble_at: list[float] = []
        self._files: dict[Path, NewLines] = {}

    def read(self) -> None:
        """Read all lines that were written since the last call."""
        for record in self._new_lines(self.run / "events.jsonl"):
            if record.get("event") in _TROUBLE:
                self.trouble_at.append(float(record["time"]))
        for file in self.run.glob("steps/rank-*.jsonl"):
            for record in self._new_lines(file):
                self.newest = int(record["step"])
                self.furthest = max(self.furthest, self.newest)

    def recovers_since(self, time: float) -> bool:
        """Return True if the run has reported a failure that occurred after the given time."""
        return any(at >= time for at in self.trouble_at)

    def phases(self) -> set[str]:
        """Return the phases in which the ranks currently are."""
        return {status.phase for status in self._statuses()}

    def pids_of(self, rank: int) -> list[int]:
        """Return the process ids of a rank, sorted."""
        return sorted({status.pid for status in self._statuses() if status.rank == rank})

    def _statuses(self) -> list[RankStatus]:
        found: list[RankStatus] = []
        for file in self.temporary.glob("*/status"):
            try:
                board = StatusBoard.at(file)
            except (OSError, ValueError):  # the file has just been removed, or does not have its full size yet
                continue
            found += [status for status in board.read() if status.pid]
            board.close()
        return found

    def _new_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        for record in self._files.setdefault(file, NewLines(file)):
            self.news += 1
            yield record


_SET_CHILD_SUBREAPER = 36  # option of prctl
_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory"))
_MEMORY = Path("/dev/shm")
_SEGMENTS = ("paceline", "torch_", "psm_", "sem.")  # file name prefixes that paceline, torch and Python use
_LOOK_AGAIN_S = 0.1


class Left:
    """Finder of processes and files that did not exist when it was created."""

    def __init__(self) -> None:
        # orphans of a launcher become children of this process, so that this process can find them
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._children = {process.pid for process in _children()}
        self._files = _files()
        self._temporary: Path | None = None

    @contextmanager
    def own_temporary_folder(self) -> Iterator[Path]:
        """Create a temporary folder that only this run uses."""
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
            self._temporary = Path(folder)
            yield self._temporary

    def found(self, grace_s: float, *, files: bool = True) -> list[str]:
        """List leftovers after a grace period, and kill leftover processes.

        Args:
            files: whether to report temporary files too.
        """
        if not files:
            self._temporary = None
        until = time.monotonic() + grace_s
        while (words := self._words()) and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
        for process in _children():
            if process.pid not in self._children:
                with suppress(psutil.Error):
                    process.kill()
        return words

    def _words(self) -> list[str]:
        _reap()
        words = []
        for process in _children():
            with suppress(psutil.Error):
                if process.pid not in self._children and process.status() != psutil.STATUS_ZOMBIE:
                    words.append(f"process {process.pid} ({' '.join(process.cmdline())[:80] or process.name()})")
        words += [f"file {path}" for path in sorted(_unused(_files() - self._files))]
        if self._temporary is not None:
            words += [f"temporary file {path.name}" for path in sorted(self._temporary.iterdir())]
        return words


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _files() -> set[Path]:
    """List this user's named shared memory, and control groups of launchers that have ended."""
    found = set()
    for path in _MEMORY.glob("*"):
        with suppress(OSError):
            if path.stat().st_uid == os.geteuid() and path.name.startswith(_SEGMENTS):
                found.add(path)
    for top in _GROUPS:
        for path in top.glob(f"{PREFIX}*"):
            launcher = path.name.removeprefix(PREFIX).partition("-")[0]
            if launcher.isdecimal() and not psutil.pid_exists(int(launcher)):
                found.add(path)
    return found


def _unused(paths: set[Path]) -> set[Path]:
    """Remove shared memory that a running process has mapped, because another command uses it."""
    if not paths:
        return paths
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {int(line.split()[4]) for line in maps.read_text().splitlines() if f" {_MEMORY}/" in line}
    return {path for path in paths if path.exists() and path.stat().st_ino not in mapped}


def _reap() -> None:
    """Reap adopted orphans that have ended."""
    for process in _children():
        with suppress(psutil.Error, ChildProcessError):
            if process.ppid() == os.getpid() and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


_EVERY_S = 2.0
_LEAST_SAMPLES = 30  # runs with fewer samples are mostly startup and shutdown
_MORE = 1.1
_NOT_YET = frozenset(("starting", "joining"))


class Sizes(NamedTuple):
    """Resource use of a command and all its processes, including ranks, at one time.

    `memory_mb` counts shared pages once.
    """

    memory_mb: float
    processes: float
    descriptors: float
    threads: float
    files: float


_SPARE = Sizes(memory_mb=16, processes=1, descriptors=8, threads=4, files=8)  # usual fluctuation


@dataclass(frozen=True)
class Course:
    """Use of one resource over the course of a run.

    Attributes:
        early: median over the second quarter of the run. The first quarter is left out, because caches fill during it.
        late: median over the last quarter of the run.
        per_minute: growth per minute, by a linear fit without the first quarter.
    """

    name: str
    early: float
    late: float
    per_minute: float

    @property
    def grows(self) -> bool:
        """True if the late median exceeds the early median by more than the usual fluctuation."""
        spare: float = getattr(_SPARE, self.name)
        return self.late > _MORE * self.early + spare

    def __str__(self) -> str:
        name = self.name.removesuffix("_mb")
        unit = " MB" if name != self.name else ""
        return f"{name} from {self.early:g} to {self.late:g}{unit}, {self.per_minute:+.3g} a minute"


class Growth:
    """Sampler of a command's resource use, which takes samples while all ranks train.

    No samples are taken while ranks are lost, so lost and replaced ranks do not count as growth.

    Args:
        temporary: folder whose files are counted as a resource.
    """

    def __init__(self, command: int, ranks: int, temporary: Path) -> None:
        self.command, self.ranks, self.temporary = command, ranks, temporary
        self.samples: list[tuple[float, Sizes]] = []  # each sample with its monotonic time
        self._due, self._step = 0.0, 0

    def sample(self, step: int, phases: Callable[[], Set[str]]) -> None:
        """Take a sample if a sample is due.

        Args:
            step: latest step of the run.
            phases: function that returns the current phases of the ranks.
        """
        now = time.monotonic()
        if now >= self._due and step > self._step and not phases() & _NOT_YET:
            self._due, self._step = now + _EVERY_S, step
            # if a process has just ended, the sum would be incomplete
            with suppress(psutil.Error, OSError, IndexError):
                if (sizes := self._sizes()) is not None:
                    self.samples.append((now, sizes))

    def _sizes(self) -> Sizes | None:
        command = psutil.Process(self.command)
        processes = [command, *command.children(recursive=True)]
        alive = [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
        if sum(process.cmdline()[0].startswith("paceline rank ") for process in alive) != self.ranks:
            return None
        return Sizes(
            memory_mb=round(sum(process.memory_full_info().pss for process in alive) / 1e6, 1),
            processes=len(processes),
            descriptors=sum(process.num_fds() for process in alive),
            threads=sum(process.num_threads() for process in alive),
            files=sum(1 for _ in self.temporary.rglob("*")),
        )


def courses(samples: Sequence[tuple[float, Sizes]]) -> list[Course]:
    """Return the course of each resource. The list is empty if there are too few samples."""
    if len(samples) < _LEAST_SAMPLES:
        return []
    quarter = len(samples) // 4
    minutes = [time / 60 for time, _ in samples[quarter:]]
    found = []
    for number, name in enumerate(Sizes._fields):
        sizes = [sample[number] for _, sample in samples]
        slope = statistics.linear_regression(minutes, sizes[quarter:]).slope
        early, late = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
        found.append(Course(name, early, late, round(slope, 4)))
    return found
