"""Service that provides named functions to clients of the run.

One thread per client reads the client's calls, and passes them to a thread pool. If a function is marked `quick`, or is
marked `at_once` and need not wait, the reading thread calls it directly, so that no other thread has to wake up.
"""

from __future__ import annotations

import functools
import inspect
import queue
import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ChannelError, DeadlineError, PacelineError, RemoteError
from paceline.text import nearest
from paceline.wire.connection import HANDSHAKE_S, Connection
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener, Where
from paceline_server.client import STREAM_AHEAD
from paceline_server.talk import (
    LATER,
    VERSION,
    Answer,
    Call,
    Closing,
    End,
    Forget,
    FromClient,
    Hello,
    More,
    Raised,
    Refused,
    Talk,
    Welcome,
    frame_limits,
)
from paceline_server.values import pack, unpack

_MOST_NAME = 200  # maximum number of characters
_MOST_TRACEBACK = 2**16
_MOST_REFUSED = 512  # maximum number of refused connections that wait until their client has read the reason
_END_S = 5.0  # time for threads to end when a service is closed
_QUIET_S = 3600.0  # longest single wait for a message; a client may stay silent for longer


class Limits(NamedTuple):
    """Limits for clients.

    Attributes:
        message_bytes: maximum size of a call without its large tensors.
        attached_bytes: maximum size of the large tensors in a client's pending calls. Beyond it, the client must wait.
        calls_at_once: maximum number of pending calls of one client. Beyond it, the client must wait.
        callers: maximum number of connected clients. Further clients are refused.
    """

    message_bytes: int = 2**22
    attached_bytes: int = 2**33
    calls_at_once: int = 128
    callers: int = 4096


@dataclass(eq=False)
class Caller:
    """A connected client.

    Attributes:
        name: the name that the client chose for itself.
        identity: random identity that stays the same when the client reconnects.
        peer: the client's address, for messages.
    """

    name: str
    identity: str
    peer: str


