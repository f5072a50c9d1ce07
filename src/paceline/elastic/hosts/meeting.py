"""Meeting place of hosts: a listener, and the connections that have come to it."""

from __future__ import annotations

import queue

from paceline.elastic.hosts.messages import Elsewhere, FromHost, Joining
from paceline.errors import ChannelError
from paceline.wire.connection import Connection
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener


class Meeting:
    """Place where hosts come to the one that coordinates, or would.

    It is open for as long as the host process lives: where nobody listens any more, that has ended.

    Attributes:
        came: connections that nobody has looked at. Who puts None there wakes who waits.
    """

    def __init__(self, address: str, port: int, key: RunKey) -> None:
        self.came: queue.Queue[Connection | None] = queue.Queue()
        self._listener = Listener((address, port), key, FromHost, self.came.put)

    @property
    def address(self) -> tuple[str, int]:
        """Address and port."""
        assert isinstance(self._listener.address, tuple)
        return self._listener.address

    @property
    def unauthenticated(self) -> int:
        """The number of connections that were turned away."""
        return self._listener.unauthenticated

    def direct(self, elsewhere: Elsewhere) -> None:
        """Tell hosts that come where the run goes on.

        Not those that have lost its coordinator: they may meet here.
        """
        for _ in range(self.came.qsize()):
            if (connection := self.came.get()) is None:
                continue
            try:
                message = connection.take()
                if message is None or (isinstance(message, Joining) and message.again):
                    if message is not None:
                        connection.give_back(message)
                    self.came.put(connection)
                    continue
                connection.post(elsewhere)
            except ChannelError:  # it has gone again
                pass
            connection.close()

    def close(self) -> None:
        """Stop listening, and leave who has come and was not looked at."""
        self._listener.close()
        while not self.came.empty():
            if (connection := self.came.get()) is not None:
                connection.close()
