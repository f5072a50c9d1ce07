"""Turns of the threads that run microbatches; only one thread computes at a time.

Threads that compute at the same time share the cores, and finish at the same time. The serving processes would then
first have no work, and later get all microbatches at once.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# Seconds after which a thread computes without its turn: the thread that has the turn may wait for this thread, for
# example for a lock that the loop's code holds.
_PATIENCE_S = 5.0


class Turns:
    """Order in which threads compute; the waiting thread with the lowest number is next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: list[tuple[int, threading.Lock]] = []

    @contextmanager
    def taken(self, number: int) -> Iterator[None]:
        """Hold the turn within this context, except during `waiting`."""
        _own.turn = (self, number, self.take(number))
        try:
            yield
        finally:
            (_, _, has_turn), _own.turn = _own.turn, None
            if has_turn:
                self.give()

    def take(self, number: int) -> bool:
        """Wait for this thread's turn; return False if it did not come in time."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            given = threading.Lock()
            given.acquire()
            heapq.heappush(self._waiting, (number, given))
        if given.acquire(timeout=_PATIENCE_S):
            return True
        with self._lock:
            if (number, given) not in self._waiting:  # the turn came just now
                return True
            self._waiting.remove((number, given))
            heapq.heapify(self._waiting)
            return False

    def give(self) -> None:
        """End this thread's turn."""
        with self._lock:
            if self._waiting:
                heapq.heappop(self._waiting)[1].release()
            else:
                self._is_taken = False


_own = threading.local()


@contextmanager
def waiting() -> Iterator[None]:
    """Within this context, let other threads compute, because this thread waits."""
    turn: tuple[Turns, int, bool] | None = getattr(_own, "turn", None)
    if turn is None:
        yield
        return
    turns, number, has_turn = turn
    if has_turn:
        turns.give()
    try:
        yield
    finally:
        _own.turn = (turns, number, turns.take(number))


_idle: dict[int, list[ThreadPoolExecutor]] = defaultdict(list)  # idle pools by number of threads
os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Lend a pool of threads within this context, and keep the pool for later calls.

    Pools are kept because the first passes in a new thread are slow.
    """
    idle = _idle[count]
    pool = idle.pop() if idle else ThreadPoolExecutor(count, thread_name_prefix="paceline-microbatch")
    try:
        yield pool
    except BaseException:  # tasks may still run
        pool.shutdown(cancel_futures=True)
        raise
    idle.append(pool)


def end_threads() -> None:
    """End the threads of all idle pools."""
    for idle in _idle.values():
        while idle:
            idle.pop().shutdown()
