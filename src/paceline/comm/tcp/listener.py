"""Listener for a group's other ranks, on the cluster's address alone; it rejects strangers."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.comm.tcp.handshake import HELLO_BYTES, Hello
from paceline.comm.tcp.progress import TcpProgress
from paceline.errors import LaunchError

_PATIENCE_S = 5.0  # for a new connection to identify itself
_MOST_PENDING = 64  # connections that have not identified themselves; beyond, the oldest is dropped
_BACKLOG = 256


@dataclass
class _Pending:
    """A connection that has not yet identified itself."""

    socket: socket.socket
    until: float
    received: bytes = b""


class Listener:
    """Listens, and hands each connection that knows the group's secret to `welcome`.

    Called under the loop's lock, but for its construction.
    """

    def __init__(
        self, loop: TcpProgress, address: str, secret: bytes, welcome: Callable[[socket.socket, Hello], None]
    ) -> None:
        self._loop, self._secret, self._welcome = loop, secret, welcome
        self._pending: dict[int, _Pending] = {}
        self._socket = _listen(address)
        self.address, self.port = self._socket.getsockname()[:2]
        with loop.lock:
            loop.watch(self._socket.fileno(), select.EPOLLIN, self._on_arrival)
            loop.add_clock(self, self._drop_late)

    def close(self) -> None:
        """Stop listening and drop pending connections."""
        self._loop.remove_clock(self)
        for fd in list(self._pending):
            self._drop(fd)
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def _on_arrival(self, _: int) -> None:
        while True:
            try:
                connection, _who = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors left, or the peer has gone again
                for fd in list(self._pending):
                    self._drop(fd)
                return
            connection.setblocking(False)
            if len(self._pending) >= _MOST_PENDING:
                self._drop(next(iter(self._pending)))
            fd = connection.fileno()
            self._pending[fd] = _Pending(connection, time.monotonic() + _PATIENCE_S)
            self._loop.watch(fd, select.EPOLLIN, lambda _, fd=fd: self._on_data(fd))  # type: ignore[misc]

    def _on_data(self, fd: int) -> None:
        pending = self._pending[fd]
        try:
            found = pending.socket.recv(HELLO_BYTES - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            found = b""
        pending.received += found
        if len(pending.received) < HELLO_BYTES:
            if not found:
                self._drop(fd)
            return
        hello = Hello.from_bytes(pending.received, self._secret)
        if hello is None:
            self._drop(fd)
            return
        del self._pending[fd]
        self._loop.forget(fd)
        self._welcome(pending.socket, hello)

    def _drop(self, fd: int) -> None:
        self._loop.forget(fd)
        self._pending.pop(fd).socket.close()

    def _drop_late(self, now: float) -> None:
        for fd in [fd for fd, pending in self._pending.items() if now > pending.until]:
            self._drop(fd)


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
