"""Byte stream between two ranks that survives lost connections, without loss or repetition.

Every byte has a position, counted from the stream's beginning. Sent bytes are kept until the other side acknowledges
them. Each frame carries an acknowledgement for the other direction. After a lost connection, both sides announce on the
next connection how many bytes they have received, and each sender resumes at this position. A frame consists of a
header (number of bytes that follow, number of bytes received so far) and the bytes. Unlike the frames of
`wire.connection`, these frames carry positions instead of whole messages. Tensors are sent from and received into their
own memory.

On the connection, the bytes are encrypted with AES-128-GCM (NIST SP 800-38D), or sent in plaintext if encryption is
off. Each direction of each connection has a separate random key, which is exchanged in the handshake. A record consists
of length, ciphertext and tag, and its nonce is the record's number. If a record was changed, repeated, omitted, moved,
or taken from another direction or connection, the tag does not match. TLS records offer the same protection at several
times the cost, because Python's `ssl` copies every 16 KiB several times.

If a record has arrived only in part, the kernel wakes the receiver when the rest of the record has arrived
(`SO_RCVLOWAT`), instead of for every packet.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from itertools import takewhile
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.errors import SyncError

KEY_BYTES, TAG_BYTES = 16, 16
_LENGTH = struct.Struct("<I")
RECORD_BYTES = 2**20  # maximum plaintext: large enough to hide Python's overhead
_SEALING_BYTES = _LENGTH.size + TAG_BYTES
_SEALED_BYTES = _SEALING_BYTES + RECORD_BYTES
# Consecutive parts of at most this size are copied into one record, up to _MOST_GATHERED of them.
_GATHERED_BYTES = 2**12
_MOST_GATHERED = 16
_SEALED_GATHERED_BYTES = _LENGTH.size + _MOST_GATHERED * _GATHERED_BYTES + TAG_BYTES
_MOST_BYTES = 2**42  # bytes encrypted with one key; after that, a new connection brings new keys


class AlteredError(ConnectionError):
    """Raised if received bytes differ from the sent bytes."""


class Wire:
    """Connection of a byte stream; this class sends plaintext.

    The bytes are not protected against changes in transit. The socket does not block: a call that would block raises
    BlockingIOError.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @property
    def pending(self) -> bool:
        """Return True if accepted bytes wait for the kernel."""
        return False

    @property
    def buffered(self) -> bool:
        """Return True if bytes can be read that `poll` does not report."""
        return False

    def flush(self) -> None:
        """Pass the pending bytes to the kernel."""

    def pause(self) -> None:
        """Prepare the connection for a wait in `poll`."""

    def send(self, parts: list[memoryview]) -> int:
        """Accept bytes from the beginning of `parts`, and return the number of accepted bytes."""
        return self.connection.sendmsg(parts)

    def receive(self, *targets: memoryview) -> int:
        """Fill the targets with the available bytes; return 0 at the end of the connection."""
        return self.connection.recvmsg_into(targets)[0]


