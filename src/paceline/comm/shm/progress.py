"""Progress of shared-memory operations: whoever waits drives all generators of the process.

A wait spins briefly, then offers its core to others, then sleeps on this process' *doorbell*: a word of shared memory
that peers ring after they have stored data that this process may be waiting for. So no rank spins for long on a core
that another one needs, and waiting for one group never holds up another. Every wait ends: at its deadline, or soon
after a peer has died.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.cluster.cgroup import cpu_quota
from paceline.comm.operation import GRACE_S, WATCH_S, Driver, Operation, call_all
from paceline.comm.shm.segment import Handle, Segment, attach, create
from paceline.rank_environment import RankEnvironment, is_our_rank

# longer than a wait of ranks that keep step; they may have been put on one core, so no longer than that
_SPIN_S = 20e-6
_YIELD_S = 2e-3  # still looking, but any thread that wants the core gets it
_YIELD_OVERSUBSCRIBED_S = 200e-6  # the same with more ranks than cores
_NAP_S = 0.1  # the longest sleep between two looks at whether the peers live
_SLEEPERS, _RUNG = 0, 1  # the words of a doorbell


@dataclass(eq=False)
class Peer:
    """Another process of this host: rank, doorbell, and a pidfd that shows its end."""

    rank: int
    pid: int
    doorbell: memoryview
    bell_address: int
    life: int

    def why_over(self) -> str | None:
        """Report that the process has ended, even if its parent has not reaped it yet."""
        poll = select.poll()  # `select` knows no descriptor above 1023
        poll.register(self.life, select.POLLIN)
        return f"{self.state()} has ended" if poll.poll(0) else None

    def state(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def ring(self) -> None:
        """Wake it if it sleeps. A fence must lie between the store that it waits for and this look."""
        if self.doorbell[_SLEEPERS]:
            self.doorbell[_RUNG] = (self.doorbell[_RUNG] + 1) & 0xFFFFFFFF
            futex_wake(self.bell_address)


class ShmProgress(Driver):
    """Drives the operations of this process, of all its groups over shared memory."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self.oversubscribed = False  # whether there are more ranks on this host than cores for them
        self._own = create(4096, "doorbell")
        self._doorbell = self._own.segment.words(0, 2)
        self._doorbell_address = self._own.segment.address + 8 * _RUNG
        self._peers: dict[Handle, tuple[Segment, int]] = {}
        self._wanted = threading.Event()
        self._urgent = threading.Event()
        self._watching = False

    @property
    def doorbell(self) -> Handle:
        """The handle that peers need to ring this process' doorbell."""
        return self._own.handle

    def meet(self, rank: int, doorbell: Handle) -> Peer:
        """The process that has this doorbell, as a rank of a group."""
        if doorbell not in self._peers:
            segment = attach(doorbell)
            self._peers[doorbell] = (segment, os.pidfd_open(doorbell.pid))
        segment, life = self._peers[doorbell]
        return Peer(rank, doorbell.pid, segment.words(0, 2), segment.address + 8 * _RUNG, life)

    def expect(self, ranks: int) -> None:
        """Register a group with so many ranks on this host.

        With more ranks than cores, spinning would slow down the others.
        """
        # then its affinity says nothing of the other ranks' cores
        pinned = is_our_rank() and bool(RankEnvironment.from_env().cores)
        cores = (os.cpu_count() or 1) if pinned else len(os.sched_getaffinity(0))
        self.oversubscribed = self.oversubscribed or ranks > min(cores, cpu_quota() or cores)

    def close(self) -> None:
        super().close()
        for _, life in self._peers.values():
            os.close(life)
        self._peers.clear()
        self._own.close_descriptor()

    def in_background(self, operation: Operation) -> None:
        with self.lock:
            if operation.done:
                return
            if self._thread is None:
                self._start_thread("paceline-shm")
            if not self._watching:
                self._wanted.set()

    def _hurry(self) -> None:
        self._urgent.set()

    def _wake_thread(self) -> None:
        self._wanted.set()
        self._urgent.set()
        self._doorbell[_RUNG] = (self._doorbell[_RUNG] + 1) & 0xFFFFFFFF
        futex_wake(self._doorbell_address)

    def drive(self, is_over: Callable[[], bool]) -> None:
        """Drive everything until `is_over`: look, then yield the core, then sleep."""
        started = time.perf_counter()
        yield_after, sleep_after = (0.0, _YIELD_OVERSUBSCRIBED_S) if self.oversubscribed else (_SPIN_S, _YIELD_S)
        while True:
            with self.lock:
                calls = self._advance()
            call_all(calls)
            if is_over():
                return
            waited = time.perf_counter() - started
            if waited > sleep_after:
                self._sleep(is_over)
            elif waited > yield_after:
                os.sched_yield()

    def _sleep(self, is_over: Callable[[], bool]) -> None:
        """Sleep until the doorbell rings or a short time is over, then fail hopeless operations.

        Hopeless ones are late or wait for a dead peer.
        """
        with self.lock:
            self._doorbell[_SLEEPERS] += 1
            fence()
            rung = self._doorbell[_RUNG]
        try:
            with self.lock:
                calls = self._advance()  # what came before the doorbell could be rung
            call_all(calls)
            if not is_over():
                futex_wait(self._doorbell_address, rung, _NAP_S)
        finally:
            with self.lock:
                self._doorbell[_SLEEPERS] -= 1
        with self.lock:
            calls = self._advance()
            self._fail_hopeless()
            calls += self._advance()
        call_all(calls)

    def _run(self) -> None:
        """The background thread: drives operations that nobody has waited for.

        It sleeps while nothing is in progress.
        """
        while not self._ending:
            self._wanted.wait()
            self._wanted.clear()
            until = time.monotonic() + WATCH_S
            while self._keeps_watching(until):
                urgent = self._urgent.wait(GRACE_S)
                self._urgent.clear()
                # It never spins: what it would gain, it would take from the thread that computes.
                while self._busy and not self._ending and (urgent or self._is_late()):
                    until = time.monotonic() + WATCH_S
                    self._sleep(lambda: not self._busy or self._ending)

    def _is_late(self) -> bool:
        with self.lock:
            return self._oldest_s() > GRACE_S

    def _keeps_watching(self, until: float) -> bool:
        with self.lock:  # so that whoever starts an operation either is seen here, or sees that nobody watches
            self._watching = not self._ending and (bool(self._busy) or time.monotonic() < until)
            return self._watching


_SYS_FUTEX = 202  # x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_one_lock = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_no_shared_memory() -> str | None:
    """The reason why this machine cannot use shared memory, or None.

    Flags and data are plain stores, which other cores must see in their order. x86-64 promises that; other processors
    would need barriers that Python cannot give.
    """
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create (Linux 3.17 has)"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs the memory order of x86-64, and this is {platform.machine()}"
    return None


def futex_wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until woken at `address`, or until the time is over.

    Returns at once if the word is not `expected`.
    """
    seconds = int(timeout_s)
    timespec = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    # ctypes gives up the GIL around the call.
    result = _syscall(
        _SYS_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(timespec), None, 0
    )
    if result < 0 and (error := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(error, f"futex wait: {os.strerror(error)}")


def futex_wake(address: int) -> None:
    """Wake all who wait at `address`, in whatever process."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _WAKE, ctypes.c_uint32(_EVERYBODY), None, None, 0)


def fence() -> None:
    """Order earlier stores before later loads, which x86-64 does only at a locked instruction."""
    with _one_lock:
        return
