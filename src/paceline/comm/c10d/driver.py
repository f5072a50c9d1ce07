"""Base of what drives a process' operations, of all its groups over one transport.

A transport adds how a thread waits, and which operations can wait no longer (`shm/progress.py`, `tcp/progress.py`).
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

from paceline.comm.c10d.operation import Operation, OperationQueue, follow_up_error

GRACE_S = 1e-3  # for the caller to wait himself, before the thread drives what he has started
WATCH_S = 0.5  # how long the thread looks out for more, which spares the callers from waking it each time

Calls = list[Callable[[], None]]


class Driver(ABC):
    """Drives operations: the thread that waits does, or else a background thread.

    Attributes:
        lock: of everything here; what an operation calls when it is done is called without it.
    """

    _of_process: ClassVar[Any] = None
    _users: ClassVar[int] = 0

    def __init__(self, lock: threading.Lock | threading.RLock | None = None) -> None:
        self.lock = lock or threading.Lock()
        self._busy: dict[OperationQueue, None] = {}
        self._thread: threading.Thread | None = None
        self._ending = False

    @classmethod
    def acquire(cls) -> Self:
        """The one of this process, which lives from its first group to its last."""
        with _SHARING:
            cls._of_process = cls._of_process or cls()
            cls._users += 1
            return cls._of_process  # type: ignore[no-any-return]

    @classmethod
    def release(cls) -> None:
        """Let go of what `acquire` gave; the last group's call closes it."""
        with _SHARING:
            cls._users -= 1
            if cls._users == 0 and cls._of_process is not None:
                cls._of_process.close()
                cls._of_process = None

    def start(self, queue: OperationQueue, operation: Operation) -> None:
        """Append an operation to its queue, and continue with all as far as possible."""
        with self.lock:
            if queue.broken is not None:
                operation.fail(follow_up_error(queue.broken))
                return
            queue.operations.append(operation)
            self._busy[queue] = None
            calls = self._advance()
        call_all(calls)

    def call_when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Call back from the thread that finishes the operation; at once if it is done."""
        with self.lock:
            if not operation.done:
                operation.on_done.append(call)
                self._hurry()
                return
        call()

    def is_done(self, operation: Operation) -> bool:
        """True if it is done, after continuing as far as possible."""
        if not operation.done:
            with self.lock:
                calls = self._look()
            call_all(calls)
        return operation.done

    def wait(self, operation: Operation) -> None:
        """Drive everything until `operation` is done.

        Raises:
            SyncError, DistBackendError: a peer is gone, did not come within the deadline, or did something else.
        """
        if not operation.done:
            self.drive(lambda: operation.done)
        if operation.error is not None:
            raise operation.error

    def close(self) -> None:
        """End the background thread."""
        self._end_thread()

    # What a transport adds

    @abstractmethod
    def in_background(self, operation: Operation) -> None:
        """Drive an operation while nobody waits for it; soon, as most are waited for at once."""

    @abstractmethod
    def drive(self, is_over: Callable[[], bool]) -> None:
        """Drive everything until `is_over`."""

    @abstractmethod
    def _run(self) -> None:
        """Run the background thread, until `_ending`."""

    @abstractmethod
    def _wake_thread(self) -> None:
        """Wake the background thread; the caller holds the lock."""

    @abstractmethod
    def _hurry(self) -> None:
        """Have the background thread drive at once; the caller holds the lock."""

    @abstractmethod
    def _hopeless(self, operation: Operation) -> Exception | None:
        """The error of an operation that can wait no longer; None while it may."""

    def _look(self) -> Calls:
        """Continue as far as possible without waiting; the caller holds the lock and makes the calls."""
        return self._advance()

    # For the transports; the caller holds the lock

    def _advance(self) -> Calls:
        """Continue with all operations as far as possible; returns the calls to be made without the lock."""
        done: list[Operation] = []
        for queue in list(self._busy):
            done += queue.advance()
            if not queue.operations:
                del self._busy[queue]
        # most looks find nothing done
        if not done:
            return []
        calls = [call for operation in done for call in operation.on_done]
        for operation in done:
            operation.on_done.clear()
        return calls

    def _fail_hopeless(self) -> None:
        for queue in self._busy:
            if queue.operations and (error := self._hopeless(queue.operations[0])):
                queue.operations[0].fail(error)

    def _oldest_s(self) -> float:
        """Seconds since the start of the oldest operation in progress."""
        now = time.monotonic()
        return now - min((queue.operations[0].started for queue in self._busy if queue.operations), default=now)

    def _start_thread(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # a thread that is inside torch when Python ends aborts the process

    def _end_thread(self) -> None:
        atexit.unregister(self._end_thread)
        with self.lock:
            self._ending = True
            self._wake_thread()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


_SHARING = threading.Lock()


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make the calls of finished operations; they may start others, and wait for them."""
    for call in calls:
        call()
