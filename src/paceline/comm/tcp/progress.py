"""Progress of socket operations, driven by a waiting thread or by a background thread.

Only one thread at a time is the *driver*. The driver sleeps until a socket is ready, reads and writes, and advances all
operations. Other waiting threads sleep until their operation is done, or the driver stops. While no thread waits, the
background thread polls from time to time. The background thread replaces lost connections and acknowledges received
bytes while this rank computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from paceline.comm.operation import GRACE_S, WATCH_S, Calls, Driver, Operation, call_all
from paceline.errors import SyncError
from paceline.wire.listener import OnFault, SocketLoop

_NAP_S = 0.02  # longest sleep between two checks for hopeless waits
_CLOCK_S = 0.05  # seconds between two checks of the links
_IDLE_S = 0.05  # polling interval of the idle background thread


class TcpProgress(Driver, SocketLoop):
    """Driver of the operations and connections of all TCP groups of this process.

    Attributes:
        unauthenticated: number of connections that the groups' listeners have rejected so far.
    """

    advice = (
        ". Look for the first error of the ranks that did not come; if they, or the network, are only slow, raise "
        "deadline_s."
    )

    def failure(self, reason: str) -> SyncError:
        """Create the error of an operation that cannot wait any longer."""
        return SyncError("ranks.operation_failed", "{reason}", reason=reason)

    def __init__(self) -> None:
        Driver.__init__(self)  # the driver's lock also guards the links of all groups
        SocketLoop.__init__(self)
        self._turns = threading.Condition(self.lock)
        self._wanted = threading.Condition(self.lock)
        self._clocks: dict[object, tuple[Callable[[float], None], OnFault]] = {}
        self._expected: set[object] = set()
        self._driving = False
        self._waiting = 0
        self._urgent = False
        self._watch_until = 0.0
        self._looked_at = self._checked_at = 0.0
        self.unauthenticated = 0
        self._start_thread("paceline-tcp")

    def close(self) -> None:
        super().close()
        self.close_loop()

    # Sockets (see `SocketLoop`) and clocks; the caller holds the lock

    def add_clock(self, key: object, look: Callable[[float], None], on_fault: OnFault) -> None:
        """Call `look` with the time every few hundredths of a second.

        `on_fault` is as in `watch`.
        """
        self._clocks[key] = look, on_fault

    def remove_clock(self, key: object) -> None:
        """Stop the calls of `add_clock`."""
        self._clocks.pop(key, None)

    def expect(self, key: object) -> None:
        """Make the background thread react at once, even if no thread waits.

        The effect lasts until `expect_no_more`, for example while a connection is established.
        """
        self._expected.add(key)
        self._wanted.notify()

    def expect_no_more(self, key: object) -> None:
        """End the effect of `expect`."""
        self._expected.discard(key)

    # Operations

    def in_background(self, operation: Operation) -> None:
        with self.lock:
            if not operation.done:
                watching = self._watch_until > time.monotonic()
                self._watch_until = time.monotonic() + WATCH_S
                if not watching:
                    self._wanted.notify()

    def _hurry(self) -> None:
        self._urgent = True
        self._wanted.notify()

    def _wake_thread(self) -> None:
        self._wanted.notify_all()
        self.wake()

    def _look(self) -> Calls:
        return [] if self._driving else self._turn(0)

    def drive(self, is_over: Callable[[], bool]) -> None:
        """Drive all operations until `is_over`, which is called under the lock, returns True."""
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
            call_all(calls)

    def _turn(self, nap_s: float) -> Calls:
        """Wait for a ready socket without the lock, then advance all operations.

        The result contains the callbacks to call without the lock.
        """
        self._driving = True
        try:
            self.lock.release()
            try:
                ready = self.ready(nap_s)
            finally:
                self.lock.acquire()
            for fd, events in ready:
                if fd in self.handlers:  # an earlier handler may have removed this handler
                    _call(*self.handlers[fd], events)
            now = time.monotonic()
            if now - self._looked_at >= _CLOCK_S:
                self._looked_at = now
                for look, on_fault in list(self._clocks.values()):
                    _call(look, on_fault, now)
            if now - self._checked_at >= _NAP_S:
                self._checked_at = now
                self._fail_hopeless()
            return self._advance()
        finally:
            self._driving = False
            if self._waiting:
                self._turns.notify_all()

    def _advance(self) -> Calls:
        calls = super()._advance()
        if self._waiting:
            self._turns.notify_all()
        return calls

    def _run(self) -> None:
        while True:
            with self.lock:
                if self._ending:
                    return
                if not self._is_needed():
                    self._wanted.wait(GRACE_S if self._watch_until > time.monotonic() else _IDLE_S)
                if self._ending:
                    return
                needed = self._is_needed()
                calls = [] if self._driving or self._waiting else self._turn(_NAP_S if needed else 0)
                if not self._busy:
                    self._urgent = False
            call_all(calls)

    def _is_needed(self) -> bool:
        """Return True if an operation is in progress without a waiting thread."""
        if self._waiting or self._driving:
            return False
        return bool(self._expected) or (bool(self._busy) and (self._urgent or self._oldest_s() > GRACE_S))


_Told = TypeVar("_Told")


def _call(handler: Callable[[_Told], None], on_fault: OnFault, told: _Told) -> None:
    """Call a handler; an exception ends its connection or group, but not the thread."""
    try:
        handler(told)
    except Exception as error:  # noqa: BLE001 - whatever it is, other groups go on
        on_fault(error)
