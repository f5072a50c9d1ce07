"""Rendezvous store: keys and values that only processes of the run can read and write.

The store has the same methods as torch's `TCPStore`, and `paceline.comm.rendezvous` makes it a torch store. The server
never blocks. A wait is a request that the server answers later, and the client handles the timeout.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import ChannelError, DeadlineError
from paceline.wire.connection import LIMIT_BYTES, Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener, Where
from paceline.wire.status import generation_is_over

# largest sizes in bytes of a key, of a value, and of all keys and values together
KEY_LIMIT, VALUE_LIMIT, TOTAL_LIMIT = 2**12, 2**20, 2**28
_MOST_SHOWN = 8  # number of missing keys shown in an error


What = Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "count"]


class Request(msgspec.Struct, array_like=True, tag="request", forbid_unknown_fields=True):
    """Request to the store. The number lets the client recognize answers that arrive after the deadline.

    The server answers `get` and `wait` once all keys exist.
    """

    number: int
    what: What
    keys: list[str] = []
    values: list[bytes] = []
    amount: int = 0


class Answer(msgspec.Struct, array_like=True, tag="answer", forbid_unknown_fields=True):
    """Answer to a request. `problem` is the reason if the request was refused."""

    number: int
    values: list[bytes] = []
    keys: list[str] = []
    count: int = 0
    problem: str | None = None


class StoreServer:
    """Server of the store, in a thread of this process.

    Args:
        key, where: see `Listener`.
    """

    def __init__(self, key: RunKey | None, where: Where) -> None:
        self._values: dict[str, bytes] = {}
        self._total = 0
        self._waiting: dict[Connection, tuple[Request, set[str]]] = {}
        self._listener = Listener(where, key, Request, lambda _: None, on_message=self._obey, on_close=self._forget)
        self.address = self._listener.address

    @property
    def unauthenticated(self) -> int:
        """Number of rejected connections."""
        return self._listener.unauthenticated

    def close(self) -> None:
        """Stop the server. Later calls of clients raise an error."""
        self._listener.close()

    def _forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def _obey(self, connection: Connection, request: Request) -> None:
        self._forget(connection)  # a new request of a client ends the client's earlier wait
        if request.what in ("get", "wait") and (missing := set(request.keys) - self._values.keys()):
            self._waiting[connection] = request, missing
            return
        answer = Answer(request.number)
        try:
            self._answer(request, answer)
        except ValueError as error:
            answer = Answer(request.number, problem=str(error))
        connection.post(answer)

    def _answer(self, request: Request, answer: Answer) -> None:
        """Carry out a request. Raise ValueError if the request is invalid, for example if it has too many keys."""
        keys, values = request.keys, request.values
        match request.what:
            case "get":
                answer.values = [self._values[key] for key in keys]
                if sum(map(len, answer.values)) > LIMIT_BYTES // 2:
                    raise ValueError(f"values of {len(keys)} keys are too long for one answer; ask for fewer at once")
            case "check":
                answer.keys = [key for key in keys if key not in self._values]
            case "set":
                for key, value in zip(keys, values, strict=True):
                    self._set(key, value)
            case "add":
                [key] = keys
                answer.count = int(self._values.get(key, b"0")) + request.amount
                if not -(2**63) <= answer.count < 2**63:
                    raise ValueError(f"{key[:80]!r} would have more than 64 bits")
                self._set(key, str(answer.count).encode())
            case "append":
                [key], [value] = keys, values
                self._set(key, self._values.get(key, b"") + value)
            case "compare_set":
                [key], [expected, desired] = keys, values
                found = self._values.get(key)
                if found == expected or (found is None and not expected):
                    self._set(key, desired)
                    found = desired
                answer.values = [expected if found is None else found]
            case "delete":
                [key] = keys
                gone = self._values.pop(key, None)
                self._total -= 0 if gone is None else len(key) + len(gone)
                answer.count = int(gone is not None)
            case "count":
                answer.count = len(self._values)

    def _set(self, key: str, value: bytes) -> None:
        before = self._values.get(key)
        total = self._total + len(value) + (len(key) if before is None else -len(before))
        if len(key) > KEY_LIMIT or len(value) > VALUE_LIMIT or total > TOTAL_LIMIT:
            raise ValueError(
                f"the store holds keys of {KEY_LIMIT:,} bytes, values of {VALUE_LIMIT:,} and {TOTAL_LIMIT:,} in all; "
                f"{key[:80]!r} has {len(value):,}"
            )
        self._values[key], self._total = value, total
        if before is None:
            self._wake(key)

    def _wake(self, key: str) -> None:
        """Answer the requests that were waiting only for this key."""
        for connection, (request, missing) in list(self._waiting.items()):
            missing.discard(key)
            if not missing:
                try:
                    self._obey(connection, request)  # if another key was deleted meanwhile, the request waits again
                except ChannelError:  # the listener handles the end of the connection
                    self._forget(connection)


class StoreClient:
    """Client of the store. Any thread may call it.

    Each call raises ChannelError if the server is lost, and DeadlineError if it does not answer in time.

    Args:
        where: address and port of the server, which need the run's key, or the path of a Unix socket, which needs no
            key.
        deadline_s: default deadline of calls, and deadline to connect.
    """

    def __init__(self, where: tuple[str, int] | Path, key: RunKey | None, deadline_s: float) -> None:
        self._where, self._key, self.deadline_s = where, key, deadline_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._all: list[Connection] = []
        self._closed = False
        self._idle = [self._connect(deadline_s)]

    def set(self, key: str, value: bytes, deadline_s: float | None = None) -> None:
        """Set a value."""
        self.set_all({key: value}, deadline_s)

    def set_all(self, values: Mapping[str, bytes], deadline_s: float | None = None) -> None:
        """Set several values."""
        self._ask("set", values, deadline_s, values.values())

    def get(self, key: str, deadline_s: float | None = None) -> bytes:
        """Wait until a key exists; return its value."""
        return self.get_all([key], deadline_s)[0]

    def get_all(self, keys: Iterable[str], deadline_s: float | None = None) -> list[bytes]:
        """Wait until all keys exist; return their values."""
        return self._ask("get", keys, deadline_s).values

    def wait(self, keys: Iterable[str], deadline_s: float | None = None) -> None:
        """Wait until all keys exist. The error names the missing keys."""
        self._ask("wait", keys, deadline_s)

    def check(self, keys: Iterable[str], deadline_s: float | None = None) -> bool:
        """Return True if all keys exist."""
        return not self._ask("check", keys, deadline_s).keys

    def add(self, key: str, amount: int, deadline_s: float | None = None) -> int:
        """Add `amount` to a number; return the sum. A missing key counts as 0."""
        return self._ask("add", [key], deadline_s, amount=amount).count

    def append(self, key: str, value: bytes, deadline_s: float | None = None) -> None:
        """Append to a value. A missing key counts as an empty value."""
        self._ask("append", [key], deadline_s, [value])

    def compare_set(self, key: str, expected: bytes, desired: bytes, deadline_s: float | None = None) -> bytes:
        """Set a key to `desired` if its value equals `expected`; return the resulting value.

        An empty `expected` also matches a missing key.
        """
        return self._ask("compare_set", [key], deadline_s, [expected, desired]).values[0]

    def delete(self, key: str, deadline_s: float | None = None) -> bool:
        """Delete a key; return True if it existed."""
        return bool(self._ask("delete", [key], deadline_s).count)

    def num_keys(self, deadline_s: float | None = None) -> int:
        """Return the number of keys."""
        return self._ask("count", [], deadline_s).count

    def close(self) -> None:
        """Close all connections to the server."""
        with self._lock:
            self._closed = True
            for connection in self._all:
                connection.close()

    def _connect(self, deadline_s: float) -> Connection:
        # once the generation is over, stop waiting for its store, whose host may be lost
        connection = connect(self._where, self._key, Answer, deadline_s=deadline_s, stopped=generation_is_over)
        with self._lock:
            if self._closed:
                connection.close()
            self._all.append(connection)
        return connection

    def _ask(
        self,
        what: What,
        keys: Iterable[str],
        deadline_s: float | None,
        values: Iterable[bytes] = (),
        amount: int = 0,
    ) -> Answer:
        """Send a request over an idle connection, and wait for the answer."""
        request = Request(next(self._numbers), what, list(keys), list(values), amount)
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect(deadline_s)
        try:
            answer = _exchange(connection, request, until)
        except DeadlineError as error:
            if what not in ("get", "wait"):
                raise
            raise DeadlineError(
                "store.deadline", "{reason}", reason=self._who_is_missing(connection, request.keys, deadline_s)
            ) from error
        finally:
            with self._lock:
                if connection.lost:
                    connection.close()
                    self._all.remove(connection)
                else:
                    self._idle.append(connection)
        if answer.problem is not None:
            raise ChannelError("store.refused", "{reason}", reason=answer.problem)
        return answer

    def _who_is_missing(self, connection: Connection, keys: list[str], deadline_s: float) -> str:
        try:
            answer = _exchange(connection, Request(next(self._numbers), "check", keys), time.monotonic() + 1.0)
        except ChannelError as error:
            return f"waited {deadline_s:g} s for the store, which does not answer: {error}"
        more = f" and {len(answer.keys) - _MOST_SHOWN} more" if len(answer.keys) > _MOST_SHOWN else ""
        return f"waited {deadline_s:g} s for {', '.join(answer.keys[:_MOST_SHOWN])}{more}, which no process has set"


def _exchange(connection: Connection, request: Request, until: float) -> Answer:
    connection.send(request, max(0.0, until - time.monotonic()) + 1.0)
    while True:
        answer: Answer = connection.receive(max(0.0, until - time.monotonic()))
        if answer.number == request.number:  # any other answer belongs to a request that has timed out
            return answer
