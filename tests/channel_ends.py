"""Two ends of the channel in one process, for tests."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener, Where


class Note(msgspec.Struct, tag="note"):
    """A message with some text and a number."""

    text: str
    number: int = 0


class Blob(msgspec.Struct, tag="blob"):
    """A message with bytes."""

    data: bytes


Messages = Note | Blob
DEADLINE_S = 30.0


@contextmanager
def listening(where: Where, key: RunKey | None) -> Iterator[tuple[Listener, queue.Queue[Connection]]]:
    """A listener, and the connections that it hands over, which are closed at the end."""
    arrived: queue.Queue[Connection] = queue.Queue()
    handed: list[Connection] = []

    def note(connection: Connection) -> None:
        handed.append(connection)
        arrived.put(connection)

    listener = Listener(where, key, Messages, note)
    try:
        yield listener, arrived
    finally:
        listener.close()
        for connection in handed:
            connection.close()


@contextmanager
def pair(where: Where, key: RunKey | None) -> Iterator[tuple[Connection, Connection]]:
    """The end that connected, and the one that accepted."""
    with listening(where, key) as (listener, arrived):
        here = connect(reached(listener), key, Messages, deadline_s=DEADLINE_S)
        try:
            yield here, arrived.get(timeout=DEADLINE_S)
        finally:
            here.close()


def reached(listener: Any) -> tuple[str, int] | Path:
    """The address of a listener or a server, as `connect` takes it."""
    address: tuple[str, int] | Path = listener.address
    return address
