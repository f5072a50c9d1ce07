"""Typed messages between two processes, over TLS or a Unix socket.

A message is a `msgspec.Struct` with a tag. The length of the message is sent first, followed by the message in msgpack
encoding. Nothing is unpickled. A length above the limit ends the connection before any memory is allocated. Memory
grows only as bytes arrive.

A length has 4 bytes. If its highest bit is set, the next 8 bytes are the size of an attachment, which follows the
message. The attachment is received directly into separate memory. By default, attachments are not allowed.
"""

from __future__ import annotations

import array
import errno
import mmap
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.errors import ChannelError, DeadlineError
from paceline.files import user_name
from paceline.wire.key import RunKey, has_key, name_of, short_path, user_of_peer
from paceline.wire.silence import end_when_silent, is_heard, patience_s, unanswered

LIMIT_BYTES = 2**22  # largest size of a message in bytes
_LENGTH, _ATTACHED = struct.Struct("!I"), struct.Struct("!Q")
_HAS_ATTACHED = 2**31


def _untouched_memory(nbytes: int) -> memoryview:
    """Allocate memory whose pages the system provides on their first write."""
    return memoryview(mmap.mmap(-1, nbytes))


class FrameLimits(NamedTuple):
    """Limits of received data. By default, attachments and descriptors are not allowed.

    Attributes:
        attached_bytes: largest size of the memory attached to a message.
        message_bytes: largest size of a message. It cannot exceed `LIMIT_BYTES`, which is the limit for sending.
        memory: function that allocates memory for an attachment. The memory should cost nothing until it is written.
        descriptors: largest number of received descriptors that are not taken yet. Only Unix sockets pass descriptors.
    """

    attached_bytes: int = 0
    message_bytes: int = LIMIT_BYTES
    memory: Callable[[int], memoryview] = _untouched_memory
    descriptors: int = 0


class Frame(NamedTuple):
    """Encoded message, and the memory attached to the message."""

    body: bytes
    attached: memoryview | None = None


def begin_of(body: bytes, attached_bytes: int) -> bytes:
    """Return the first part of a frame: the length and the encoded message. Attached bytes follow this part.

    Raises:
        ChannelError: the message is too long.
    """
    if len(body) > LIMIT_BYTES:
        raise ChannelError(
            "channel.message_too_large",
            "a message has {size:,} bytes, but at most {limit:,} bytes can be sent at once",
            size=len(body),
            limit=LIMIT_BYTES,
        )
    if attached_bytes:
        return _LENGTH.pack(len(body) | _HAS_ATTACHED) + _ATTACHED.pack(attached_bytes) + body
    return _LENGTH.pack(len(body)) + body


class Incoming:
    """Parser that splits received bytes into frames."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._bytes: bytes | bytearray = b""
        self._at = 0  # offset of the first byte that is not parsed yet
        self._body = b""
        self._memory: memoryview | None = None  # memory attached to the current message
        self._filled = 0

    @property
    def holds_bytes(self) -> bool:
        """True if received bytes are not parsed yet."""
        return self._at < len(self._bytes)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        if self._at == len(self._bytes):
            self._bytes, self._at = data, 0  # `data` is usually a whole frame
            return
        if not isinstance(self._bytes, bytearray):
            self._bytes, self._at = bytearray(self._bytes[self._at :]), 0
        elif self._at:
            del self._bytes[: self._at]
            self._at = 0
        self._bytes += data

    def target(self) -> memoryview | None:
        """Return the memory for the next bytes of an attachment, or None to use `add`.

        After writing to the memory, call `advance`.
        """
        return None if self._memory is None else self._memory[self._filled :]

    def advance(self, count: int) -> None:
        """Record the number of bytes that were received directly into `target`."""
        self._filled += count

    def next(self) -> Frame | None:
        """Return the next frame, or None while the frame is incomplete.

        Raises:
            ChannelError: an announced size exceeds the limits.
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
        """Parse the length and the message that follows it."""
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
                raise ChannelError(
                    "channel.attached_too_much",
                    "announced an attachment of {length:,} bytes, which is not allowed",
                    length=attached,
                )
        if length > self._limits.message_bytes:
            raise ChannelError(
                "channel.announced_too_much",
                "announced a message of {length:,} bytes, which exceeds the limit",
                length=length,
            )
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


