"""End of a launch by a signal or a failure, and its root cause."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from paceline.elastic.stall import Stall
from paceline.errors import LaunchError, PacelineError, device_fault, lost_a_peer
from paceline.files import write_traceback
from paceline.rank_environment import HostEntry
from paceline.text import printable
from paceline.wire.status import RankStatus

HOST = socket.gethostname()
# These errors of a file system or a network may be transient. A missing file, a directory in place of a file, or a
# permission error is permanent.
_PASSING_NAMES = (
    "EIO ENOSPC EDQUOT EROFS ESTALE ETIMEDOUT EAGAIN EBUSY EINTR ENOMEM ENFILE EMFILE ENOLCK EREMOTEIO ENODEV ENXIO "
    "ENOTCONN ECONNRESET ECONNABORTED ECONNREFUSED EPIPE EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ENETRESET ENOLINK "
    "ECOMM"
)
_PASSING = {getattr(errno, name) for name in _PASSING_NAMES.split()}
_WAITING = re.compile("in (_kill_when_orphaned|_answer_with_position)")  # functions of threads that only wait
_STACK_LINES = 60  # largest number of lines shown of a hung rank's stack trace
# folders of paceline's own packages
OWN_FILES = tuple(
    f"{Path(__file__).parents[2] / package}{os.sep}"
    for package in ("paceline", "paceline_federated", "paceline_lab", "paceline_server")
)


@dataclass(frozen=True)
class ErrorRecord:
    """Error record that a rank writes when it raises an exception.

    `time` is in seconds since the epoch. `secondary` is true if the rank only lost a peer, so that another rank is the
    cause. `explained` is true for a PacelineError, which needs no traceback unless it comes from the user's own code.
    `may_pass` is true if the cause lies outside the program, such as a disk or a killed process, and another attempt
    may succeed. `device` is `lost` or `memory` if the hardware of the rank's accelerator has failed (see
    `device_fault`), which counts as the loss of the rank; otherwise it is empty.
    """

    rank: int
    host: str
    pid: int
    time: float
    type: str
    message: str  # begins with the name of the type, unless `explained`
    traceback: str
    secondary: bool
    explained: bool
    may_pass: bool = False
    code: str = "launch.rank_raised"  # code of a PacelineError; `fields` has its fields
    fields: dict[str, Any] = field(default_factory=dict)
    device: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> ErrorRecord:
        """Make the record of an error that this process has just caught.

        The traceback starts in the frame below the one that caught the error.
        """
        explained = isinstance(error, PacelineError)
        told: dict[str, Any] = {}
        if isinstance(error, PacelineError):
            message, lines = str(error), traceback_of_users_code(error)
            told = {"code": error.code, "fields": error.fields}
        else:
            inner = error.__traceback__.tb_next if error.__traceback__ else None
            message = "".join(traceback.format_exception_only(error)).strip()
            lines = "".join(traceback.format_exception(type(error), error, inner))
        return cls(
            rank,
            host.name if (host := HostEntry.from_env()) else HOST,
            os.getpid(),
            time.time(),
            type(error).__name__,
            message,
            lines,
            _only_lost_a_peer(error),
            explained,
            _may_pass(error),
            device=_failed_hardware(error),
            **told,
        )

    def cause(self, ranks: int) -> str:
        """Message of the error for the user, without the traceback."""
        if self.explained:
            return self.message
        stopped = " and the other ranks were stopped" if ranks > 1 else ""
        return f"rank {self.rank} (host {self.host}, pid {self.pid}) raised{stopped}: {self.message}"

    @classmethod
    def read(cls, path: Path) -> ErrorRecord | None:
        """Read the record in `path`; return None if the rank left no record."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)