class SealedWire(Wire):
    """Connection with encrypted, authenticated records.

    Args:
        sending: key for sent records.
        receiving: key for received records.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        super().__init__(connection)
        self._sending, self._receiving = AESGCM(sending), AESGCM(receiving)
        self._sent = self._received = 0  # numbers of the next records
        self._sent_bytes = 0
        self._out = _memory(_SEALED_GATHERED_BYTES + _SEALED_BYTES)
        self._unsent = self._out[:0]
        self._in = _memory(_SEALED_BYTES + _AHEAD_BYTES)
        self._begin = self._end = 0  # range of the content of `_in`
        self._opened = _memory(RECORD_BYTES)
        self._rest = self._opened[:0]  # decrypted bytes that have not been read yet
        self._awaited = 1  # bytes that must arrive before the kernel reports the socket as readable

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

    @property
    def buffered(self) -> bool:
        return bool(self._rest) or self._whole() is not None

    def flush(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def send(self, parts: list[memoryview]) -> int:
        """Encrypt one record, or two if the first record is small.

        As many encrypted bytes as possible are passed to the kernel.
        """
        self.flush()
        if self._sent_bytes >= _MOST_BYTES:
            raise ConnectionError("the connection's keys have encrypted the maximum number of bytes")
        small = list(takewhile(lambda part: len(part) <= _GATHERED_BYTES, parts[:_MOST_GATHERED]))
        end = taken = 0
        if small:
            plain = small[0] if len(small) == 1 else b"".join(small)
            end, taken = self._seal(plain, 0), len(plain)
        if len(small) < min(len(parts), _MOST_GATHERED):  # a large part, sealed without a copy
            plain = parts[len(small)][:RECORD_BYTES]
            end, taken = self._seal(plain, end), taken + len(plain)
        self._sent_bytes += end
        self._unsent = self._out[:end]
        with suppress(BlockingIOError):  # the bytes are accepted anyway, because they are pending
            self.flush()
        return taken

    def _seal(self, plain: memoryview | bytes, begin: int) -> int:
        """Write an encrypted record to `_out`; return the record's end."""
        _LENGTH.pack_into(self._out, begin, len(plain))
        begin += _LENGTH.size
        end = begin + len(plain) + TAG_BYTES
        self._sending.encrypt_into(_nonce(self._sent), plain, None, self._out[begin:end])
        self._sent += 1
        return end

    def receive(self, *targets: memoryview) -> int:
        """Decrypt records into the first target, directly if a record fits."""
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

    def pause(self) -> None:
        """Let `poll` report the connection only when the rest of the current record has arrived."""
        there = self._end - self._begin
        whole = _SEALING_BYTES + _LENGTH.unpack_from(self._in, self._begin)[0] if there >= _LENGTH.size else 0
        awaited = max(1, whole - there)
        if awaited != self._awaited:
            self._awaited = awaited
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)

    def _whole(self) -> int | None:
        """Return the length of the next record once the whole record has arrived, else None."""
        there = self._end - self._begin
        if there < _LENGTH.size:
            return None
        length: int = _LENGTH.unpack_from(self._in, self._begin)[0]
        if not 0 < length <= RECORD_BYTES:
            raise AlteredError(f"a record of {length} bytes is not valid")
        return length if there >= _LENGTH.size + length + TAG_BYTES else None

    def _fill(self) -> bool:
        """Read the rest of the current record, and a few bytes beyond it.

        The result is False if the connection has ended.
        """
        there = self._end - self._begin
        if self._begin:
            self._in[:there] = self._in[self._begin : self._end]  # source and destination may overlap
            self._begin, self._end = 0, there
        whole = _SEALING_BYTES + _LENGTH.unpack_from(self._in)[0] if there >= _LENGTH.size else 0
        count = self.connection.recv_into(self._in[there : whole + _AHEAD_BYTES])
        self._end += count
        return count > 0

    def _open(self, length: int, target: memoryview) -> None:
        begin = self._begin + _LENGTH.size
        self._begin = begin + length + TAG_BYTES
        try:
            self._receiving.decrypt_into(_nonce(self._received), self._in[begin : self._begin], None, target)
        except InvalidTag:
            raise AlteredError("a record was changed in transit") from None
        self._received += 1


def _memory(nbytes: int) -> memoryview:
    """Allocate memory that uses no physical memory until it is written.

    Most links never send a record of full length.
    """
    return np.empty(nbytes, np.uint8).data


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


MESSAGE_HEADER = struct.Struct("<BBBBiQqQQ")  # channel, what, how, dtype, root, number, tag, elements, bytes
_FRAME = struct.Struct("<IQ")
_GOODBYE = 0xFFFFFFFF  # length which means that the sender will send nothing more, on any connection
# Maximum size of a frame: a ring's chunk and its header. Frequent frames keep acknowledgements recent.
FRAME_BYTES = RECORD_BYTES + MESSAGE_HEADER.size
_ACKNOWLEDGE_BYTES = 2**18  # number of received bytes after which an acknowledgement is sent, if no frame carries one
WINDOW_BYTES = 2**24  # maximum of unacknowledged bytes, which may have to be sent again after a lost connection
_AHEAD_BYTES = 2**12  # bytes read beyond a frame and copied: headers, and whole small messages
_NO_LINGER = struct.pack("ii", 1, 0)
_TURN_BYTES = 2**21  # bytes read at a time, so that no peer delays the others


class Sink(Protocol):
    """Consumer of received bytes."""

    def target(self) -> memoryview:
        """Return the memory for the next bytes, which must not be empty."""

    def advance(self, count: int) -> None:
        """Account for `count` received bytes."""


