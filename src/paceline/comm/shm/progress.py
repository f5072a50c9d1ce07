"""Progress of shared-memory operations: a waiting thread drives all generators of the process.

A waiting thread spins briefly, then yields its core, then sleeps on this process's *doorbell*. The doorbell is a word
of shared memory that peers change after they store data for this process. Therefore, no rank spins for long on a core
that another rank needs, and a wait for one group never blocks another group. Every wait ends at its deadline, or soon
after a peer has died.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.cluster.cgroup import cpu_quota
from paceline.comm.operation import GRACE_S, WATCH_S, Driver, Operation, call_all
from paceline.comm.shm.segment import Handle, Segment, attach, create
from paceline.rank_environment import RankEnvironment, is_our_rank
from paceline.shared_words import acquiring, futex_wait, futex_wake, publish

# slightly longer than a wait of ranks in lockstep; not much longer, because ranks may share a core
SPIN_S = 20e-6
_YIELD_S = 2e-3  # still polling, but yielding the core to any other thread
_YIELD_OVERSUBSCRIBED_S = 200e-6  # the same with more ranks than cores
_NAP_S = 0.1  # longest sleep between two checks that the peers are alive
_SLEEPERS, _RUNG = 0, 1  # the words of a doorbell


@dataclass(eq=False)
class Peer:
    """Process of this host, with rank, doorbell, and a pidfd that shows the process's end."""

    rank: int
    pid: int
    doorbell: memoryview
    bell_address: int
    life: int

    def why_over(self) -> str | None:
        """Report that the process has ended, even if its parent process has not reaped it."""
        poll = select.poll()  # `select` does not support descriptors above 1023
        poll.register(self.life, select.POLLIN)
        return f"{self.state()} has ended" if poll.poll(0) else None

    def state(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def ring(self) -> None:
        """Wake the peer if it sleeps.

        Before this call, the word for which the peer waits must be published.
        """
        if self.doorbell[_SLEEPERS]:
            self.doorbell[_RUNG] = (self.doorbell[_RUNG] + 1) & 0xFFFFFFFF
            futex_wake(self.bell_address)


class ShmProgress(Driver):
    """Driver of all shared-memory operations of this process."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self.oversubscribed = False  # True if this host has more ranks than cores for them
        self._own = create(4096, "doorbell")
        self._doorbell = self._own.segment.words(0, 2)
        self._doorbell_address = self._own.segment.address + 8 * _RUNG
        self._peers: dict[Handle, tuple[Segment, int]] = {}
        self._wanted = threading.Event()
        self._urgent = threading.Event()
        self._watching = False

    @property
    def doorbell(self) -> Handle:
        """Handle with which peers ring this process's doorbell."""
        return self._own.handle

    def meet(self, rank: int, doorbell: Handle) -> Peer:
        """Return the peer with this doorbell, as a rank of a group."""
        if doorbell not in self._peers:
            segment = attach(doorbell)
            self._peers[doorbell] = (segment, os.pidfd_open(doorbell.pid))
        segment, life = self._peers[doorbell]
        return Peer(rank, doorbell.pid, segment.words(0, 2), segment.address + 8 * _RUNG, life)

    def expect(self, ranks: int) -> None:
        """Register a group with this number of ranks on this host.

        If there are more ranks than cores, spinning would slow down the other ranks.
        """
        # a pinned rank's affinity does not show the other ranks' cores
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

    def spin(self, is_over: Callable[[], bool]) -> bool:
        """Poll `is_over` briefly without yielding the core; return True if it became true."""
        until = time.perf_counter() + (0.0 if self.oversubscribed else SPIN_S)
        while not is_over():
            if time.perf_counter() > until:
                return False
        return True

    def drive(self, is_over: Callable[[], bool]) -> None:
        """Drive all operations until `is_over` returns True: spin, then yield, then sleep."""
        started = time.perf_counter()
        yield_after, sleep_after = (0.0, _YIELD_OVERSUBSCRIBED_S) if self.oversubscribed else (SPIN_S, _YIELD_S)
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

        An operation is hopeless if it has missed its deadline or waits for a dead peer.
        """
        with self.lock:
            publish(self._doorbell, _SLEEPERS, self._doorbell[_SLEEPERS] + 1)
            rung = self._times_rung()
        try:
            with self.lock:
                calls = self._advance()  # data that arrived before the doorbell could be rung
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

    @acquiring
    def _times_rung(self) -> int:
        return self._doorbell[_RUNG]

    def _run(self) -> None:
        """Run the background thread, which drives operations without a waiting caller.

        The thread sleeps while no operation is in progress.
        """
        while not self._ending:
            self._wanted.wait()
            self._wanted.clear()
            until = time.monotonic() + WATCH_S
            while self._keeps_watching(until):
                urgent = self._urgent.wait(GRACE_S)
                self._urgent.clear()
                # The thread never spins, because spinning would slow down the computing thread.
                while self._busy and not self._ending and (urgent or self._is_late()):
                    until = time.monotonic() + WATCH_S
                    self._sleep(lambda: not self._busy or self._ending)

    def _is_late(self) -> bool:
        with self.lock:
            return self._oldest_s() > GRACE_S

    def _keeps_watching(self, until: float) -> bool:
        with self.lock:  # either this thread notices a new operation, or the caller sees that no thread watches
            self._watching = not self._ending and (bool(self._busy) or time.monotonic() < until)
            return self._watching
