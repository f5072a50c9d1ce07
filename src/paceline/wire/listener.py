"""Listener for the run's own processes, which unauthenticated peers cannot delay.

One thread waits for everything. `admission` says who may come in.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import ChannelError
from paceline.wire.admission import Admission, listen, peer_name
from paceline.wire.connection import GREETING, Connection
from paceline.wire.ends import name_of
from paceline.wire.frames import FrameLimits
from paceline.wire.key import RunKey

_LIMITS = FrameLimits()
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET

Where = tuple[str, int] | Path | socket.socket


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
        admission: who comes in, and who was turned away.
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
            raise ChannelError("without the run's key only a Unix socket is listened on")
        self.address = self._own_path or _address_of(listening)
        self._served: dict[int, Connection] = {}
        self._loop = _ThreadLoop(listening.fileno(), self._forget_closed)
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
    def unauthenticated(self) -> int:
        """Number of connections that were turned away."""
        return self.admission.unauthenticated

    def close(self) -> None:
        """Stop listening, and close the connections that are served here. Those handed over stay."""
        if not self._closing:
            self._closing = True
            self._loop.wake()
            self._thread.join()
            self._loop.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._loop.turn(self.admission.patience_s())
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
        except OSError:  # it has gone again
            link.close()
            return
        connection = Connection(link, self._messages, peer, self._limits)
        self._on_connection(connection)
        if self._on_message is not None:
            fd = connection.fileno()
            # the loop tells at once what has come already
            self._loop.watch(fd, _EDGES, partial(self._serve, fd, connection))
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
        """Forget a connection that somebody else has closed, and whose descriptor has come again."""
        if (connection := self._served.pop(fd, None)) is not None:
            self._on_close(connection)

    def _tell_of_refused(self, who: str) -> None:
        if self.unauthenticated == 1:
            print(
                f"paceline: {name_of(self.address)}: {who} does not belong to this run and was turned away. "
                "Others will be, too, without a word.",
                file=sys.stderr,
            )


class _ThreadLoop:
    """Waits for sockets in one thread, and calls the listening one's handler last.

    Args:
        listening: descriptor of the socket that takes new connections.
        on_reuse: called with a descriptor before it is watched, as an earlier one of that number may have been closed.
    """

    def __init__(self, listening: int, on_reuse: Callable[[int], None]) -> None:
        self._listening, self._on_reuse = listening, on_reuse
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wakes, select.EPOLLIN)

    def watch(self, fd: int, events: int, handler: Callable[[int], None], on_fault: object = None) -> None:
        """Call `handler` on these events. Its faults end the thread."""
        self._on_reuse(fd)
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Wait no more."""
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError):  # closing it has taken it out
                self._epoll.unregister(fd)

    def turn(self, patience_s: float | None) -> None:
        """Wait, and call handlers once."""
        for fd, events in sorted(self._epoll.poll(patience_s), key=lambda event: event[0] == self._listening):
            if (handler := self._handlers.get(fd)) is not None:
                handler(events)

    def wake(self) -> None:
        """End a wait; for any thread, once."""
        os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Close what is the loop's own."""
        self._epoll.close()
        os.close(self._wakes)


def _address_of(listener: socket.socket) -> tuple[str, int] | Path:
    name = listener.getsockname()
    return Path(name) if listener.family == socket.AF_UNIX else (name[0], name[1])
