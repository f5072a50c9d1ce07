"""Messages of remote calls, and the transfer of their tensors.

A `Talk` sends and receives messages with values over one connection of the run's channel. Within a host, large tensors
lie in memory that both ends map: each end owns the memory that it sends in. It is a memfd, sealed against shrinking, so
that a tensor in it never ends in a fault; its descriptor goes over the Unix socket. Received tensors lie in it, without
a copy; when the last of a message's is gone, the receiver says so with its next message, and the sender writes the next
tensors there.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import torch

from paceline.comm.shm.segment import TOKEN_BYTES, Segment
from paceline.errors import ChannelError, DeadlineError
from paceline.wire.connection import LIMIT_BYTES, Connection, FrameLimits
from paceline_server.values import Packed

SILENT_S = 20  # of a host that was cut off, until its connections are lost
_DESCRIPTORS = 4  # that came, and whose message was not read yet


def frame_limits(attached_bytes: int, message_bytes: int = LIMIT_BYTES, *, within_host: bool) -> FrameLimits:
    """Limits of a connection; within a host, descriptors of shared memory may come too."""
    return FrameLimits(attached_bytes, message_bytes, _memory, _DESCRIPTORS if within_host else 0)


def _memory(nbytes: int) -> memoryview:
    data: memoryview = torch.empty(nbytes, dtype=torch.uint8).numpy().data
    return data


class Closing:
    """Context manager that closes itself at the end of its `with` block."""

    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Talk:
    """A connection, and the shared memory of both ends.

    Any thread may send; one at a time receives.

    Args:
        limit_bytes: of the tensors beside one message that comes.
    """

    def __init__(self, connection: Connection, limit_bytes: int) -> None:
        self.connection, self._limit_bytes = connection, limit_bytes
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
                raise DeadlineError(
                    "shared.send_deadline",
                    "{peer} accepted no message for {deadline_s:g} s, so the connection was closed",
                    peer=self.connection.peer,
                    deadline_s=deadline_s,
                )
            if meanwhile and events & select.POLLIN:
                meanwhile()

    def receive(self, deadline_s: float) -> tuple[Any, memoryview | None]:
        """The next message, and the memory beside it. Raises as `Connection.receive`."""
        until = time.monotonic() + deadline_s
        found = self.take() if self.connection.holds_bytes else None
        while found is None:
            if not self.connection.wait(select.POLLIN, until):
                raise DeadlineError(
                    "channel.receive_deadline",
                    "{peer} sent nothing for {deadline_s:g} s",
                    peer=self.connection.peer,
                    deadline_s=deadline_s,
                )
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
                raise ChannelError(
                    "shared.refused", "{peer}: {error}", peer=self.connection.peer, error=error
                ) from None
        return None

    def close(self) -> None:
        """Close the connection, and let go of both ends' memory. Tensors in it stay."""
        self.connection.close()
        with self._lock:
            self._own, self._peers = None, PeersMemory()

    def _place(self, message: Any, packed: Packed | None) -> list[memoryview]:
        """Put large tensors into shared memory, or return them to go through the socket."""
        placed = None
        if packed and self._own is not None and packed.nbytes >= SHARED_BYTES:
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
            raise ChannelError("shared.bytes_unexpected", "bytes came beside a message that has none")
        with self._lock:
            self._peers.add(message.number, message.nbytes, descriptor)

    def _block(self, message: Any, attached: memoryview | None) -> memoryview | None:
        """The memory beside a message; what it says of our own memory is noted."""
        block = message.block if type(message) is Call or type(message) is Answer else None
        if block is None and attached is not None and not isinstance(message, Call | Answer):
            raise ChannelError("shared.bytes_unexpected", "bytes came beside a message that has none")
        if returned := getattr(message, "returned", None):
            with self._lock:
                if self._own is None:
                    raise ChannelError("shared.return_unexpected", "shared memory was returned, but there is none")
                self._own.returned(returned)
        if block is None:
            return attached
        if attached is not None or block.nbytes > self._limit_bytes:
            raise ChannelError(
                "shared.bytes_impossible",
                "{nbytes:,} bytes came beside a message, which is not possible",
                nbytes=block.nbytes,
            )
        with self._lock:
            return self._peers.block(block.memory, block.nbytes)


