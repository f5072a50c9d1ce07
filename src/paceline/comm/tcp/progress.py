"""Progress of socket operations: a thread that waits drives all; a background thread the others.

One thread at a time is the *driver*: it sleeps until a socket is ready, reads and writes, and continues all operations.
Others that wait sleep until it has done theirs, or leaves off. While nobody waits, the thread looks in now and then:
lost connections are made anew, and what was received is acknowledged, also while this rank computes.
"""

from __future__ import annotations

import atexit
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.comm.c10d.operation import Operation, OperationQueue, follow_up_error
from paceline.errors import SyncError

_NAP_S = 0.05  # the longest sleep between two looks at the clock
_IDLE_S = 0.05  # how often the thread looks in while nothing is asked of it
_GRACE_S = 1e-3  # for the caller to wait himself, before the thread drives what he has started
_WATCH_S = 0.5  # how long the thread looks out for more, which spares the callers from waking it each time


class Awaited(Protocol):
    """Whom an operation waits for."""

    def why_over(self) -> str | None:
        """The reason why nothing more will come of it; None while something may."""

    def state(self) -> str:
        """The state of the connection, as text."""


class TcpProgress:
    """Drives the operations and the connections of this process, of all its groups over TCP."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of everything here, and of the groups' links
        self._turns = threading.Condition(self.lock)
        self._wanted = threading.Condition(self.lock)
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._clocks: dict[object, Callable[[float], None]] = {}
        self._busy: dict[OperationQueue, None] = {}
        self._driving = False
        self._waiting = 0
        self._urgent = False
        self._watch_until = 0.0
        self._looked_at = 0.0
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="paceline-tcp", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is inside torch when Python ends aborts the process

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        with self.lock:
            if self._ending:
                return
            self._ending = True
            self._wanted.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._epoll.close()

    # Sockets and clocks; the caller holds the lock

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with what epoll says of a descriptor."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Watch a descriptor no more, before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def add_clock(self, key: object, look: Callable[[float], None]) -> None:
        """Call `look` with the time every few hundredths of a second."""
        self._clocks[key] = look

    def remove_clock(self, key: object) -> None:
        """Call it no more."""
        self._clocks.pop(key, None)

    # Operations, as `Driver` has them

    def start(self, queue: OperationQueue, operation: Operation) -> None:
        """Append an operation to its queue, and continue with all as far as possible."""
        with self.lock:
            if queue.broken is not None:
                operation.fail(follow_up_error(queue.broken))
                return
            queue.operations.append(operation)
            self._busy[queue] = None
            calls = self._advance()
            if calls or operation.done:
                self._turns.notify_all()
        _call(calls)

    def in_background(self, operation: Operation) -> None:
        """Drive an operation while nobody waits for it.

        This begins soon, not at once, as most are waited for at once.
        """
        with self.lock:
            if not operation.done:
                watching = self._watch_until > time.monotonic()
                self._watch_until = time.monotonic() + _WATCH_S
                if not watching:
                    self._wanted.notify()

    def call_when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Call back from the thread that finishes the operation; at once if it is done."""
        with self.lock:
            if not operation.done:
                operation.on_done.append(call)
                self._urgent = True
                self._wanted.notify()
                return
        call()

    def is_done(self, operation: Operation) -> bool:
        """True if it is done, after continuing as far as possible."""
        if not operation.done:
            with self.lock:
                calls = [] if self._driving else self._turn(0)
            _call(calls)
        return operation.done

    def wait(self, operation: Operation) -> None:
        """Drive everything until `operation` is done.

        Raises:
            SyncError: a peer is gone, did not come within the deadline, or did something else.
        """
        self.drive(lambda: operation.done)
        if operation.error is not None:
            raise operation.error

    def drive(self, is_over: Callable[[], bool]) -> None:
        """Drive everything until `is_over`, which is asked under the lock."""
        while True:
            with self.lock:
                self._waiting += 1
                try:
                    while self._driving and not is_over():
                        self._turns.wait()
                    if is_over():
                        return
                    calls = self._turn(_NAP_S)
                finally:
                    self._waiting -= 1
                    if self._waiting:
                        self._turns.notify_all()
            _call(calls)

    def _turn(self, nap_s: float) -> list[Callable[[], None]]:
        """Wait for a ready socket without the lock, then continue with everything.

        Returns the calls to be made without the lock.
        """
        self._driving = True
        try:
            self.lock.release()
            try:
                ready = self._epoll.poll(nap_s)
            finally:
                self.lock.acquire()
            for fd, events in ready:
                handler = self._handlers.get(fd)  # one before it may have ended it
                if handler is not None:
                    handler(events)
            now = time.monotonic()
            if now - self._looked_at >= _NAP_S:
                self._looked_at = now
                for look in list(self._clocks.values()):
                    look(now)
                self._fail_the_late()
            return self._advance()
        finally:
            self._driving = False
            if self._waiting:
                self._turns.notify_all()

    def _advance(self) -> list[Callable[[], None]]:
        done: list[Operation] = []
        for queue in list(self._busy):
            done += queue.advance()
            if not queue.operations:
                del self._busy[queue]
        calls = [call for operation in done for call in operation.on_done]
        for operation in done:
            operation.on_done.clear()
        return calls

    def _fail_the_late(self) -> None:
        for queue in self._busy:
            if queue.operations and (error := _lost(queue.operations[0])):
                queue.operations[0].fail(error)

    def _run(self) -> None:
        """The thread."""
        while True:
            with self.lock:
                if self._ending:
                    return
                if not self._is_needed():
                    self._wanted.wait(_GRACE_S if self._watch_until > time.monotonic() else _IDLE_S)
                if self._ending:
                    return
                needed = self._is_needed()
                calls = [] if self._driving or self._waiting else self._turn(_NAP_S if needed else 0)
                if not self._busy:
                    self._urgent = False
            _call(calls)

    def _is_needed(self) -> bool:
        """True if something is in progress that nobody waits for."""
        if not self._busy or self._waiting or self._driving:
            return False
        oldest = min(
            (queue.operations[0].started for queue in self._busy if queue.operations), default=time.monotonic()
        )
        return self._urgent or time.monotonic() - oldest > _GRACE_S


def _call(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:  # may start another operation, and wait for it
        call()


def _lost(operation: Operation) -> Exception | None:
    """The error of an operation that can wait no longer."""
    waited_s = time.monotonic() - operation.started
    awaited: Sequence[Awaited] = operation.waits_for()
    over = [why for peer in awaited if (why := peer.why_over())]
    if over:
        return SyncError(f"{operation.what} failed after {waited_s:.1f} s: {'; '.join(over)}")
    if waited_s > operation.deadline_s:
        states = "; ".join(peer.state() for peer in awaited)
        return SyncError(
            f"{operation.what}: timeout after {waited_s:.1f} s" + (f", waiting: {states}" if states else "") + ". "
            "Look for the first error of the ranks that did not come; if they, or the network, are only slow, "
            "raise deadline_s."
        )
    return None