class Service(Closing):
    """Server that calls named functions for clients of the run in threads.

    A function is called as `function(caller, *args)`. Clients call generator functions by `Client.stream`. Calls run in
    a thread pool, unless they are marked `quick` or `at_once`.

    Args:
        where: address and port (TLS with the run's key), path of a new Unix socket in a private folder (no TLS), or a
            listening socket.
        threads: number of threads of the pool. If all are busy, further calls wait.
        grace_s: time without a connection after which a client is lost.
        on_lost: function that is called once for each lost client. Calls of the client may still run.

    Attributes:
        address: address of the service, for `Client`.
        presence: the connected clients.
    """

    def __init__(
        self,
        where: Where,
        key: RunKey | None,
        functions: Mapping[str, Callable[..., Any]],
        *,
        threads: int = 8,
        limits: Limits = Limits(),  # noqa: B008 - nothing changes it
        grace_s: float = 0.0,
        on_lost: Callable[[Caller], object] = lambda _: None,
    ) -> None:
        self.functions, self.limits = dict(functions), limits
        self.pool, self._identity = Pool(threads), secrets.token_hex(8)
        self._served: dict[Connection, threading.Thread] = {}
        self._refused: deque[Connection] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.presence = Presence(grace_s, on_lost)
        within = frame_limits(limits.attached_bytes, limits.message_bytes, within_host=_is_within_host(where))
        self._listener = Listener(where, key, FromClient, self._welcome, limits=within)
        self.address = self._listener.address

    @property
    def unauthenticated(self) -> int:
        """Number of refused connections."""
        return self._listener.unauthenticated

    @property
    def callers(self) -> int:
        """Number of active connections."""
        return len(self._served)

    def close(self) -> None:
        """Stop serving. Pending calls raise ChannelError in their clients.

        Running functions have 5 s to finish.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.presence.close()
        self._listener.close()
        with self._lock:
            served = dict(self._served)
        for connection in served:
            connection.end()
        until = time.monotonic() + _END_S
        for thread in served.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self.pool.close(max(0.0, until - time.monotonic()))
        while self._refused:
            self._refused.popleft().close()

    def _welcome(self, connection: Connection) -> None:
        """Serve a connection in a new thread. The listener calls this."""
        if len(self._served) >= self.limits.callers:
            with suppress(ChannelError):
                connection.post(Refused(f"it already serves {len(self._served)} clients, which is the maximum"))
            self._refused.append(connection)
            if len(self._refused) > _MOST_REFUSED:
                self._refused.popleft().close()
            return
        thread = threading.Thread(target=self._serve, args=(connection,), name="paceline-remote-caller", daemon=True)
        with self._lock:
            self._served[connection] = thread
        thread.start()

    def _serve(self, connection: Connection) -> None:
        served = None
        try:
            caller = self._met(connection)
            known = self.presence.came(caller)
            served = _Served(self, caller, connection)
            connection.send(Welcome(self.limits.attached_bytes, self.limits.calls_at_once, self._identity, known))
            served.run()
        except ChannelError:  # the client receives a refusal, or notices the closed connection
            pass
        finally:
            if served is not None:
                served.end()
            connection.close()
            with self._lock:
                del self._served[connection]
            if served is not None:
                self.presence.left(served.caller)

    def _met(self, connection: Connection) -> Caller:
        hello = connection.receive(HANDSHAKE_S)
        if not isinstance(hello, Hello):
            raise ChannelError("remote.not_a_client", "{peer} is not a client", peer=connection.peer)
        problem = None
        if hello.version != VERSION:
            problem = ChannelError(
                "remote.version_differs",
                "the server uses version {own} of remote calls, but the client uses version {theirs}. Install the same "
                "paceline on both.",
                own=VERSION,
                theirs=hello.version,
            )
        elif len(hello.name) > _MOST_NAME or not 0 < len(hello.identity) <= _MOST_NAME:
            problem = ChannelError(
                "remote.name_too_long", "names and identities have at most {limit} characters", limit=_MOST_NAME
            )
        if problem is not None:
            connection.send(Refused(str(problem)))
            connection.receive(HANDSHAKE_S)  # waits until the client has read the refusal and closes the connection
            raise problem
        return Caller(hello.name, hello.identity, connection.peer)


class _Task:
    __slots__ = ("arguments", "block", "call", "credits", "forgotten", "function", "nbytes")

    def __init__(self, call: Call, block: memoryview | None, function: Callable[..., Any]) -> None:
        self.call, self.block, self.function = call, block, function
        self.arguments: list[Any] | None = None  # set by unpacking
        self.nbytes = 0 if block is None else len(block)
        self.forgotten = False
        self.credits = threading.Semaphore(STREAM_AHEAD) if call.stream else None


class _Served:
    def __init__(self, service: Service, caller: Caller, connection: Connection) -> None:
        self.caller = caller
        self._functions, self._limits, self._pool = service.functions, service.limits, service.pool
        self._talk = Talk(connection, service.limits.attached_bytes)
        self._changed = threading.Condition()
        self._tasks: dict[int, _Task] = {}  # pending calls, except quick ones
        self._attached = 0  # attached bytes of the pending calls
        self._ended = False

    def run(self) -> None:
        """Read messages until the connection ends, which raises ChannelError."""
        while True:
            try:
                message, block = self._talk.receive(_QUIET_S)
            except DeadlineError:
                continue
            self._obey(message, block)
            del message, block

    def end(self) -> None:
        """Cancel running calls, because the client is gone."""
        with self._changed:
            self._ended = True
            for task in self._tasks.values():
                self._forget(task)
            self._changed.notify_all()

    def _obey(self, message: Any, block: memoryview | None) -> None:
        if isinstance(message, Call):
            self._begin(message, block)
        elif isinstance(message, Forget | More):
            with self._changed:
                task = self._tasks.get(message.number)
                if task is None:
                    return
                if isinstance(message, Forget):
                    self._forget(task)
                elif task.credits is not None and 0 < message.count <= STREAM_AHEAD:
                    task.credits.release(message.count)
        else:
            raise ChannelError(
                "remote.unexpected_call",
                "{peer} sent a {class_name} instead of a call",
                peer=self.caller.peer,
                class_name=type(message).__name__,
            )

    def _begin(self, call: Call, block: memoryview | None) -> None:
        function = self._functions.get(call.function)
        if function is None:
            hint = nearest(call.function[:_MOST_NAME], self._functions)
            self._raised(call, "", f"no function {call.function[:_MOST_NAME]!r} is served there. {hint}")
            return
        mark = getattr(function, "remote_mark", "")
        task = _Task(call, block, function)
        if mark == "quick" and not call.stream:
            self._run(task)
            return
        if mark == "at once" and not call.stream and self._run(task, is_trial=True):
            return
        self._admit(task)
        lane = (self.caller.identity, call.lane) if call.lane else None
        self._pool.put(lambda: self._run_admitted(task), lane)

    def _admit(self, task: _Task) -> None:
        """Admit a call as soon as the limits allow it.

        Until then, no message of the client is read, so the client waits.
        """
        with self._changed:
            while not self._ended and self._tasks and not self._has_room(task):
                if self._talk.connection.wait(0, time.monotonic()) or self._talk.connection.lost:
                    raise ChannelError("remote.client_gone", "{peer} is no longer available", peer=self.caller.peer)
                self._changed.wait(1.0)
            if task.call.number in self._tasks:
                raise ChannelError(
                    "remote.call_number_reused", "{peer} used the same call number twice", peer=self.caller.peer
                )
            self._tasks[task.call.number] = task
            self._attached += task.nbytes

    def _has_room(self, task: _Task) -> bool:
        fits = self._attached + task.nbytes <= self._limits.attached_bytes
        return len(self._tasks) < self._limits.calls_at_once and fits

    def _run_admitted(self, task: _Task) -> None:
        try:
            self._run(task)
        finally:
            with self._changed:
                del self._tasks[task.call.number]
                self._attached -= task.nbytes
                self._changed.notify_all()

    def _run(self, task: _Task, *, is_trial: bool = False) -> bool:
        """Call the function and send its result; return False if a trial must wait."""
        if task.forgotten or self._ended:
            return True
        call = task.call
        try:
            if call.stream:
                self._run_stream(task)
                return True
            result = self._tried(task) if is_trial else self._called(task)
            if result is LATER:
                return False
            packed = pack(result)
            del result
            self._talk.send(Answer(call.number, [], packed.tree, None), packed)
        except RemoteError as error:  # a value cannot be sent, or a remote call in the function failed
            self._raised(call, error.kind and "RemoteError", str(error), error)
        except ChannelError as error:
            if not self._talk.connection.lost:  # the function raised, or its answer is too long
                self._raised(call, "ChannelError", str(error), error)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the caller
            self._raised(call, type(error).__qualname__, _text_of(error), error)
        return True

    def _unpacked(self, task: _Task) -> list[Any]:
        if task.arguments is None:
            task.arguments = unpack(task.call.arguments, task.block)
            task.block = task.call.arguments = None
        if not isinstance(task.arguments, list):
            raise RemoteError("remote.arguments_not_a_list", "the arguments of a call must be a list")
        return task.arguments

    def _tried(self, task: _Task) -> Any:
        """Return the result of the function's trial, and free the arguments unless it must wait."""
        result = task.function.__dict__["remote_trial"](self.caller, *self._unpacked(task))
        if result is not LATER:
            task.arguments = None
        return result

    def _called(self, task: _Task) -> Any:
        """Call the function, and free its arguments, whose memory is returned with the answer."""
        arguments = self._unpacked(task)
        task.arguments = None
        result = task.function(self.caller, *arguments)
        if inspect.isgenerator(result) and not task.call.stream:
            result.close()
            raise RemoteError(
                "remote.is_a_stream", "this function yields results one by one. Call the function with `stream`."
            )
        return result

    def _run_stream(self, task: _Task) -> None:
        results: Iterator[Any] = iter(self._called(task))
        try:
            for result in results:
                assert task.credits is not None
                task.credits.acquire()
                if task.forgotten:
                    return
                packed = pack(result)
                del result
                self._talk.send(Answer(task.call.number, [], packed.tree, None), packed)
            self._talk.send(End(task.call.number, []))
        finally:
            if inspect.isgenerator(results):
                results.close()

    def _raised(self, call: Call, kind: str, text: str, error: BaseException | None = None) -> None:
        trace = "".join(traceback.format_exception(error)) if error is not None and kind else ""
        with suppress(ChannelError):
            code = error.code if isinstance(error, PacelineError) else ""
            text, trace = text[:_MOST_TRACEBACK], trace[-_MOST_TRACEBACK:]
            self._talk.send(Raised(call.number, [], kind[:_MOST_NAME], text, trace, code))

    def _forget(self, task: _Task) -> None:
        task.forgotten = True
        if task.credits is not None:
            task.credits.release()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - of the user's class
        return f"(its text cannot be had: {type(another).__qualname__})"


