"""Where the other ranks of a group connect: a socket that listens on the cluster's address alone, and lets no stranger in."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.comm.tcp.handshake import HELLO_BYTES, Hello
from paceline.comm.tcp.progress import Loop
from paceline.errors import LaunchError

_PATIENCE_S = 5.0  # for somebody who has connected to say who it is
_VISITORS = 64  # who have not said it yet, at most: the oldest has to go
_BACKLOG = 256


@dataclass
class _Visitor:
    """A connection that has not said who it is."""

    socket: socket.socket
    until: float
    said: bytes = b""


class Door:
    """Listens, and hands a connection that knows the group's secret to `welcome`. Called under the loop's lock, but for its making."""

    def __init__(self, loop: Loop, address: str, secret: bytes, welcome: Callable[[socket.socket, Hello], None]) -> None:
        self._loop, self._secret, self._welcome = loop, secret, welcome
        self._visitors: dict[int, _Visitor] = {}
        self._listener = _listen(address)
        self.address, self.port = self._listener.getsockname()[:2]
        with loop.lock:
            loop.watch(self._listener.fileno(), select.EPOLLIN, self._on_arrival)
            loop.add_clock(self, self._look)

    def close(self) -> None:
        """Let nobody in any more."""
        self._loop.remove_clock(self)
        for fd in list(self._visitors):
            self._send_away(fd)
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _on_arrival(self, _: int) -> None:
        while True:
            try:
                connection, _who = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors left, or the visitor has gone again
                for fd in list(self._visitors):
                    self._send_away(fd)
                return
            connection.setblocking(False)
            if len(self._visitors) >= _VISITORS:
                self._send_away(next(iter(self._visitors)))
            fd = connection.fileno()
            self._visitors[fd] = _Visitor(connection, time.monotonic() + _PATIENCE_S)
            self._loop.watch(fd, select.EPOLLIN, lambda _, fd=fd: self._on_word(fd))  # type: ignore[misc]

    def _on_word(self, fd: int) -> None:
        visitor = self._visitors[fd]
        try:
            found = visitor.socket.recv(HELLO_BYTES - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            found = b""
        visitor.said += found
        if len(visitor.said) < HELLO_BYTES:
            if not found:
                self._send_away(fd)
            return
        hello = Hello.from_bytes(visitor.said, self._secret)
        if hello is None:
            self._send_away(fd)
            return
        del self._visitors[fd]
        self._loop.forget(fd)
        self._welcome(visitor.socket, hello)

    def _send_away(self, fd: int) -> None:
        self._loop.forget(fd)
        self._visitors.pop(fd).socket.close()

    def _look(self, now: float) -> None:
        for fd in [fd for fd, visitor in self._visitors.items() if now > visitor.until]:
            self._send_away(fd)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {address}: {error.strerror}. PACELINE_ADDRESS names the address of this host that the others are to use."
        ) from error
    listener.setblocking(False)
    return listener
