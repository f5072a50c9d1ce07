"""Handshake of two ranks on a new connection: rank, group, and bytes received so far.

The secret is the group's, made by rank 0 and distributed through the rendezvous' store; each side shows one half of it.
It keeps strangers and
ranks of other groups out. It does not hide anything: what follows it on the wire is not encrypted.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

_MAGIC = b"pace-tcp"
_HELLO = struct.Struct("<8s16sIBIQ")
_WELCOME = struct.Struct("<8s16sIQ")
HELLO_BYTES, WELCOME_BYTES = _HELLO.size, _WELCOME.size
SECRET_BYTES = 32


@dataclass(frozen=True)
class Hello:
    """The first message of the rank that connects.

    `knock`: it may not connect, and asks the other to, as connection number `epoch` is lost.
    """

    rank: int
    knock: bool
    epoch: int
    received: int

    def to_bytes(self, secret: bytes) -> bytes:
        """For the wire."""
        return _HELLO.pack(_MAGIC, secret[:16], self.rank, self.knock, self.epoch, self.received)

    @classmethod
    def from_bytes(cls, data: bytes, secret: bytes) -> Hello | None:
        """The message from its bytes; None from a stranger."""
        magic, token, rank, knock, epoch, received = _HELLO.unpack(data)
        known = hmac.compare_digest(magic + token, _MAGIC + secret[:16])
        return cls(rank, bool(knock), epoch, received) if known else None


@dataclass(frozen=True)
class Welcome:
    """The answer: the number of this connection, and the bytes received so far."""

    epoch: int
    received: int

    def to_bytes(self, secret: bytes) -> bytes:
        """The bytes to send."""
        return _WELCOME.pack(_MAGIC, secret[16:], self.epoch, self.received)

    @classmethod
    def from_bytes(cls, data: bytes, secret: bytes) -> Welcome | None:
        """The message from its bytes; None from a stranger."""
        magic, token, epoch, received = _WELCOME.unpack(data)
        known = hmac.compare_digest(magic + token, _MAGIC + secret[16:])
        return cls(epoch, received) if known else None