def _is_within_host(where: Where) -> bool:
    return where.family == socket.AF_UNIX if isinstance(where, socket.socket) else isinstance(where, Path)


class Presence:
    """Connected clients, and clients disconnected for less than the grace time.

    Args:
        on_lost: function that is called once for each client whose grace time is over, in a thread of this object.
    """

    def __init__(self, grace_s: float, on_lost: Callable[[Caller], object]) -> None:
        self._grace_s, self._on_lost = grace_s, on_lost
        self._changed = threading.Condition()
        self._here: dict[str, set[Caller]] = {}  # connections by client
        self._away: dict[str, tuple[float, Caller]] = {}  # end of the grace time, by client
        self._closed = False
        self._thread: threading.Thread | None = None  # started when the first client disconnects

    def came(self, caller: Caller) -> bool:
        """Register a connection; return True if the client is known and not lost."""
        with self._changed:
            known = caller.identity in self._here
            self._here.setdefault(caller.identity, set()).add(caller)
            self._away.pop(caller.identity, None)
            return known

    def left(self, caller: Caller) -> None:
        """Record that a connection has ended."""
        with self._changed:
            connections = self._here.get(caller.identity, set())
            if caller in connections:  # otherwise the client was already declared lost
                connections.remove(caller)
                self.expect(caller)

    def expect(self, caller: Caller) -> None:
        """Declare a client lost after the grace time, unless the client reconnects in time."""
        with self._changed:
            if not self._here.setdefault(caller.identity, set()):
                self._away[caller.identity] = (time.monotonic() + self._grace_s, caller)
                self._changed.notify_all()
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._watch, name="paceline-presence", daemon=True)
                    self._thread.start()

    def forget(self, caller: Caller) -> None:
        """Declare a client lost immediately."""
        with self._changed:
            self._away.pop(caller.identity, None)
            known = self._here.pop(caller.identity, None) is not None
        if known:
            self._on_lost(caller)

    def close(self) -> None:
        """Stop. After this call, no client is declared lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while (caller := self._next_lost()) is not None:
            self._on_lost(caller)

    def _next_lost(self) -> Caller | None:
        with self._changed:
            while not self._closed:
                until, caller = min(self._away.values(), key=lambda entry: entry[0], default=(0.0, None))
                left_s = until - time.monotonic()
                if caller is not None and left_s <= 0:
                    del self._away[caller.identity], self._here[caller.identity]
                    return caller
                self._changed.wait(None if caller is None else left_s)
        return None


class Pool:
    """Pool of at most `threads` threads. A thread starts only if none is idle."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError("a pool has at least one thread")
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # tasks that wait until the running task of their lane ends
        self._lanes: dict[Hashable, deque[Callable[[], None]]] = {}
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()

    def put(self, task: Callable[[], None], lane: Hashable = None) -> None:
        """Run a task in one of the threads. The task must not raise an error.

        Tasks begin in the order in which they are added. A task of a lane begins only after the previous task of the
        lane has ended.
        """
        if lane is not None:
            with self._lock:
                if lane in self._lanes:
                    self._lanes[lane].append(task)
                    return
                self._lanes[lane] = deque()
            task = functools.partial(self._run_in_lane, lane, task)
        self._tasks.put(task)
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name="paceline-remote-call", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run_in_lane(self, lane: Hashable, task: Callable[[], None] | None) -> None:
        while task is not None:
            task()
            task = None
            with self._lock:
                if self._lanes[lane]:
                    task = self._lanes[lane].popleft()
                else:
                    del self._lanes[lane]

    def close(self, deadline_s: float) -> None:
        """End the threads within a time limit.

        A hanging thread does not stop the process from exiting.
        """
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
