"""A byte stream between two ranks that survives lost connections, without loss or repetition.

Every byte has a position, counted from the stream's beginning. What was sent is kept until the other side says that it
has it; each frame says how much has been received the other way. When a connection is lost, both sides tell on the next
how far they have received, and the sender goes on from there.

A frame is a header (bytes that follow, bytes received so far) and the bytes.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import Protocol

from paceline.comm.tcp.messages import HEADER_BYTES
from paceline.comm.tcp.wire import RECORD_BYTES, AlteredError, Wire
from paceline.errors import SyncError

_FRAME = struct.Struct("<IQ")
_GOODBYE = 0xFFFFFFFF  # as a length: the sender will send no more, on this connection or any other
# At most in a frame, so that word of what was received is never far behind: a piece of a ring, and its header.
FRAME_BYTES = RECORD_BYTES + HEADER_BYTES
_ACKNOWLEDGE_BYTES = 2**18  # received before the other side is told, where nothing goes its way anyhow
WINDOW_BYTES = 2**24  # sent and not acknowledged, at most: what a lost connection may have to carry again
_AHEAD_BYTES = 2**12  # read beyond a frame, and copied: headers, and whole small messages
_NO_LINGER = struct.pack("ii", 1, 0)
_TURN_BYTES = 2**21  # read at a time, so that no peer holds up the others


class Sink(Protocol):
    """The consumer of received bytes."""

    def target(self) -> memoryview:
        """The memory for the next bytes; not empty."""

    def advance(self, count: int) -> None:
        """Account for `count` received bytes."""


class OutgoingBytes:
    """Bytes given to the stream: `start` is the position of the first.

    `lent`: the memory is the caller's, who may change it.
    """

    __slots__ = ("data", "lent", "start")

    def __init__(self, start: int, data: memoryview, lent: bool) -> None:
        self.start, self.data, self.lent = start, data, lent

    @property
    def end(self) -> int:
        """The position after the last byte."""
        return self.start + len(self.data)


class ByteStream:
    """One end.

    `attach` it to a connection; `read` and `write` raise OSError when that is lost, and then `detach` it.
    """

    def __init__(self, sink: Sink) -> None:
        self._wire: Wire | None = None
        self.given = 0  # bytes that were given to this end to send, ever
        self.sent = 0  # of these, bytes in frames of this connection or known to be received
        self.acknowledged = 0  # bytes that the other side has
        self.received = 0  # bytes received from it
        self.said_goodbye = self.ended = False  # this side, and the other
        self._sink = sink
        self._told = 0  # of `received`, what the other side knows
        self._acknowledge_now = False
        self._queued: deque[OutgoingBytes] = deque()  # not sent, or in part
        self._kept: deque[OutgoingBytes] = deque()  # sent, and not all of it acknowledged
        self._frame: list[memoryview] = []  # of the frame under way, what the kernel has not taken yet
        self._frame_left = 0  # bytes of it
        self._frame_payload = 0  # bytes of it that belong to the stream
        self._reading = 0  # bytes of the frame under way that are still to come
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0  # what lies in `_ahead`

    @property
    def connection(self) -> socket.socket | None:
        """The socket, if there is one."""
        return None if self._wire is None else self._wire.connection

    # Giving

    def give(self, data: memoryview, *, lent: bool) -> OutgoingBytes:
        """Send bytes after all given before.

        Lent ones must stay as they are until `written` has passed them and `keep` was called.
        """
        piece = OutgoingBytes(self.given, data, lent)
        self._queued.append(piece)
        self.given = piece.end
        return piece

    @property
    def written(self) -> int:
        """The position up to which the kernel, or the other side, has the bytes."""
        return self.sent - min(self._frame_left, self._frame_payload)

    @property
    def outstanding(self) -> int:
        """Bytes that the other side is not known to have."""
        return self.given - self.acknowledged

    def keep(self, piece: OutgoingBytes) -> None:
        """End a loan: copy what may have to be sent again."""
        if piece.lent:
            begin = max(piece.start, self.acknowledged)
            piece.data, piece.start = (
                memoryview(bytes(piece.data[begin - piece.start :])) if begin < piece.end else memoryview(b""),
                begin,
            )
            piece.lent = False

    # Connections

    def attach(self, wire: Wire, has_received: int) -> None:
        """Continue over a new connection, on which the other side said what it has received.

        Raises:
            SyncError: it cannot be.
        """
        if not self.acknowledged <= has_received <= self.given:
            raise SyncError(
                f"the other side claims to have received {has_received} bytes, of {self.given} sent and "
                f"{self.acknowledged} acknowledged"
            )
        self.detach()
        self._wire = wire
        self._told = self.received
        self._acknowledge(has_received)
        self.sent = has_received

    def detach(self) -> None:
        """Close the connection. All that is not acknowledged is to be sent again."""
        if self._wire is not None:
            connection, self._wire = self._wire.connection, None
            if not self.said_goodbye:  # what the kernel still has would only be in the way of the next connection
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
        """True if there is something to write as soon as the connection takes it."""
        can_send = self.given > self.sent and self.sent - self.acknowledged < WINDOW_BYTES
        pending = self._wire is not None and self._wire.pending
        return pending or bool(self._frame) or can_send or self._owes_word()

    def acknowledge_soon(self) -> None:
        """Acknowledge received bytes with the next `write`, however few they are."""
        self._acknowledge_now = self.received > self._told

    def write(self) -> None:
        """Write what the connection takes."""
        assert self._wire is not None
        try:
            self._wire.flush()
            while self._frame or self._begin_frame():
                self._drop(self._wire.send(self._frame))
        except BlockingIOError:
            return

    def say_goodbye(self) -> None:
        """Write the last frame, if nothing else is under way."""
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
            piece = self._queued[0]
            offset = self.sent - piece.start
            part = piece.data[offset : offset + left]
            if part:
                payload.append(part)
            self.sent += len(part)
            left -= len(part)
            if self.sent >= piece.end:
                self._kept.append(self._queued.popleft())
        self._frame_payload = max(room, 0)
        self._frame = [memoryview(_FRAME.pack(self._frame_payload, self.received)), *payload]
        self._frame_left = _FRAME.size + self._frame_payload
        self._told, self._acknowledge_now = self.received, False
        return True

    def _drop(self, count: int) -> None:
        """The kernel has taken bytes of the frame."""
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
        """Read what has come, or a good part of it.

        Raises:
            ConnectionError: the other side has closed the connection, and not said goodbye.
        """
        until = self.received + _TURN_BYTES
        try:
            # What lies ahead is taken as well: no poll would tell of it.
            while (self.received < until or self._lies_ahead()) and not self.ended:
                if self._reading:
                    self._read_bytes()
                else:
                    self._read_header()
        except BlockingIOError:
            return

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
            raise AlteredError(f"a frame of {length} bytes is not one of paceline's")
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
        if self._wire is None:  # what was read may have ended it
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
        """The other side has all bytes before `position`."""
        if not self.acknowledged <= position <= self.given:
            raise AlteredError(f"the other side acknowledges {position} bytes of {self.given}")
        self.acknowledged = position
        for pieces in (self._kept, self._queued):
            while pieces and pieces[0].end <= position:
                pieces.popleft()
