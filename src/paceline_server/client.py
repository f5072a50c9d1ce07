"""Client: calls functions of a service in another process.

The thread that waits for an answer reads the connection itself, so that no other thread has to wake first. Where
several wait, one reads for all, and hands over when it has its own.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import ChannelError, DeadlineError, RemoteError
from paceline.printable import printable
from paceline.wire.connection import connect
from paceline.wire.key import RunKey, name_of
from paceline_server.talk import (
    VERSION,
    Answer,
    Call,
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
from paceline_server.values import pack

ANSWER_BYTES = 2**34  # of the tensors in one answer, at most
_ANSWERS = (Answer, End, Raised)
STREAM_AHEAD = 8  # results of a stream that may be under way


class Client:
    """Calls functions of a service in another process. Any thread may call.

    A lost connection fails the calls under way; the next call makes a new one.

    Args:
        where: the service's address and port, over TLS with the run's key; or its Unix socket, without.
        name: for messages about this client.
        identity: by which the service knows this client again; random by default.
        deadline_s: of calls that are given none, and of connecting.
        reconnect: False if nothing goes over another connection than the first; then `lost` says when it has ended.

    Raises:
        DeadlineError: nobody of the run answers there.
        ChannelError: the service has another key, or takes no more clients.
    """

    def __init__(
        self,
        where: tuple[str, int] | Path,
        key: RunKey | None,
        *,
        name: str = "",
        identity: str | None = None,
        deadline_s: float = 60.0,
        reconnect: bool = True,
    ) -> None:
        self._where, self._key, self._reconnect = where, key, reconnect
        self.name, self.deadline_s = name, deadline_s
        self.identity = identity or secrets.token_hex(16)
        self.peer = name_of(where)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._line: _Line | None = self._connect(deadline_s)

    @property
    def lost(self) -> bool:
        """True if there is no connection now."""
        line = self._line
        return line is None or line.error is not None or line.talk.connection.lost

    def call(self, function: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call a function there, and return its result.

        Raises:
            RemoteError: it raised there, there is no such function, or a value cannot be sent.
            DeadlineError: it did not answer in time. It may still run.
            ChannelError: the connection is lost. It may have run or not.
        """
        return self.begin(function, *args, deadline_s=deadline_s).result()

    def begin(self, function: str, *args: Any, deadline_s: float | None = None) -> Pending:
        """Send a call, and return without its answer. Raises as `call`."""
        return self._begin(function, args, self.deadline_s if deadline_s is None else deadline_s, stream=False)

    def stream(self, function: str, *args: Any, deadline_s: float | None = None) -> Iterator[Any]:
        """Results of a function that yields, as they come. It is called when the first is asked for.

        Args:
            deadline_s: for each result.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        pending = self._begin(function, args, deadline_s, stream=True)
        taken = 0
        try:
            while True:
                message, block = pending.next(deadline_s)
                if isinstance(message, End):
                    return
                value = pending.line.talk.value(message.value, block)
                del message, block
                yield value
                del value
                taken += 1
                if taken % (STREAM_AHEAD // 2) == 0:
                    pending.line.send(More(pending.number, [], STREAM_AHEAD // 2), deadline_s)
        finally:
            pending.forget()

    def close(self) -> None:
        """Close the connection. Who waits for an answer gets a ChannelError."""
        with self._lock:
            self._closed = True
            line, self._line = self._line, None
        if line is not None:
            line.fail(ChannelError(f"the client of {self.peer} was closed"))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, function: str, args: tuple[Any, ...], deadline_s: float, stream: bool) -> Pending:
        until = time.monotonic() + deadline_s
        packed = pack(list(args), self)
        line = self._current(deadline_s)
        if packed.nbytes > line.attached_bytes:
            raise RemoteError(
                f"{function}: the arguments have {packed.nbytes:,} bytes of tensors; {self.peer} takes "
                f"{line.attached_bytes:,} a call",
                function=function,
            )
        pending = Pending(line, next(self._numbers), function, deadline_s, stream)
        line.begin(pending, until)
        try:
            message = Call(pending.number, [], function, packed.tree, None, stream)
            line.send(message, max(0.0, until - time.monotonic()), packed)
        except BaseException:
            line.drop(pending)
            raise
        return pending

    def _current(self, deadline_s: float) -> _Line:
        """The connection; a new one where the last is lost."""
        line = self._line
        if line is not None and line.error is None and not line.talk.connection.lost:
            return line
        with self._lock:
            if self._closed:
                raise ChannelError(f"the client of {self.peer} was closed")
            if self._line is line:
                if not self._reconnect:
                    raise ChannelError(f"the connection to {self.peer} is lost")
                if line is not None:
                    line.fail(ChannelError(f"the connection to {self.peer} is lost"))
                self._line = self._connect(deadline_s)
            assert self._line is not None
            return self._line

    def _connect(self, deadline_s: float) -> _Line:
        until = time.monotonic() + deadline_s
        limits = frame_limits(ANSWER_BYTES, within_host=isinstance(self._where, Path))
        connection = connect(self._where, self._key, FromService, deadline_s=deadline_s, limits=limits)
        try:
            left_s = max(0.05, until - time.monotonic())
            # a service that takes no more clients says so first, and may have closed the connection since
            answer = connection.take()
            if answer is None:
                connection.send(Hello(VERSION, self.name, self.identity), left_s)
                answer = connection.receive(left_s)
            if isinstance(answer, Refused):
                raise ChannelError(f"{self.peer} takes no calls of this client: {printable(answer.reason)}")
            if not isinstance(answer, Welcome):
                raise ChannelError(f"{self.peer} is no service")
        except BaseException:
            connection.close()
            raise
        return _Line(Talk(connection, self, ANSWER_BYTES), answer)


class Pending:
    """A call under way."""

    def __init__(self, line: _Line, number: int, function: str, deadline_s: float, streams: bool) -> None:
        self.line, self.number, self.function, self.streams = line, number, function, streams
        self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        self.arrived: deque[tuple[Any, memoryview | None]] = deque()

    @property
    def done(self) -> bool:
        """True if `result` returns at once."""
        if not self.is_settled():
            self.line.look()
        return self.is_settled()

    def result(self, deadline_s: float | None = None) -> Any:
        """The result, once; waited for. Raises as `Client.call`.

        Args:
            deadline_s: from now on; by default the call's own.
        """
        if deadline_s is not None:
            self._deadline_s, self._until = deadline_s, time.monotonic() + deadline_s
        message, block = self._arrival(self._until)
        return self.line.talk.value(message.value, block)

    def next(self, deadline_s: float) -> tuple[Any, memoryview | None]:
        """The next message on this call: an Answer, or the End. Raises as `Client.call`."""
        self._deadline_s = deadline_s
        return self._arrival(time.monotonic() + deadline_s)

    def is_settled(self) -> bool:
        """True if something has arrived, or nothing can."""
        return bool(self.arrived) or self.line.error is not None

    def forget(self) -> None:
        """Let the service know that nobody waits, if it has not answered to the end."""
        if self.line.drop(self):
            with suppress(ChannelError):
                self.line.talk.connection.post(Forget(self.number, []))

    def _arrival(self, until: float) -> tuple[Any, memoryview | None]:
        if not self.arrived and not self.line.wait(self.is_settled, until):
            self.forget()
            raise DeadlineError(
                f"{self.line.peer} did not answer {self.function} within {self._deadline_s:g} s; it may still run"
            )
        if not self.arrived:
            assert self.line.error is not None
            raise ChannelError(f"{self.function}: {self.line.error}") from self.line.error
        message, block = self.arrived.popleft()
        if isinstance(message, Raised):
            raise self._error(message)
        return message, block

    def _error(self, raised: Raised) -> RemoteError:
        text, trace = printable(raised.text), printable(raised.remote_traceback)
        what = f"{printable(raised.kind)}: {text}" if raised.kind else text
        return RemoteError(
            f"{self.function} at {self.line.peer}: {what}" + (f"\n\n{trace}" if trace else ""),
            function=self.function,
            kind=raised.kind,
            remote_traceback=trace,
        )


class _Line:
    """One connection to the service, with the calls that wait for answers on it."""

    def __init__(self, talk: Talk, welcome: Welcome) -> None:
        self.talk = talk
        self.attached_bytes, self._calls_at_once = welcome.attached_bytes, welcome.calls_at_once
        self.peer = talk.connection.peer
        self.error: ChannelError | None = None
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._is_read = False  # by one of the waiting threads
        self._waiting: list[_Waiting] = []  # the other ones

    def begin(self, pending: Pending, until: float) -> None:
        """Expect messages on a call, once the service takes another one."""
        while True:
            with self._lock:
                if self.error is not None:
                    raise ChannelError(f"{pending.function}: {self.error}") from self.error
                if len(self._pending) < self._calls_at_once:
                    self._pending[pending.number] = pending
                    return
            if not self.wait(self._has_room, until):
                raise DeadlineError(
                    f"{pending.function}: {self.peer} has answered none of {self._calls_at_once} calls, which is as "
                    "many as it takes at once"
                )

    def send(self, message: Any, deadline_s: float, packed: Any = None) -> None:
        """Send a message. What comes meanwhile is taken, so that neither end waits for the other for ever."""
        try:
            self.talk.send(message, packed, deadline_s, meanwhile=self.look)
        except ChannelError as error:
            if self.talk.connection.lost:
                self.fail(error)
            raise

    def drop(self, pending: Pending) -> bool:
        """Expect no more messages on a call; False if none was."""
        with self._lock:
            return self._pending.pop(pending.number, None) is not None

    def wait(self, condition: Callable[[], bool], until: float) -> bool:
        """Read messages until a condition holds, or have another thread do it. False at the deadline."""
        while not condition():
            waiting = None
            with self._lock:
                if condition():
                    return True
                if self._is_read:
                    waiting = _Waiting(condition)
                    self._waiting.append(waiting)
                self._is_read = True
            if waiting is None:
                try:
                    if not self._read_until(condition, until):
                        return condition()
                finally:
                    self._hand_over()
            elif not waiting.doorbell.acquire(timeout=max(0.0, until - time.monotonic())):
                with self._lock, suppress(ValueError):
                    self._waiting.remove(waiting)
                if waiting.doorbell.acquire(blocking=False):  # at the last moment, maybe to read for the others
                    self._ring_one()
                return condition()
            elif condition():
                self._ring_one()  # it may have been woken to read
        return True

    def look(self) -> None:
        """Take what is here, unless another thread reads."""
        with self._lock:
            if self._is_read:
                return
            self._is_read = True
        try:
            while (found := self.talk.take()) is not None:
                self._arrived(*found)
        except ChannelError as error:
            self.fail(error)
        finally:
            self._hand_over()

    def fail(self, error: ChannelError) -> None:
        """Fail all calls, and let nothing come or go any more."""
        with self._lock:
            self.error = self.error or error
            self._pending.clear()
            is_read, self._is_read = self._is_read, True
            for waiting in self._waiting:
                waiting.ring()
            self._waiting.clear()
        self.talk.connection.end()
        if not is_read:  # else by the thread that reads
            self.talk.connection.close()

    def _read_until(self, condition: Callable[[], bool], until: float) -> bool:
        try:
            while not condition():
                self._arrived(*self.talk.receive(max(0.0, until - time.monotonic())))
        except DeadlineError:
            return False
        except ChannelError as error:
            self.fail(error)
        return True

    def _arrived(self, message: Any, block: memoryview | None) -> None:
        if not isinstance(message, _ANSWERS):
            raise ChannelError(f"{self.peer} sent a {type(message).__name__} where answers are expected")
        with self._lock:
            pending = self._pending.get(message.number)
            if pending is not None:  # else its time is over
                pending.arrived.append((message, block))
                if not (pending.streams and isinstance(message, Answer)):
                    del self._pending[message.number]
            if self._waiting:
                for waiting in [waiting for waiting in self._waiting if waiting.condition()]:
                    self._waiting.remove(waiting)
                    waiting.ring()

    def _has_room(self) -> bool:
        return len(self._pending) < self._calls_at_once or self.error is not None

    def _hand_over(self) -> None:
        """Let another thread read, if one waits."""
        if self.error is not None:
            self.talk.connection.close()
            return
        with self._lock:
            self._is_read = False
            if self._waiting:
                self._waiting.pop(0).ring()

    def _ring_one(self) -> None:
        with self._lock:
            if self._waiting and not self._is_read:
                self._waiting.pop(0).ring()


class _Waiting:
    """A thread that waits while another one reads for it."""

    __slots__ = ("condition", "doorbell")

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition = condition
        self.doorbell = threading.Lock()
        self.doorbell.acquire()

    def ring(self) -> None:
        """Wake it; once."""
        self.doorbell.release()


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
