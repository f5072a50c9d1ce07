"""Listener for processes of the run, which unauthenticated peers cannot delay.

Each connection is isolated until the other end proves that it has the run's key. Connections without this proof cost
little, because their number and duration are limited. A listener can also pause if such connections are too frequent.
All listeners of paceline use `Admission` to accept connections, with any event loop.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import ChannelError
from paceline.wire.connection import GREETING, HANDSHAKE_S, Connection, FrameLimits
from paceline.wire.key import RunKey, has_key, name_of, short_path, user_of_peer

_LIMITS = FrameLimits()
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET

Where = tuple[str, int] | Path | socket.socket


class Listener:
    """Listener that accepts connections, and passes on the connections that belong to the run.

    Args:
        where: address and port for TLS with the run's key, the path of a Unix socket to create in a private folder, or
            a listening socket.
        key: key of the run. None for Unix sockets, for which the kernel reports the user of the peer.
        messages: type of the messages that peers may send: a tagged Struct, or a union of them.
        on_connection: called with each accepted connection, in the thread of the listener.
        on_message: function to call for each message. If given, connections stay with the listener. The function must
            answer with `Connection.post`, which never blocks.
        on_close: called when a connection that stays with the listener has ended.
        limits: limits of received data.

    Attributes:
        admission: admission control of the listener.
    """

    def __init__(
        self,
        where: Where,
        key: RunKey | None,
        messages: Any,
        on_connection: Callable[[Connection], object],
        *,
        on_message: Callable[[Connection, Any], None] | None = None,
        on_close: Callable[[Connection], None] = lambda _: None,
        limits: FrameLimits = _LIMITS,
    ) -> None:
        self._messages, self._limits = messages, limits
        self._on_connection, self._on_message, self._on_close = on_connection, on_message, on_close
        self._own_path = where if isinstance(where, Path) else None
        listening = where if isinstance(where, socket.socket) else listen(where)
        self._within_host = listening.family == socket.AF_UNIX
        if key is None and not self._within_host:
            listening.close()
            raise ChannelError(
                "channel.listen_without_key", "without the run's key, only a Unix socket can accept connections"
            )
        self.address = self._own_path or _address_of(listening)
        self._served: dict[int, Connection] = {}
        self._loop, self._listening_fd = SocketLoop(), listening.fileno()
        self.admission = Admission(
            listening,
            None if self._within_host else key,
            self._loop,
            self._welcome,
            on_refused=self._tell_of_refused,
        )
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="paceline-listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """TCP port of the listener."""
        assert isinstance(self.address, tuple)
        return self.address[1]

    @property
    def unauthenticated(self) -> int:
        """Number of rejected connections."""
        return self.admission.unauthenticated

    def close(self) -> None:
        """Stop listening, and close the connections that stay with the listener. Other connections remain open."""
        if not self._closing:
            self._closing = True
            self._loop.wake()
            self._thread.join()
            self._loop.close_loop()

    def _run(self) -> None:
        try:
            while not self._closing:
                ready = self._loop.ready(self.admission.patience_s())
                # established connections are served before new connections
                for fd, events in sorted(ready, key=lambda event: event[0] == self._listening_fd):
                    if fd in self._loop.handlers:  # an earlier handler may have removed this one
                        self._loop.handlers[fd][0](events)
                self.admission.look(time.monotonic())
        finally:
            for connection in self._served.values():
                connection.close()
            self.admission.close()
            if self._own_path is not None:
                self._own_path.unlink(missing_ok=True)

    def _welcome(self, link: socket.socket, _: bytes) -> None:
        peer = name_of(self._own_path or Path("a Unix socket")) if self._within_host else peer_name(link)
        try:
            link.send(GREETING)
        except OSError:  # the peer has disconnected
            link.close()
            return
        connection = Connection(link, self._messages, peer, self._limits)
        self._on_connection(connection)
        if self._on_message is not None:
            fd = connection.fileno()
            # the loop also reports data that arrived before this call
            self._loop.watch(fd, _EDGES, partial(self._serve, fd, connection), lambda _: self._forget_closed(fd))
            self._served[fd] = connection

    def _serve(self, fd: int, connection: Connection, _: int) -> None:
        assert self._on_message is not None
        try:
            connection.flush()
            while (message := connection.take()) is not None:
                self._on_message(connection, message)
        except ChannelError:
            self._loop.forget(fd)
            self._served.pop(fd, None)
            connection.close()
            self._on_close(connection)

    def _forget_closed(self, fd: int) -> None:
        """Remove a connection that was closed elsewhere, and whose descriptor number is used again."""
        self._on_close(self._served.pop(fd))

    def _tell_of_refused(self, who: str) -> None:
        if self.unauthenticated == 1:
            print(
                f"paceline: {name_of(self.address)}: {who} does not belong to this run and was turned away. "
                "Others will be, too, without a word.",
                file=sys.stderr,
            )


def _address_of(listener: socket.socket) -> tuple[str, int] | Path:
    name = listener.getsockname()
    return Path(name) if listener.family == socket.AF_UNIX else (name[0], name[1])


MOST_UNPROVEN = 64  # largest number of connections without proof; the oldest is dropped to make room
_MOST_A_TURN = 8  # number of new connections to accept before established connections are served again
_BACKLOG = 256
# number of unauthenticated peers in quick succession before a listener with a rate limit pauses
_UNAUTHENTICATED = 64.0
_PAUSE_S = 0.05  # pause in seconds when no descriptor is left


OnFault = Callable[[Exception], object]


class SocketLoop:
    """Event loop that calls the handlers of sockets. Only one thread at a time may wait."""

    def __init__(self) -> None:
        self.handlers: dict[int, tuple[Callable[[int], None], OnFault]] = {}
        self._epoll = select.epoll()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakes, select.EPOLLIN)

    def watch(self, fd: int, events: int, handler: Callable[[int], None], on_fault: OnFault) -> None:
        """Call `handler` with every epoll event of a descriptor.

        Args:
            on_fault: called with an error if the handler raises one, or if the descriptor was closed and its number is
                used again.
        """
        if (closed := self.handlers.pop(fd, None)) is not None:
            closed[1](ConnectionError("it was closed"))
        self.handlers[fd] = handler, on_fault
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for different events of a descriptor from now on."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop waiting for events of a descriptor, which may already be closed."""
        if self.handlers.pop(fd, None) is not None:
            with suppress(OSError):  # the kernel has already removed a closed descriptor from the epoll instance
                self._epoll.unregister(fd)

    def ready(self, patience_s: float | None) -> list[tuple[int, int]]:
        """Wait until sockets are ready; return their descriptors and events."""
        return self._epoll.poll(patience_s)

    def wake(self) -> None:
        """Make the current wait and all later waits return immediately. Any thread may call this method."""
        os.eventfd_write(self._wakes, 1)

    def close_loop(self) -> None:
        """Close the descriptors that the loop has opened."""
        self._epoll.close()
        os.close(self._wakes)


