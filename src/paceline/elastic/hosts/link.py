"""Link between the coordinator and one agent."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from paceline.elastic.hosts.messages import Held, Interrupted
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cluster.cluster import Host
    from paceline.wire.connection import Connection

M = TypeVar("M", bound=Struct)
# A peer whose machine is gone says nothing: the kernel asks after 15 s of silence, and gives up after 45.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 45_000}


class Link:
    """An agent as the coordinator sees it.

    Attributes:
        address: where other hosts reach it.
        standby_port: where it would listen as the coordinator; 0 if it never does.
        meets_again: it has lost a coordinator.
        held: the ranks that it has kept since a coordinator was lost.
        clock_ahead_s: its clock minus the coordinator's.
        lost: why nothing can be sent to it any more; None while it is there.
        is_known_lost: that is in the run's record.
        heard_at: when its last message came, by the monotonic clock.
    """

    is_known_lost = False
    held: Held | None
    _silence = ""
    _watched: tuple[select.poll, int] | None = None

    def __init__(self, connection: Connection, number: int, name: str, address: str, host: Host) -> None:
        self.connection, self.number, self.name, self.address, self.host = connection, number, name, address, host
        self.clock_ahead_s = 0.0
        self.standby_port = 0
        self.meets_again, self.held = False, None
        self.lost: str | None = None
        self.heard_at = time.monotonic()
        keep_alive(connection)

    @property
    def silent(self) -> bool:
        """True where nothing came for too long. It may be there, behind a network that is cut."""
        return bool(self._silence)

    @property
    def who(self) -> str:
        """Name and number, for messages."""
        return f"host {self.name} (number {self.number})"

    def send(self, message: Struct) -> None:
        """Send a message; a host that is lost takes none."""
        if self.lost is None:
            try:
                self.connection.send(message)
            except (OSError, PacelineError) as error:
                self.lose(str(error))

    def offer(self, messages: Iterator[Struct], until: float) -> bool:
        """Send messages as long as the network accepts them without a wait.

        Args:
            until: when to stop, by the monotonic clock.

        Returns:
            True if all messages are sent, or the host is lost.
        """
        try:
            while self.connection.flush() and time.monotonic() < until:
                if (message := next(messages, None)) is None:
                    return True
                self.connection.post(message)
        except PacelineError as error:
            self.lose(str(error))
        return self.lost is not None

    def receive(self, deadline_s: float) -> Any:
        """The next message; None from a host that sends none in time, and is lost."""
        if self.lost is None:
            try:
                message = self.connection.receive(deadline_s)
            except (OSError, PacelineError) as error:
                self.lose(str(error))
            else:
                self.heard_at = time.monotonic()
                return message
        return None

    def answer(self, kind: type[M], deadline_s: float) -> M | None:
        """The next message of a kind; None from a host that is lost meanwhile.

        Raises:
            SystemExit: 130 or 143, when SIGINT or SIGTERM came to that host meanwhile.
        """
        while (message := self.receive(deadline_s)) is not None:
            if isinstance(message, Interrupted):
                raise SystemExit(128 + signal.Signals[message.signal])
            if isinstance(message, kind):
                return message
        return None

    def waiting(self) -> Iterator[Any]:
        """Messages that are there, without waiting for more."""
        while self.lost is None:
            try:
                message = self.connection.take()
            except (OSError, PacelineError) as error:
                self.lose(str(error))
                return
            if message is None:
                return
            self.heard_at = time.monotonic()
            yield message

    def lose(self, reason: str) -> None:
        """Give the host up."""
        if self.lost is None:
            self.lost = self._silence or reason
            self.unwatch()
            self.connection.close()

    def fall_silent(self, silent_s: float) -> None:
        """Have the host's owner find it lost; for any thread."""
        self._silence = f"nothing has come from it for {silent_s:.2g} s"
        self.connection.end()

    def watch(self, poll: select.poll) -> None:
        """Have `poll` tell of messages, until the host is lost."""
        if self.lost is None:
            self._watched = poll, self.connection.fileno()
            poll.register(self._watched[1], select.POLLIN)

    def unwatch(self) -> None:
        """Have nobody told any more."""
        if self._watched is not None:
            poll, descriptor = self._watched
            poll.unregister(descriptor)
            self._watched = None


class AbsentLink(Link):
    """Place of a host that has not come yet."""

    is_known_lost = True

    def __init__(self, number: int, name: str, host: Host) -> None:
        self.number, self.name, self.address, self.host = number, name, "", host
        self.clock_ahead_s, self.standby_port, self.heard_at = 0.0, 0, time.monotonic()
        self.meets_again, self.held, self.lost = False, None, "it has not come yet"


def keep_alive(connection: Connection) -> None:
    """Have the kernel notice a peer that is gone without a word."""
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
