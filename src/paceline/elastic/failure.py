"""Ends of a launch: stop signals, and the root cause of a failure."""

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

from paceline.errors import LaunchError, PacelineError, lost_a_peer
from paceline.files import write_traceback
from paceline.rank_environment import HostEntry
from paceline.text import printable
from paceline.wire.status import RankStatus

HOST = socket.gethostname()
# Transient errors of a file system or a network. A missing file, a directory with its name or a permission error is
# permanent.
_PASSING_NAMES = (
    "EIO ENOSPC EDQUOT EROFS ESTALE ETIMEDOUT EAGAIN EBUSY EINTR ENOMEM ENFILE EMFILE ENOLCK EREMOTEIO ENODEV ENXIO "
    "ENOTCONN ECONNRESET ECONNABORTED ECONNREFUSED EPIPE EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ENETRESET ENOLINK "
    "ECOMM"
)
_PASSING = {getattr(errno, name) for name in _PASSING_NAMES.split()}
_STACK_LINES = 60  # shown of each hung rank
# folders of the packages of this distribution
OWN_FILES = tuple(
    f"{Path(__file__).parents[2] / package}{os.sep}"
    for package in ("paceline", "paceline_federated", "paceline_lab", "paceline_server")
)


@dataclass(frozen=True)
class ErrorRecord:
    """Record that a rank writes when it raises.

    `time` is in seconds since the epoch. `secondary`: the rank only lost a peer, so another rank is the cause.
    `explained`: a PacelineError, whose message is enough for a user unless the error comes from their own code.
    `may_pass`: the cause lies outside the program, such as a disk or a killed process, and another attempt may succeed.
    """

    rank: int
    host: str
    pid: int
    time: float
    type: str
    message: str  # with the type's name in front, unless `explained`
    traceback: str
    secondary: bool
    explained: bool
    may_pass: bool = False
    code: str = "launch.rank_raised"  # of a PacelineError, with its fields
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException, rank: int) -> ErrorRecord:
        """Make a record of `error`, which this process has just caught.

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
            **told,
        )

    def cause(self, ranks: int) -> str:
        """The error as a user reads it, without its traceback."""
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
    """End of one rank; `code` is None if it still runs, negative for a signal."""

    status: RankStatus
    pid: int
    code: int | None
    alive_at: float  # seconds since the epoch when it was last seen alive
    record: ErrorRecord | None
    stack: str  # faulthandler's output, after a crash or on request
    stopped: bool  # held by SIGSTOP
    host: str = HOST
    remote: bool = False  # on another host; `oom_kills` is the count of its kernel
    oom_kills: int | None = None

    @property
    def primary(self) -> bool:
        """True if the rank failed by itself. SIGABRT without a record comes from C++ code that lost a peer."""
        if self.record:
            return not self.record.secondary
        return self.code not in (None, 0, -signal.SIGABRT)

    @property
    def failed_at(self) -> float:
        """Time of the failure; for a rank without a record, the earliest possible time."""
        return self.record.time if self.record else self.alive_at


def root_cause(ends: Sequence[RankEnd], oom_kills: int | None) -> LaunchError:
    """Return the failed rank: the first primary failure, else the rank that others waited for.

    Args:
        oom_kills: processes of this control group that were killed for lack of memory during the attempt; None if the
            kernel does not report them.
    """
    own = sorted((e for e in ends if e.primary), key=lambda e: e.failed_at)
    if own:
        return _describe(own[0], len(ends), oom_kills)
    if stopped := [e for e in ends if e.stopped]:
        return hang(stopped, ends, time.monotonic_ns())
    lost = min((e for e in ends if e.record or e.code), key=lambda e: e.failed_at)
    failure = _describe(lost, len(ends), oom_kills)
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


def hang(hung: Sequence[RankEnd], ends: Sequence[RankEnd], now_ns: int) -> LaunchError:
    """Describe the failure of ranks without progress for longer than allowed.

    Stopped ranks come first, then the ranks with the longest idle time.
    """
    hung = sorted(hung, key=lambda e: (not e.stopped, e.status.changed_ns))
    first = hung[0]
    idle = f"for {first.status.idle_s(now_ns):.0f} s"
    waiting = [e for e in ends if e.code is None and e not in hung and e.status.phase == "sync"]
    tail = f" while {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it" if waiting else ""
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
    stacks = "".join(f"\n\nThe stack of rank {e.status.rank}:\n{shortened(e.stack)}" for e in hung if e.stack)
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
    )


def _describe(end: RankEnd, ranks: int, oom_kills: int | None) -> LaunchError:
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
        why = _reason(-end.code, end.oom_kills if end.remote else oom_kills)
        stack = f"\n\n{shortened(end.stack)}" if end.stack else ""
        return LaunchError(
            "launch.rank_killed",
            "{how}{why}; {then}.{stack}",
            how=_killed(end),
            why=why,
            then=others,
            stack=stack,
            rank=rank,
        )
    return LaunchError(
        "launch.rank_left",
        "{who} ended with exit code {code} in {where} and reported no error. Check whether the job's code calls "
        "os._exit(). {then}.",
        who=_who(end),
        code=end.code,
        where=_where(end.status),
        then=others,
        rank=rank,
    )


def killed(end: RankEnd, oom_kills: int | None, *, serves: bool = False) -> str:
    """Describe a killed rank: its signal and what it was doing.

    If the kernel killed the rank, the text gives the reason.

    Args:
        oom_kills: as for `root_cause`, but on the rank's host, since the previous loss of a rank there.
        serves: the rank is a server, which takes no steps.
    """
    assert end.code is not None
    return f"{_killed(end, serves=serves)}{_reason(-end.code, oom_kills) if oom_kills else ''}"


def _killed(end: RankEnd, *, serves: bool = False) -> str:
    assert end.code is not None
    who, how = _who(end), f"was killed by {_signal_name(-end.code)}"
    return f"{who}, a server, {how}" if serves else f"{who} {how} in {_where(end.status)}"


def _who(end: RankEnd) -> str:
    return f"rank {end.status.rank} (host {end.host}, pid {end.pid})"


def _where(status: RankStatus) -> str:
    return "start-up" if status.phase == "starting" else f"{status.phase} of step {status.step}"


def _ranks(ends: Sequence[RankEnd]) -> str:
    numbers = [str(e.status.rank) for e in ends]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


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
    """Return the stack traces that a rank wrote beside its error record, or ""."""
    path = record.with_suffix(".stack")
    return path.read_text(errors="replace") if path.exists() else ""


def shortened(stack: str) -> str:
    """Shorten the output of faulthandler to one screen, main thread first.

    Frames around the rank's function are left out.
    """
    threads = [thread for thread in stack.split("\n\n") if "hread 0x" in thread and "_kill_when_orphaned" not in thread]
    threads.sort(key=lambda thread: "Current thread" not in thread)
    around = ("elastic/rank.py", "<frozen runpy>")
    lines = [line for line in "\n\n".join(threads).splitlines() if not any(place in line for place in around)]
    return "\n".join(lines[:_STACK_LINES])


def traceback_of_users_code(error: PacelineError) -> str:
    """Return the traceback of the user's error behind `error`; "" if the message is enough.

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
    told_elsewhere = getattr(cause, "__notes__", None)  # of a loader process
    return "".join(traceback.format_exception(type(cause), cause, frames)) if frames or told_elsewhere else ""


