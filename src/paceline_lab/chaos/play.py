"""Execution of a schedule: start `paceline train`, inject faults, and resume after each end."""

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

STILL_SAVES = "ranks that it started still save and end"  # printed by a command that resumes a killed one
_AGAIN_S = 10.0  # until the next attempt to resume
_TICK_S = 0.01
_WAIT_FOR_PHASE = 0.08  # share of the steps after which a fault is injected in any phase
_OFTEN = "1000000"  # losses of a rank allowed per hour; chaos causes more than real life
_GRACE_S = 40.0  # for ranks whose launcher was killed
_TEXT_BYTES = 2**16


@dataclass(frozen=True)
class Setting:
    """Settings of the runs of a chaos command.

    Attributes:
        job: file of the job as chaos trains it.
        cluster: file of the emulated hosts; None without emulated hosts.
        quiet_s: time without progress after which a run counts as hanging.
    """

    job: Path
    cluster: Path | None
    quiet_s: float
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Ended:
    """Outcome of one command: exit code, and the end of its output."""

    code: int
    text: str
    time: float


@dataclass
class Played:
    """Course of a run under a schedule.

    Attributes:
        not_made: faults that the run gave no opportunity for.
        ends: outcome of each command; all but the last were resumed.
        hung: description of a run that made no progress.
        left: leftover processes and files.
        grown: resource use over time of the longest command.
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
    """Train under the faults of a schedule until the run has ended.

    Args:
        folder: folder for logs and observations of the run.
        disk: folder for the run, on the file system that is filled.
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
        # the next start removes what a killed host or command left there
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
        self.growths: list[Growth] = []  # one for each command

    @contextmanager
    def command(self, *, resume: bool) -> Iterator[subprocess.Popen[bytes]]:
        """A running command, terminated with all its processes; faults are reverted at exit."""
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
        """Inject the faults that are due until the command has ended."""
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
        """True once the run has ended, or fails without a fault."""
        *before, last = self.played.ends or [Ended(1, "", 0.0)]
        since = before[-1].time if before else 0.0
        if STILL_SAVES in last.text and len(before) < 2 * len(self.schedule.faults):
            time.sleep(_AGAIN_S)
            return False
        return last.code == 0 or not any(injected.time > since for injected in self.played.made)

    def _make_due(self, scene: Scene) -> None:
        for fault in list(self.waiting):
            if not self._is_due(fault):
                return  # the faults after it are due later
            injected = inject(fault, scene)
            if injected is None:  # not yet, or no longer possible
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
                with suppress(OSError, PacelineError):  # already gone with the run
                    injected.undo()


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a command and all processes that it started."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.send_signal(signal.SIGKILL)
    process.kill()


_TROUBLE = ("lost", "host_lost", "restart", "joins", "checkpoint_failed", "rewind")


class Progress:
    """Newest step, phases and events of a run that is in progress.

    Attributes:
        newest: most recently recorded step.
        furthest: highest step so far.
        news: counter of new lines; it changes with any sign of progress.
    """

    def __init__(self, run: Path, temporary: Path) -> None:
        self.run, self.temporary = run, temporary
        self.newest = self.furthest = 0
        self.news = 0
        self.trouble_at: list[float] = []
        self._files: dict[Path, NewLines] = {}

    def read(self) -> None:
        """Read everything that was written since the last call."""
        for record in self._new_lines(self.run / "events.jsonl"):
            if record.get("event") in _TROUBLE:
                self.trouble_at.append(float(record["time"]))
        for file in self.run.glob("steps/rank-*.jsonl"):
            for record in self._new_lines(file):
                self.newest = int(record["step"])
                self.furthest = max(self.furthest, self.newest)

    def recovers_since(self, time: float) -> bool:
        """True once the run has reported a problem that occurred after a given time."""
        return any(at >= time for at in self.trouble_at)

    def phases(self) -> set[str]:
        """Return the current phases of the ranks."""
        return {status.phase for status in self._statuses()}

    def pids_of(self, rank: int) -> list[int]:
        """Return the process ids of a rank; one if its host is this machine."""
        return sorted({status.pid for status in self._statuses() if status.rank == rank})

    def _statuses(self) -> list[RankStatus]:
        found: list[RankStatus] = []
        for file in self.temporary.glob("*/status"):
            try:
                board = StatusBoard.at(file)
            except (OSError, ValueError):  # just removed, or not yet at its full size
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
_SEGMENTS = ("paceline", "torch_", "psm_", "sem.")  # prefixes of paceline, torch and Python
_LOOK_AGAIN_S = 0.1