class Admission:
    """Admission control of a listener, which passes connections of the run to `welcome`.

    Callers must be in the thread of the loop, or hold the lock of the loop.

    Args:
        listening: socket from `listen`, which `close` closes.
        key: key of the run. None for Unix sockets, for which the kernel reports the user of the peer.
        welcome: called with the socket of an accepted connection, and with the received message. The function then owns
            the socket.
        expects: length in bytes of the message that the other end must send after the TLS handshake.
        unauthenticated_per_s: rate of unauthenticated peers above which the listener pauses; None for no limit.
        on_refused: called with the name of each rejected peer.

    Attributes:
        pending: connections that have not proved the key yet, oldest first.
        unauthenticated: number of rejected peers.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: RunKey | None,
        loop: SocketLoop,
        welcome: Callable[[socket.socket, bytes], None],
        *,
        expects: int = 0,
        unauthenticated_per_s: float | None = None,
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._socket, self._key, self._loop, self._welcome = listening, key, loop, welcome
        self._expects, self.unauthenticated_per_s, self._on_refused = (
            expects,
            unauthenticated_per_s,
            on_refused,
        )
        self.pending: dict[int, _Pending] = {}
        self.unauthenticated = 0
        self._allowance, self._looked_at = _UNAUTHENTICATED, time.monotonic()
        self._rests_until: float | None = None
        listening.setblocking(False)
        loop.watch(listening.fileno(), select.EPOLLIN, self._on_arrival, lambda _: self.rest(_PAUSE_S))

    def close(self) -> None:
        """Stop listening, and drop the connections that have not proved the key."""
        for fd in list(self.pending):
            self._forget(fd).link.close()
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def look(self, now: float) -> None:
        """Drop connections that did not prove the key in time; end an expired pause.

        The loop must call this method after every wait, and wait no longer than `patience_s`.
        """
        for fd in [fd for fd, pending in self.pending.items() if now >= pending.until]:
            self._turn_away(fd)
        if self.unauthenticated_per_s is not None:
            gained = self.unauthenticated_per_s * (now - self._looked_at)
            self._allowance = min(_UNAUTHENTICATED, self._allowance + gained)
        self._looked_at = now
        if self._rests_until is not None and now >= self._rests_until and self._allowance >= 1:
            self._rests_until = None
            self._loop.change(self._socket.fileno(), select.EPOLLIN)

    def patience_s(self) -> float | None:
        """Return the seconds until `look` has something to do, or None if nothing is pending."""
        ends = [pending.until for pending in self.pending.values()][:1]
        ends += [] if self._rests_until is None else [self._rests_until]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def rest(self, seconds: float) -> None:
        """Accept no connections for some seconds, and until the rate limit allows unauthenticated peers again."""
        if self._rests_until is None:
            self._rests_until = time.monotonic() + seconds
            self._loop.change(self._socket.fileno(), 0)

    def _on_arrival(self, _: int) -> None:
        for _ in range(_MOST_A_TURN):
            if self._allowance < 1:
                self.rest(0.0)
                return
            try:
                link, _who = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, or the peer has disconnected
                for fd in list(self.pending):
                    self._turn_away(fd)
                self.rest(_PAUSE_S)
                return
            link.setblocking(False)
            if self._key is None:
                self._ask_the_kernel(link)
            else:
                self._await_proof(link, self._key)

    def _ask_the_kernel(self, link: socket.socket) -> None:
        if (user := user_of_peer(link)) == os.geteuid():
            self._welcome(link, b"")
        else:
            self._count(f"a process of user {user}")
            link.close()

    def _await_proof(self, link: socket.socket, key: RunKey) -> None:
        if len(self.pending) >= MOST_UNPROVEN:
            self._turn_away(next(iter(self.pending)))
        with suppress(OSError):  # the peer has disconnected, and reading its first byte will fail
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd, handshake = link.fileno(), TlsHandshake(link, key.client_and_server[1], accepts=True)
        self._loop.watch(fd, select.EPOLLIN, partial(self._go_on, fd, key), partial(self._on_fault, fd))
        self.pending[fd] = _Pending(handshake, peer_name(link), time.monotonic() + HANDSHAKE_S)

    def _go_on(self, fd: int, key: RunKey, _: int) -> None:
        handshake = self.pending[fd].handshake
        try:
            message = handshake.message(self._expects)
        except (OSError, ValueError):  # TLS errors are subclasses of OSError
            self._turn_away(fd)
            return
        if message is None:
            return
        if not has_key(handshake.link, key):  # the certificate differs, although the run's key has signed it
            self._turn_away(fd)
            return
        self._welcome(self._forget(fd).link, message)

    def _on_fault(self, fd: int, _: Exception) -> None:
        if fd in self.pending:
            self._turn_away(fd)

    def _turn_away(self, fd: int) -> None:
        self._count(self.pending[fd].who)
        self._forget(fd).link.close()

    def _count(self, who: str) -> None:
        self.unauthenticated += 1
        if self.unauthenticated_per_s is not None:
            self._allowance -= 1
        self._on_refused(who)

    def _forget(self, fd: int) -> TlsHandshake:
        self._loop.forget(fd)
        return self.pending.pop(fd).handshake


@dataclass
class _Pending:
    handshake: TlsHandshake
    who: str
    until: float


class TlsHandshake:
    """TLS 1.3 handshake with the run's key, on a blocking or non-blocking socket.

    Both ends prove that they have the key. Each end may then send a message inside TLS. OpenSSL reads no bytes beyond a
    TLS record, so that another protocol can follow on the same socket (`released`).

    Args:
        link: connected socket. The first call of `message` wraps the socket in TLS.
        context: TLS context of the run's key.
        accepts: True at the accepting end of the connection.
        opening: message to send inside TLS after the handshake.

    Attributes:
        link: the connection, which the caller must close.
    """

    def __init__(self, link: socket.socket, context: ssl.SSLContext, *, accepts: bool, opening: bytes = b"") -> None:
        self.link = link
        self._context, self._accepts, self._opening = context, accepts, opening
        self._shaken = False
        self._message = b""

    def message(self, length: int) -> bytes | None:
        """Continue the handshake as far as possible. Return the peer's message once it is complete.

        Raises:
            OSError: the peer does not hold the key, does not support TLS 1.3, or has disconnected.
        """
        # the socket is wrapped late, so that a silent peer does not cost a TLS object
        if not isinstance(self.link, ssl.SSLSocket):
            self.link = self._context.wrap_socket(self.link, server_side=self._accepts, do_handshake_on_connect=False)
        try:
            if not self._shaken:
                self.link.do_handshake()
                self._shaken = True
                if self._opening and self.link.send(self._opening) < len(self._opening):
                    raise ConnectionError("the other side takes nothing")
            while len(self._message) < length:
                if not (found := self.link.recv(length - len(self._message))):
                    raise _closed()
                self._message += found
        # more bytes of the peer are needed; writes always fit into the kernel's buffer
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise _closed() from None
        return self._message


def released(link: socket.socket) -> socket.socket:
    """Return the socket below TLS, and send no TLS closing message."""
    return socket.socket(link.family, link.type, link.proto, link.detach())


def listen(where: tuple[str, int] | Path) -> socket.socket:
    """Listen at an address, or at a path in a private folder.

    Raises:
        ChannelError: the address cannot be used, or other users can access the folder.
    """
    with ExitStack() as held:
        place: Any
        if isinstance(where, Path):
            about = where.parent.stat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ChannelError(
                    "channel.folder_open",
                    "{where} is open to other users, so no socket is created there",
                    where=where.parent,
                )
            listener, place = socket.socket(socket.AF_UNIX), held.enter_context(short_path(where))
        else:
            family, kind, protocol, _, place = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ChannelError(
                "channel.cannot_listen",
                "cannot listen on {where}: {reason}",
                where=name_of(where),
                reason=error.strerror,
            ) from error
    return listener


def peer_name(link: socket.socket) -> str:
    """Format the address of the other end of a TCP connection."""
    try:
        return name_of(link.getpeername()[:2])
    except OSError:
        return "somebody who has gone again"


def _closed() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "the connection was closed before it was made")
