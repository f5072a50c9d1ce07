"""Admission of connections: each one is held apart until it proves the run's key.

Connections without proof cost little. There are few of them at a time, each for a few seconds, and a listener can rest
when they come too often. Every listener of paceline admits connections here, whatever loop waits for its sockets.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ChannelError
from paceline.wire.connection import HANDSHAKE_S
from paceline.wire.ends import has_key, name_of, short_path, user_of_peer
from paceline.wire.key import RunKey

MOST_UNPROVEN = 64  # connections; beyond, the oldest is dropped
_MOST_A_TURN = 8  # new connections that are taken before the known ones come again
_BACKLOG = 256
_UNAUTHENTICATED = 64.0  # in a row, before a listener with a limit rests
_PAUSE_S = 0.05  # where no descriptor is left


class Loop(Protocol):
    """Waits for sockets, and calls their handlers with the events of epoll."""

    def watch(
        self, fd: int, events: int, handler: Callable[[int], None], on_fault: Callable[[Exception], None]
    ) -> None:
        """Call `handler` on these events, and `on_fault` with an exception of the handler."""

    def change(self, fd: int, events: int) -> None:
        """Wait for other events."""

    def forget(self, fd: int) -> None:
        """Wait no more; for descriptors that are closed already, too."""


class Admission:
    """Accepts connections, and hands those that belong to the run to `welcome`.

    All calls come from the loop's thread, or under its lock.

    Args:
        listening: socket from `listen`; it is closed with the admission.
        key: of the run; None for Unix sockets, where the peer's user is asked of the kernel.
        welcome: called with a connection, which is its own from then on, and with the message that came.
        expects: length of the message that the other end has to say inside TLS, after its proof.
        unauthenticated_per_s: with more peers without proof than this the listener rests. None: no limit.
        on_refused: called with the name of each peer that is turned away.

    Attributes:
        pending: connections that have yet to prove themselves, the oldest first.
        unauthenticated: number of peers that were turned away.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: RunKey | None,
        loop: Loop,
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
        """Stop listening, and drop the connections without proof."""
        for fd in list(self.pending):
            self._forget(fd).link.close()
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def look(self, now: float) -> None:
        """Drop who is late, and end a rest. The loop calls it often, or when `patience_s` is over."""
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
        """Time until `look` has something to do; None if nothing is under way."""
        ends = [pending.until for pending in self.pending.values()][:1]
        ends += [] if self._rests_until is None else [self._rests_until]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def rest(self, seconds: float) -> None:
        """Accept nobody for so long, and until unauthenticated peers are allowed again."""
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
            except OSError:  # no descriptors left, or the peer has gone again
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
        with suppress(OSError):  # it has gone again, as its first byte will say
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd, handshake = link.fileno(), TlsHandshake(link, key.client_and_server[1], accepts=True)
        self._loop.watch(fd, select.EPOLLIN, partial(self._go_on, fd, key), partial(self._on_fault, fd))
        self.pending[fd] = _Pending(handshake, peer_name(link), time.monotonic() + HANDSHAKE_S)

    def _go_on(self, fd: int, key: RunKey, _: int) -> None:
        """Go on with the handshake of an unproven connection."""
        handshake = self.pending[fd].handshake
        try:
            message = handshake.message(self._expects)
        except (OSError, ValueError):  # includes those of TLS
            self._turn_away(fd)
            return
        if message is None:
            return
        if not has_key(handshake.link, key):  # but another certificate, which the run's key has signed
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
    """A connection that has yet to prove that it belongs to the run."""

    handshake: TlsHandshake
    who: str
    until: float


class TlsHandshake:
    """TLS 1.3 handshake with the run's key, on a socket of any timeout.

    Both ends prove the key, then each may say a message inside TLS. OpenSSL reads whole records and no byte more, so
    that something else may follow on the socket (`released`).

    Args:
        link: connected; TLS wraps it when `message` is first called.
        context: of the run's key.
        accepts: True at the end that was connected to.
        opening: what to say, inside TLS, once the handshake is done.

    Attributes:
        link: the connection, which the caller closes.
    """

    def __init__(self, link: socket.socket, context: ssl.SSLContext, *, accepts: bool, opening: bytes = b"") -> None:
        self.link = link
        self._context, self._accepts, self._opening = context, accepts, opening
        self._shaken = False
        self._message = b""

    def message(self, length: int) -> bytes | None:
        """Continue as far as possible; returns the other's message once it is whole.

        Raises:
            OSError: the other does not hold the key, speaks no TLS 1.3, or has gone.
        """
        if not isinstance(self.link, ssl.SSLSocket):  # a peer that says nothing costs no TLS
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
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # what it writes, the kernel always has room for
            return None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise _closed() from None
        return self._message


def released(link: socket.socket) -> socket.socket:
    """The socket below TLS, which ends there without a word."""
    return socket.socket(link.family, link.type, link.proto, link.detach())


def listen(where: tuple[str, int] | Path) -> socket.socket:
    """A socket that listens at an address, or at a path in a private folder.

    Raises:
        ChannelError: it cannot be listened on, or the folder is open to others.
    """
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


def peer_name(link: socket.socket) -> str:
    """The other end of a TCP connection, for people."""
    try:
        return name_of(link.getpeername()[:2])
    except OSError:
        return "somebody who has gone again"


def _closed() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "the connection was closed before it was made")