@dataclass(frozen=True)
class RankEnd:
    """Final or current state of a rank. `code` is None while the rank runs, and negative after a signal."""

    status: RankStatus
    pid: int
    code: int | None
    alive_at: float  # when the rank was last seen alive, in seconds since the epoch
    record: ErrorRecord | None
    stack: str  # output of faulthandler, after a crash or on request
    stopped: bool  # suspended by SIGSTOP
    host: str = HOST
    remote: bool = False  # True if the rank is on another host; `oom_kills` is then the count of that host's kernel
    oom_kills: int | None = None

    @property
    def primary(self) -> bool:
        """True if the failure began in this rank.

        A rank that SIGABRT ended without a record only lost a peer, in C++ code.
        """
        if self.record:
            return not self.record.secondary
        return self.code not in (None, 0, -signal.SIGABRT)

    @property
    def failed_at(self) -> float:
        """Time of the failure; for a rank without a record, the earliest possible time."""
        return self.record.time if self.record else self.alive_at


def root_cause(ends: Sequence[RankEnd], oom_kills: int | None, stall: Stall | None = None) -> LaunchError:
    """Return the error of the rank that caused the failure of an attempt.

    This is the first rank whose failure began in the rank itself. Otherwise it is a suspended rank, a rank that ended
    too early, or the rank that failed first.

    Args:
        oom_kills: number of processes in this control group that were killed for lack of memory during the attempt;
            None if the kernel does not report it.
        stall: the collective that a rank did not enter, if the positions of the ranks show it.
    """
    own = sorted((e for e in ends if e.primary), key=lambda e: e.failed_at)
    if own:
        return _describe(own[0], len(ends), oom_kills, stall)
    if stopped := [e for e in ends if e.stopped]:
        return hang(stopped, ends, time.monotonic_ns(), stall)
    if stall and stall.differs and stall.instead:
        odd = next(e for e in ends if e.status.rank == stall.rank)
        frames = f"\n\n{odd.record.traceback}".rstrip() if odd.record else ""
        return LaunchError(
            "launch.calls_differ",
            "{who} called {instead} in step {step}, but {others} called {wait}; {then}. Every rank "
            "of a group must make the same calls in the same order, with tensors of the same type and size.{stacks}",
            who=_who(odd),
            instead=stall.instead,
            wait=stall.wait,
            others=_ranks(stall.waiting),
            then=_others(len(ends)),
            stacks=frames,
            traceback=frames.strip(),
            rank=stall.rank,
            **stall.fields,
        )
    caused = stall.rank if stall else None
    lost = min((e for e in ends if e.record or e.code), key=lambda e: (e.status.rank != caused, e.failed_at))
    failure = _describe(lost, len(ends), oom_kills, stall)
    left = [e for e in ends if e.code == 0]
    if left:
        return LaunchError(
            "launch.rank_ended_early",
            "{early}\n{failure}",
            early=ended_early(left[0]),
            failure=failure,
            rank=left[0].status.rank,
            traceback=failure.traceback,
        )
    return failure


def ended_early(end: RankEnd) -> str:
    """Describe a rank that ended with exit code 0 before its work was done."""
    where = f"in {_where(end.status)}, before the others"
    return f"{_who(end)} ended with exit code 0 {where}: did the job's code call exit()?"


