"""Link to another rank: a stream over a TCP connection, which is replaced when lost.

In each pair of ranks, the rank with the higher number connects. The other rank can only request a reconnect, with a
separate connection for this request. Both kinds of connection also show if the process still runs. If the address
answers but the port is closed, the process has ended. If the address does not answer, the network is down, and it may
recover.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from paceline.comm.tcp.progress import TcpProgress
from paceline.comm.tcp.stream import KEY_BYTES, AlteredError, ByteStream, SealedWire, Sink, Wire
from paceline.errors import SyncError
from paceline.wire.key import RunKey
from paceline.wire.listener import TlsHandshake, released
from paceline.wire.silence import is_unacknowledged

_FIRST_REQUEST_S = 1.0  # time for the other rank to connect first
_BACK_OFF_S = (0.05, 0.5)  # between two attempts: initially, at most
_ATTEMPT_S = (0.5, 4.0)  # time limit of an attempt; longer after several attempts, for slow networks
_GONE_S = 3.0  # seconds of refused connections after which the peer counts as gone
_ALTERED = (5, 60.0)  # (number of connections with altered bytes, seconds) that indicate an attack
_SILENCE_S = 0.6  # seconds without an acknowledgement from the peer's kernel, during retransmissions
_KEEPALIVE_S = (5, 2, 3)  # keepalive of a waiting rank: idle time, interval, probes
_READ, _WRITE = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


@dataclass(frozen=True)
class RankAddress:
    """Address of a rank: host name, listening address, and process id."""

    rank: int
    host: str
    address: str
    port: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, {self.address})"


@dataclass(frozen=True)
class Membership:
    """Group and key that a connection must prove, and its encryption setting.

    Attributes:
        group: random name of the group, which is not secret.
        key: key of the run.
        sealed: True if the bytes after the handshake are encrypted, too.
    """

    group: bytes
    key: RunKey
    sealed: bool


class PeerLink:
    """This rank's end of the link to `peer`.

    Callers of all methods must hold the loop's lock.
    """

    def __init__(
        self,
        loop: TcpProgress,
        own: RankAddress,
        peer: RankAddress,
        member: Membership,
        sink: Sink,
        on_fault: Callable[[PeerLink, Exception], None],
    ) -> None:
        self.own, self.peer = own, peer
        self.stream = ByteStream(sink)
        self.connections = 0  # number of connections made so far
        self._loop, self.member = loop, member
        self._connects = own.rank > peer.rank
        self._attempt: _Connecting | None = None
        self._number = 0  # number of the connection, counted by the rank that accepts
        self._attempts = 0  # since the connection was lost
        self._since = time.monotonic()  # connected, or not
        self._next_attempt = self._since + (0.0 if self._connects else _FIRST_REQUEST_S)
        self._last_error = ""
        self._refused: list[float] = []
        self._altered: deque[float] = deque(maxlen=_ALTERED[0])
        self._over = ""
        self._events = 0
        self._ending = False  # after a fault
        self._on_fault = partial(on_fault, self)
        loop.add_clock(self, self._look, self._on_fault)
        loop.expect(self)

    def begin(self) -> None:
        """Make the first connection at once, if this rank is the connecting rank."""
        if self._connects:
            self._try(time.monotonic())

    @property
    def connected(self) -> bool:
        """Return True if there is a connection whose loss has not been detected."""
        return self.stream.connection is not None

    @property
    def rank(self) -> int:
        """Rank of the peer in the group."""
        return self.peer.rank

    def why_over(self) -> str | None:
        """Return the reason why the peer will send nothing more, or None."""
        return self._over or None

    def state(self) -> str:
        """Describe the peer and the state of the connection for an error message."""
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
        """Write as much as the connection accepts, and keep the remainder for later."""
        if not self.connected:
            return
        try:
            self.stream.write()
        except OSError as error:
            self.lose(error)
            return
        self._watch()

    def adopt(self, wire: Wire, number: int, has_received: int) -> None:
        """Continue over a connection whose other end is known to be the peer.

        Raises:
            SyncError: the two ends do not fit together.
        """
        self._end_attempt()
        self._forget()
        _tune(wire.connection)
        self.stream.attach(wire, has_received)
        self.connections += 1
        self._number, self._attempts, self._since = number, 0, time.monotonic()
        self._refused.clear()
        self._loop.expect_no_more(self)
        self._loop.watch(wire.connection.fileno(), _READ, self._on_event, self._on_fault)
        self._events = _READ
        self.flush()

    def accept(self, connection: socket.socket, hello: Greeting) -> None:
        """Accept a connection of the other rank, for the stream or for a reconnect request.

        Raises:
            SyncError: the two ends do not fit together.
        """
        own = self._greeting(self._number + (not hello.reconnect))
        if not own.answers(hello):
            connection.close()
            return
        if hello.reconnect:
            with connection:
                connection.send(own.to_bytes())
            if self._connects and hello.number >= self._number and not self._attempt:
                self.lose(ConnectionError("the other side has lost the connection"))
                self._next_attempt = 0.0
            return
        # the peer has given up this connection, because it has received more over a later connection
        is_late = hello.received < self.stream.acknowledged
        if self._connects or self._over or is_late:
            connection.close()
            return
        connection.send(own.to_bytes())
        self._check_sealed(hello)
        self.adopt(wire_after(released(connection), own, hello), own.number, hello.received)

    def lose(self, error: OSError) -> None:
        """Handle a lost connection, and prepare a new one."""
        if not self.connected:
            return
        self._last_error = error.strerror or str(error)
        self._loop.expect(self)
        if isinstance(error, AlteredError):
            self._altered.append(time.monotonic())
        self._forget()
        self.stream.detach()
        self._since = time.monotonic()
        self._next_attempt = 0.0 if self._connects else self._since + _BACK_OFF_S[0]
        if self.stream.ended:
            self._over = f"{self.peer} has left the group"
        elif self.stream.said_goodbye:
            self._over = "the group has ended here"
        elif len(self._altered) == _ALTERED[0] and self._altered[-1] - self._altered[0] < _ALTERED[1]:
            self._over = (
                f"{self.own} and {self.peer}: the bytes of {len(self._altered)} connections in a row were altered in "
                f"transit, most recently: {error}. An attacker or a broken device between the two ranks changes them"
            )

    def say_goodbye(self) -> None:
        """Notify the other rank, once, that nothing more will be sent.

        The other rank then closes the connection, and the link is over.
        """
        if self.connected and not self.stream.said_goodbye:
            try:
                self.stream.say_goodbye()
            except OSError as error:
                self.lose(error)

    def end(self, why: str) -> None:
        """End the link after a fault: stop reading, and send what is pending."""
        if self._ending or not self.connected:
            self.close()
            return
        self._ending, self._over = True, self._over or why
        self.flush()

    def close(self) -> None:
        """End the link."""
        self._loop.remove_clock(self)
        self._loop.expect_no_more(self)
        self._end_attempt()
        self._forget()
        self.stream.detach()
        self._over = self._over or "the group has ended here"

    # Current connection

    def _on_event(self, events: int) -> None:
        if not self.connected:  # lost or closed since the event
            return
        if self._ending and events & ~select.EPOLLOUT:
            self.close()
            return
        try:
            if events & ~select.EPOLLOUT:
                self.stream.read()
            if self.stream.ended:
                self.lose(ConnectionError("it has left the group"))
            elif self.connected:  # the received bytes may have ended this rank's group
                self.stream.write()
        except OSError as error:
            self.lose(error)
        if self.connected:
            self._watch()

    def _watch(self) -> None:
        events = _WRITE if self.stream.wants_to_write else _READ
        if self._ending:
            events &= ~_READ
            if not events:
                self.say_goodbye()
        if events != self._events and self.stream.connection is not None:
            self._events = events
            self._loop.change(self.stream.connection.fileno(), events)

    def _forget(self) -> None:
        if self.stream.connection is not None:
            self._loop.forget(self.stream.connection.fileno())

    # Reconnection

    def _look(self, now: float) -> None:
        """Handle overdue acknowledgements, dead connections, and due connection attempts.

        The loop calls this method periodically.
        """
        if self._over:
            return
        if self.connected:
            self.stream.acknowledge_soon()
            assert self.stream.connection is not None
            if self.stream.outstanding and is_unacknowledged(self.stream.connection, _SILENCE_S):
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
        hello = self._greeting(self._number)
        try:
            self._attempt = _Connecting(self.own, self.peer, self.member.key, hello, now + patience_s)
        except OSError as error:
            self._failed(error)
            return
        self._loop.watch(self._attempt.connection.fileno(), select.EPOLLOUT, self._on_attempt, self._on_fault)

    def _on_attempt(self, _: int) -> None:
        attempt = self._attempt
        assert attempt is not None
        try:
            welcome = attempt.go_on()
            if welcome is None:
                self._loop.change(attempt.connection.fileno(), select.EPOLLIN)
                return
            if not welcome.answers(attempt.hello):
                raise ConnectionError(f"another rank listens at {self.peer.address}:{self.peer.port}")
            if not self._connects:  # an answered reconnect request
                self._end_attempt()
                self._next_attempt = time.monotonic() + _FIRST_REQUEST_S
                return
            self._check_sealed(welcome)
            self._loop.forget(attempt.connection.fileno())
            self._attempt = None
            wire = wire_after(released(attempt.connection), attempt.hello, welcome)
            self.adopt(wire, welcome.number, welcome.received)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            self._failed(
                ConnectionError(
                    f"the process at {self.peer.address}:{self.peer.port} does not show this run's key ({reason})"
                )
            )
        except OSError as error:
            self._failed(error)
        except SyncError as error:
            attempt.connection.close()
            self._over = f"{self.own} and {self.peer}: {error}"
        except Exception as error:  # noqa: BLE001 - retried; the deadline's error names it
            self._failed(ConnectionError(f"{type(error).__name__}: {error}"))

    def _greeting(self, number: int) -> Greeting:
        member, reconnect = self.member, not self._connects
        return Greeting(
            member.group, self.own.rank, self.peer.rank, reconnect, member.sealed, number, self.stream.received
        )

    def _check_sealed(self, other: Greeting) -> None:
        if other.sealed != self.member.sealed:
            ours, theirs = (
                "encrypts" if sealed else "has encrypt=off" for sealed in (self.member.sealed, other.sealed)
            )
            raise SyncError(
                "ranks.settings_differ",
                "{own} {ours}, and {peer} {theirs}. Use the same setting on every host.",
                own=self.own,
                ours=ours,
                peer=self.peer,
                theirs=theirs,
            )

    def _failed(self, error: OSError) -> None:
        self._end_attempt()
        now = time.monotonic()
        self._last_error = error.strerror or str(error)
        waited = isinstance(error, TimeoutError)  # the attempt has already waited, so no back-off is needed
        self._next_attempt = now + (
            0.0 if waited else min(_BACK_OFF_S[0] * 2 ** min(self._attempts, 10), _BACK_OFF_S[1])
        )
        if not isinstance(error, ConnectionRefusedError):
            self._refused.clear()
            return
        self._refused.append(now)
        if now - self._refused[0] > _GONE_S:
            self._over = (
                f"{self.peer} is gone (pid {self.peer.pid}): its host answers {self.own}, but no process listens at "
                f"port {self.peer.port} any more ({len(self._refused)} attempts in {now - self._refused[0]:.1f} s)"
            )

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._loop.forget(self._attempt.connection.fileno())
            self._attempt.connection.close()
            self._attempt = None


class _Connecting:
    def __init__(self, own: RankAddress, peer: RankAddress, key: RunKey, hello: Greeting, until: float) -> None:
        self.until, self.hello = until, hello
        family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            link.bind((own.address, 0))
            code = link.connect_ex((peer.address, peer.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError:
            link.close()
            raise
        self._connected = False
        self._handshake = TlsHandshake(link, key.client_and_server[0], accepts=False, opening=hello.to_bytes())

    @property
    def connection(self) -> socket.socket:
        """The socket, which TLS wraps once it is connected."""
        return self._handshake.link

    def go_on(self) -> Greeting | None:
        """Continue the handshake; return the answer once it has arrived."""
        if not self._connected:
            code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))  # creates the subclass of OSError that belongs to the code
            self._connected = True
        answer = self._handshake.message(GREETING_BYTES)
        return None if answer is None else Greeting.from_bytes(answer)


def _tune(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(
        (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), _KEEPALIVE_S, strict=True
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


_MAGIC = b"pace-tcp"
_VERSION = 4
_GREETING = struct.Struct(f"<8sH16sII??QQ{KEY_BYTES}s")
GREETING_BYTES = _GREETING.size
GROUP_BYTES = 16


@dataclass(frozen=True)
class Greeting:
    """First message of each side; the side that connects sends first.

    Attributes:
        group: random name of the group.
        reconnect: True if the sender asks the other side to connect again, because only that side may connect.
        sealed: True if the sender encrypts all later bytes.
        number: number of this connection, as counted by the accepting rank. In a reconnect request, the number of the
            previous connection.
        received: number of the stream's bytes that the sender has received.
        key: the sender's encryption key, new for every connection.
    """

    group: bytes
    sender: int
    receiver: int
    reconnect: bool
    sealed: bool
    number: int
    received: int
    key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    def to_bytes(self) -> bytes:
        """Encode the message."""
        return _GREETING.pack(
            *(_MAGIC, _VERSION, self.group, self.sender, self.receiver),
            *(self.reconnect, self.sealed, self.number, self.received, self.key),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Greeting:
        """Decode a greeting.

        Raises:
            ConnectionError: the bytes are not a greeting of this version of paceline.
        """
        magic, version, *fields = _GREETING.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ConnectionError("the other side runs another version of paceline")
        return cls(*fields)

    def answers(self, other: Greeting) -> bool:
        """Return True if this greeting comes from the receiver and group of `other`."""
        return (self.group, self.sender, self.receiver) == (other.group, other.receiver, other.sender)


def wire_after(connection: socket.socket, own: Greeting, other: Greeting) -> Wire:
    """Return the wire for a stream, after both sides have exchanged greetings."""
    return SealedWire(connection, own.key, other.key) if own.sealed else Wire(connection)
