"""Messages between two ranks, and their matching with receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Message:
    """Message that is arriving, or that is kept until a receive requests the message.

    Attributes:
        call: the sender's description of the message.
        data: memory for the message's bytes: the memory of the waiting receive, or separate memory.
    """

    call: Any
    data: Any
    received: int = 0

    @property
    def whole(self) -> bool:
        """True once all bytes have arrived."""
        return self.received == len(self.data)


@dataclass(eq=False)
class Receive:
    """Request for the next message from one rank, or from any of several ranks.

    Attributes:
        call: the receiver's description of the expected message.
        source: rank of the sender; -1 until the sender is known.
    """

    call: Any
    target: Any
    source: int = -1
    message: Message | None = None

    @property
    def done(self) -> bool:
        """True once all bytes have arrived."""
        return self.message is not None and self.message.whole

    def take(self, message: Message, source: int) -> None:
        """Pair the receive with the message that `source` sent."""
        self.message, self.source = message, source


class Matching:
    """Pairing of one sender's messages with receives.

    Messages with the same key are paired in order. A message without a receive is kept, so that it does not block later
    messages.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, deque[Message]] = {}
        self._waiting: dict[Hashable, deque[Receive]] = {}

    def ask(self, key: Hashable, receive: Receive) -> Message | None:
        """Return the first kept message with this key, or queue the receive and return None."""
        if (messages := self._kept.pop(key, None)) is None:
            self._waiting.setdefault(key, deque()).append(receive)
            return None
        message = messages.popleft()
        if messages:
            self._kept[key] = messages
        return message

    def who_waits(self, key: Hashable) -> Receive | None:
        """Return the first receive that waits for a message of this key."""
        receives = self._waiting.pop(key, deque())  # another sender's messages may have completed some of them
        while receives:
            receive = receives.popleft()
            if receive.message is None:
                if receives:
                    self._waiting[key] = receives
                return receive
        return None

    def keep(self, key: Hashable, message: Message) -> None:
        """Keep a message for which no receive waits."""
        self._kept.setdefault(key, deque()).append(message)
