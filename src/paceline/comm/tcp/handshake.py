"""Greetings of two ranks on a new connection: ranks, bytes received, and fresh keys.

They are said inside TLS (`wire/admission.py`), to one who holds the run's key. A run has several groups and many ranks
with that key, so each message names the group and both ranks: a connection that was led to another door ends there.
"""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass, field

from paceline.comm.tcp.wire import KEY_BYTES, PlainWire, SealedWire, Wire

_MAGIC = b"pace-tcp"
_VERSION = 3
_GREETING = struct.Struct(f"<8sH16sII??QQ{KEY_BYTES}s")
GREETING_BYTES = _GREETING.size
GROUP_BYTES = 16


@dataclass(frozen=True)
class Greeting:
    """The message of each side, of the one that connects first.

    Attributes:
        group: a random name of the group.
        reconnect: the sender may not connect, and asks the other to, as its connection is lost.
        sealed: what the sender sends afterwards is encrypted.
        number: the number of this connection, counted by the rank that accepts; before, of the last one.
        received: bytes of the stream that the sender has.
        key: what it seals with, new for every connection.
    """

    group: bytes
    sender: int
    receiver: int
    reconnect: bool
    sealed: bool
    number: int
    received: int
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    def to_bytes(self) -> bytes:
        """For the wire."""
        return _GREETING.pack(
            *(_MAGIC, _VERSION, self.group, self.sender, self.receiver),
            *(self.reconnect, self.sealed, self.number, self.received, self.key),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Greeting:
        """The message from its bytes.

        Raises:
            ConnectionError: it is none.
        """
        magic, version, *fields = _GREETING.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ConnectionError("the other side runs another version of paceline")
        return cls(*fields)

    def answers(self, other: Greeting) -> bool:
        """True if it comes from the rank and group that `other` was for."""
        return (self.group, self.sender, self.receiver) == (other.group, other.receiver, other.sender)


def wire_after(connection: socket.socket, own: Greeting, other: Greeting) -> Wire:
    """The connection as a stream uses it, when both sides have greeted."""
    return SealedWire(connection, own.key, other.key) if own.sealed else PlainWire(connection)