class Left:
    """Leftovers: compares the current processes and files with an earlier state."""

    def __init__(self) -> None:
        # orphans of a launcher become children of this process, so that it can find them
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._children = {process.pid for process in _children()}
        self._files = _files()
        self._temporary: Path | None = None

    @contextmanager
    def own_temporary_folder(self) -> Iterator[Path]:
        """Create a temporary folder for this run alone."""
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
            self._temporary = Path(folder)
            yield self._temporary

    def found(self, grace_s: float, *, files: bool = True) -> list[str]:
        """List leftovers after a grace period for those about to end; terminate leftover processes.

        Args:
            files: also report temporary files.
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
    """List this user's named shared memory, and control groups of ended launchers."""
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
    """Drop shared memory that a living process has mapped: it belongs to another command."""
    if not paths:
        return paths
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {int(line.split()[4]) for line in maps.read_text().splitlines() if f" {_MEMORY}/" in line}
    return {path for path in paths if path.exists() and path.stat().st_ino not in mapped}


def _reap() -> None:
    """Collect the exit codes of adopted orphans that have ended."""
    for process in _children():
        with suppress(psutil.Error, ChildProcessError):
            if process.ppid() == os.getpid() and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


_EVERY_S = 2.0
_LEAST_SAMPLES = 30  # shorter runs are mostly startup and shutdown
_MORE = 1.1
_NOT_YET = frozenset(("starting", "joining"))


class Sizes(NamedTuple):
    """Sums over a command and all its processes, including ranks, at one time.

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
    """One resource over the course of a run.

    Attributes:
        early: median of its second quarter; caches fill during the first.
        late: median of its last quarter.
        per_minute: slope of a linear fit through all but the first quarter.
    """

    name: str
    early: float
    late: float
    per_minute: float

    @property
    def grows(self) -> bool:
        """True if late values exceed early ones by more than the usual fluctuation."""
        spare: float = getattr(_SPARE, self.name)
        return self.late > _MORE * self.early + spare

    def __str__(self) -> str:
        name = self.name.removesuffix("_mb")
        unit = " MB" if name != self.name else ""
        return f"{name} from {self.early:g} to {self.late:g}{unit}, {self.per_minute:+.3g} a minute"


class Growth:
    """Sampler of a running command's resource use, while all its ranks train.

    Resources that a lost rank or host frees and its replacement uses again do not count as growth.

    Args:
        temporary: folder whose files are counted.
    """

    def __init__(self, command: int, ranks: int, temporary: Path) -> None:
        self.command, self.ranks, self.temporary = command, ranks, temporary
        self.samples: list[tuple[float, Sizes]] = []  # each with its monotonic time
        self._due, self._step = 0.0, 0

    def sample(self, step: int, phases: Callable[[], Set[str]]) -> None:
        """Take a sample if one is due.

        Args:
            step: newest step of the run.
            phases: current phases of its ranks.
        """
        now = time.monotonic()
        if now >= self._due and step > self._step and not phases() & _NOT_YET:
            self._due, self._step = now + _EVERY_S, step
            # a process has just ended, so the sum would be incomplete
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
    """Return the course of each resource; empty for a run that was too short."""
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
