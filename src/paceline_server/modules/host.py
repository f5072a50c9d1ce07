"""Named connections to serving processes, and references to objects in them.

Calls are repeated until they are answered.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import nn

from paceline.errors import ChannelError, DeadlineError, PacelineError, RemoteError
from paceline.job.spec import import_path_of
from paceline.text import nearest
from paceline.wire.key import RunKey, own_key
from paceline_server.client import Client, Pending, place_of
from paceline_server.modules.turns import end_threads, waiting
from paceline_server.talk import Closing
from paceline_server.values import Held, mapped

RECONNECT_S = 10.0
_LEAVE_S = 5.0


def connect(
    name: str,
    where: tuple[str, int] | str | Path,
    key: RunKey | None = None,
    *,
    deadline_s: float = 60.0,
    client: str = "",
) -> Host:
    """Connect to a serving process, and register the connection under `name`.

    Args:
        where: address and port, `"address:port"`, or the path of a Unix socket.
        key: key of the run; by default the key in the file PACELINE_KEY_FILE.
        deadline_s: default deadline of each call.
        client: name of this process for error messages in other processes.

    Raises:
        ChannelError: no process with this key answers at the address.
        PacelineError: this process is already connected to another host under this name.
    """
    if name in _hosts:
        raise PacelineError(
            "remote.name_taken",
            'this process already has a connection named "{name}". Close it first, or give another name.',
            name=name,
        )
    host = Host(name, place_of(where), key or own_key(), deadline_s, client or f"pid {os.getpid()}")
    _hosts[name] = host
    return host


def host_of(name: str | Host) -> Host:
    """Return the host of this name.

    Raises:
        PacelineError: no connection has that name.
    """
    if isinstance(name, Host):
        return name
    if name not in _hosts:
        known = nearest(name, _hosts) if _hosts else "There is none yet."
        raise PacelineError(
            "remote.name_unknown",
            'this process has no connection named "{name}": call remote.connect("{name}", …) first. {known}',
            name=name,
            known=known,
        )
    return _hosts[name]


@dataclass(eq=False)
class _Sent:
    """Call that is not answered yet."""

    function: str
    lane: str
    number: int
    args: tuple[Any, ...]
    deadline_s: float
    what: str  # description for errors
    pending: Pending | None = None
    dropped: bool = False  # the answer is no longer needed
    connection: int = 0  # number of the host's connection over which the call was last sent


_Release = tuple[str, str, tuple[Any, ...]]  # function, lane, and leading arguments


class Answer:
    """Result of a call, which may not have arrived yet."""

    def __init__(self, host: Host, sent: _Sent) -> None:
        self._host = host
        self._sent: _Sent | None = sent

    def result(self) -> Any:
        """Wait for the result, and return it. This is possible only once.

        Raises:
            RemoteError: the remote function raised an error.
            DeadlineError: the call was not answered in time. The function may still be running.
            ChannelError: the connection was lost and could not be restored.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            raise PacelineError(
                "remote.result_taken",
                "{host}: the result of this call was already read, and can be read only once",
                host=self._host.name,
            )
        return self._host.wait(sent)

    def __del__(self) -> None:
        if self._sent is not None:
            self._sent.dropped = True


