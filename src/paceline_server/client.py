"""Client that calls functions of a service in another process.

The thread that waits for an answer reads the connection itself, so that no other thread has to wake up first. If
several threads wait, one thread reads for all, and another thread takes over once the first thread has its answer.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import ChannelError, DeadlineError, RemoteError
from paceline.text import printable
from paceline.wire.connection import connect
from paceline.wire.key import RunKey, name_of
from paceline_server.talk import (
    VERSION,
    Answer,
    Call,
    Closing,
    End,
    Forget,
    FromService,
    Hello,
    More,
    Raised,
    Refused,
    Talk,
    Welcome,
    frame_limits,
)
from paceline_server.values import pack, unpack

ANSWER_BYTES = 2**34  # limit for the bytes of the tensors in one answer
STREAM_AHEAD = 8  # maximum number of results of a stream in flight


def place_of(where: tuple[str, int] | str | Path | Any) -> Any:
    """Convert `"address:port"` or a path to a socket address."""
    if not isinstance(where, str):
        return where
    address, colon, port = where.rpartition(":")
    if colon and port.isdecimal() and "/" not in where:
        return address.strip("[]"), int(port)
    return Path(where)


class Client(Closing):
    """Connection to a service in another process, whose functions any thread can call.

    If the connection is lost, the pending calls and all later calls fail, and `lost` is True.

    Args:
        where: address and port of the service (TLS with the run's key), or path of its Unix socket (no TLS).
        name: name of this client in messages.
        identity: identity with which the service recognises this client on a new connection; random by default.
        deadline_s: default deadline of a call, and deadline for connecting.

    Attributes:
        talk: message exchange with the service.
        error: the error that ended the connection, or None.
        service: identity of the service. A changed identity means that the state of this client in the service is lost.
        known: True if the service knew this client from an earlier connection.

    Raises:
        DeadlineError: no service of the run answers at the address.
        ChannelError: the service has a different key, or accepts no further clients.
    """

    def __init__(
        self,
        where: tuple[str, int] | Path,
        key: RunKey | None,
        *,
        name: str = "",
        identity: str | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self.deadline_s, self.identity, self.peer = deadline_s, identity or secrets.token_hex(16), name_of(where)
        self.error: ChannelError | None = None
        self._numbers = itertools.count()
        self._changed = threading.Condition(threading.Lock())  # notified on messages, and when a thread stops reading
        self._pending: dict[int, Pending] = {}
        self._is_read = False  # True while one of the waiting threads reads
        until = time.monotonic() + deadline_s
        limits = frame_limits(ANSWER_BYTES, within_host=isinstance(where, Path))
        connection = connect(where, key, FromService, deadline_s=deadline_s, limits=limits)
        try:
            left_s = max(0.05, until - time.monotonic())
            # a service that refuses further clients first sends the reason, and may already have closed the connection
            answer = connection.take()
            if answer is None:
                connection.send(Hello(VERSION, name, self.identity), left_s)
                answer = connection.receive(left_s)
            if isinstance(answer, Refused):
                raise ChannelError(
                    "remote.calls_refused",
                    "{peer} does not accept calls from this client: {reason}",
                    peer=self.peer,
                    reason=printable(answer.reason),
                )
            if not isinstance(answer, Welcome):
                raise ChannelError("remote.not_a_service", "{peer} is not a service", peer=self.peer)
        except BaseException:
            connection.close()
            raise
        self.talk = Talk(connection, ANSWER_BYTES)
        self._attached_bytes, self._calls_at_once = answer.attached_bytes, answer.calls_at_once
        self.service, self.known = answer.service, answer.known

    @property
    def lost(self) -> bool:
        """True if the connection has ended."""
        return self.error is not None or self.talk.connection.lost

    def call(self, function: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a function of the service, and return its result.

        Raises:
            RemoteError: the function raised or does not exist, or a value cannot be sent.
            DeadlineError: the service did not answer in time. The function may still run.
            ChannelError: the connection is lost. The function may or may not have run.
        """
        return self.begin(function, *args, deadline_s=deadline_s).result()

    def begin(self, function: str, *args: Any, deadline_s: float | None = None, lane: str = "") -> Pending:
        """Send a call without waiting for the answer. Raises the same errors as `call`.

        Args:
            lane: name of a sequence of calls, which the service runs one at a time, in the order sent.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        return self._begin(function, args, deadline_s, stream=False, lane=lane)

    def stream(self, function: str, *args: Any, deadline_s: float | None = None) -> Iterator[Any]:
        """Iterate over the results of a generator function as they arrive.

        The service calls the function when the first result is requested.

        Args:
            deadline_s: deadline for each result.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        pending = self._begin(function, args, deadline_s, stream=True)
        taken = 0
        try:
            while True:
                message, block = pending.next(deadline_s)
                if isinstance(message, End):
                    return
                value = unpack(message.value, block)
                del message, block
                yield value
                del value
                taken += 1
                if taken % (STREAM_AHEAD // 2) == 0:
                    self._send(More(pending.number, [], STREAM_AHEAD // 2), deadline_s)
        finally:
            pending.forget()

    def close(self) -> None:
        """Close the connection. Pending calls raise ChannelError."""
        self._fail(ChannelError("remote.client_closed", "the client of {peer} was closed", peer=self.peer))

    def drop(self, pending: Pending) -> bool:
        """Stop expecting messages of a call; return False if no message was expected."""
        with self._changed:
            self._changed.notify_all()
            return self._pending.pop(pending.number, None) is not None

    def wait(self, condition: Callable[[], bool], until: float) -> bool:
        """Read messages, or let another thread read, until a condition is true.

        Returns False if the deadline passes first.
        """
        with self._changed:
            while not condition() and self._is_read:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    return condition()
            if condition():
                return True
            self._is_read = True
        try:
            while not condition():
                self._arrived(*self.talk.receive(max(0.0, until - time.monotonic())))
        except DeadlineError:
            pass
        except ChannelError as error:
            self._fail(error)
        finally:
            self._hand_over()
        return condition()

    def look(self) -> None:
        """Read the messages that have arrived, unless another thread reads."""
        with self._changed:
            if self._is_read:
                return
            self._is_read = True
        try:
            while (found := self.talk.take()) is not None:
                self._arrived(*found)
        except ChannelError as error:
            self._fail(error)
        finally:
            self._hand_over()

    def _begin(
        self, function: str, args: tuple[Any, ...], deadline_s: float, *, stream: bool, lane: str = ""
    ) -> Pending:
        until = time.monotonic() + deadline_s
        packed = pack(list(args))
        if packed.nbytes > self._attached_bytes:
            raise RemoteError(
                "remote.arguments_too_large",
                "{function}: the arguments have {nbytes:,} bytes of tensors, but {peer} accepts at most {limit:,} "
                "bytes per call",
                function=function,
                nbytes=packed.nbytes,
                peer=self.peer,
                limit=self._attached_bytes,
            )
        pending = Pending(self, next(self._numbers), function, deadline_s, stream)
        self._expect(pending, until)
        try:
            message = Call(pending.number, [], function, packed.tree, None, stream, lane)
            self._send(message, max(0.0, until - time.monotonic()), packed)
        except BaseException:
            self.drop(pending)
            raise
        return pending

    def _expect(self, pending: Pending, until: float) -> None:
        """Wait until the service accepts another call, and expect messages of this call."""
        while True:
            with self._changed:
                if self.error is not None:
                    raise ChannelError(
                        "remote.call_failed", "{function}: {error}", function=pending.function, error=self.error
                    ) from self.error
                if len(self._pending) < self._calls_at_once:
                    self._pending[pending.number] = pending
                    return
            if not self.wait(lambda: len(self._pending) < self._calls_at_once or self.error is not None, until):
                raise DeadlineError(
                    "remote.too_many_calls",
                    "{function}: {peer} has answered none of {limit} pending calls, and accepts no further calls",
                    function=pending.function,
                    peer=self.peer,
                    limit=self._calls_at_once,
                )

    def _send(self, message: Any, deadline_s: float, packed: Any = None) -> None:
        """Send a message, and read incoming messages meanwhile to avoid a deadlock."""
        try:
            self.talk.send(message, packed, deadline_s, meanwhile=self.look)
        except ChannelError as error:
            if self.talk.connection.lost:
                self._fail(error)
            raise

    def _fail(self, error: ChannelError) -> None:
        with self._changed:
            self.error = self.error or error
            self._pending.clear()
            is_read, self._is_read = self._is_read, True
            self._changed.notify_all()
        self.talk.connection.end()
        if not is_read:  # otherwise the reading thread takes the message
            self.talk.close()

    def _arrived(self, message: Any, block: memoryview | None) -> None:
        if not isinstance(message, Answer | End | Raised):
            raise ChannelError(
                "remote.unexpected_answer",
                "{peer} sent a {class_name} instead of an answer",
                peer=self.peer,
                class_name=type(message).__name__,
            )
        with self._changed:
            pending = self._pending.get(message.number)
            if pending is not None:  # otherwise the deadline of the call has passed
                pending.arrived.append((message, block))
                if not (pending.streams and isinstance(message, Answer)):
                    del self._pending[message.number]
            self._changed.notify_all()

    def _hand_over(self) -> None:
        if self.error is not None:
            self.talk.close()
            return
        with self._changed:
            self._is_read = False
            self._changed.notify_all()


class Pending:
    """Call whose result has not been read yet."""

    def __init__(self, client: Client, number: int, function: str, deadline_s: float, streams: bool) -> None:
        self._client, self.number, self.function, self.streams = client, number, function, streams
        self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        self.arrived: deque[tuple[Any, memoryview | None]] = deque()

    @property
    def done(self) -> bool:
        """True if `result` returns immediately."""
        if not self._is_settled():
            self._client.look()
        return self._is_settled()

    def result(self, deadline_s: float | None = None) -> Any:
        """Wait for the result and return it. This is possible only once. Raises the same errors as `Client.call`.

        Args:
            deadline_s: deadline, counted from now; by default the deadline of the call.
        """
        if deadline_s is not None:
            self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        message, block = self._arrival(self._until)
        return unpack(message.value, block)

    def next(self, deadline_s: float) -> tuple[Any, memoryview | None]:
        """Return the next message of this call: an Answer or an End.

        Raises the same errors as `Client.call`.
        """
        self._deadline_s = deadline_s
        return self._arrival(time.monotonic() + deadline_s)

    def forget(self) -> None:
        """Cancel the call at the service, unless the service has fully answered."""
        if self._client.drop(self):
            with suppress(ChannelError):
                self._client.talk.connection.post(Forget(self.number, []))

    def _is_settled(self) -> bool:
        """Return True if a message has arrived, or no message can arrive any more."""
        return bool(self.arrived) or self._client.error is not None

    def _arrival(self, until: float) -> tuple[Any, memoryview | None]:
        client = self._client
        if not self.arrived and not client.wait(self._is_settled, until):
            self.forget()
            raise DeadlineError(
                "remote.deadline",
                "{peer} did not answer {function} within {deadline_s:g} s. It may still run.",
                peer=client.peer,
                function=self.function,
                deadline_s=self._deadline_s,
            )
        if not self.arrived:
            assert client.error is not None
            raise ChannelError(
                "remote.call_failed", "{function}: {error}", function=self.function, error=client.error
            ) from client.error
        message, block = self.arrived.popleft()
        if isinstance(message, Raised):
            raise self._error(message)
        return message, block

    def _error(self, raised: Raised) -> RemoteError:
        text, trace = printable(raised.text), printable(raised.remote_traceback)
        what = f"{printable(raised.kind)}: {text}" if raised.kind else text
        error = RemoteError(
            "remote.raised",
            "{function} at {peer}: {what}{traceback_text}",
            function=self.function,
            peer=self._client.peer,
            what=what,
            traceback_text=f"\n\n{trace}" if trace else "",
            kind=raised.kind,
            remote_traceback=trace,
        )
        if not raised.code:
            return error
        told = error.as_json() | {"code": raised.code}
        return RemoteError.of_json(told, function=self.function, kind=raised.kind, remote_traceback=trace)
