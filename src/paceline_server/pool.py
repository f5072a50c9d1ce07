"""Threads that run what they are given. One that hangs holds up neither the others nor the end of the process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Pool:
    """At most so many threads, each started when no other is idle."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError("a pool has at least one thread")
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()

    def put(self, task: Callable[[], None]) -> None:
        """Run a task, which raises nothing, in one of the threads. Tasks begin in their order."""
        self._tasks.put(task)
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name="paceline-remote-call", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self, deadline_s: float) -> None:
        """End the threads, and wait for them as long as that. What hangs stays, without holding up the process."""
        until = time.monotonic() + deadline_s
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task

    def _next(self) -> Callable[[], None] | None:
        with suppress(queue.Empty):
            return self._tasks.get_nowait()
        self._idle.release()
        return self._tasks.get()
