"""Bytes on an authenticated connection: sealed with AES-128-OCB (RFC 7253), or, by name, as they are.

Sealed, each direction of each connection has a random key of its own, told within the handshake. The bytes go in
records: their length, the ciphertext, and a tag; the nonce is the record's number. A record that was changed, repeated,
left out, moved, or comes from another direction or connection does not fit its tag. TLS's own records would do the same
at several times the cost, as Python's `ssl` copies every 16 KiB several times.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from itertools import takewhile
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESOCB3

KEY_BYTES, TAG_BYTES = 16, 16
_LENGTH = struct.Struct("<I")
RECORD_BYTES = 2**20  # of plaintext, at most: a piece of a ring, so that Python's turns cost little beside the cipher
_SEALED_BYTES = _LENGTH.size + RECORD_BYTES + TAG_BYTES
_GATHERED_BYTES = 2**12  # a part up to here is copied into one record with those behind it, of which so many are
_MOST_GATHERED = 16
_SEALED_GATHERED_BYTES = _LENGTH.size + _MOST_GATHERED * _GATHERED_BYTES + TAG_BYTES
_AHEAD_BYTES = 2**12  # read beyond the record under way, and copied: the next one's length, and small ones whole
_MOST_BYTES = 2**42  # sealed with one key; beyond, a new connection brings new ones


class AlteredError(ConnectionError):
    """Received bytes differ from those that the other rank sent."""


class Wire(Protocol):
    """A connection, as a stream writes and reads it. Its socket does not block."""

    connection: socket.socket

    @property
    def pending(self) -> bool:
        """True if bytes that were taken wait for the kernel."""

    @property
    def buffered(self) -> bool:
        """True if bytes can be read of which no poll tells."""

    def flush(self) -> None:
        """Give the kernel what is pending. Raises BlockingIOError while it does not take all."""

    def send(self, parts: list[memoryview]) -> int:
        """Take some bytes of the first parts, and return how many. Raises BlockingIOError."""

    def receive(self, *targets: memoryview) -> int:
        """Fill the targets as far as bytes are there; 0 at the end. Raises BlockingIOError."""


class PlainWire:
    """Bytes as they are: anybody on the way can read and change them."""

    pending = buffered = False

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def flush(self) -> None:
        """Nothing is ever pending."""

    def send(self, parts: list[memoryview]) -> int:
        """Hand bytes to the kernel."""
        return self.connection.sendmsg(parts)

    def receive(self, *targets: memoryview) -> int:
        """Take bytes from the kernel."""
        return self.connection.recvmsg_into(targets)[0]


class SealedWire:
    """Bytes in encrypted, authenticated records.

    Args:
        sending, receiving: the key of each direction.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.connection = connection
        self._sending, self._receiving = AESOCB3(sending), AESOCB3(receiving)
        self._sent = self._received = 0  # records: the numbers of the next
        self._sent_bytes = 0
        self._out = _memory(_SEALED_GATHERED_BYTES + _SEALED_BYTES)
        self._unsent = self._out[:0]
        self._in = _memory(_SEALED_BYTES + _AHEAD_BYTES)
        self._begin = self._end = 0  # what lies in `_in`
        self._opened = _memory(RECORD_BYTES)
        self._rest = self._opened[:0]  # opened, and not yet taken

    @property
    def pending(self) -> bool:
        """True if a part of a record waits for the kernel."""
        return bool(self._unsent)

    @property
    def buffered(self) -> bool:
        """True if a whole record, or the rest of one, is here."""
        return bool(self._rest) or self._whole() is not None

    def flush(self) -> None:
        """Give the kernel the rest of the last record."""
        while self._unsent:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def send(self, parts: list[memoryview]) -> int:
        """Seal one record, or two where the first is small.

        The kernel gets what it takes of them.
        """
        self.flush()
        if self._sent_bytes >= _MOST_BYTES:
            raise ConnectionError("its keys have served their time")
        small = list(takewhile(lambda part: len(part) <= _GATHERED_BYTES, parts[:_MOST_GATHERED]))
        end = taken = 0
        if small:
            plain = small[0] if len(small) == 1 else b"".join(small)
            end, taken = self._seal(plain, 0), len(plain)
        if len(small) < min(len(parts), _MOST_GATHERED):  # a large one, sealed without a copy
            plain = parts[len(small)][:RECORD_BYTES]
            end, taken = self._seal(plain, end), taken + len(plain)
        self._sent_bytes += end
        self._unsent = self._out[:end]
        with suppress(BlockingIOError):  # taken all the same: it is pending
            self.flush()
        return taken

    def _seal(self, plain: memoryview | bytes, begin: int) -> int:
        """Write a record to `_out`; returns where it ends."""
        _LENGTH.pack_into(self._out, begin, len(plain))
        begin += _LENGTH.size
        end = begin + len(plain) + TAG_BYTES
        self._sending.encrypt_into(_nonce(self._sent), plain, None, self._out[begin:end])
        self._sent += 1
        return end

    def receive(self, *targets: memoryview) -> int:
        """Open records into the first target, straight where one fits."""
        target = targets[0]
        if not self._rest:
            while (length := self._whole()) is None:
                if not self._fill():
                    return 0
            if length <= len(target):
                self._open(length, target[:length])
                return length
            self._rest = self._opened[:length]
            self._open(length, self._rest)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _whole(self) -> int | None:
        """The length of the next record, if all of it is here."""
        there = self._end - self._begin
        if there < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(self._in, self._begin)[0]
        if not 0 < length <= RECORD_BYTES:
            raise AlteredError(f"a record of {length} bytes is not one of paceline's")
        return length if there >= _LENGTH.size + length + TAG_BYTES else None

    def _fill(self) -> bool:
        """Read the rest of the record under way, and little more. False: the connection has ended."""
        there = self._end - self._begin
        if self._begin:
            self._in[:there] = self._in[self._begin : self._end]  # they may overlap
            self._begin, self._end = 0, there
        rest = _LENGTH.unpack_from(self._in)[0] + TAG_BYTES if there >= _LENGTH.size else 0
        count = self.connection.recv_into(self._in[there : rest + _AHEAD_BYTES])
        self._end += count
        return count > 0

    def _open(self, length: int, target: memoryview) -> None:
        begin = self._begin + _LENGTH.size
        self._begin = begin + length + TAG_BYTES
        try:
            self._receiving.decrypt_into(_nonce(self._received), self._in[begin : self._begin], None, target)
        except InvalidTag:
            raise AlteredError("a record was changed on its way") from None
        self._received += 1


def _memory(nbytes: int) -> memoryview:
    """Memory that costs nothing until it is written.

    Most links never carry a record of full length.
    """
    return np.empty(nbytes, np.uint8).data


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
