"""Connection of a primary to its backup.

Every operation goes over it in order, and is answered once it is applied there.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from paceline.errors import ChannelError, RemoteError
from paceline.wire.key import RunKey
from paceline_server.client import Client, Pending
from paceline_server.parameters.operations import SLOWEST_BYTES_PER_S, Operation, nbytes, plain
from paceline_server.parameters.views import as_address

ANSWER_S = 0.8  # for an operation to be applied in the backup, before it counts as lost
STATE_S = 600.0  # for the whole state


class Backup:
    """A backup as its primary sees it.

    Attributes:
        address: of the backup, as a view has it.
        generation: in which it becomes the backup, and takes operations.
        counts: the primary answers nobody before the backup has; until the state is there it does not count.
        lost: it failed once, and is used no more.
    """

    def __init__(self, address: str, key: RunKey | None, generation: int, name: str) -> None:
        self.address, self.generation = address, generation
        self.counts = self.lost = False
        self._client = Client(as_address(address), key, name=name, deadline_s=ANSWER_S, reconnect=False)
        self._sent: deque[tuple[int, Pending]] = deque()
        self._confirmed = -1
        self._collecting = threading.Lock()  # one thread takes the answers of all, in order

    def install(self, index: int, state: dict[str, Any]) -> None:
        """Send the whole state, after so many operations. Raises ChannelError."""
        self._sent.append((index, self._client.begin("install", self.generation, index, state, deadline_s=STATE_S)))

    def post(self, index: int, operation: Operation) -> None:
        """Send an operation. A failure is told by `wait`."""
        name, identity, sequence, action = operation
        entry = [name, identity, sequence, plain(action)]
        deadline_s = (ANSWER_S if self.counts else STATE_S) + nbytes(entry) / SLOWEST_BYTES_PER_S
        try:
            pending = self._client.begin("repeat", self.generation, index, entry, deadline_s=deadline_s)
        except (ChannelError, RemoteError):
            self.lost = True
        else:
            self._sent.append((index, pending))

    def wait(self, index: int) -> None:
        """Return when the operation is applied there. Raises ChannelError where it is not, or is not known to be."""
        with self._collecting:
            while self._confirmed < index:
                if self.lost:
                    raise ChannelError(f"the backup at {self.address} is lost")
                at, pending = self._sent[0]
                if pending.result()[0] != "ok":
                    raise ChannelError(f"the backup at {self.address} takes no more operations")
                self._confirmed = at
                self._sent.popleft()

    def answers(self) -> bool:
        """True if it is there, and still the backup."""
        try:
            return not self.lost and self._client.call("alive", self.generation)[:2] == ["ok", True]
        except (ChannelError, RemoteError):
            return False

    def close(self) -> None:
        """Hang up."""
        self.lost = True
        self._client.close()
