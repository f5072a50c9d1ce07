"""Connections to serving processes, by name, and calls that are repeated until answered."""

from __future__ import annotations

import os
import secrets
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from paceline.errors import ChannelError, DeadlineError, PacelineError, RemoteError
from paceline.nearest import nearest
from paceline.wire.key import RunKey, own_key
from paceline_server.client import Client, Pending

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
    """Connect to a serving process, which functions of `paceline_server` then know by `name`.

    Args:
        where: address and port, `"address:port"`, or the path of a Unix socket.
        key: of the run; the one handed to this process by PACELINE_KEY_FILE where none is given.
        deadline_s: for each call that names no other.
        client: name of this process in errors of others.

    Raises:
        ChannelError: nobody with this key answers there.
        PacelineError: this process is connected to another host of this name.
    """
    if name in _hosts:
        raise PacelineError(
            f'this process has a connection named "{name}" already; close it first, or give another name'
        )
    host = Host(name, place_of(where), key or own_key(), deadline_s, client or f"pid {os.getpid()}")
    _hosts[name] = host
    return host


def host_of(name: str | Host) -> Host:
    """The host of this name.

    Raises:
        PacelineError: there is no connection of that name.
    """
    if isinstance(name, Host):
        return name
    if name not in _hosts:
        known = nearest(name, _hosts) if _hosts else "There is none yet."
        raise PacelineError(f'no connection is named "{name}": call remote.connect("{name}", …) first. {known}')
    return _hosts[name]


def place_of(where: tuple[str, int] | str | Path | Any) -> Any:
    """A place as sockets take it, of `"address:port"` or a path."""
    if not isinstance(where, str):
        return where
    address, colon, port = where.rpartition(":")
    if colon and port.isdecimal() and "/" not in where:
        return address.strip("[]"), int(port)
    return Path(where)


@dataclass(eq=False)
class _Sent:
    """A call that has no answer yet."""

    function: str
    lane: str
    number: int
    args: tuple[Any, ...]
    deadline_s: float
    what: str  # for errors
    pending: Pending | None = None
    dropped: bool = False  # nobody wants the answer
    connection: int = 0  # of the host, that carried it last


class _Lost(Exception):
    """The connection went before the answer came."""