class OutgoingBytes:
    """Bytes to send, beginning at position `start` of the stream.

    If `lent` is True, the memory belongs to the caller, which may change the bytes later.
    """

    __slots__ = ("data", "lent", "start")

    def __init__(self, start: int, data: memoryview, lent: bool) -> None:
        self.start, self.data, self.lent = start, data, lent

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self.start + len(self.data)


class ByteStream:
    """One end of a byte stream.

    Call `attach` with each new connection. `read` and `write` raise OSError when the connection is lost; then call
    `detach`.
    """

    def __init__(self, sink: Sink) -> None:
        self._wire: Wire | None = None
        self.given = 0  # total bytes given to this end to send
        self.sent = 0  # bytes in frames of this connection, or known to be received
        self.acknowledged = 0  # bytes that the other side has received
        self.received = 0  # bytes received from the other side
        self.said_goodbye = self.ended = False  # of this side, and of the other side
        self._sink = sink
        self._told = 0  # part of `received` that was acknowledged
        self._acknowledge_now = False
        self._queued: deque[OutgoingBytes] = deque()  # not sent, or sent in part
        self._kept: deque[OutgoingBytes] = deque()  # sent, and not all of it acknowledged
        self._frame: list[memoryview] = []  # part of the current outgoing frame that the kernel has not accepted yet
        self._frame_left = 0  # bytes of it
        self._frame_payload = 0  # bytes of the frame that belong to the stream
        self._reading = 0  # remaining bytes of the current incoming frame
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0  # range of the content of `_ahead`

    @property
    def connection(self) -> socket.socket | None:
        """The socket, if there is one."""
        return None if self._wire is None else self._wire.connection

    # Sending

    def give(self, data: memoryview, *, lent: bool) -> OutgoingBytes:
        """Queue bytes to send after all earlier bytes.

        Lent bytes must not change until `written` has passed their end and `keep` was called.
        """
        chunk = OutgoingBytes(self.given, data, lent)
        self._queued.append(chunk)
        self.given = chunk.end
        return chunk

    @property
    def written(self) -> int:
        """Position up to which the kernel or the other side has all bytes."""
        return self.sent - min(self._frame_left, self._frame_payload)

    @property
    def outstanding(self) -> int:
        """Number of bytes that the other side has not acknowledged."""
        return self.given - self.acknowledged

    def keep(self, chunk: OutgoingBytes) -> None:
        """End a loan: copy the bytes that may have to be sent again."""
        if chunk.lent:
            begin = max(chunk.start, self.acknowledged)
            chunk.data, chunk.start = (
                memoryview(bytes(chunk.data[begin - chunk.start :])) if begin < chunk.end else memoryview(b""),
                begin,
            )
            chunk.lent = False

    # Connections

    def attach(self, wire: Wire, has_received: int) -> None:
        """Continue over a new connection, on which the other side has received `has_received` bytes.

        Raises:
            SyncError: the other side's number of received bytes is impossible.
        """
        if not self.acknowledged <= has_received <= self.given:
            raise SyncError(
                "ranks.bytes_inconsistent",
                "the peer claims to have received {received} bytes, but {sent} were sent and {acknowledged} "
                "acknowledged",
                received=has_received,
                sent=self.given,
                acknowledged=self.acknowledged,
            )
        self.detach()
        self._wire = wire
        self._told = self.received
        self._acknowledge(has_received)
        self.sent = has_received

    def detach(self) -> None:
        """Close the connection; the next connection sends all unacknowledged bytes again."""
        if self._wire is not None:
            connection, self._wire = self._wire.connection, None
            if not self.said_goodbye:  # the bytes that the kernel still has would only delay the next connection
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            connection.close()
        self._frame.clear()
        self._frame_left = self._frame_payload = self._reading = self._begin = self._end = 0
        self._queued.extendleft(reversed(self._kept))
        self._kept.clear()
        self.sent = self.acknowledged

    # Writing

    @property
    def wants_to_write(self) -> bool:
        """Return True if bytes wait for the connection to accept them."""
        can_send = self.given > self.sent and self.sent - self.acknowledged < WINDOW_BYTES
        pending = self._wire is not None and self._wire.pending
        return pending or bool(self._frame) or can_send or self._owes_word()

    def acknowledge_soon(self) -> None:
        """Acknowledge all received bytes with the next `write`."""
        self._acknowledge_now = self.received > self._told

    def write(self) -> None:
        """Write as much as the connection accepts."""
        assert self._wire is not None
        try:
            self._wire.flush()
            while self._frame or self._begin_frame():
                self._drop(self._wire.send(self._frame))
        except BlockingIOError:
            return

    def say_goodbye(self) -> None:
        """Write the last frame, if no other frame is pending."""
        if self._wire is not None and not self._frame and not self._wire.pending:
            self._wire.send([memoryview(_FRAME.pack(_GOODBYE, self.received))])
            self.said_goodbye = True

    def _begin_frame(self) -> bool:
        room = min(FRAME_BYTES, self.acknowledged + WINDOW_BYTES - self.sent, self.given - self.sent)
        if room <= 0 and not self._owes_word():
            return False
        payload: list[memoryview] = []
        left = max(room, 0)
        while left:
            chunk = self._queued[0]
            offset = self.sent - chunk.start
            part = chunk.data[offset : offset + left]
            if part:
                payload.append(part)
            self.sent += len(part)
            left -= len(part)
            if self.sent >= chunk.end:
                self._kept.append(self._queued.popleft())
        self._frame_payload = max(room, 0)
        self._frame = [memoryview(_FRAME.pack(self._frame_payload, self.received)), *payload]
        self._frame_left = _FRAME.size + self._frame_payload
        self._told, self._acknowledge_now = self.received, False
        return True

    def _drop(self, count: int) -> None:
        self._frame_left -= count
        if not self._frame_left:
            self._frame = []
            return
        while count >= len(self._frame[0]):
            count -= len(self._frame.pop(0))
        self._frame[0] = self._frame[0][count:]

    def _owes_word(self) -> bool:
        return self._acknowledge_now or self.received - self._told >= _ACKNOWLEDGE_BYTES

    # Reading

    def read(self) -> None:
        """Read the available bytes, up to a limit.

        Raises:
            ConnectionError: the other side has closed the connection without a last frame.
        """
        until = self.received + _TURN_BYTES
        try:
            # Bytes read ahead are consumed as well, because `poll` would not report them.
            while (self.received < until or self._lies_ahead()) and not self.ended:
                if self._reading:
                    self._read_bytes()
                else:
                    self._read_header()
        except BlockingIOError:
            pass
        if self._wire is not None:
            self._wire.pause()

    def _read_header(self) -> None:
        while self._end - self._begin < _FRAME.size:
            if self._begin:
                self._ahead[: self._end - self._begin] = bytes(self._ahead[self._begin : self._end])
                self._begin, self._end = 0, self._end - self._begin
            self._end += self._got(self._open_wire().receive(self._ahead[self._end :]))
        length, has_received = _FRAME.unpack_from(self._ahead, self._begin)
        self._begin += _FRAME.size
        self._acknowledge(has_received)
        if length == _GOODBYE:
            self.ended = True
        elif length > FRAME_BYTES:
            raise AlteredError(f"a frame of {length} bytes is not valid")
        else:
            self._reading = length

    def _read_bytes(self) -> None:
        target = self._sink.target()[: self._reading]
        there = self._end - self._begin
        if there:
            count = min(there, len(target))
            target[:count] = self._ahead[self._begin : self._begin + count]
            self._begin += count
        else:
            found = self._got(self._open_wire().receive(target, self._ahead))
            count = min(found, len(target))
            self._begin, self._end = 0, found - count
        self._reading -= count
        self.received += count
        self._sink.advance(count)

    def _open_wire(self) -> Wire:
        if self._wire is None:  # the received bytes may have ended the stream
            raise BlockingIOError
        return self._wire

    def _lies_ahead(self) -> bool:
        return self._begin < self._end or (self._wire is not None and self._wire.buffered)

    @staticmethod
    def _got(count: int) -> int:
        if not count:
            raise ConnectionResetError("the connection was closed by the other side")
        return count

    def _acknowledge(self, position: int) -> None:
        """Record that the other side has received all bytes before `position`."""
        if not self.acknowledged <= position <= self.given:
            raise AlteredError(f"the other side acknowledges {position} bytes of {self.given}")
        self.acknowledged = position
        for chunks in (self._kept, self._queued):
            while chunks and chunks[0].end <= position:
                chunks.popleft()
