"""Messages with values on a connection, and the way that their tensors take."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import ChannelError, DeadlineError
from paceline.wire.connection import Connection
from paceline.wire.frames import LIMIT_BYTES, FrameLimits
from paceline_server.messages import Answer, Block, Call, SharedMemory
from paceline_server.shared_memory import SHARED_BYTES, OwnMemory, PeersMemory
from paceline_server.values import Packed, unpack

SILENT_S = 20  # of a host that was cut off, until its connections are lost
_DESCRIPTORS = 4  # that came, and whose message was not read yet


def frame_limits(attached_bytes: int, message_bytes: int = LIMIT_BYTES, *, within_host: bool) -> FrameLimits:
    """Limits of a connection; within a host, descriptors of shared memory may come too."""
    return FrameLimits(attached_bytes, message_bytes, _memory, _DESCRIPTORS if within_host else 0)


def _memory(nbytes: int) -> memoryview:
    data: memoryview = torch.empty(nbytes, dtype=torch.uint8).numpy().data
    return data


class Talk:
    """A connection, and the shared memory of both ends.

    Any thread may send; one at a time receives.

    Args:
        peer: what values are packed for and unpacked from: a client's `Client`, a service's `Caller`.
        limit_bytes: of the tensors beside one message that comes.
    """

    def __init__(self, connection: Connection, peer: Any, limit_bytes: int) -> None:
        self.connection, self._peer, self._limit_bytes = connection, peer, limit_bytes
        connection.end_when_silent(SILENT_S)
        self._own = OwnMemory() if connection.is_within_host else None
        self._peers = PeersMemory()
        self._lock = threading.Lock()  # of both ends' memory

    def send(
        self,
        message: Any,
        packed: Packed | None = None,
        deadline_s: float = 60.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send a message and the memory beside it, and wait until the kernel has them.

        Args:
            meanwhile: called when the peer says something while it takes nothing.

        Raises:
            ChannelError: the message is too long, or the connection is lost, now or before.
            DeadlineError: the peer takes nothing.
        """
        attached = self._place(message, packed)
        try:
            self.connection.post(message, attached=attached)
        except ChannelError:
            self._take_back(message)
            raise
        if not self.connection.flush():
            self._flush(time.monotonic() + deadline_s, deadline_s, meanwhile)

    def _flush(self, until: float, deadline_s: float, meanwhile: Callable[[], object] | None) -> None:
        while not self.connection.flush():
            wanted = select.POLLOUT | (select.POLLIN if meanwhile else 0)
            events = self.connection.wait(wanted, until)
            if not events:
                self.connection.end()
                raise DeadlineError(f"{self.connection.peer} took no message for {deadline_s:g} s: closed")
            if meanwhile and events & select.POLLIN:
                meanwhile()

    def receive(self, deadline_s: float) -> tuple[Any, memoryview | None]:
        """The next message, and the memory beside it. Raises as `Connection.receive`."""
        until = time.monotonic() + deadline_s
        found = self.take() if self.connection.holds_bytes else None
        while found is None:
            if not self.connection.wait(select.POLLIN, until):
                raise DeadlineError(f"{self.connection.peer} sent nothing for {deadline_s:g} s")
            found = self.take()
        return found

    def take(self) -> tuple[Any, memoryview | None] | None:
        """The next message, and the memory beside it; None if none is here. Raises as `Connection.take`."""
        while (found := self.connection.take_attached()) is not None:
            message, attached = found
            try:
                if isinstance(message, SharedMemory):
                    self._map(message, attached)
                    continue
                return message, self._block(message, attached)
            except ChannelError as error:
                self.connection.end()
                raise ChannelError(f"{self.connection.peer}: {error}") from None
        return None

    def value(self, tree: Any, block: memoryview | None) -> Any:
        """The value of a message. Raises RemoteError as `unpack`."""
        return unpack(tree, block, self._peer)

    def _place(self, message: Any, packed: Packed | None) -> list[memoryview]:
        """Put large tensors into shared memory, or return them to go through the socket."""
        placed = None
        if packed and self._own and packed.nbytes >= SHARED_BYTES:
            with self._lock:
                placed = self._own.place(packed.parts, packed.nbytes)
        if placed and packed:  # they may lie in the peer's memory, which returns to it now
            packed.parts.clear()
        if self._peers.has_ended:
            with self._lock:
                message.returned = self._peers.returned()
        if placed is None or packed is None:
            return packed.parts if packed else []
        if placed.descriptor is not None:
            self.connection.post(SharedMemory(placed.number, placed.size), descriptor=placed.descriptor)
        message.block = Block(placed.number, packed.nbytes)
        return []

    def _take_back(self, message: Any) -> None:
        """Free the memory of an unsent message, and keep what it would have returned."""
        with self._lock:
            if self._own is not None and getattr(message, "block", None) is not None:
                self._own.returned([message.block.memory])
            self._peers.not_returned(getattr(message, "returned", []))

    def _map(self, message: SharedMemory, attached: memoryview | None) -> None:
        descriptor = self.connection.take_descriptor()
        if attached is not None:
            os.close(descriptor)
            raise ChannelError("bytes came beside a message that has none")
        with self._lock:
            self._peers.add(message.number, message.nbytes, descriptor)

    def _block(self, message: Any, attached: memoryview | None) -> memoryview | None:
        """The memory beside a message; what it says of our own memory is noted."""
        block = message.block if type(message) is Call or type(message) is Answer else None
        if block is None and attached is not None and not isinstance(message, Call | Answer):
            raise ChannelError("bytes came beside a message that has none")
        if returned := getattr(message, "returned", None):
            with self._lock:
                if self._own is None:
                    raise ChannelError("shared memory was returned where there is none")
                self._own.returned(returned)
        if block is None:
            return attached
        if attached is not None or block.nbytes > self._limit_bytes:
            raise ChannelError(f"{block.nbytes:,} bytes came beside a message, in a way that cannot be")
        with self._lock:
            return self._peers.block(block.memory, block.nbytes)
