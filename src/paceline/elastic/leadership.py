"""Leadership of a run: the exclusive right to train it and write its files.

The leader writes its name in one shared place and renews a heartbeat there. A candidate that finds another name waits
for a heartbeat: if there is one, the candidate is refused; otherwise it takes over. A leader that finds another name
has lost the run and stops, so that it no longer writes to the run. There are two kinds of place: `RunLock` is a file in
the run's directory, `Lease` an object at the run's URL. After the loss of a host, `is_quorum` and the order of hosts
(`hosts/takeover.py`) decide which host may try to lead. The lock makes the final decision.
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
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

from paceline.cluster.machine import boot_id
from paceline.errors import RunError, StorageError
from paceline.files import PRIVATE_FILE, open_to_append

if TYPE_CHECKING:
    from paceline.storage.store import Store

LOCK = "lock"  # name of the file or object
_MOST_BYTES = 4096
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def is_quorum(there: int, of: int) -> bool:
    """True if the hosts may continue without the others: at least half are present.

    If the network separates two halves, only the half that gets the lock of the run continues.
    """
    return 2 * there >= of


@dataclass(frozen=True)
class Holder:
    """Process that trains a run and holds its lock.

    Attributes:
        started: start time of the process in kernel clock ticks, which distinguishes the process from a later one with
            the same pid.
        machine: boot id of the kernel on which the process runs.
        since: Unix time at which the process acquired the run.
        token: random text that identifies this acquisition.
    """

    host: str
    pid: int
    started: int
    machine: str
    since: float
    token: str

    @classmethod
    def this_process(cls) -> Holder:
        """Make a holder for this process, with a new token."""
        pid, since = os.getpid(), round(time.time(), 3)
        return cls(socket.gethostname(), pid, _started(pid) or 0, boot_id(), since, secrets.token_hex(8))

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """Parse the content of a lock; return None if the lock is empty or unreadable.

        A crash or another program may have left invalid content.
        """
        try:
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, RecursionError):
            return None

    @property
    def runs_here(self) -> bool:
        """True if the holder is a running process of this host.

        The result is false for processes that are not visible to this process.
        """
        return self.machine == boot_id() and _started(self.pid) == self.started

    @property
    def is_gone(self) -> bool:
        """True if the holder was a process of this host that has ended."""
        return self.machine == boot_id() and _started(self.pid) != self.started

    @property
    def text(self) -> bytes:
        """Content of the lock, which `parse` reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on host {self.host}, since {since}"