def hang(hung: Sequence[RankEnd], ends: Sequence[RankEnd], now_ns: int, stall: Stall | None = None) -> LaunchError:
    """Describe the failure of ranks that made no progress within the deadline.

    The rank that did not enter a collective comes first, then suspended ranks, then the other ranks in order of
    decreasing idle time.
    """
    caused = stall.rank if stall else None
    hung = sorted(hung, key=lambda e: (e.status.rank != caused, not e.stopped, e.status.changed_ns))
    first = hung[0]
    idle = f"for {first.status.idle_s(now_ns):.0f} s"
    numbers = {e.status.rank for e in hung}
    waiting = [
        e.status.rank for e in ends if e.code is None and e.status.phase == "sync" and e.status.rank not in numbers
    ]
    tail = f" while {_wait(waiting)} for it" if waiting else ""
    if stall and stall.rank == first.status.rank:
        tail = _in_collective(stall)
    if first.stopped:
        head = f"{_who(first)} is stopped (SIGSTOP) in {_where(first.status)} and has done nothing {idle}{tail}"
    elif len(hung) == len(ends) > 1 and all(e.status.phase == "sync" for e in hung):
        places = ", ".join(
            f"rank {e.status.rank} in step {e.status.step}" for e in sorted(hung, key=lambda e: e.status.rank)
        )
        head = f"{_who(first)} and all others have waited for one another in sync {idle} ({places})"
    else:
        head = f"{_who(first)} has been in {_where(first.status)} {idle}{tail}"
    more = "".join(
        f"\n{_who(e)} has been in {_where(e.status)} for {e.status.idle_s(now_ns):.0f} s as well" for e in hung[1:]
    )
    traces = {e.status.rank: shortened(e.stack) or (e.record.traceback if e.record else "") for e in hung}
    stacks = "".join(f"\n\nThe stack of rank {rank}:\n{trace}" for rank, trace in traces.items() if trace)
    advice = "" if first.stopped or first.status.phase == "starting" else ". If it is only slow, raise deadline_s"
    return LaunchError(
        "launch.rank_hung",
        "{head}; {others}{advice}.{more}{stacks}",
        head=head,
        others=_others(len(ends)),
        advice=advice,
        more=more,
        stacks=stacks,
        rank=first.status.rank,
        **(stall.fields if stall else {}),
    )


def _in_collective(stall: Stall) -> str:
    """Return the end of the sentence about a rank that did not enter a collective."""
    own = f", in {stall.instead}," if stall.instead else f", in layer {stall.own_layer}," if stall.own_layer else ""
    return f"{own} while {_wait(stall.waiting)} for it in {stall.wait} in step {stall.step}"


def _describe(end: RankEnd, ranks: int, oom_kills: int | None, stall: Stall | None) -> LaunchError:
    rank = end.status.rank
    if end.record:
        record = end.record
        final = record.explained and not record.secondary and not record.may_pass
        fields = record.fields if record.explained else {"rank": rank, "type": record.type, "message": record.message}
        text = f"{record.cause(ranks)}\n\n{record.traceback}".rstrip()
        return LaunchError.of_json(
            {"code": record.code, "text": text, "fields": fields},
            rank=rank,
            final=final,
            rank_error=record.type,
            explained=record.explained,
            traceback=record.traceback.rstrip(),
        )
    others = _others(ranks)
    if end.code is not None and end.code < 0:
        kills = end.oom_kills if end.remote else oom_kills
        why = _reason(-end.code, kills)
        stack = f"\n\n{shortened(end.stack)}" if end.stack else ""
        stall = stall if stall and stall.rank == rank else None
        return LaunchError(
            "launch.rank_killed",
            "{how}{why}; {then}.{stack}",
            how=_killed(end) + (_in_collective(stall) if stall else ""),
            why=why,
            then=others,
            stack=stack,
            out_of_memory=end.code == -signal.SIGKILL and bool(kills),
            rank=rank,
            **(stall.fields if stall else {}),
        )
    return LaunchError(
        "launch.rank_left",
        "{who} ended with exit code {code} in {where} and reported no error; {then}. Check whether the "
        "job's code calls os._exit().",
        who=_who(end),
        code=end.code,
        where=_where(end.status),
        then=others,
        rank=rank,
    )


def killed(end: RankEnd, oom_kills: int | None, *, serves: bool = False) -> str:
    """Describe a killed rank: its signal and what it was doing.

    If the kernel killed the rank for lack of memory, the text gives this reason.

    Args:
        oom_kills: number of processes that were killed for lack of memory on the rank's host, since the previous loss
            of a rank on that host.
        serves: True if the rank is a server, which takes no steps.
    """
    assert end.code is not None
    return f"{_killed(end, serves=serves)}{_reason(-end.code, oom_kills) if oom_kills else ''}"


def lost_device(end: RankEnd) -> str:
    """Describe a rank whose accelerator has failed."""
    assert end.record is not None
    what = "lost its device" if end.record.device == "lost" else "found an uncorrectable error of its device"
    first, *others = end.record.message.splitlines()
    lines = [first.rstrip("."), *(line for line in others if " XID " in line)]
    return f"{_who(end)} {what} in {_where(end.status)}: {'; '.join(lines)}"


