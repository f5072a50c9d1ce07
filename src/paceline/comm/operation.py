"""Operations (collectives and messages), queues of operations, and the driver of operations.

An operation is a generator that yields while it waits. Each transport defines how a thread waits (`shm/progress.py`,
`tcp/progress.py`).
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError

from paceline.wire.position import report_wait
from paceline.wire.status import generation_is_over

GRACE_S = 1e-3  # time for the caller to wait itself, before the thread drives its operation
# time that the thread polls for more, which saves wake-ups by callers; a poll takes 20 us
WATCH_S = 0.01

Calls = list[Callable[[], None]]
Steps = Generator[None, None, Any]


class Operation:
    """Collective or message in progress.

    `waits_for` returns the peers that the operation waits for. `started` is the time when the operation became the
    first of its queue, because the deadline excludes the time of earlier operations. `group`, `number` and `tensors`
    describe the operation in reports about hung ranks (`positions.py`).
    """

    def __init__(
        self,
        what: str,
        steps: Steps,
        deadline_s: float,
        waits_for: Callable[[], Sequence[Awaited]],
        group: Any = None,
        number: int = 0,
        tensors: Sequence[Any] = (),
    ) -> None:
        self.what, self.deadline_s, self.waits_for = what, deadline_s, waits_for
        self.group, self.number, self.tensors = group, number, tensors
        self.done = False
        self.error: Exception | None = None
        self.result: Any = None
        self.on_done: list[Callable[[], None]] = []
        self.started = math.inf
        self._steps = steps

    def advance(self) -> bool:
        """Advance the operation as far as possible without waiting; return True when done."""
        if not self.done:
            if self.started == math.inf:
                self.started = time.monotonic()
            try:
                next(self._steps)
            except StopIteration as end:
                self.result, self.done = end.value, True
            except Exception as error:  # noqa: BLE001 - raised by `Driver.wait`
                self.fail(error)
            except BaseException as error:  # after Ctrl-C, a second attempt must not find the operation done
                self.fail(DistBackendError(f"{self.what} was interrupted by {type(error).__name__}"))
                raise
        return self.done

    def fail(self, error: Exception) -> None:
        """End the operation with an error, which `Driver.wait` raises."""
        self._steps.close()
        self.error, self.done = error, True


class Breakage:
    """Error that has ended one or more queues.

    The first operation to fail reports the original error. Later operations report an error that refers to the original
    error.

    Attributes:
        error: the original error, or None.
        told: True once an operation has failed with the original error.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.told = False

    def fail(self, error: Exception) -> None:
        """End the queues with an error, or keep an earlier error."""
        self.error = self.error or error


class OperationQueue:
    """Queue of operations that run one after the other, such as a group's collectives.

    If an operation fails, all later operations of the queue fail, too, as do the operations of all queues with the same
    `Breakage`. The same applies to operations that start after another rank has reported a failure.
    """

    def __init__(self, breakage: Breakage | None = None) -> None:
        self.operations: deque[Operation] = deque()
        self.breakage = breakage or Breakage()

    def advance(self) -> list[Operation]:
        """Advance the first operations as far as possible; return the finished operations."""
        done = []
        if self.breakage.error is not None and self.operations:
            self.operations[0].fail(self.breakage.error)
        while self.operations and self.operations[0].advance():
            first = self.operations.popleft()
            if first.error is not None:
                if not self.breakage.told:
                    note_failure(first)
                self.breakage.fail(first.error)
                self.breakage.told = True
            done.append(first)
            for behind in self.operations if self.breakage.error else ():
                self.fail_as_broken(behind)
        return done

    def break_off(self, error: Exception) -> list[Operation]:
        """End all operations with an error, and return them."""
        ended = [*self.operations]
        self.operations.clear()
        for operation in ended:
            operation.error, operation.done = operation.error or error, True
        return ended

    def finish(self, steps: Steps) -> bool:
        """Run a collective without an `Operation` until its first wait; return True if done.

        The queue must be empty. If the steps raise an error, all later operations fail, as in `advance`.
        """
        try:
            next(steps)
        except StopIteration:
            return True
        except BaseException as error:  # also after Ctrl-C, because other ranks may have this rank's contribution
            self.breakage.fail(error if isinstance(error, Exception) else DistBackendError(f"interrupted by {error!r}"))
            self.breakage.told = True
            raise
        return False

    def fail_as_broken(self, operation: Operation) -> None:
        """End an operation of a queue that is broken."""
        assert self.breakage.error is not None
        operation.fail(_follow_up_error(self.breakage.error) if self.breakage.told else self.breakage.error)
        self.breakage.told = True