class Leadership(ABC):
    """Exclusive right of this process and its ranks to train a run.

    The context manager releases the run at its end.

    Args:
        place: directory or URL of the run, for messages.
        say: called with a message when this process waits for the run or takes it over.
        on_lost: called in another thread, with the error, when another process has taken over the run because this
            process showed no sign of life. If None, only `check` reports the loss.

    Attributes:
        beat_s: seconds between two signs of life.
        stale_s: seconds without a sign of life after which a holder counts as dead, unless the kernel shows that it
            runs.
        lost: error to raise if another process has taken over the run; None while this process holds the run.

    Raises:
        RunError: another process trains the run. The text names that process.
    """

    beat_s: ClassVar[float]
    stale_s: ClassVar[float]
    look_s: ClassVar[float]  # seconds between two checks for a sign of life of another holder

    def __init__(
        self, place: str, say: Callable[[str], object], on_lost: Callable[[RunError], object] | None = None
    ) -> None:
        self.place, self.say, self.on_lost = place, say, on_lost
        self.own = Holder.this_process()
        self.lost: RunError | None = None
        self._ended = threading.Event()
        self._fd = self._open()
        try:
            self._acquire()
        except BaseException:
            os.close(self._fd)
            raise
        self._beats: threading.Thread | None = threading.Thread(
            target=self._keep_alive, name=f"run-{LOCK}", daemon=True
        )
        self._beats.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise RunError if another process has taken over the run."""
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        """Release the run."""
        if self._beats is None:
            return
        self._ended.set()
        # the thread is still alive afterwards only if the storage does not answer; it is a daemon
        self._beats.join(self.beat_s)
        with suppress(OSError, StorageError):  # the disk is lost, or the object becomes stale by itself
            if not self._beats.is_alive() and self._is_own(self._holder()):
                self._remove()
        self._beats = None
        os.close(self._fd)

    @abstractmethod
    def _open(self) -> int:
        """Open the file whose kernel lock excludes other processes of this host."""

    @abstractmethod
    def _acquire(self) -> None:
        """Write this process's name to the shared place. Raise RunError if another process leads."""

    @abstractmethod
    def _content(self) -> bytes:
        """Read the current content of the shared place."""

    @abstractmethod
    def _show_life(self) -> None:
        """Renew the sign of life."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove this process's name from the shared place."""

    def _holder(self) -> Holder | None:
        return Holder.parse(self._content())

    def _is_own(self, holder: Holder | None) -> bool:
        return holder is not None and holder.token == self.own.token

    def _stamp(self) -> object:
        """Return a value that changes with every sign of life.

        The value is compared only with earlier values, and not with the local time, because the clocks of hosts differ.
        """
        return self._content()

    def _await_sign_of_life(self, holder: Holder) -> Holder | None:
        """Wait until a holder counts as dead; return None if it released the run.

        Raises:
            RunError: the holder still runs.
        """
        before, until = self._stamp(), time.monotonic() + self.stale_s
        self.say(f"the run is held by {holder}; waiting up to {self.stale_s:g} s for a sign of life from there")
        while time.monotonic() < until:
            time.sleep(min(self.look_s, self.stale_s / 10))
            if self._holder() is None:
                return None
            if self._stamp() != before:
                raise self._refused(holder)
        return holder

    def _refused(self, holder: Holder | None, more: str = "") -> RunError:
        who = str(holder) if holder is not None else "a process that is just starting"
        advice = more or "Wait for its end, stop it there, or name another run."
        return RunError(
            "run.in_use", "{place} is being trained by {holder}. {advice}", place=self.place, holder=who, advice=advice
        )

    def _keep_alive(self) -> None:
        while not self._ended.wait(self.beat_s):
            self._look()
            if self.lost is not None:
                if self.on_lost is not None:
                    self.on_lost(self.lost)
                return

    def _look(self) -> None:
        """Renew the sign of life, or record that another process has taken over the run."""
        with suppress(OSError, StorageError):  # the code that writes to the run reports such errors
            holder = self._holder()
            if self._is_own(holder):
                self._show_life()
                return
            self.lost = RunError(
                "run.taken_over",
                "{place} was taken over by {holder}, because this process showed no sign of life for some "
                "time. This process ends. Its saved checkpoints are kept.",
                place=self.place,
                holder=holder or "another process",
            )