GREETING = b"pace"  # sent by the accepting end, once it has authenticated the other end
HANDSHAKE_S = 5.0
_BACKLOG_LIMIT = 2**26  # largest number of pending bytes for a peer that does not read
_PIECE = 2**14  # size of a TLS record in bytes
_SENT_AT_ONCE = 2**20  # largest number of bytes passed to the kernel at once
_INT_BYTES = array.array("i").itemsize
_SEND_S = 60.0
_LONG_RTO_S = 0.3  # the minimum timeout is 0.2 s; a longer one shows that the network has delayed packets
_REACH_S = 2.0  # longest wait for the kernel of the other machine, which answers even if its processes are busy
_PAUSES_S = (0.02, 0.5)  # first and longest pause between attempts to connect
_LIMITS = FrameLimits()
_CLOSED_ON_EXEC, _CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """One end of a connection to another process of the run.

    Any thread may send messages, but only one thread at a time may receive messages.

    Args:
        link: socket that is connected and authenticated.
        messages: type of received messages: a tagged Struct, or a union of them.
        peer: name of the other end, for error messages.
        limits: limits of received data.
    """

    def __init__(self, link: socket.socket, messages: Any, peer: str, limits: FrameLimits = _LIMITS) -> None:
        link.setblocking(False)
        self.peer = peer
        self._link = link
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._most_descriptors = limits.descriptors
        self._descriptors_room = socket.CMSG_SPACE(limits.descriptors * _INT_BYTES)
        self._incoming = Incoming(limits)
        self._outgoing: deque[_Outgoing] = deque()
        self._kept_bytes = 0  # number of bytes in `_outgoing`, without attachments
        self._descriptors: deque[int] = deque()
        self._given_back: list[Any] = []
        self._lock = threading.Lock()  # only one thread at a time may use TLS
        self._lost = False

    @property
    def lost(self) -> bool:
        """True once the connection has failed or was closed."""
        return self._lost

    @property
    def is_within_host(self) -> bool:
        """True if the peer is at the other end of a Unix socket."""
        return self._link.family == socket.AF_UNIX

    def is_unanswered(self, for_s: float, packets: int) -> bool:
        """Return True if the other end's kernel has acknowledged nothing for `for_s` seconds.

        The result is False if another connection has recently received data from the other end's host, which happens on
        a full link. If earlier round trips were long, the limit is at least twice the retransmission timeout.

        Args:
            packets: minimum number of unacknowledged packets, unless a packet was retransmitted.
        """
        with self._lock:
            again, sent, silent_s = (False, 0, 0.0) if self._lost else unanswered(self._link)
            if not (again or sent >= packets) or silent_s <= for_s:
                return False
            patience = patience_s(self._link)
            limit_s = for_s if patience < _LONG_RTO_S else max(for_s, 2 * patience)
            return silent_s > limit_s and not is_heard(self._link, limit_s)

    def end_when_silent(self, silent_s: int) -> None:
        """End the connection once the other host's kernel has been silent for about `silent_s` seconds."""
        if not self.is_within_host:
            with self._lock, suppress(OSError):  # the connection has ended, and its next use raises the error
                end_when_silent(self._link, silent_s)

    def fileno(self) -> int:
        """Return the descriptor for polling, or -1 once the connection is closed."""
        return self._link.fileno()

    def send(
        self,
        message: msgspec.Struct,
        deadline_s: float = _SEND_S,
        *,
        attached: Sequence[memoryview] = (),
        descriptor: int | None = None,
    ) -> None:
        """Send a message, and wait until the kernel has accepted it.

        Args:
            attached: memory to send with the message. It is not copied.
            descriptor: file descriptor to pass to the other end of a Unix socket. This process closes it after sending.

        Raises:
            ChannelError: the message is too long, or the connection is lost.
            DeadlineError: the peer did not read within the deadline.
        """
        self.post(message, attached=attached, descriptor=descriptor)
        until = time.monotonic() + deadline_s
        while not self.flush():
            if not self.wait(select.POLLOUT, until):
                self.close()
                raise DeadlineError(
                    "channel.send_deadline",
                    "{peer} accepted no message for {deadline_s:g} s, so the connection was closed",
                    peer=self.peer,
                    deadline_s=deadline_s,
                )

    def receive(self, deadline_s: float) -> Any:
        """Receive the next message.

        Raises:
            ChannelError: the connection is lost, or the received bytes are not a message.
            DeadlineError: no message arrived within the deadline. The connection remains usable.
        """
        until = time.monotonic() + deadline_s
        message = self.take() if self.holds_bytes else None
        while message is None:
            if not self.wait(select.POLLIN, until):
                raise DeadlineError(
                    "channel.receive_deadline",
                    "{peer} sent nothing for {deadline_s:g} s",
                    peer=self.peer,
                    deadline_s=deadline_s,
                )
            message = self.take()
        return message

    def post(
        self, message: msgspec.Struct, *, attached: Sequence[memoryview] = (), descriptor: int | None = None
    ) -> None:
        """Send a message as far as possible without waiting; keep the rest for `flush`.

        Attached memory is not copied, and must not change until `flush` returns True. Raises ChannelError like `send`.
        """
        begin = begin_of(msgspec.msgpack.encode(message), sum(map(len, attached)))
        with self._lock:
            if self._outgoing or descriptor is not None or len(begin) > _SENT_AT_ONCE:
                sent = 0
            elif (sent := self._send(begin)) == len(begin) and not attached:
                return
            if sent < len(begin):
                self._kept_bytes += len(begin) - sent
                self._outgoing.append(_Outgoing(memoryview(begin)[sent:], True, descriptor))
            self._outgoing.extend(_Outgoing(part, False) for part in attached if len(part))
        if not self.flush() and self._kept_bytes > _BACKLOG_LIMIT:
            self.close()
            raise ChannelError(
                "channel.not_taken", "{peer} no longer accepts messages, so the connection was closed", peer=self.peer
            )

    def flush(self) -> bool:
        """Send as much pending data as possible without waiting; return True if nothing is left."""
        if not self._outgoing and not self._lost:
            return True
        with self._lock:
            if self._lost:
                raise ChannelError("channel.closed", "the connection to {peer} is closed", peer=self.peer)
            while self._outgoing:
                piece = self._outgoing[0]
                if not (sent := self._send(piece.data[:_SENT_AT_ONCE], piece.descriptor)):
                    break
                piece.close_descriptor()
                piece.data = piece.data[sent:]
                if piece.kept:
                    self._kept_bytes -= sent
                if not len(piece.data):
                    self._outgoing.popleft()
        return not self._outgoing

    @property
    def holds_bytes(self) -> bool:
        """True if data has been read that `wait` does not report."""
        pending = self._link.pending() if isinstance(self._link, ssl.SSLSocket) and not self._lost else 0
        return bool(self._given_back) or self._incoming.holds_bytes or pending > 0

    def take(self) -> Any:
        """Return the next message, or None if no message has arrived. Raise ChannelError like `receive`."""
        found = self.take_attached()
        return None if found is None else found[0]

    def take_attached(self) -> tuple[Any, memoryview | None] | None:
        """Return the next message and its attached memory, or None if no message has arrived.

        Raises ChannelError like `receive`.
        """
        if self._given_back:
            return self._given_back.pop(), None
        with self._lock:
            frame = self._frame() if self._incoming.holds_bytes else None
            while frame is None:
                if not self._read():
                    return None
                frame = self._frame()
        try:
            return self._decoder.decode(frame.body), frame.attached
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            self.close()
            raise ChannelError(
                "channel.not_a_message",
                "{peer} sent data that is not a message, so the connection was closed: {error}",
                peer=self.peer,
                error=error,
            ) from error

    def take_descriptor(self) -> int:
        """Return the next received descriptor, which the caller must close.

        Raises:
            ChannelError: no descriptor was received.
        """
        try:
            return self._descriptors.popleft()
        except IndexError:
            raise ChannelError(
                "channel.descriptor_missing", "{peer} announced a descriptor, but did not send it", peer=self.peer
            ) from None

    def give_back(self, message: msgspec.Struct) -> None:
        """Put a message back, so that the next `take` or `receive` returns it again."""
        self._given_back.append(message)

    def wait(self, events: int, until: float) -> int:
        """Wait for events of `select.poll` until `time.monotonic` reaches `until`; return 0 after a timeout."""
        poll = select.poll()
        try:
            poll.register(self._link, events)
        except ValueError:  # the connection was closed, and its next use raises the error
            return events
        found = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        return int(found[0][1]) if found else 0

    def close(self) -> None:
        """Close the connection. Threads that wait for a message raise an error."""
        with self._lock:
            self._end()
            self._link.close()
            while self._descriptors:
                os.close(self._descriptors.popleft())
            while self._outgoing:
                self._outgoing.popleft().close_descriptor()

    def end(self) -> None:
        """Shut the connection down from any thread.

        The next use in the owner's thread raises an error, and the owner closes the connection.
        """
        with self._lock:
            self._end()

    def _frame(self) -> Frame | None:
        try:
            return self._incoming.next()
        except ChannelError as error:
            self._end()
            raise ChannelError(
                "channel.peer_error", "{peer} {error}, so the connection was closed", peer=self.peer, error=error
            ) from None

    def _send(self, data: bytes | memoryview, descriptor: int | None = None) -> int:
        """Pass bytes to the kernel without blocking; return the number of accepted bytes."""
        if self._lost:
            raise ChannelError("channel.closed", "the connection to {peer} is closed", peer=self.peer)
        try:
            if descriptor is None:
                return self._link.send(data)
            return self._link.sendmsg([data], [_rights(descriptor)])
        except _WOULD_BLOCK:
            return 0
        except OSError as error:
            raise self._failed(error) from error

    def _read(self) -> bool:
        """Read the bytes that have arrived; return False if there are none."""
        if self._lost:
            raise ChannelError("channel.closed", "the connection to {peer} is closed", peer=self.peer)
        target = self._incoming.target()
        try:
            if self._most_descriptors:
                count = self._read_with_descriptors(target)
            elif target is not None:
                count = self._link.recv_into(target)
                self._incoming.advance(count)
            else:
                data = self._link.recv(_PIECE)
                count = len(data)
                self._incoming.add(data)
        except _WOULD_BLOCK:
            return False
        except OSError as error:
            raise self._failed(error) from error
        if count == 0:
            self._end()
            raise ChannelError("channel.closed_by_peer", "{peer} has closed the connection", peer=self.peer)
        return True

    def _read_with_descriptors(self, target: memoryview | None) -> int:
        if target is None:
            data, beside, flags, _ = self._link.recvmsg(_PIECE, self._descriptors_room, _CLOSED_ON_EXEC)
            count = len(data)
            self._incoming.add(data)
        else:
            count, beside, flags, _ = self._link.recvmsg_into([target], self._descriptors_room, _CLOSED_ON_EXEC)
            self._incoming.advance(count)
        for level, kind, data in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", data[: len(data) - len(data) % _INT_BYTES]))
        if flags & _CUT or len(self._descriptors) > self._most_descriptors:
            self._end()
            raise ChannelError(
                "channel.too_many_descriptors",
                "{peer} sent more descriptors than allowed, so the connection was closed",
                peer=self.peer,
            )
        return count

    def _failed(self, error: OSError) -> ChannelError:
        """End the connection after an error; return the exception to raise."""
        self._end()
        # no TLS closing message arrived, for example because the peer was killed
        if isinstance(error, ssl.SSLEOFError):
            return ChannelError("channel.closed_by_peer", "{peer} has closed the connection", peer=self.peer)
        return ChannelError(
            "channel.lost", "the connection to {peer} is lost: {reason}", peer=self.peer, reason=error.strerror or error
        )

    def _end(self) -> None:
        """Shut the connection down, which wakes waiting threads. The owner closes the descriptor later."""
        self._lost = True
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)


