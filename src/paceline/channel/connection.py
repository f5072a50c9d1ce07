"""Typed messages between two processes, over TLS between hosts or a Unix socket within one.

A message is a `msgspec.Struct` with a tag, packed by msgpack behind its length. Nothing is unpickled, a length beyond
the limit ends the connection before any memory is taken, and memory grows only with bytes that have come.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline.channel.key import RunKey
from paceline.channel.silence import is_unacknowledged
from paceline.errors import ChannelError, DeadlineError
from paceline.files import user_name

LIMIT_BYTES = 2**22  # of a message
GREETING = b"pace"  # from the end that accepts, once it knows who the other is
HANDSHAKE_S = 5.0
_BACKLOG_LIMIT = 2**26  # bytes that wait for a peer that reads nothing
_PIECE = 2**14  # bytes of a TLS record
_LENGTH = struct.Struct("!I")
_PEER = struct.Struct("3i")  # process, user and group, of SO_PEERCRED
_SEND_S = 60.0
_REACH_S = 2.0  # for the kernel of the other machine, which answers however busy its processes are
_PAUSES_S = (0.02, 0.5)  # between attempts to connect, the first and the longest


class Connection:
    """One end of a connection whose other end has proved to belong to the run.

    Any thread may send; one at a time receives.

    Args:
        link: connected, and authenticated.
        messages: what may come: a tagged Struct, or a union of them.
        peer: name of the other end, for errors.
    """

    def __init__(self, link: socket.socket, messages: Any, peer: str) -> None:
        link.setblocking(False)
        self.peer = peer
        self._link = link
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._given_back: list[Any] = []
        self._lock = threading.Lock()  # TLS serves one thread at a time
        self._lost = False

    @property
    def lost(self) -> bool:
        """True once it has failed or was closed: nothing comes or goes any more."""
        return self._lost

    def is_unacknowledged(self, for_s: float, retransmissions: int) -> bool:
        """True if the other end's kernel has left so many retransmissions unanswered, for so long."""
        with self._lock:
            return not self._lost and is_unacknowledged(self._link, for_s, retransmissions)

    def fileno(self) -> int:
        """The descriptor, to wait on; -1 once closed."""
        return self._link.fileno()

    def send(self, message: msgspec.Struct, deadline_s: float = _SEND_S) -> None:
        """Send a message, and wait until the kernel has it.

        Raises:
            ChannelError: the message is too long, or the connection is lost.
            DeadlineError: the peer takes nothing.
        """
        self.post(message)
        until = time.monotonic() + deadline_s
        while not self.flush():
            if not self._wait(select.POLLOUT, until):
                self.close()
                raise DeadlineError(f"{self.peer} took no message for {deadline_s:g} s, so the connection was closed")

    def receive(self, deadline_s: float) -> Any:
        """The next message.

        Raises:
            ChannelError: the connection is lost, or what came is no message.
            DeadlineError: none came in time. The connection is as before.
        """
        until = time.monotonic() + deadline_s
        while (message := self.take()) is None:
            if not self._wait(select.POLLIN, until):
                raise DeadlineError(f"{self.peer} sent nothing for {deadline_s:g} s")
        return message

    def post(self, message: msgspec.Struct) -> None:
        """Send what goes at once of a message, and keep the remainder for `flush`. Raises ChannelError as `send`."""
        body = msgspec.msgpack.encode(message)
        if len(body) > LIMIT_BYTES:
            raise ChannelError(f"a message has {len(body):,} bytes; at most {LIMIT_BYTES:,} are sent at once")
        with self._lock:
            self._outgoing += _LENGTH.pack(len(body)) + body
        if not self.flush() and len(self._outgoing) > _BACKLOG_LIMIT:
            self.close()
            raise ChannelError(f"{self.peer} takes no messages, so the connection was closed")

    def flush(self) -> bool:
        """Send what the kernel takes of the messages that wait. True if none does."""
        with self._lock, self._told_apart():
            while self._outgoing:
                sent = self._link.send(bytes(self._outgoing[:_PIECE]))
                del self._outgoing[:sent]
        return not self._outgoing

    def take(self) -> Any:
        """The next message, or None if it is not here yet. Raises ChannelError as `receive`."""
        if self._given_back:
            return self._given_back.pop()
        with self._lock:
            while (frame := self._frame()) is None:
                data = None
                with self._told_apart():
                    data = self._link.recv(_PIECE)
                if data is None:
                    return None
                if not data:
                    self._end()
                    raise ChannelError(f"{self.peer} has closed the connection")
                self._incoming += data
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            self.close()
            raise ChannelError(f"{self.peer} sent what is no message, so the connection was closed: {error}") from error

    def give_back(self, message: msgspec.Struct) -> None:
        """Have the next `take` or `receive` return a message once more, for somebody else."""
        self._given_back.append(message)

    def close(self) -> None:
        """Close the connection. Who waits for a message gets an error."""
        with self._lock:
            self._end()
            self._link.close()

    def end(self) -> None:
        """Let nothing come or go any more; for any thread. Its owner gets an error, and closes it."""
        with self._lock:
            self._end()

    def _frame(self) -> bytes | None:
        """The body of the first message, or None while it is not whole."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > LIMIT_BYTES:
            self._end()
            raise ChannelError(f"{self.peer} announced {length:,} bytes, so the connection was closed")
        end = _LENGTH.size + length
        if len(self._incoming) < end:
            return None
        frame = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        return frame

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """Do nothing about a call that would block; any other error ends the connection."""
        if self._lost:
            raise ChannelError(f"the connection to {self.peer} is closed")
        try:
            yield
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ssl.SSLEOFError as error:  # closed without the word that TLS has for it, as by a process that was killed
            self._end()
            raise ChannelError(f"{self.peer} has closed the connection") from error
        except OSError as error:
            self._end()
            raise ChannelError(f"the connection to {self.peer} is lost: {error.strerror or error}") from error

    def _wait(self, events: int, until: float) -> bool:
        """Wait for the kernel; False when the time is over."""
        poll = select.poll()
        try:
            poll.register(self._link, events)
        except ValueError:  # closed meanwhile, as the next call says
            return True
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def _end(self) -> None:
        """Let nothing come or go any more. Its descriptor is closed by whoever owns it, and wakes who waits for it."""
        self._lost = True
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)


def connect(
    where: tuple[str, int] | Path,
    key: RunKey | None,
    messages: Any,
    *,
    deadline_s: float,
    stopped: Callable[[], object] = lambda: False,
) -> Connection:
    """Connect to a listener of the run, which may still be starting.

    Args:
        where: address and port, over TLS with the run's key; or the path of a Unix socket, without a key.
        stopped: if true, no further try is made.

    Raises:
        DeadlineError: nobody with the run's key answered in time.
        ChannelError: who answers has another key, or is another user's.
    """
    until = time.monotonic() + deadline_s
    pause_s, longest_s = _PAUSES_S
    while True:
        left_s = until - time.monotonic()
        try:
            patience_s = max(0.05, min(HANDSHAKE_S, left_s))
            if isinstance(where, Path):
                return _connect_within_host(where, messages, patience_s)
            return _connect_between_hosts(where, key, messages, patience_s)
        except ssl.SSLCertVerificationError:
            raise ChannelError(
                f"{name_of(where)}: who answers there does not have this run's key ({key and key.fingerprint}). "
                "Every host needs a copy of the same key file."
            ) from None
        except OSError as error:
            if left_s < pause_s or stopped():
                raise DeadlineError(
                    f"{name_of(where)}: nobody of this run answered within {deadline_s:g} s. Last: "
                    f"{error.strerror or error}"
                ) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _connect_within_host(path: Path, messages: Any, patience_s: float) -> Connection:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(patience_s)
        with short_path(path) as reached:
            link.connect(reached)
        if (user := user_of_peer(link)) != os.geteuid():
            raise ChannelError(f"{path}: {user_name(user)} serves this socket, and not this run")
        _expect_greeting(link)
    except BaseException:
        link.close()
        raise
    return Connection(link, messages, str(path))


def _connect_between_hosts(where: tuple[str, int], key: RunKey | None, messages: Any, patience_s: float) -> Connection:
    if key is None:
        raise ChannelError(f"{name_of(where)}: without the run's key nothing is sent to other hosts")
    try:
        link = socket.create_connection(where, timeout=min(patience_s, _REACH_S))
    except TimeoutError as error:
        raise OSError(errno.EHOSTUNREACH, str(error)) from error
    try:
        link.settimeout(patience_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = key.client_context().wrap_socket(link)
        if not has_key(link, key):
            raise ssl.SSLCertVerificationError
        _expect_greeting(link)
    except BaseException:
        link.close()
        raise
    return Connection(link, messages, name_of(where))


def _expect_greeting(link: socket.socket) -> None:
    greeting = b""
    while len(greeting) < len(GREETING):
        if not (data := link.recv(len(GREETING) - len(greeting))):
            raise ConnectionResetError("it closed the connection")
        greeting += data
    if greeting != GREETING:
        raise ConnectionError("it is no listener of paceline's")


def has_key(link: ssl.SSLSocket, key: RunKey) -> bool:
    """True if the other end of a connection has proved that it holds this key."""
    return link.getpeercert(binary_form=True) == key.certificate_der


def user_of_peer(link: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel tells it."""
    _, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path of a Unix socket in any folder; the kernel takes 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def name_of(where: tuple[str, int] | Path) -> str:
    """A place as messages name it."""
    return str(where) if isinstance(where, Path) else f"{where[0]}:{where[1]}"