class RunLock(Leadership):
    """Leadership by a lock file in the run's directory, which must exist.

    On one host, the kernel shows whether a holder still runs. The launcher locks the file (flock), and its ranks
    inherit the descriptor. If the launcher is killed, the run therefore stays locked until its last rank has ended.
    Other hosts may share the directory over a file system without such locks. They read the content of the file, and
    use its modification time as the sign of life.

    Args:
        succeeds: True if the hosts of the run have lost the holder and continue the run. This process then waits until
            the holder has ended or shows no sign of life.
        has_ended: function that returns True if the lost holder is known to have ended. It is called only if the holder
            was on another host.
    """

    beat_s, stale_s, look_s = 5.0, 30.0, 0.5
    fence_s: ClassVar[float] = 15.0  # replaces `stale_s` for hosts that continue the run after the loss of the holder
    give_up_s: ClassVar[float] = 60.0  # longest wait for a lost holder to end

    def __init__(
        self,
        run: Path,
        say: Callable[[str], object] = lambda line: None,
        on_lost: Callable[[RunError], object] | None = None,
        *,
        succeeds: bool = False,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.path = run, run / LOCK
        self._succeeds, self._has_ended = succeeds, has_ended
        self._beat_at = time.monotonic()
        super().__init__(str(run), say, on_lost)

    @property
    def fd(self) -> int:
        """Descriptor of the locked file, which ranks inherit."""
        return self._fd

    def check(self) -> None:
        if self.lost is None and time.monotonic() - self._beat_at > 2 * self.beat_s:
            self._look()  # this process was suspended, and has resumed
        super().check()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            raise RunError(
                "run.directory_unwritable",
                "the run cannot be kept in {run}: {reason}. Name a writable directory with --run.",
                run=self.run,
                reason=error.strerror,
            ) from error

    def _acquire(self) -> None:
        holder, alone = self._holder(), self._lock()
        if holder is not None and self._succeeds:
            self._await_end_of_lost()
            self._write()
            return
        # The successor of a suspended holder gets the kernel's lock at the first beat after the end of that holder.
        if not alone or (holder is not None and holder.runs_here):
            raise self._refused(holder)
        if holder is not None and (holder.machine != boot_id() or self._without_locks):
            holder = self._await_sign_of_life(holder)
        if holder is not None:
            self.say(f"the run was held by {holder}, which is no more: it is taken over")
        self._write()

    def _lock(self) -> bool:
        """Take the kernel's lock; return False if another process holds it."""
        self._locked, self._without_locks = True, False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._locked = False
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunError(
                    "run.lock_failed", "{path} cannot be locked: {reason}", path=self.path, reason=error.strerror
                ) from error
            self._without_locks = True
        return True

    def _await_end_of_lost(self) -> None:
        """Wait until the holder has ended, or counts as dead.

        A suspended process keeps the kernel's lock. When it resumes, it finds the name of this process before it
        writes.

        Raises:
            RunError: the holder still runs.
        """
        began = since = ask_at = time.monotonic()
        stamp, told = self._stamp(), False
        while True:
            holder, alone, now = self._holder(), self._lock(), time.monotonic()
            here = holder is not None and holder.machine == boot_id()
            if alone and (holder is None or (here and not (self._without_locks and holder.runs_here))):
                return
            if alone and not here and now >= ask_at:
                if self._has_ended():
                    return
                ask_at = now + 1.0
            if self._stamp() != stamp:
                stamp, since = self._stamp(), now
            orphans = not alone and holder is not None and holder.is_gone
            if now - since > self.fence_s and not orphans:
                return
            if now - began > self.give_up_s:
                raise self._refused(holder)
            if not told:
                told = True
                self.say(f"the run was held by {holder}; waiting for the end of what runs there")
            time.sleep(0.02)

    def _refused(self, holder: Holder | None, more: str = "") -> RunError:
        if holder is not None and holder.is_gone:
            more = "That process is dead, but ranks that it started still save and end: try again in half a minute."
        return super()._refused(holder, more)

    def _show_life(self) -> None:
        if not self._locked:
            self._lock()  # a suspended process that held the lock may have ended meanwhile
        os.utime(self._fd)
        self._beat_at = time.monotonic()

    def _remove(self) -> None:
        os.ftruncate(self._fd, 0)

    def _write(self) -> None:
        try:
            text = self.own.text
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))
            os.fsync(self._fd)
        except OSError as error:
            raise RunError(
                "run.disk_full",
                "{path} cannot be written: {reason}. Free some space, then try again.",
                path=self.path,
                reason=error.strerror,
            ) from error

    def _content(self) -> bytes:
        """Read the lock file.

        The file is opened for every read, because NFS asks the server for changes only when a file is opened.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.read(fd, _MOST_BYTES)
        finally:
            os.close(fd)

    def _stamp(self) -> int:
        self._content()
        return os.stat(self.path).st_mtime_ns


class Lease(Leadership):
    """Leadership by an object in the store at the run's URL.

    Only one of several processes can create the object. A store cannot check whether the holder still runs, so the
    holder rewrites the object every few seconds. If two processes take over the run of a dead holder in the same
    second, both may succeed for a moment. The process that then finds the name of the other process ends.

    Args:
        own_file: file of this user on this host. Its lock immediately shows whether another process on the same host
            trains the run.

    Raises:
        StorageError: the store cannot be used.
    """

    beat_s, stale_s, look_s = 10.0, 60.0, 2.0

    def __init__(self, store: Store, own_file: Path, say: Callable[[str], object]) -> None:
        self.store, self.own_file = store, own_file
        self._written = 0  # number of rewrites
        super().__init__(store.url, say)

    def _open(self) -> int:
        return open_to_append(self.own_file)

    def _acquire(self) -> None:
        before = Holder.parse(os.pread(self._fd, _MOST_BYTES, 0))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused(before) from None
        if not self.store.create(LOCK, self.own.text):
            holder = self._holder()
            # This process got the lock of the file, so the previous holder on this host has ended.
            if holder is not None and (before is None or before.token != holder.token):
                holder = self._await_sign_of_life(holder)
            self.store.delete([LOCK])
            if not self.store.create(LOCK, self.own.text):
                raise self._refused(self._holder())
            if holder is not None:
                self.say(f"the run was held by {holder}, which is no more: it is taken over")
        os.ftruncate(self._fd, 0)
        os.write(self._fd, self.own.text)

    def _is_own(self, holder: Holder | None) -> bool:
        return holder is None or super()._is_own(holder)  # a lock object that was removed is written again

    def _show_life(self) -> None:
        self._written += 1
        self.store.write(LOCK, self.own.text + b"\n" * (self._written % 1000))

    def _remove(self) -> None:
        self.store.delete([LOCK])

    def _content(self) -> bytes:
        return self.store.read(LOCK, _MOST_BYTES) or b""


def _started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or None after its end."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