class _Outgoing:
    """Bytes that the kernel has not accepted yet. They belong to a message (`kept`) or to an attachment."""

    __slots__ = ("data", "descriptor", "kept")

    def __init__(self, data: memoryview, kept: bool, descriptor: int | None = None) -> None:
        self.data, self.kept, self.descriptor = data, kept, descriptor

    def close_descriptor(self) -> None:
        """Close the descriptor to send, if there is one."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes()


def connect(
    where: tuple[str, int] | Path,
    key: RunKey | None,
    messages: Any,
    *,
    deadline_s: float,
    stopped: Callable[[], object] = lambda: False,
    limits: FrameLimits = _LIMITS,
) -> Connection:
    """Connect to a listener of the run, which may not have started yet.

    Args:
        where: address and port for TLS with the run's key, or the path of a Unix socket, which needs no key.
        stopped: called after a failed attempt. If it returns true, the function does not try again.
        limits: limits of received data.

    Raises:
        DeadlineError: no process of the run answered within the deadline.
        ChannelError: the peer has another key, or belongs to another user.
    """
    until = time.monotonic() + deadline_s
    pause_s, longest_s = _PAUSES_S
    while True:
        left_s = until - time.monotonic()
        try:
            patience_s = max(0.05, min(HANDSHAKE_S, left_s))
            if isinstance(where, Path):
                link: socket.socket = _link_within_host(where, patience_s)
            else:
                link = _link_between_hosts(where, key, patience_s)
            return Connection(link, messages, name_of(where), limits)
        except ssl.SSLCertVerificationError:
            raise ChannelError(
                "channel.key_differs",
                "{where}: the process that answers does not have this run's key ({key}). Every host needs a copy "
                "of the same key file.",
                where=name_of(where),
                key=key and key.fingerprint,
            ) from None
        except OSError as error:
            if left_s < pause_s or stopped():
                raise DeadlineError(
                    "channel.connect_deadline",
                    "{where}: no process of this run answered within {deadline_s:g} s. Last error: {reason}",
                    where=name_of(where),
                    deadline_s=deadline_s,
                    reason=error.strerror or error,
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _link_within_host(path: Path, patience_s: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(patience_s)
        with short_path(path) as reached:
            link.connect(reached)
        if (user := user_of_peer(link)) != os.geteuid():
            raise ChannelError(
                "channel.socket_of_other_user",
                "{path}: this socket belongs to {user}, not to this run",
                path=path,
                user=user_name(user),
            )
        _expect_greeting(link)
    except BaseException:
        link.close()
        raise
    return link


def _link_between_hosts(where: tuple[str, int], key: RunKey | None, patience_s: float) -> socket.socket:
    if key is None:
        raise ChannelError(
            "channel.no_key",
            "{where}: a connection to another host needs the run's key, which this process does not have",
            where=name_of(where),
        )
    try:
        link: socket.socket = socket.create_connection(where, timeout=min(patience_s, _REACH_S))
    except TimeoutError as error:
        raise OSError(errno.EHOSTUNREACH, str(error)) from error
    try:
        link.settimeout(patience_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = key.client_and_server[0].wrap_socket(link)
        if not has_key(link, key):
            raise ssl.SSLCertVerificationError
        _expect_greeting(link)
    except BaseException:
        link.close()
        raise
    return link


def _expect_greeting(link: socket.socket) -> None:
    greeting = b""
    while len(greeting) < len(GREETING):
        if not (data := link.recv(len(GREETING) - len(greeting))):
            raise ConnectionResetError("it closed the connection")
        greeting += data
    if greeting != GREETING:
        raise ConnectionError("it is no listener of paceline's")
