"""Listener for the run's own processes, whom no unauthenticated peer holds up.

One thread waits for everything. A turn takes few new connections, after what the known ones have sent; few may be
unproven at a time, each for a few seconds.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from paceline.errors import ChannelError
from paceline.wire.connection import GREETING, HANDSHAKE_S, Connection
from paceline.wire.ends import has_key, name_of, short_path, user_of_peer
from paceline.wire.frames import FrameLimits
from paceline.wire.key import RunKey

MOST_UNPROVEN = 64  # connections; beyond, the oldest is dropped
_MOST_A_TURN = 8  # new connections that are taken before the known ones come again
_BACKLOG = 256
_PAUSE_S = 0.05  # where no descriptor is left
_LIMITS = FrameLimits()
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET

Where = tuple[str, int] | Path | socket.socket


@dataclass
class _Unproven:
    """A connection that has yet to prove that it belongs to the run. It is wrapped by TLS once it has sent a byte."""

    link: socket.socket
    peer: str
    until: float


class Listener:
    """Accepts connections, and hands over those that belong to the run.

    Args:
        where: address and port, for TLS with the run's key; the path of a Unix socket to make in a private folder; or a
            socket that listens already.
        key: of the run; None for Unix sockets, where the peer's user is asked of the kernel.
        messages: what peers may send: a tagged Struct, or a union of them.
        on_connection: called for each, in the listener's thread.
        on_message: where given, connections stay with the listener, which calls this for each message. It answers by
            `Connection.post`, which never waits.
        on_close: called when such a connection has ended.
        limits: of what may come.

    Attributes:
        unauthenticated: number of connections that were turned away.
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
        self._key, self._messages, self._limits = key, messages, limits
        self._on_connection, self._on_message, self._on_close = on_connection, on_message, on_close
        self._context = key.client_and_server[1] if key else None
        self._own_path = where if isinstance(where, Path) else None
        self._socket = where if isinstance(where, socket.socket) else _listen(where)
        self._within_host = self._socket.family == socket.AF_UNIX
        if key is None and not self._within_host:
            self._socket.close()
            raise ChannelError("without the run's key only a Unix socket is listened on")
        self.address = self._own_path or _address_of(self._socket)
        self.unauthenticated = 0
        self._unproven: dict[int, _Unproven] = {}
        self._served: dict[int, Connection] = {}
        self._socket.setblocking(False)
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._doorbell, select.EPOLLIN)
        self._epoll.register(self._socket, select.EPOLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="paceline-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the connections that are served here. Those handed over stay."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._doorbell, 1)
            self._thread.join()
            os.close(self._doorbell)

    def _run(self) -> None:
        try:
            while not self._closing:
                arrived = False
                for fd, _ in self._epoll.poll(self._patience_s()):
                    if fd in self._served:
                        self._serve(fd)
                    elif fd in self._unproven:
                        self._go_on(fd)
                    else:
                        arrived = arrived or fd == self._socket.fileno()
                if arrived:
                    self._accept()
                self._drop_late()
        finally:
            self._end()

    def _end(self) -> None:
        for connection in self._served.values():
            connection.close()
        for unproven in self._unproven.values():
            unproven.link.close()
        self._socket.close()
        self._epoll.close()
        if self._own_path is not None:
            self._own_path.unlink(missing_ok=True)

    def _accept(self) -> None:
        for _ in range(_MOST_A_TURN):
            try:
                link, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors left, or the peer has gone again
                for fd in list(self._unproven):
                    self._drop(fd)
                time.sleep(_PAUSE_S)
                return
            link.setblocking(False)
            if self._within_host:
                self._ask_the_kernel(link)
            else:
                self._await_proof(link)

    def _ask_the_kernel(self, link: socket.socket) -> None:
        if (user := user_of_peer(link)) == os.geteuid():
            self._welcome(link, name_of(self._own_path or Path("a Unix socket")))
        else:
            self._count_unauthenticated(f"a process of user {user}")
            link.close()

    def _await_proof(self, link: socket.socket) -> None:
        if len(self._unproven) >= MOST_UNPROVEN:
            self._drop(next(iter(self._unproven)))
        self._forget_closed(link.fileno())
        with suppress(OSError):  # it has gone again, as its first byte will say
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unproven[link.fileno()] = _Unproven(link, _peer_of(link), time.monotonic() + HANDSHAKE_S)
        self._epoll.register(link, select.EPOLLIN)

    def _go_on(self, fd: int) -> None:
        """Go on with the handshake of an unproven connection."""
        unproven = self._unproven[fd]
        assert self._context is not None
        assert self._key is not None
        try:
            if not isinstance(unproven.link, ssl.SSLSocket):
                unproven.link = self._context.wrap_socket(
                    unproven.link, server_side=True, do_handshake_on_connect=False
                )
            unproven.link.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # what it writes, the kernel always has room for
            return
        except (OSError, ValueError):
            self._drop(fd)
            return
        if not has_key(unproven.link, self._key):
            self._drop(fd)
            return
        del self._unproven[fd]
        self._epoll.unregister(fd)
        self._welcome(unproven.link, unproven.peer)

    def _welcome(self, link: socket.socket, peer: str) -> None:
        try:
            link.send(GREETING)
        except OSError:  # it has gone again
            link.close()
            return
        connection = Connection(link, self._messages, peer, self._limits)
        self._on_connection(connection)
        if self._on_message is not None:
            fd = connection.fileno()
            self._forget_closed(fd)
            self._served[fd] = connection
            self._epoll.register(fd, _EDGES)  # tells at once what has come already

    def _serve(self, fd: int) -> None:
        connection = self._served[fd]
        assert self._on_message is not None
        try:
            connection.flush()
            while (message := connection.take()) is not None:
                self._on_message(connection, message)
        except ChannelError:
            del self._served[fd]  # closing it has taken it out of the epoll
            connection.close()
            self._on_close(connection)

    def _forget_closed(self, fd: int) -> None:
        """Forget a connection that somebody else has closed, and whose descriptor has come again."""
        if (connection := self._served.pop(fd, None)) is not None:
            self._on_close(connection)

    def _patience_s(self) -> float | None:
        """Time until the oldest unproven connection is late; None without one."""
        oldest = next(iter(self._unproven.values()), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def _drop_late(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, unproven in self._unproven.items() if now >= unproven.until]:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        unproven = self._unproven.pop(fd)
        self._count_unauthenticated(unproven.peer)
        unproven.link.close()  # which takes it out of the epoll

    def _count_unauthenticated(self, who: str) -> None:
        self.unauthenticated += 1
        if self.unauthenticated == 1:
            print(
                f"paceline: {name_of(self.address)}: {who} does not belong to this run and was turned away. "
                "Others will be, too, without a word.",
                file=sys.stderr,
            )


def _listen(where: tuple[str, int] | Path) -> socket.socket:
    with ExitStack() as held:
        place: Any
        if isinstance(where, Path):
            about = where.parent.stat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ChannelError(f"{where.parent} is open to other users, so no socket is made there")
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
            raise ChannelError(f"{name_of(where)} cannot be listened on: {error.strerror}") from error
    return listener


def _address_of(listener: socket.socket) -> tuple[str, int] | Path:
    name = listener.getsockname()
    return Path(name) if listener.family == socket.AF_UNIX else (name[0], name[1])


def _peer_of(link: socket.socket) -> str:
    try:
        return name_of(link.getpeername()[:2])
    except OSError:
        return "somebody who has gone again"