class Answer:
    """The result of a call, when it comes."""

    def __init__(self, host: Host, sent: _Sent) -> None:
        self._host = host
        self._sent: _Sent | None = sent

    def result(self) -> Any:
        """Wait for the result, which can be had once.

        Raises:
            RemoteError: the function raised there.
            DeadlineError: it did not answer in time. It may still be running.
            ChannelError: the connection was lost, and nobody came back.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            raise PacelineError(f"{self._host.name}: the result of a call can be had once, and was")
        return self._host.wait(sent)

    def __del__(self) -> None:
        if self._sent is not None:
            self._sent.dropped = True


class Host:
    """Connection to a serving process. A context manager; objects there that this process holds end with it.

    When a connection is lost, another one is made, and what has no answer is sent again; the other end runs it once.
    """

    def __init__(
        self, name: str, where: tuple[str, int] | Path, key: RunKey | None, deadline_s: float, client: str
    ) -> None:
        self.name, self._where, self._key, self.deadline_s, self._client_name = name, where, key, deadline_s, client
        self._identity = secrets.token_hex(16)
        self._process, self._closed = os.getpid(), False
        self._lock = threading.RLock()
        self._numbers: dict[str, int] = defaultdict(int)  # of the next call, by lane
        self._sent: dict[str, dict[int, _Sent]] = defaultdict(dict)  # by lane, in the order sent
        self._error: ChannelError | None = None
        self._connection, self._server = 0, ""
        self._client = self._connected(deadline_s)
        self._released: SimpleQueue[tuple[str, str, tuple[Any, ...], Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._release_all, name=f"paceline-release-{name}", daemon=True)
        self._thread.start()

    def call(self, function: str, lane: str, *args: Any, what: str = "", deadline_s: float | None = None) -> Any:
        """The result of a function of the serving process. Raises as `Answer.result`."""
        return self.begin(function, lane, *args, what=what, deadline_s=deadline_s).result()

    def begin(self, function: str, lane: str, *args: Any, what: str = "", deadline_s: float | None = None) -> Answer:
        """Send a call; `what` names it in errors. Those of one lane run in the order sent."""
        self._must_be_open()
        with self._lock:
            sent = _Sent(function, lane, self._numbers[lane], args, deadline_s or self.deadline_s, what or function)
            self._sent[lane][sent.number] = sent
            try:
                self._send(sent)
            except BaseException as error:
                if not isinstance(error, ChannelError) or not self._client.lost:  # else who waits for it sends it again
                    del self._sent[lane][sent.number]
                    raise
            self._numbers[lane] += 1
        return Answer(self, sent)

    def stream(self, path: str, number: str | None, args: Any, kwargs: Any) -> Any:
        """Results of a generator of the serving process, as they come. They are not repeated."""
        self._must_be_open()
        return self._client.stream("stream", path, number, args, kwargs)

    def wait(self, sent: _Sent) -> Any:
        """The result of a call; `Answer.result` is the door to it."""
        try:
            while True:
                pending, connection = sent.pending, sent.connection
                with suppress(_Lost):
                    return self._result(sent, pending)
                self._reconnect(connection)
        except BaseException:  # it may never have begun, and later ones of its lane are not to wait for it
            self._released.put(("skip", sent.lane, (), sent.number))
            raise
        finally:
            self._sent[sent.lane].pop(sent.number, None)

    def release(self, function: str, lane: str, first: tuple[Any, ...], what: Any) -> None:
        """Have the other end let go of something, soon, by `function(*first, [what, …])`. For finalizers."""
        self._released.put((function, lane, first, what))  # takes no lock

    def close(self) -> None:
        """Close the connection, and let go of everything that this process holds there."""
        if _hosts.get(self.name) is self:
            del _hosts[self.name]
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        self._released.put(None)
        self._thread.join()
        if self._error is None:
            with suppress(ChannelError):
                self._client.call("leave", deadline_s=_LEAVE_S)
            self._error = ChannelError(f"the connection to {self.name} was closed")
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _must_be_open(self) -> None:
        if os.getpid() != self._process:
            raise PacelineError(
                f"{self.name}: a forked process has no connection of its own: call remote.connect in it"
            )
        if self._error is not None:
            raise ChannelError(str(self._error))

    def _result(self, sent: _Sent, pending: Pending | None) -> Any:
        if pending is None:
            raise _Lost
        try:
            return pending.result(sent.deadline_s)
        except DeadlineError as error:
            raise DeadlineError(
                f"{sent.what} on {self.name} has not ended within {sent.deadline_s:g} s; it may still run"
            ) from error
        except RemoteError as error:
            raise RemoteError(
                f"{sent.what} on {self.name}: {error}",
                function=error.function,
                kind=error.kind,
                remote_traceback=error.remote_traceback,
            ) from None
        except ChannelError as error:
            raise _Lost from error

    def _send(self, sent: _Sent) -> None:
        lane = self._sent[sent.lane]
        for number, each in list(lane.items()):
            if each.dropped and each.pending is not None and each.pending.done:
                lane.pop(number, None)
        floor = min(list(lane), default=sent.number)
        sent.pending, sent.connection = None, self._connection
        sent.pending = self._client.begin(
            sent.function, sent.lane, sent.number, floor, *sent.args, deadline_s=sent.deadline_s
        )

    def _connected(self, deadline_s: float) -> Client:
        client = Client(
            self._where,
            self._key,
            name=self._client_name,
            identity=self._identity,
            deadline_s=deadline_s,
            reconnect=False,  # before anything else goes, what has no answer does
        )
        try:
            server, known = client.call("hello")
            if self._server not in ("", server):
                raise ChannelError(f"{self.name} was started again; what this process held there is lost")
            if self._server and not known:
                raise ChannelError(
                    f"{self.name} had let go of what this process held there before it could be reached again"
                )
        except BaseException:
            client.close()
            raise
        self._server = server
        self._connection += 1
        return client

    def _reconnect(self, connection: int) -> None:
        """Send what has no answer over a new connection, once for all threads."""
        with self._lock:
            if self._error is not None:
                raise ChannelError(str(self._error))
            if self._connection != connection:
                return
            self._client.close()
            try:
                self._client = self._connected(RECONNECT_S)
            except ChannelError as error:
                self._error = ChannelError(f"the connection to {self.name} is lost: {error}")
                raise self._error from error
            for lane in list(self._sent.values()):
                for number in sorted(lane):
                    with suppress(ChannelError):  # lost again, as who waits for it will find
                        self._send(lane[number])

    def _release_all(self) -> None:
        """Carry out `release`, in a thread of its own."""
        while (first := self._released.get()) is not None:
            waiting: dict[tuple[str, str, tuple[Any, ...]], list[Any]] = defaultdict(list)
            last: tuple[str, str, tuple[Any, ...], Any] | None = first
            while last is not None:
                function, lane, arguments, what = last
                waiting[function, lane, arguments].append(what)
                if self._released.empty():
                    break
                last = self._released.get()
            for (function, lane, arguments), entries in waiting.items():
                with suppress(PacelineError):  # the other end does it when this client has left
                    if function == "skip":
                        self._client.call("skip", lane, entries)
                    else:
                        self.call(function, lane, *arguments, entries)
            if last is None:
                return


_hosts: dict[str, Host] = {}