def _may_pass(error: BaseException | None) -> bool:
    """True if a disk, network or loader process caused the error, and not the job."""
    if error is None:
        return False
    if getattr(error, "may_pass", False) or (isinstance(error, OSError) and error.errno in _PASSING):
        return True
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return True
    return _may_pass(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _only_lost_a_peer(error: BaseException | None) -> bool:
    """True if the error is a lost connection: another rank's failure, seen from here."""
    return error is not None and (lost_a_peer(error) or _only_lost_a_peer(error.__cause__))


def state_of(pid: int) -> str:
    """Return the state letter of a process's first thread; "" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def oom_kills() -> int | None:
    """Count the processes of this control group that the kernel killed for lack of memory.

    None if the kernel does not report it.
    """
    for file in _memory_counters():
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return None


def _memory_counters() -> list[Path]:
    """Candidate paths of this control group's counters. In a container the group is often the root."""
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
    """The printable text of an error, with `[code]` after each problem; dim in a terminal."""
    shown = "\x1b[2m[{}]\x1b[0m" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else "[{}]"
    texts = [problem.text for problem in error.problems]
    if not cause.startswith(whole := "\n".join(texts)):  # the text has a location or a summary around its problem
        return f"{printable(cause)}  {shown.format(error.code)}"
    lines = [f"{printable(problem.text)}  {shown.format(problem.code)}" for problem in error.problems]
    return "\n".join(lines) + printable(cause.removeprefix(whole))


def cause_and_traceback(error: Exception) -> tuple[str, str]:
    """Return the message of an error, and its traceback; empty if the message is enough."""
    if isinstance(error, PacelineError):
        if error.traceback:
            lines = str(error).replace(error.traceback, "").strip().splitlines()
            return "\n".join(line for line in lines if line.strip()), error.traceback
        return str(error), traceback_of_users_code(error).rstrip()
    cause = "".join(traceback.format_exception_only(error)).strip()
    return cause, "".join(traceback.format_exception(error)).rstrip()


def below(frames: str, name: str = "newest", folder: Path | None = None) -> str:
    """Return the lines below the cause of an error.

    These lines give the location of the error and the file with the traceback, or the traceback itself.

    Args:
        frames: the traceback.
        name: name of the file, without `.txt`.
        folder: folder of the file; None is a folder in the user's cache.
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
    """Context that counts SIGINT and SIGTERM instead of ending this process.

    `first` is the name of the first signal, or None. A later SIGINT sets `kill`. A signal that was ignored before stays
    ignored (as under nohup). Outside the main thread Python handles no signals, so nothing changes there.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.kill = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
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
    """Turn SIGTERM into an exit with code 143 inside the context. A launch handles SIGTERM itself."""
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
    """Error of a run that a signal stopped before something happened."""
    return LaunchError(
        "launch.stopped_by_signal",
        "{signal} stopped the run before {what}.",
        signal=name,
        what=what,
        exit_code=128 + signal.Signals[name],
    )


def exit_code_of(error: BaseException) -> int:
    """Exit code of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "code", None) if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
    return code if isinstance(code, int) else 0 if isinstance(error, SystemExit) and code is None else 1