def _killed(end: RankEnd, *, serves: bool = False) -> str:
    assert end.code is not None
    who, how = _who(end), f"was killed by {_signal_name(-end.code)}"
    return f"{who}, a server, {how}" if serves else f"{who} {how} in {_where(end.status)}"


def _who(end: RankEnd) -> str:
    return f"rank {end.status.rank} (host {end.host}, pid {end.pid})"


def _where(status: RankStatus) -> str:
    return "start-up" if status.phase == "starting" else f"{status.phase} of step {status.step}"


def _ranks(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _wait(numbers: Sequence[int]) -> str:
    return f"{_ranks(numbers)} {'waits' if len(numbers) == 1 else 'wait'}"


def _others(ranks: int) -> str:
    return "the ranks were stopped" if ranks > 1 else "it was stopped"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _reason(number: int, oom_kills: int | None) -> str:
    if number != signal.SIGKILL:
        return ""
    if oom_kills is None:
        return " (maybe out of memory: `dmesg` tells)"
    if oom_kills:
        return " (out of memory: the kernel ended it; use a smaller global_batch, a smaller model or fewer ranks)"
    return " (from outside: the kernel counts no out-of-memory kill)"


def stack_beside(record: Path) -> str:
    """Return the stack traces from the file next to an error record, or ""."""
    path = record.with_suffix(".stack")
    return path.read_text(errors="replace") if path.exists() else ""


def shortened(stack: str) -> str:
    """Shorten the output of faulthandler to one screen, main thread first.

    Frames outside the rank's own function are omitted.
    """
    threads = [thread for thread in stack.split("\n\n") if "hread 0x" in thread and not _WAITING.search(thread)]
    threads.sort(key=lambda thread: ("elastic/rank.py" not in thread, "Current thread" not in thread))
    around = ("elastic/rank.py", "<frozen runpy>")
    lines = [line for line in "\n\n".join(threads).splitlines() if not any(place in line for place in around)]
    return "\n".join(lines[:_STACK_LINES])


def traceback_of_users_code(error: PacelineError) -> str:
    """Return the traceback of the user's exception that caused `error`; "" if no traceback is needed.

    The traceback begins at the first frame outside paceline and Python's importer.
    """
    cause = error.__cause__
    if not error.from_users_code or cause is None:
        return ""
    frames = cause.__traceback__
    while frames and (
        frames.tb_frame.f_code.co_filename.startswith(OWN_FILES) or "importlib" in frames.tb_frame.f_code.co_filename
    ):
        frames = frames.tb_next
    told_elsewhere = getattr(cause, "__notes__", None)  # set by an error in a loader process
    return "".join(traceback.format_exception(type(cause), cause, frames)) if frames or told_elsewhere else ""


def _may_pass(error: BaseException | None) -> bool:
    """Return True if a disk, a network or a loader process caused the error."""
    if error is None:
        return False
    if getattr(error, "may_pass", False) or (isinstance(error, OSError) and error.errno in _PASSING):
        return True
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return True
    return _may_pass(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _failed_hardware(error: BaseException | None) -> str:
    """Return the hardware fault of a device that caused the error, or ""."""
    if error is None:
        return ""
    fault = device_fault(error)
    return fault if fault in ("lost", "memory") else _failed_hardware(error.__cause__)


def _only_lost_a_peer(error: BaseException | None) -> bool:
    """Return True if the error is a lost connection to another rank."""
    return error is not None and (lost_a_peer(error) or _only_lost_a_peer(error.__cause__))


def state_of(pid: int) -> str:
    """Return the state letter of a process's first thread; "" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def handles(pid: int, number: int) -> bool:
    """Return True until a process's first thread has handled a signal that was sent."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    # the kernel blocks a signal while its handler runs
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:", "SigBlk:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def oom_kills() -> int | None:
    """Count the processes in this control group that were killed for lack of memory.

    The result is None if the kernel does not report the number.
    """
    for file in _memory_counters():
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return None


def _memory_counters() -> list[Path]:
    """Files that may contain the memory counters of this control group. In a container, the group is often the root."""
    files = [Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":  # version 2
                files.insert(0, Path(f"/sys/fs/cgroup{group}/memory.events"))
            elif controllers == "memory":  # version 1
                files.insert(0, Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return files


_shows_traceback = False
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def show_traceback(wanted: bool) -> None:
    """Set whether tracebacks are shown on the screen (`--traceback`)."""
    global _shows_traceback
    _shows_traceback = wanted


def show(error: Exception) -> None:
    """Print an error on stderr: the cause first, then each problem with its code.

    The traceback is shown with `--traceback`, or if it cannot be written to a file.
    """
    cause, frames = cause_and_traceback(error)
    text = _with_codes(cause, error) if isinstance(error, PacelineError) else printable(cause)
    print(f"paceline: {text}", file=sys.stderr)
    if frames:
        print(printable(below(frames)), file=sys.stderr)


def _with_codes(cause: str, error: PacelineError) -> str:
    """Printable text of an error, with `[code]` after each problem. In a terminal, the codes are dim."""
    shown = "\x1b[2m[{}]\x1b[0m" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else "[{}]"
    texts = [problem.text for problem in error.problems]
    if not cause.startswith(whole := "\n".join(texts)):  # the text adds a location or a summary to the problem
        return f"{printable(cause)}  {shown.format(error.code)}"
    lines = [f"{printable(problem.text)}  {shown.format(problem.code)}" for problem in error.problems]
    return "\n".join(lines) + printable(cause.removeprefix(whole))


def cause_and_traceback(error: Exception) -> tuple[str, str]:
    """Return the message of an error, and its traceback. The traceback is empty if the message is sufficient."""
    if isinstance(error, PacelineError):
        if error.traceback:
            lines = str(error).replace(error.traceback, "").strip().splitlines()
            return "\n".join(line for line in lines if line.strip()), error.traceback
        return str(error), traceback_of_users_code(error).rstrip()
    cause = "".join(traceback.format_exception_only(error)).strip()
    return cause, "".join(traceback.format_exception(error)).rstrip()


def below(frames: str, name: str = "newest", folder: Path | None = None) -> str:
    """Return the lines to print after the cause of an error.

    These lines name the location of the error and the file that contains the traceback, or they show the traceback.

    Args:
        frames: the traceback.
        name: name of the file, without `.txt`.
        folder: folder of the file; None uses a folder in the user's cache.
    """
    file = None if _shows_traceback else write_traceback(frames, name, folder)
    if file is None:
        return f"\n{frames}"
    places = [
        place
        for place in _FRAME.findall(frames)
        if "site-packages" not in place[0] and not place[0].startswith(OWN_FILES)
    ]
    where = f"raised in {places[-1][0]}, line {places[-1][1]}, in {places[-1][2]}; " if places else ""
    return f"{where}traceback in {file}; --traceback shows it on the screen"


class StopSignals:
    """Context manager that records SIGINT and SIGTERM instead of ending this process.

    `first` is the name of the first signal, or None. A later SIGINT sets `kill`. A signal that was already ignored
    stays ignored, for example under nohup. Outside the main thread, the context has no effect, because Python handles
    signals only in the main thread.

    Args:
        numbers: the signals to record.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.first: str | None = None
        self.kill = False
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.kill = True


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Make SIGTERM raise SystemExit with code 143 inside the context. A launch handles SIGTERM by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a repeated signal must not interrupt the cleanup
    with suppress(OSError):
        os.write(2, b"paceline: ended by SIGTERM\n")
    raise SystemExit(128 + number)


def stopped_before(what: str, name: str) -> LaunchError:
    """Make the error of a run that a signal stopped before `what` happened."""
    return LaunchError(
        "launch.stopped_by_signal",
        "{signal} stopped the run before {what}.",
        signal=name,
        what=what,
        exit_code=128 + signal.Signals[name],
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "code", None) if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
    return code if isinstance(code, int) else 0 if isinstance(error, SystemExit) and code is None else 1