class Description(NamedTuple):
    """Description of an operation that waits, or that has just failed.

    Attributes:
        group: name of the operation's group.
        tensors: types and shapes of the first tensors.
        awaited: group ranks of the peers that the operation waits for.
        at: time of the description.
    """

    what: str
    group: str
    number: int
    tensors: str
    awaited: Sequence[int]
    waited_s: float
    at: float

    @classmethod
    def of(cls, operation: Operation) -> Description:
        """Describe an operation now."""
        awaited: Sequence[int] = ()
        with suppress(Exception):  # another thread may be advancing the operation
            awaited = [peer.rank for peer in operation.waits_for()]
        group = "" if operation.group is None else operation.group.getGroupName()
        now = time.monotonic()
        waited_s = max(0.0, now - operation.started)
        return cls(operation.what, group, operation.number, _shown(operation.tensors), awaited, waited_s, now)


_last_failure: list[Description] = []  # at most one


def note_failure(operation: Operation) -> None:
    """Keep the description of a failed operation for the launcher."""
    _last_failure[:] = [Description.of(operation)]


def last_failure() -> Description | None:
    """Return the description of the operation that failed last."""
    return _last_failure[0] if _last_failure else None


def _shown(tensors: Sequence[Any], most: int = 3) -> str:
    flat = [one for t in tensors for one in (t if isinstance(t, list | tuple) else [t])]
    shown = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in flat[:most]]
    return ", ".join(shown) + (f" and {len(flat) - most} more" if len(flat) > most else "")


class Awaited(Protocol):
    """Peer that an operation waits for, with its rank in the group."""

    @property
    def rank(self) -> int:
        """Rank of the peer in the group."""

    def why_over(self) -> str | None:
        """Return the reason why the peer will send nothing more, or None."""

    def state(self) -> str:
        """Describe the peer and the state of the connection."""


