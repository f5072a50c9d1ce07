"""Listener for a group's other ranks, on the cluster's address; unauthenticated peers cost it little.

Who does not hold the run's key is an unauthenticated peer. Few connections at a time may be without proof, each for a
few seconds, and unauthenticated peers who come too often make the listener rest: connections that there are go on at
full speed.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.comm.tcp.handshake import GREETING_BYTES, Greeting
from paceline.comm.tcp.progress import TcpProgress
from paceline.comm.tcp.tls import TlsHandshake
from paceline.errors import LaunchError

_PATIENCE_S = 5.0  # for a new connection to prove itself
_MOST_PENDING = 64  # connections that have not; beyond, the oldest is dropped
_MOST_A_TURN = 8  # accepted, before the ranks' own connections have their turn
_UNAUTHENTICATED = 64.0  # in a row, and then so many a second
_UNAUTHENTICATED_PER_S = 50.0
_BACKLOG = 256


@dataclass
class _Pending:
    """A connection that has not yet proved itself."""

    handshake: TlsHandshake
    until: float


class Listener:
    """Listens, and hands each connection that holds the run's key to `welcome`.

    Called under the loop's lock, but for its construction.
    """

    def __init__(
        self,
        loop: TcpProgress,
        address: str,
        context: ssl.SSLContext,
        welcome: Callable[[TlsHandshake, Greeting], None],
    ) -> None:
        self._loop, self._context, self._welcome = loop, context, welcome
        self._pending: dict[int, _Pending] = {}
        self.unauthenticated = 0  # so far
        self._allowance, self._looked_at = _UNAUTHENTICATED, time.monotonic()
        self._resting = False
        self._socket = _listen(address)
        self.address, self.port = self._socket.getsockname()[:2]
        with loop.lock:
            loop.watch(self._socket.fileno(), select.EPOLLIN, self._on_arrival, self._on_fault)
            loop.add_clock(self, self._look, self._on_fault)

    def close(self) -> None:
        """Stop listening and drop pending connections."""
        self._loop.remove_clock(self)
        for fd in list(self._pending):
            self._forget(fd).connection.close()
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def _on_arrival(self, _: int) -> None:
        for _ in range(_MOST_A_TURN):
            if self._allowance < 1:
                self._rest(True)
                return
            try:
                connection, _who = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors left, or the peer has gone again
                for fd in list(self._pending):
                    self._turn_away(fd)
                return
            connection.setblocking(False)
            if len(self._pending) >= _MOST_PENDING:
                self._turn_away(next(iter(self._pending)))
            fd = connection.fileno()
            try:
                handshake = TlsHandshake(connection, self._context, accepts=True)
            except Exception:
                connection.close()
                raise
            self._pending[fd] = _Pending(handshake, time.monotonic() + _PATIENCE_S)
            self._loop.watch(fd, select.EPOLLIN, partial(self._on_data, fd), partial(self._on_bad_data, fd))

    def _on_data(self, fd: int, _: int) -> None:
        handshake = self._pending[fd].handshake
        try:
            said = handshake.message(GREETING_BYTES)
            hello = None if said is None else Greeting.from_bytes(said)
        except OSError:  # includes those of TLS
            self._turn_away(fd)
            return
        if hello is not None:
            self._forget(fd)
            self._welcome(handshake, hello)

    def _on_bad_data(self, fd: int, _: Exception) -> None:
        if fd in self._pending:
            self._turn_away(fd)

    def _on_fault(self, _: Exception) -> None:
        """Pause the listener instead of failing again at once."""
        self._allowance = 0.0
        self._rest(True)

    def _turn_away(self, fd: int) -> None:
        self._forget(fd).connection.close()
        self.unauthenticated += 1
        self._loop.unauthenticated += 1
        self._allowance -= 1

    def _forget(self, fd: int) -> TlsHandshake:
        self._loop.forget(fd)
        return self._pending.pop(fd).handshake

    def _look(self, now: float) -> None:
        """Drop who is late, and end a rest."""
        for fd in [fd for fd, pending in self._pending.items() if now > pending.until]:
            self._turn_away(fd)
        self._allowance = min(_UNAUTHENTICATED, self._allowance + _UNAUTHENTICATED_PER_S * (now - self._looked_at))
        self._looked_at = now
        if self._allowance >= 1:
            self._rest(False)

    def _rest(self, resting: bool) -> None:
        if resting != self._resting:
            self._resting = resting
            self._loop.change(self._socket.fileno(), 0 if resting else select.EPOLLIN)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {address}: {error.strerror}. PACELINE_ADDRESS names the address of this host "
            "that the others are to use."
        ) from error
    listener.setblocking(False)
    return listener