VERSION = 3


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of a client; one of another version may have more."""

    version: int
    name: str
    identity: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """First message of a service.

    Attributes:
        attached_bytes, calls_at_once: the service's limits.
        service: random identity of this service.
        known: the service knows this client from an earlier connection.
    """

    attached_bytes: int
    calls_at_once: int
    service: str
    known: bool


class Refused(msgspec.Struct, array_like=True, tag="refused", forbid_unknown_fields=True):
    """First and last message of a service that does not take calls."""

    reason: str


class SharedMemory(msgspec.Struct, array_like=True, tag="memory", forbid_unknown_fields=True):
    """Memory that the receiver is to map. Its descriptor comes with the message.

    A number that stood for other memory stands for this from now on.
    """

    number: int
    nbytes: int


class Block(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The bytes of a message's large tensors, in shared memory."""

    memory: int
    nbytes: int


class _Numbered(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message on one call.

    Attributes:
        returned: shared memory of the receiver's that the sender has no tensors in any more.
    """

    number: int
    returned: list[int]


class Call(_Numbered, tag="call"):
    """Call a function.

    Attributes:
        stream: asks for the results one by one.
        lane: calls of one client in one lane run one after the other, in order; calls without a lane run at any time.
    """

    function: str
    arguments: Any
    block: Block | None
    stream: bool
    lane: str = ""


class Forget(_Numbered, tag="forget"):
    """Nobody waits for the answer to a call. It need not begin, and its stream may end."""


class More(_Numbered, tag="more"):
    """A number of further results of a stream that may be sent."""

    count: int


class Answer(_Numbered, tag="answer"):
    """Result of a call, or the next one of a stream."""

    value: Any
    block: Block | None


class End(_Numbered, tag="end"):
    """A stream has no further results."""


class Raised(_Numbered, tag="raised"):
    """A call raised, or was refused (then without a kind)."""

    kind: str
    text: str
    remote_traceback: str
    code: str = ""  # of a PacelineError


FromClient = Hello | Call | Forget | More | SharedMemory
FromService = Welcome | Refused | Answer | End | Raised | SharedMemory


F = TypeVar("F", bound=Callable[..., Any])
LATER = object()  # result of a trial that would have to wait


def quick(function: F) -> F:
    """Have a function run in the thread that reads its calls. It must never wait."""
    function.__dict__["remote_mark"] = "quick"
    return function


def at_once(function: F, trial: Callable[..., Any]) -> F:
    """Have a trial of a function run in the thread that reads its calls.

    Where the trial would have to wait it does nothing and returns `LATER`; the function itself is called then.
    """
    function.__dict__ |= {"remote_mark": "at once", "remote_trial": trial}
    return function


SHARED_BYTES = 2**16  # in all of a message's large tensors; shorter ones go through the socket
MOST_BLOCKS = 32
LEAST_BYTES = 2**20
_MOST_BYTES = 2**33  # of all blocks of one end of a connection; they take memory where they were written
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Placed(NamedTuple):
    """Data that was written into shared memory.

    Attributes:
        descriptor: of the memory, where the receiver does not map it yet.
    """

    number: int
    size: int
    descriptor: int | None


class OwnMemory:
    """Memory of this end, which the other reads. One thread at a time."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._free: set[int] = set()

    def __len__(self) -> int:
        return len(self._segments)

    def place(self, parts: Collection[memoryview], nbytes: int) -> Placed | None:
        """Copy parts into free memory, one behind the other; None where there is none. The caller closes `descriptor`.

        What has been placed stays there until it is `returned`.
        """
        fitting = [number for number in self._free if self._segments[number].size >= nbytes]
        descriptor = None
        if fitting:
            number = min(fitting, key=lambda number: self._segments[number].size)
        else:
            made = self._make(nbytes)
            if made is None:
                return None
            number, descriptor = made
        self._free.discard(number)
        segment, at = self._segments[number], 0
        memory = np.frombuffer(segment.map, np.uint8)
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
        return Placed(number, segment.size, descriptor)

    def returned(self, numbers: Collection[int]) -> None:
        """Take back what the other end no longer uses.

        Raises:
            ChannelError: it never had some of it.
        """
        for number in numbers:
            if number not in self._segments or number in self._free:
                raise ChannelError(
                    "shared.return_unknown",
                    "the peer returned shared memory {number}, which it did not have",
                    number=number,
                )
            self._free.add(number)

    def _make(self, nbytes: int) -> tuple[int, int] | None:
        """New memory for so many bytes. It replaces free one that is too small where there is too much."""
        size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        held = sum(segment.size for segment in self._segments.values())
        number = len(self._segments)
        if number >= MOST_BLOCKS or held + size > _MOST_BYTES:
            number = min(self._free, key=lambda number: self._segments[number].size, default=-1)
            if number < 0 or held - self._segments[number].size + size > _MOST_BYTES:
                return None
        try:
            descriptor = os.memfd_create("paceline-remote", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, size + TOKEN_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._segments[number] = Segment(descriptor, size)
        except OSError:
            os.close(descriptor)
            return None
        return number, descriptor


class PeersMemory:
    """Memory of the other end, which this one reads. `returned` holds the numbers of what it uses no longer."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._lent: set[int] = set()
        self._ended: deque[int] = deque()  # added to wherever the last tensor of a block ends

    def add(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map memory, and close its descriptor.

        Raises:
            ChannelError: it is not what a peer of ours would send.
        """
        try:
            if not 0 <= number < MOST_BLOCKS or number in self._lent or not 0 < nbytes <= _MOST_BYTES:
                raise ChannelError(
                    "shared.size_impossible",
                    "the peer sent shared memory {number} of {nbytes:,} bytes, which is not possible",
                    number=number,
                    nbytes=nbytes,
                )
            held = sum(segment.size for other, segment in self._segments.items() if other != number)
            if held + nbytes > _MOST_BYTES:
                raise ChannelError(
                    "shared.too_much", "the peer sent more than {limit:,} bytes of shared memory", limit=_MOST_BYTES
                )
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ChannelError("shared.shrinkable", "the peer sent shared memory that it can still shrink")
            if os.fstat(descriptor).st_size != nbytes + TOKEN_BYTES:
                raise ChannelError(
                    "shared.size_differs",
                    "the peer sent shared memory of another size than the announced {nbytes:,} bytes",
                    nbytes=nbytes,
                )
            self._segments[number] = Segment(descriptor, nbytes)
        except OSError as error:
            raise ChannelError(
                "shared.not_mapped", "shared memory of the peer cannot be mapped: {error}", error=error
            ) from error
        finally:
            os.close(descriptor)

    def block(self, number: int, nbytes: int) -> memoryview:
        """The bytes of a message. Its memory is returned when nothing uses them any more.

        Raises:
            ChannelError: there is no such memory, or its bytes are still in use here.
        """
        segment = self._segments.get(number)
        if segment is None or number in self._lent or not 0 < nbytes <= segment.size:
            raise ChannelError(
                "shared.range_impossible",
                "the peer sent {nbytes:,} bytes in shared memory {number}, at an impossible place",
                nbytes=nbytes,
                number=number,
            )
        self._lent.add(number)
        data: memoryview = np.asarray(_Loan(segment, nbytes, number, self._ended)).data
        return data

    @property
    def has_ended(self) -> bool:
        """True if `returned` has something."""
        return bool(self._ended)

    def returned(self) -> list[int]:
        """Numbers of the memory that is no longer used here, each once."""
        numbers = []
        while self._ended:
            numbers.append(self._ended.popleft())
        self._lent.difference_update(numbers)
        return numbers

    def not_returned(self, numbers: list[int]) -> None:
        """Have what `returned` gave returned another time."""
        self._lent.update(numbers)
        self._ended.extend(numbers)


class _Loan:
    """Bytes of a segment, as numpy takes them. It ends with the last array or tensor that lies there."""

    def __init__(self, segment: Segment, nbytes: int, number: int, ended: deque[int]) -> None:
        self._segment, self._number, self._ended = segment, number, ended
        place = (segment.address, False)
        self.__array_interface__: dict[str, Any] = {"shape": (nbytes,), "typestr": "|u1", "data": place, "version": 3}

    def __del__(self) -> None:
        # any thread, in the middle of anything: this one thing is atomic
        self._ended.append(self._number)
