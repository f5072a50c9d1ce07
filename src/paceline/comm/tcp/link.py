"""The link to another rank: a stream over a TCP connection, re-made when lost.

Of two ranks the one with the higher number connects. The other can only knock: open a connection to say that it misses
one. A knock, like a connect, also tells whether the process is still there: where the address answers and nobody
listens any more, it is gone; where nothing answers, it is the network, which may come back.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from paceline.comm.tcp.handshake import WELCOME_BYTES, Hello, Welcome
from paceline.comm.tcp.progress import TcpProgress
from paceline.comm.tcp.stream import ByteStream, Sink
from paceline.errors import SyncError

_FIRST_KNOCK_S = 1.0  # for the other rank to connect by itself at first
_BACK_OFF_S = (0.05, 0.5)  # between two attempts: at first, at most
_ATTEMPT_S = (0.5, 4.0)  # until an attempt is given up; more after several, for networks on which that is not enough
_GONE_S = 3.0  # of being refused
_SILENCE_S = 0.6  # without an acknowledgement from the other's kernel, with retransmissions under way
_KEEPALIVE_S = (5, 2, 3)  # idle, between probes, probes: for a rank that only waits, and whose peer's host is gone
_TCP_INFO_BYTES = 104
_READ, _WRITE = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


@dataclass(frozen=True)
class RankAddress:
    """A rank of a group: its host's name, where it listens, and its process."""

    rank: int
    host: str
    address: str
    port: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.address})"


