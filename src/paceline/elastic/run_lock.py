"""Lock of a run directory: one training at a time.

On one host the kernel knows whether a holder lives: the file is locked (flock) by the launcher and, through
the descriptor that they inherit, by its ranks, so a launcher that was killed still has the run until its last
rank has ended. Other hosts may share the directory over a file system that does not carry such locks: they
see the file's content, and its time of change, which a heartbeat keeps moving.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import msgspec

from paceline.cluster.machine import boot_id
from paceline.errors import RunError
from paceline.files import PRIVATE_FILE

LOCK = "lock"
BEAT_S = 5.0
STALE_S = 30.0  # without a heartbeat, another host's holder is taken for dead
FENCE_S = 15.0  # the same, for hosts that have met without a holder that they have lost
_GIVE_UP_S = 60.0  # for such a holder to end
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """The process that trains in a run directory.

    Attributes:
        started: start time of the process in kernel clock ticks; tells a reused pid from the same process.
        machine: boot id of its kernel.
        since: Unix seconds when it took the run.
        token: unique to this acquisition.
    """

    host: str
    pid: int
    started: int
    machine: str
    since: float
    token: str

    @classmethod
    def this_process(cls) -> Holder:
        """This process as a new holder, with a token of its own."""
        return cls(
            socket.gethostname(),
            os.getpid(),
            _started(os.getpid()) or 0,
            boot_id(),
            round(time.time(), 3),
            secrets.token_hex(8),
        )

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """The holder that a lock file names; None where it is empty or unreadable.

        A crash or another program may have left something else there.
        """
        try:
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, RecursionError):
            return None

    @property
    def runs_here(self) -> bool:
        """True if the holder is a living process of this host.

        Only as far as this process can see others.
        """
        return self.machine == boot_id() and _started(self.pid) == self.started

    @property
    def is_gone(self) -> bool:
        """True if the holder was a process of this host, and has ended."""
        return self.machine == boot_id() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return (
            f"process {self.pid} on host {self.host}, since "
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"
        )


class RunLock:
    """Exclusive right of this process and its ranks to train in a run directory.

    As a context manager it gives the right back at the end.

    Args:
        run: the directory, which exists.
        say: told, in words, when a run is waited for or taken over.
        on_lost: called, in another thread, when the run was taken over because this process showed no sign of
            life; the text says by whom. None: `check` tells.
        succeeds: the holder is lost to the run's hosts, which continue the run: wait for its end, or until it shows
            no sign of life.
        has_ended: asked where such a holder was a process of another host: true if it is known to have ended.

    Raises:
        RunError: somebody else trains in it; names who.
    """

    def __init__(
        self,
        run: Path,
        say: Callable[[str], object] = lambda line: None,
        on_lost: Callable[[RunError], object] | None = None,
        *,
        succeeds: bool = False,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._succeeds, self._has_ended = succeeds, has_ended
        self._beat_at = time.monotonic()
        self.run, self.path, self.say, self.on_lost = run, run / LOCK, say, on_lost
        self.own = Holder.this_process()
        self.lost: RunError | None = None
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            text = (
                f"the run cannot be kept in {run}: {error.strerror}. Name a directory that can be written with --run."
            )
            raise RunError(text) from error
        try:
            self._acquire()
        except BaseException:
            os.close(self.fd)
            raise
        self._beat = threading.Thread(target=self._keep_alive, name="run-lock", daemon=True)
        self._beat.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise RunError where the run was taken over."""
        if self.lost is None and time.monotonic() - self._beat_at > 2 * BEAT_S:
            self._look()  # this process was stopped, and goes on
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        """Give the run back."""
        if self._beat is None:
            return
        self._ended.set()
        self._beat.join()
        self._beat = None
        with suppress(OSError):  # a disk that is gone: the kernel's lock goes with the descriptor
            if self._is_ours():
                os.ftruncate(self.fd, 0)
        os.close(self.fd)

    def _acquire(self) -> None:
        seen = self._content()
        alone = self._lock()
        holder = Holder.parse(seen)
        if holder is not None and self._succeeds:
            self._await_end_of_lost()
            self._write()
            return
        # Who succeeded a stopped holder has the kernel's lock a beat after that one's end.
        if not alone or (holder is not None and holder.runs_here):
            raise self._refused(holder)
        if holder is not None and (holder.machine != boot_id() or self._without_locks):
            holder = self._await_sign_of_life(holder)
        if holder is not None:
            self.say(f"the run was held by {holder}, which is no more: it is taken over")
        self._write()

    def _lock(self) -> bool:
        """Take the kernel's lock; False where a living process has it."""
        self._locked, self._without_locks = True, False
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._locked = False
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunError(f"{self.path} cannot be locked: {error.strerror}") from error
            self._without_locks = True
        return True

    def _await_sign_of_life(self, holder: Holder) -> Holder | None:
        """Wait until another host's holder counts as dead; None if it released the run.

        The file's time of change is compared with itself, not with a clock: hosts' clocks differ.

        Raises:
            RunError: it lives.
        """
        before, until = self._stamp(), time.monotonic() + STALE_S
        self.say(f"the run is held by {holder}; waiting up to {STALE_S:g} s for a sign of life from there")
        while time.monotonic() < until:
            time.sleep(min(0.5, STALE_S / 10))
            if Holder.parse(self._content()) is None:
                return None
            if self._stamp() != before:
                raise self._refused(holder)
        return holder

    def _await_end_of_lost(self) -> None:
        """Wait until the holder has ended, or counts as dead.

        A stopped process keeps the kernel's lock. Once it goes on it finds this one's name before it writes.

        Raises:
            RunError: it lives.
        """
        began = since = ask_at = time.monotonic()
        stamp, told = self._stamp(), False
        while True:
            holder, alone, now = Holder.parse(self._content()), self._lock(), time.monotonic()
            here = holder is not None and holder.machine == boot_id()
            if alone and (holder is None or (here and not (self._without_locks and holder.runs_here))):
                return
            if alone and not here and now >= ask_at:
                if self._has_ended():
                    return
                ask_at = now + 1.0
            if self._stamp() != stamp:
                stamp, since = self._stamp(), now
            orphans = not alone and holder is not None and here and not holder.runs_here
            if now - since > FENCE_S and not orphans:
                return
            if now - began > _GIVE_UP_S:
                raise self._refused(holder)
            if not told:
                told = True
                self.say(f"the run was held by {holder}; waiting for the end of what runs there")
            time.sleep(0.02)

    def _refused(self, holder: Holder | None) -> RunError:
        who = str(holder) if holder is not None else "a process that is just starting"
        orphans = holder is not None and holder.machine == boot_id() and not holder.runs_here
        more = (
            " That process is dead, but ranks that it started still save and end: try again in half a minute."
            if orphans
            else ""
        )
        return RunError(
            f"{self.run} is being trained by {who}.{more or ' Wait for its end, stop it there, or name another run.'}"
        )

    def _keep_alive(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._look()
            if self.lost is not None:
                if self.on_lost is not None:
                    self.on_lost(self.lost)
                return

    def _look(self) -> None:
        """Show a sign of life, or see that the run was taken over."""
        with suppress(OSError):  # a full or read-only disk: told by whoever writes there
            if not self._is_ours():
                self.lost = RunError(
                    f"{self.run} was taken over by {Holder.parse(self._content()) or 'somebody else'}, as "
                    "nothing was heard of this process for a while; it ends here, and what it saved stays"
                )
                return
            if not self._locked:
                self._lock()  # of a process that was stopped, and has ended since
            os.utime(self.fd)
            self._beat_at = time.monotonic()

    def _is_ours(self) -> bool:
        holder = Holder.parse(self._content())
        return holder is not None and holder.token == self.own.token

    def _write(self) -> None:
        try:
            text = json.dumps(asdict(self.own)).encode() + b"\n"
            os.pwrite(self.fd, text, 0)
            os.ftruncate(self.fd, len(text))
            os.fsync(self.fd)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}. Make room, then try again.") from error

    def _content(self) -> bytes:
        """The lock file's bytes now.

        It is opened anew, because NFS asks the server only then.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)

    def _stamp(self) -> int:
        self._content()
        return os.stat(self.path).st_mtime_ns


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