class Driver(ABC):
    """Driver of operations, in the waiting thread or in a background thread.

    Attributes:
        lock: lock for all state of the driver; the driver does not hold the lock during completion callbacks.
        advice: last sentence of a time-out error.
    """

    advice: ClassVar[str] = ""
    _of_process: ClassVar[Any] = None
    _users: ClassVar[int] = 0

    def __init__(self, lock: threading.Lock | threading.RLock | None = None) -> None:
        self.lock = lock or threading.Lock()
        self._busy: dict[OperationQueue, None] = {}
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._ending = False

    @classmethod
    def acquire(cls) -> Self:
        """Return this process's driver, which exists as long as the process has groups."""
        with _SHARING:
            cls._of_process = cls._of_process or cls()
            cls._users += 1
            return cls._of_process  # type: ignore[no-any-return]

    @classmethod
    def release(cls) -> None:
        """Release the driver from `acquire`; the last group's call closes the driver."""
        with _SHARING:
            cls._users -= 1
            if cls._users == 0 and cls._of_process is not None:
                cls._of_process.close()
                cls._of_process = None

    def start(self, queue: OperationQueue, operation: Operation) -> None:
        """Append an operation to its queue, and advance all operations as far as possible."""
        with self.lock:
            if queue.breakage.error is not None:
                queue.fail_as_broken(operation)
                return
            queue.operations.append(operation)
            self._busy[queue] = None
            calls = self._advance()
        call_all(calls)

    @property
    def is_idle(self) -> bool:
        """True if no operation is in progress; the caller holds the lock."""
        return not self._busy

    def call_when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Register a callback for the end of an operation; call it at once if done."""
        with self.lock:
            if not operation.done:
                operation.on_done.append(call)
                self._hurry()
                return
        call()

    def is_done(self, operation: Operation) -> bool:
        """Advance all operations as far as possible; return True if this operation is done."""
        if not operation.done:
            with self.lock:
                calls = self._look()
            call_all(calls)
        return operation.done

    def wait(self, operation: Operation) -> None:
        """Drive all operations until `operation` is done.

        Raises:
            SyncError, DistBackendError: a peer is gone, missed the deadline, or made a different call.
        """
        if not operation.done:
            self.drive(lambda: operation.done)
        if operation.error is not None:
            raise operation.error

    def close(self) -> None:
        """End the background thread."""
        self._end_thread()

    # Methods that a transport adds

    @abstractmethod
    def in_background(self, operation: Operation) -> None:
        """Have the background thread drive an operation soon."""

    @abstractmethod
    def drive(self, is_over: Callable[[], bool]) -> None:
        """Drive all operations until `is_over` returns True."""

    @abstractmethod
    def _run(self) -> None:
        """Run the background thread until `_ending` is True."""

    @abstractmethod
    def _wake_thread(self) -> None:
        """Wake the background thread; the caller holds the lock."""

    @abstractmethod
    def _hurry(self) -> None:
        """Make the background thread drive at once; the caller holds the lock."""

    def _look(self) -> Calls:
        """Advance all operations without waiting; the caller holds the lock."""
        return self._advance()

    # For the transports; the caller holds the lock

    def _advance(self) -> Calls:
        """Advance all operations; return the callbacks to call without the lock."""
        done: list[Operation] = []
        for queue in list(self._busy):
            try:
                done += queue.advance()
            except Exception as error:  # noqa: BLE001 - a fault of one queue must not stop the others
                done += queue.break_off(error)
            if not queue.operations:
                del self._busy[queue]
        # most polls find no finished operation
        if not done:
            return []
        calls = [call for operation in done for call in operation.on_done]
        for operation in done:
            operation.on_done.clear()
        return calls

    def _fail_hopeless(self) -> None:
        for queue in self._busy:
            if queue.operations:
                try:
                    error = self._hopeless(queue.operations[0])
                except Exception as fault:  # noqa: BLE001 - as above
                    error = fault
                if error is not None:
                    queue.operations[0].fail(error)

    def failure(self, reason: str) -> Exception:
        """Create the error of an operation that cannot wait any longer."""
        return DistBackendError(reason)

    def _hopeless(self, operation: Operation) -> Exception | None:
        """Return the error of an operation that cannot wait any longer; otherwise None."""
        if generation_is_over():
            return self.failure(f"{operation.what}: the generation is over")
        waited_s = time.monotonic() - operation.started
        over = {peer: why for peer in operation.waits_for() if (why := peer.why_over())}
        # a peer may have finished its part just before the peer ended
        if reasons := [over[peer] for peer in operation.waits_for() if peer in over] if over else []:
            return self.failure(f"{operation.what} failed after {waited_s:.1f} s: {'; '.join(reasons)}")
        if waited_s > operation.deadline_s:
            report_wait()
            states = "; ".join(peer.state() for peer in operation.waits_for())
            waiting = f", waiting: {states}" if states else ""
            return self.failure(f"{operation.what}: timeout after {waited_s:.1f} s{waiting}{self.advice}")
        return None

    def _oldest_s(self) -> float:
        now = time.monotonic()
        return now - min((queue.operations[0].started for queue in self._busy if queue.operations), default=now)

    def _start_thread(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # a thread inside torch aborts the process when Python ends

    def _end_thread(self) -> None:
        atexit.unregister(self._end_thread)
        if os.getpid() != self._owner:  # a forked process has no such thread, and would keep its parent's thread awake
            return
        with self.lock:
            self._ending = True
            self._wake_thread()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


_SHARING = threading.Lock()


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call the callbacks of finished operations.

    Callbacks may start other operations and wait for them.
    """
    for call in calls:
        call()


def _follow_up_error(error: Exception) -> DistBackendError:
    return DistBackendError(f"this group cannot be used any more, because of an earlier error: {error}")


class DrivenWork(dist.Work):
    """Handle of an operation for torch.

    A thread that waits for the handle drives the operation. If torch uses the handle's future, the background thread
    drives the operation.
    """

    def __init__(self, progress: Driver, operation: Operation, result: list[Any]) -> None:
        super().__init__()
        self._progress, self._operation, self._result = progress, operation, result
        self._future: torch.futures.Future[Any] | None = None
        if not operation.done:
            progress.in_background(operation)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result.

        Raises:
            DistBackendError: a rank is gone, or missed the deadline.
        """
        if timeout is not None and timeout.total_seconds() > 0:
            self._operation.deadline_s = timeout.total_seconds()
        self._progress.wait(self._operation)
        return True

    def is_completed(self) -> bool:
        return self._progress.is_done(self._operation)

    def is_success(self) -> bool:
        return self.is_completed() and self._operation.error is None

    def exception(self) -> Exception | None:
        return self._operation.error

    def result(self) -> list[Any]:
        return self._result

    def source_rank(self) -> int:
        """Return the sender of a message that was received from any rank."""
        self._progress.wait(self._operation)
        return int(self._operation.result)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future()
            self._progress.call_when_done(self._operation, self._resolve)
        return self._future

    def _resolve(self) -> None:
        assert self._future is not None
        if self._operation.error is not None:
            self._future.set_exception(self._operation.error)
        else:
            self._future.set_result(self._result)


class _Done(dist.Work):
    """Handle of a collective that is already done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


DONE = _Done()