class PeerLink:
    """This rank's end of the link to `peer`. All of it is called under the loop's lock."""

    def __init__(self, loop: TcpProgress, own: RankAddress, peer: RankAddress, secret: bytes, sink: Sink) -> None:
        self.own, self.peer = own, peer
        self.stream = ByteStream(sink)
        self.connections = 0  # made so far
        self._loop, self._secret = loop, secret
        self._connects = own.rank > peer.rank
        self._attempt: _Connecting | None = None
        self._epoch = 0  # the number of the connection, counted by the rank that accepts
        self._attempts = 0  # since the connection was lost
        self._since = time.monotonic()  # connected, or not
        self._next_attempt = self._since + (0.0 if self._connects else _FIRST_KNOCK_S)
        self._last_error = ""
        self._refused: list[float] = []
        self._over = ""
        self._events = 0
        loop.add_clock(self, self._look)

    @property
    def connected(self) -> bool:
        """True if there is a connection; it may be lost without anybody knowing."""
        return self.stream.socket is not None

    def why_over(self) -> str | None:
        """The reason why nothing more will come: the other rank has left or is gone."""
        return self._over or None

    def state(self) -> str:
        """The peer and the state of the connection, as text for an error."""
        for_s = f"{time.monotonic() - self._since:.1f} s"
        if self.connected:
            how = f"connected for {for_s}" + (
                f", after {self.connections - 1} lost connections" if self.connections > 1 else ""
            )
        else:
            how = f"{'re-connecting' if self.connections else 'connecting'} for {for_s}, {self._attempts} attempts"
        error = f", last error: {self._last_error}" if self._last_error else ""
        return f"{self.own} for {self.peer}: {how}{error}; {self.stream.outstanding} bytes sent and not acknowledged"

    def flush(self) -> None:
        """Write what the connection takes, and the remainder when it does."""
        if self.stream.socket is None:
            return
        try:
            self.stream.write()
        except OSError as error:
            self.lose(error)
            return
        self._watch()

    def adopt(self, connection: socket.socket, epoch: int, has_received: int) -> None:
        """Go on over a connection whose other end is known to be the peer.

        Raises:
            SyncError: the two ends do not fit together.
        """
        self._end_attempt()
        self._forget()
        _tune(connection)
        self.stream.attach(connection, has_received)
        self.connections += 1
        self._epoch, self._attempts, self._since = epoch, 0, time.monotonic()
        self._refused.clear()
        self._loop.watch(connection.fileno(), _READ, self._on_event)
        self._events = _READ
        self.flush()

    def accept(self, connection: socket.socket, hello: Hello) -> None:
        """The other rank has connected, or knocks; `connection` is this link's from now on."""
        if hello.knock:
            with connection:
                connection.send(Welcome(self._epoch, self.stream.received).to_bytes(self._secret))
            if self._connects and hello.epoch >= self._epoch and not self._attempt:
                self.lose(ConnectionError("the other side has lost the connection"))
                self._next_attempt = 0.0
            return
        if self._connects or self._over:
            connection.close()
            return
        epoch = self._epoch + 1
        connection.send(Welcome(epoch, self.stream.received).to_bytes(self._secret))
        self.adopt(connection, epoch, hello.received)

    def lose(self, error: OSError) -> None:
        """The connection is lost: make another."""
        self._last_error = error.strerror or str(error)
        if not self.connected:
            return
        self._forget()
        self.stream.detach()
        self._since = time.monotonic()
        self._next_attempt = 0.0 if self._connects else self._since + _BACK_OFF_S[0]
        if self.stream.ended:
            self._over = f"{self.peer} has left the group"
        elif self.stream.said_goodbye:
            self._over = "the group has ended here"

    def say_goodbye(self) -> None:
        """Tell the other rank, once, that nothing more will come.

        It closes the connection then, and the link is over.
        """
        if self.connected and not self.stream.said_goodbye:
            try:
                self.stream.say_goodbye()
            except OSError as error:
                self.lose(error)

    def close(self) -> None:
        """End the link."""
        self._loop.remove_clock(self)
        self._end_attempt()
        self._forget()
        self.stream.detach()
        self._over = self._over or "the group has ended here"

    # The connection there is

    def _on_event(self, events: int) -> None:
        try:
            if events & ~select.EPOLLOUT:
                self.stream.read()
            if self.stream.ended:
                self.lose(ConnectionError("it has left the group"))
            else:
                self.stream.write()
        except OSError as error:
            self.lose(error)
        if self.connected:
            self._watch()

    def _watch(self) -> None:
        events = _WRITE if self.stream.wants_to_write else _READ
        if events != self._events and self.stream.socket is not None:
            self._events = events
            self._loop.change(self.stream.socket.fileno(), events)

    def _forget(self) -> None:
        if self.stream.socket is not None:
            self._loop.forget(self.stream.socket.fileno())

    def _is_silent(self) -> bool:
        """True if repeated retransmissions got no answer. TCP alone would try ever more rarely."""
        assert self.stream.socket is not None
        info = self.stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        retransmits = info[2]
        heard_ms: int = struct.unpack_from("I", info, 56)[0]
        return retransmits >= 2 and heard_ms > 1000 * _SILENCE_S

    # Making another

    def _look(self, now: float) -> None:
        """Periodic work: overdue acknowledgements, dead connections, and due connection attempts."""
        if self._over:
            return
        if self.connected:
            self.stream.acknowledge_soon()
            if self.stream.outstanding and self._is_silent():
                self.lose(TimeoutError(errno.ETIMEDOUT, "no answer"))
            else:
                self.flush()
        if self._attempt and now > self._attempt.until:
            self._failed(TimeoutError(errno.ETIMEDOUT, "no answer"))
        if not self.connected and not self._attempt and now >= self._next_attempt:
            self._try(now)

    def _try(self, now: float) -> None:
        self._attempts += 1
        patience_s = min(_ATTEMPT_S[0] * 1.5 ** max(0, self._attempts - 8), _ATTEMPT_S[1])
        hello = Hello(self.own.rank, not self._connects, self._epoch, self.stream.received).to_bytes(self._secret)
        try:
            self._attempt = _Connecting(self.own, self.peer, hello, now + patience_s)
        except OSError as error:
            self._failed(error)
            return
        self._loop.watch(self._attempt.socket.fileno(), select.EPOLLOUT, self._on_attempt)

    def _on_attempt(self, _: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        try:
            answer = attempt.go_on()
            if answer is None:
                if attempt.greeted:
                    self._loop.change(attempt.socket.fileno(), select.EPOLLIN)
                return
            welcome = Welcome.from_bytes(answer, self._secret)
            if welcome is None:
                raise ConnectionError(f"somebody else listens at {self.peer.address}:{self.peer.port}")
            if not self._connects:  # a knock, heard
                self._end_attempt()
                self._next_attempt = time.monotonic() + _FIRST_KNOCK_S
                return
            self._loop.forget(attempt.socket.fileno())
            self._attempt = None
            self.adopt(attempt.socket, welcome.epoch, welcome.received)
        except OSError as error:
            self._failed(error)
        except SyncError as error:
            attempt.socket.close()
            self._over = f"{self.own} and {self.peer}: {error}"

    def _failed(self, error: OSError) -> None:
        self._end_attempt()
        now = time.monotonic()
        self._last_error = error.strerror or str(error)
        waited = isinstance(error, TimeoutError)  # that was back-off enough
        self._next_attempt = now + (
            0.0 if waited else min(_BACK_OFF_S[0] * 2 ** min(self._attempts, 10), _BACK_OFF_S[1])
        )
        if not isinstance(error, ConnectionRefusedError):
            self._refused.clear()
            return
        self._refused.append(now)
        if now - self._refused[0] > _GONE_S:
            self._over = (
                f"{self.peer} is gone (pid {self.peer.pid}): its host answers {self.own}, but nobody listens "
                f"at port {self.peer.port} "
                f"any more, tried {len(self._refused)} times in {now - self._refused[0]:.1f} s"
            )

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._loop.forget(self._attempt.socket.fileno())
            self._attempt.socket.close()
            self._attempt = None


class _Connecting:
    """A connection that is being made."""

    def __init__(self, own: RankAddress, peer: RankAddress, hello: bytes, until: float) -> None:
        self.until, self._hello, self._answer = until, hello, b""
        self.greeted = False
        family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.setblocking(False)
            self.socket.bind((own.address, 0))
            code = self.socket.connect_ex((peer.address, peer.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError:
            self.socket.close()
            raise

    def go_on(self) -> bytes | None:
        """Continue as far as possible; returns the whole answer once it has arrived."""
        if not self.greeted:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))  # of the subclass that belongs to the code
            self.socket.send(self._hello)  # fits any buffer
            self.greeted = True
            return None
        try:
            found = self.socket.recv(WELCOME_BYTES - len(self._answer))
        except BlockingIOError:
            return None
        if not found:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed before it was made")
        self._answer += found
        return self._answer if len(self._answer) == WELCOME_BYTES else None


def _tune(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(
        (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), _KEEPALIVE_S, strict=True
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
