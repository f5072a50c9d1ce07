"""Frames of a connection: messages behind their lengths, and memory attached to them.

A length is 4 bytes. Its highest bit says that 8 more follow, which announce as many bytes behind the message: these go
straight into memory of their own, and their limit is 0 unless a connection is made with one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import NamedTuple

from paceline.errors import ChannelError

LIMIT_BYTES = 2**22  # of a message
_LENGTH, _ATTACHED = struct.Struct("!I"), struct.Struct("!Q")
_HAS_ATTACHED = 2**31


def _untouched_memory(nbytes: int) -> memoryview:
    """Memory that the system gives page by page, as it is written."""
    return memoryview(mmap.mmap(-1, nbytes))


class FrameLimits(NamedTuple):
    """Limits of what may come: messages alone, unless a connection is made with more.

    Attributes:
        attached_bytes: of the memory beside a message.
        message_bytes: of a message; not more than what is sent.
        memory: makes memory that costs nothing until it is written.
        descriptors: number of those that came along and were not yet taken; of Unix sockets only.
    """

    attached_bytes: int = 0
    message_bytes: int = LIMIT_BYTES
    memory: Callable[[int], memoryview] = _untouched_memory
    descriptors: int = 0


class Frame(NamedTuple):
    """The bytes of a message, and what is attached to it."""

    body: bytes
    attached: memoryview | None = None


def begin_of(body: bytes, attached_bytes: int) -> bytes:
    """The frame of a message, to which the attached bytes are still to be added.

    Raises:
        ChannelError: the message is too long.
    """
    if len(body) > LIMIT_BYTES:
        raise ChannelError(f"a message has {len(body):,} bytes; at most {LIMIT_BYTES:,} are sent at once")
    if attached_bytes:
        return _LENGTH.pack(len(body) | _HAS_ATTACHED) + _ATTACHED.pack(attached_bytes) + body
    return _LENGTH.pack(len(body)) + body


class Incoming:
    """Makes frames of bytes as they come."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._bytes: bytes | bytearray = b""
        self._at = 0  # what lies before was taken
        self._body = b""
        self._memory: memoryview | None = None  # attached to the message under way
        self._filled = 0

    @property
    def holds_bytes(self) -> bool:
        """True if `next` may have a frame without any further bytes."""
        return self._at < len(self._bytes)

    def add(self, data: bytes) -> None:
        """Take bytes that have come."""
        if self._at == len(self._bytes):
            self._bytes, self._at = data, 0  # a whole frame, most often
            return
        if not isinstance(self._bytes, bytearray):
            self._bytes, self._at = bytearray(self._bytes[self._at :]), 0
        elif self._at:
            del self._bytes[: self._at]
            self._at = 0
        self._bytes += data

    def target(self) -> memoryview | None:
        """Memory for the next bytes, accounted for by `advance`; None where `add` takes them."""
        return None if self._memory is None else self._memory[self._filled :]

    def advance(self, count: int) -> None:
        """Account for bytes that have come straight into `target`."""
        self._filled += count

    def next(self) -> Frame | None:
        """The next frame, or None while it is not whole.

        Raises:
            ChannelError: more is announced than the limits allow.
        """
        if self._memory is None:
            frame = self._begin()
            if self._memory is None:
                return frame
        if self._filled < len(self._memory):
            return None
        frame, self._memory, self._body = Frame(self._body, self._memory), None, b""
        return frame

    def _begin(self) -> Frame | None:
        """Read the length, and the message behind it."""
        held, begin = self._bytes, self._at + _LENGTH.size
        if len(held) < begin:
            return None
        length: int = _LENGTH.unpack_from(held, self._at)[0]
        attached = 0
        if length & _HAS_ATTACHED and self._limits.attached_bytes:
            length -= _HAS_ATTACHED
            begin += _ATTACHED.size
            if len(held) < begin:
                return None
            attached = _ATTACHED.unpack_from(held, begin - _ATTACHED.size)[0]
            if not 0 < attached <= self._limits.attached_bytes:
                raise ChannelError(f"announced {attached:,} bytes beside a message")
        if length > self._limits.message_bytes:
            raise ChannelError(f"announced {length:,} bytes")
        end = begin + length
        if len(held) < end:
            return None
        self._at, body = end, bytes(held[begin:end])
        if not attached:
            return Frame(body)
        self._body = body
        self._memory = self._limits.memory(attached)
        self._filled = min(attached, len(held) - end)
        self._memory[: self._filled] = held[end : end + self._filled]
        self._at += self._filled
        return None