class Host(Closing):
    """Connection to a serving process, as a context manager.

    Closing the connection releases the objects that this process holds in the serving process.

    If the connection is lost, a new connection is made, and unanswered calls are sent again. The serving process runs
    each call once.
    """

    def __init__(
        self, name: str, where: tuple[str, int] | Path, key: RunKey | None, deadline_s: float, client: str
    ) -> None:
        self.name, self._where, self._key, self.deadline_s, self._client_name = name, where, key, deadline_s, client
        self._identity = secrets.token_hex(16)
        self._process, self._closed = os.getpid(), False
        self._lock = threading.RLock()
        self._numbers: dict[str, int] = defaultdict(int)  # number of the next call, by lane
        self._sent: dict[str, dict[int, _Sent]] = defaultdict(dict)  # unanswered calls by lane, in the order sent
        self._error: ChannelError | None = None
        self._connection = 0
        self._client = self._connected(deadline_s)
        self._service = self._client.service
        self._released: SimpleQueue[tuple[_Release, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._release_all, name=f"paceline-release-{name}", daemon=True)
        self._thread.start()

    def call(self, function: str, lane: str, *args: Any, what: str = "", deadline_s: float | None = None) -> Any:
        """Call a function of the serving process. Raises the same errors as `Answer.result`."""
        return self.begin(function, lane, *args, what=what, deadline_s=deadline_s).result()

    def begin(self, function: str, lane: str, *args: Any, what: str = "", deadline_s: float | None = None) -> Answer:
        """Send a call. `what` is the name of the call in errors.

        Calls of one lane run in the order sent.
        """
        self._must_be_open()
        with self._lock:
            sent = _Sent(function, lane, self._numbers[lane], args, deadline_s or self.deadline_s, what or function)
            self._sent[lane][sent.number] = sent
            try:
                self._send(sent)
            except BaseException as error:
                # otherwise the waiting thread sends the call again
                if not isinstance(error, ChannelError) or not self._client.lost:
                    del self._sent[lane][sent.number]
                    raise
            self._numbers[lane] += 1
        return Answer(self, sent)

    def stream(self, path: str, number: str | None, args: Any, kwargs: Any) -> Any:
        """Iterate over the results of a remote generator. Lost results are not sent again."""
        self._must_be_open()
        return self._client.stream("stream", path, number, args, kwargs)

    def wait(self, sent: _Sent) -> Any:
        """Wait for the result of a call. Use `Answer.result` instead."""
        try:
            while True:
                pending, connection = sent.pending, sent.connection
                try:
                    if pending is not None:
                        with waiting():
                            return pending.result(sent.deadline_s)
                except DeadlineError as error:
                    raise DeadlineError(
                        "remote.call_deadline",
                        "{what} on {name} has not ended within {deadline_s:g} s. It may still run.",
                        what=sent.what,
                        name=self.name,
                        deadline_s=sent.deadline_s,
                    ) from error
                except RemoteError as error:
                    raise RemoteError(
                        "remote.raised_on_host",
                        "{what} on {name}: {error}",
                        what=sent.what,
                        name=self.name,
                        error=error,
                        function=error.function,
                        kind=error.kind,
                        remote_traceback=error.remote_traceback,
                    ) from None
                except ChannelError:  # the connection was lost before the answer arrived
                    pass
                self._reconnect(connection)
        finally:
            self._sent[sent.lane].pop(sent.number, None)

    def release(self, function: str, lane: str, first: tuple[Any, ...], what: Any) -> None:
        """Queue a release of `what`. Finalizers may call this.

        The remote call is `function(*first, [what, …])`, with all values queued so far.
        """
        self._released.put(((function, lane, first), what))  # takes no lock

    def close(self) -> None:
        """Close the connection, and release all objects that this process holds in the serving process."""
        if _hosts.get(self.name) is self:
            del _hosts[self.name]
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        if not _hosts:
            end_threads()
        self._released.put(None)
        self._thread.join()
        if self._error is None:
            with suppress(ChannelError):
                self._client.call("leave", deadline_s=_LEAVE_S)
            self._error = ChannelError("remote.closed", "the connection to {name} was closed", name=self.name)
        self._client.close()

    def _must_be_open(self) -> None:
        if os.getpid() != self._process:
            raise PacelineError(
                "remote.forked",
                "{name}: a forked process cannot use its parent's connection. Call remote.connect in this process.",
                name=self.name,
            )
        if self._error is not None:
            raise ChannelError("remote.host_failed", "{error}", error=self._error)

    def _send(self, sent: _Sent) -> None:
        lane = self._sent[sent.lane]
        for number, each in list(lane.items()):
            if each.dropped and each.pending is not None and each.pending.done:
                lane.pop(number, None)
        floor = min(list(lane), default=sent.number)
        sent.pending, sent.connection = None, self._connection
        sent.pending = self._client.begin(
            sent.function, sent.lane, sent.number, floor, *sent.args, deadline_s=sent.deadline_s, lane=sent.lane
        )

    def _connected(self, deadline_s: float) -> Client:
        client = Client(
            self._where,
            self._key,
            name=self._client_name,
            identity=self._identity,
            deadline_s=deadline_s,
        )
        self._connection += 1
        return client

    def _reconnect(self, connection: int) -> None:
        """Connect again, and send the unanswered calls, once for all threads."""
        with self._lock:
            if self._error is not None:
                raise ChannelError("remote.host_failed", "{error}", error=self._error)
            if self._connection != connection:
                return
            self._client.close()
            try:
                self._client = self._connected(RECONNECT_S)
                self._must_hold_what_it_held()
            except ChannelError as error:
                self._error = ChannelError(
                    "remote.lost", "the connection to {name} is lost: {error}", name=self.name, error=error
                )
                raise self._error from error
            for lane in list(self._sent.values()):
                for number in sorted(lane):
                    with suppress(ChannelError):  # the connection is lost again, which the waiting thread will notice
                        self._send(lane[number])

    def _must_hold_what_it_held(self) -> None:
        if self._client.service != self._service:
            raise ChannelError(
                "remote.host_restarted",
                "{name} was restarted, so the objects that this process held there are lost",
                name=self.name,
            )
        if not self._client.known:
            raise ChannelError(
                "remote.grace_over",
                "{name} released the objects of this process before the connection was restored",
                name=self.name,
            )

    def _release_all(self) -> None:
        """Send queued releases until None is queued. Runs in a separate thread."""
        goes_on = True
        while goes_on:
            entries = [self._released.get()]
            while not self._released.empty():
                entries.append(self._released.get())
            goes_on = None not in entries
            waiting: dict[_Release, list[Any]] = defaultdict(list)
            for call, what in filter(None, entries):
                waiting[call].append(what)
            for (function, lane, first), released in waiting.items():
                with suppress(PacelineError):  # the serving process releases the objects once this client has left
                    self.call(function, lane, *first, released)


_hosts: dict[str, Host] = {}


Named = str | Callable[..., Any]  # an import path that the serving process allows, or the function or class itself


class Reference:
    """Reference to an object in another process.

    The object is deleted when no reference is left. A reference ends when it is released or deleted, or when its
    process is unreachable for longer than the grace time of the serving process. If a reference is an argument of a
    call to the same host, the function receives the object itself.

    Attributes:
        token: text with which `remote.attach` makes another reference in another process.
    """

    def __init__(self, host: Host, token: str, what: str) -> None:
        self.host, self.token, self.what = host, token, what
        self._released = False

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of the object. Calls of one object run in order."""
        return self.begin(method, *args, **kwargs).result()

    def begin(self, method: str, /, *args: Any, **kwargs: Any) -> Answer:
        """Send a method call. Call `result()` of the returned answer to wait for it."""
        given = sent_to(self.host, (args, kwargs))
        return self.host.begin("call", self.token, method, self.number, *given, what=f"{self.what}.{method}")

    def ask(self, function: str, *args: Any, what: str = "", deadline_s: float | None = None) -> Answer:
        """Send a call to the `ServedModule` or `ServedOptimizer` itself."""
        what = f"{what or function} of {self.what}"
        return self.host.begin("of", self.token, self.number, function, args, what=what, deadline_s=deadline_s)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Iterate over the results of a generator method as they arrive."""
        given = sent_to(self.host, (args, kwargs))
        stream: Iterator[Any] = self.host.stream(method, self.number, *given)
        return stream

    @property
    def number(self) -> str:
        """Number of the object in the serving process.

        Raises:
            PacelineError: the reference was released.
        """
        if self._released:
            raise PacelineError(
                "remote.released", "this process has released {what} on {host}", what=self.what, host=self.host.name
            )
        return self.token

    def release(self) -> None:
        """Release the object. This reference cannot be used afterwards."""
        if not self._released:
            self._released = True
            self.host.release("release", "release", (), self.token)

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<{self.what} on {self.host.name}>"


class HasReference:
    """Stand-in for an object in another process, such as a remote module."""

    reference: Reference


def create(host: str | Host, factory: Named, *args: Any, name: str | None = None, **kwargs: Any) -> Reference:
    """Make an object in another process.

    Args:
        factory: a function or class that the serving process serves.
        name: name of a shared object. The first client makes the object, and other clients get the same object.

    Raises:
        RemoteError: the other process does not serve the factory, or the factory raised an error.
    """
    at = host_of(host)
    what = path_of(factory)
    made = at.call("make", "make", what, *sent_to(at, (args, kwargs)), name, None, False, what=what)
    return Reference(at, made, what)


def attach(host: str | Host, token: str) -> Reference:
    """Make a reference to an existing object in another process, given its `token`.

    Raises:
        RemoteError: the object was deleted.
    """
    at = host_of(host)
    at.call("attach", "make", token)
    return Reference(at, token, "object")


def call(host: str | Host, function: Named, *args: Any, **kwargs: Any) -> Any:
    """Call a function in another process, without gradients.

    Calls from several threads of this process run concurrently.

    Raises:
        RemoteError: the other process does not serve the function, or the function raised an error.
    """
    at, what = host_of(host), path_of(function)
    return at.call("call", f"call {what}", what, None, *sent_to(at, (args, kwargs)), what=what)


def stream(host: str | Host, function: Named, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Iterate over the results of a generator function in another process.

    Raises:
        RemoteError: the other process does not serve the function, or the function raised an error.
        ChannelError: the connection was lost. A stream is not restarted.
    """
    at = host_of(host)
    results: Iterator[Any] = at.stream(path_of(function), None, *sent_to(at, (args, kwargs)))
    return results


def sent_to(host: Host, value: Any) -> Any:
    """In call arguments, replace references to a host's objects with the objects' numbers.

    Raises:
        PacelineError: an object belongs to another host.
    """

    def sent(leaf: Any) -> Any:
        reference = leaf.reference if isinstance(leaf, HasReference) else leaf
        if isinstance(reference, Reference):
            if reference.host is not host:
                raise PacelineError(
                    "remote.argument_of_other_host",
                    "{reference!r} cannot be an argument of a call to {host}",
                    reference=reference,
                    host=host.name,
                )
            return Held(reference.number)
        if isinstance(leaf, nn.Module):
            raise PacelineError(
                "remote.argument_unsupported",
                "a {class_name} of this process cannot be an argument of a call to {host}. Arguments can be "
                "tensors, numbers, strings, lists, dicts, data classes and remote objects.",
                class_name=type(leaf).__name__,
                host=host.name,
            )
        return leaf

    return mapped(sent, value)


def path_of(factory: Named) -> str:
    """Return the import path of a function or class."""
    return factory if isinstance(factory, str) else import_path_of(factory)
