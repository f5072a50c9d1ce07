"""Messages of remote calls, and transfer of their tensors.

A `Talk` sends and receives messages with values over one connection of the run's channel. Within a host, large tensors
are in shared memory that both ends map; each end owns the memory of the tensors that it sends. The memory is a memfd
that is sealed against shrinking, so access to a tensor cannot fault. The memfd's descriptor is sent over the Unix
socket. Received tensors use this memory without a copy. When all tensors of a message are freed, the receiver reports
this with its next message, and the sender reuses the memory.
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

SILENT_S = 20  # time until connections to an unreachable host count as lost
_DESCRIPTORS = 4  # maximum number of received descriptors whose messages were not read yet


def frame_limits(attached_bytes: int, message_bytes: int = LIMIT_BYTES, *, within_host: bool) -> FrameLimits:
    """Return a connection's limits. Within a host, shared memory descriptors are allowed."""
    return FrameLimits(attached_bytes, message_bytes, _memory, _DESCRIPTORS if within_host else 0)


def _memory(nbytes: int) -> memoryview:
    data: memoryview = torch.empty(nbytes, dtype=torch.uint8).numpy().data
    return data


class Closing:
    """Context manager that calls `close` at the end of its `with` block."""

    def close(self) -> None:
        """Close the object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Talk:
    """Connection with the shared memory of both ends.

    Any thread may send. Only one thread at a time may receive.

    Args:
        limit_bytes: maximum bytes of the tensors attached to one received message.
    """

    def __init__(self, connection: Connection, limit_bytes: int) -> None:
        self.connection, self._limit_bytes = connection, limit_bytes
        connection.end_when_silent(SILENT_S)
        self._own = OwnMemory() if connection.is_within_host else None
        self._peers = PeersMemory()
        self._lock = threading.Lock()  # guards both ends' memory

    def send(
        self,
        message: Any,
        packed: Packed | None = None,
        deadline_s: float = 60.0,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send a message and its attached memory, and wait until the kernel has them.

        Args:
            meanwhile: function that is called when the peer sends messages before it receives this message.

        Raises:
            ChannelError: the message is too long, or the connection is lost.
            DeadlineError: the peer does not receive the message in time.
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
                    "{peer} did not accept a message for {deadline_s:g} s, so the connection was closed",
                    peer=self.connection.peer,
                    deadline_s=deadline_s,
                )
            if meanwhile and events & select.POLLIN:
                meanwhile()

    def receive(self, deadline_s: float) -> tuple[Any, memoryview | None]:
        """Return the next message and its attached memory. Raises the same errors as `Connection.receive`."""
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
        """Return the next message and its attached memory, or None if no message has arrived.

        Raises the same errors as `Connection.take`.
        """
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
        """Close the connection, and release both ends' memory. Tensors in this memory stay valid."""
        self.connection.close()
        with self._lock:
            self._own, self._peers = None, PeersMemory()

    def _place(self, message: Any, packed: Packed | None) -> list[memoryview]:
        """Place large tensors in shared memory, or return them for sending over the socket."""
        placed = None
        if packed and self._own is not None and packed.nbytes >= SHARED_BYTES:
            with self._lock:
                placed = self._own.place(packed.parts, packed.nbytes)
        if placed and packed:  # the tensors may use the peer's memory, which is returned below
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
        """Free the memory of an unsent message, and put back its list of returned memory."""
        with self._lock:
            if self._own is not None and getattr(message, "block", None) is not None:
                self._own.returned([message.block.memory])
            self._peers.not_returned(getattr(message, "returned", []))

    def _map(self, message: SharedMemory, attached: memoryview | None) -> None:
        descriptor = self.connection.take_descriptor()
        if attached is not None:
            os.close(descriptor)
            raise ChannelError(
                "shared.bytes_unexpected", "a message arrived with attached bytes that it does not announce"
            )
        with self._lock:
            self._peers.add(message.number, message.nbytes, descriptor)

    def _block(self, message: Any, attached: memoryview | None) -> memoryview | None:
        """Return a message's attached memory, and process the message's returned memory."""
        block = message.block if type(message) is Call or type(message) is Answer else None
        if block is None and attached is not None and not isinstance(message, Call | Answer):
            raise ChannelError(
                "shared.bytes_unexpected", "a message arrived with attached bytes that it does not announce"
            )
        if returned := getattr(message, "returned", None):
            with self._lock:
                if self._own is None:
                    raise ChannelError("shared.return_unexpected", "shared memory was returned, but none was sent")
                self._own.returned(returned)
        if block is None:
            return attached
        if attached is not None or block.nbytes > self._limit_bytes:
            raise ChannelError(
                "shared.bytes_impossible",
                "a message arrived with {nbytes:,} attached bytes, which is more than it can have",
                nbytes=block.nbytes,
            )
        with self._lock:
            return self._peers.block(block.memory, block.nbytes)


VERSION = 3


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of a client. Other versions may have additional fields."""

    version: int
    name: str
    identity: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """First message of a service.

    Attributes:
        attached_bytes: limit of the service; see `Limits`.
        calls_at_once: limit of the service; see `Limits`.
        service: random identity of the service.
        known: True if the service knows this client from an earlier connection.
    """

    attached_bytes: int
    calls_at_once: int
    service: str
    known: bool


class Refused(msgspec.Struct, array_like=True, tag="refused", forbid_unknown_fields=True):
    """Message of a service that refuses a client. No other message follows."""

    reason: str


class SharedMemory(msgspec.Struct, array_like=True, tag="memory", forbid_unknown_fields=True):
    """Shared memory that the receiver must map. Its descriptor is sent with the message.

    If `number` already refers to other memory, it refers to this memory from now on.
    """

    number: int
    nbytes: int


class Block(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Place of a message's large tensors in shared memory."""

    memory: int
    nbytes: int


class _Numbered(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Message about one call.

    Attributes:
        returned: numbers of the receiver's shared memory that the sender no longer uses.
    """

    number: int
    returned: list[int]


class Call(_Numbered, tag="call"):
    """Request to call a function.

    Attributes:
        stream: True to request the results one by one.
        lane: name of a sequence of calls that run one at a time, in order. Calls without a lane run at any time.
    """

    function: str
    arguments: Any
    block: Block | None
    stream: bool
    lane: str = ""


class Forget(_Numbered, tag="forget"):
    """Cancellation of a call. The call need not begin, and a stream may end."""


class More(_Numbered, tag="more"):
    """Number of additional results that a stream may send."""

    count: int


class Answer(_Numbered, tag="answer"):
    """Result of a call, or the next result of a stream."""

    value: Any
    block: Block | None


class End(_Numbered, tag="end"):
    """End of a stream."""


class Raised(_Numbered, tag="raised"):
    """Error that a remote call raised. If the call was refused, `kind` is empty."""

    kind: str
    text: str
    remote_traceback: str
    code: str = ""  # fields of a PacelineError


FromClient = Hello | Call | Forget | More | SharedMemory
FromService = Welcome | Refused | Answer | End | Raised | SharedMemory


F = TypeVar("F", bound=Callable[..., Any])
LATER = object()  # result of a trial whose function must wait


def quick(function: F) -> F:
    """Mark a function to run in the thread that reads its calls. The function must never wait."""
    function.__dict__["remote_mark"] = "quick"
    return function


def at_once(function: F, trial: Callable[..., Any]) -> F:
    """Mark a function whose `trial` runs in the thread that reads its calls.

    If the trial would have to wait, it returns `LATER` without any effect, and a thread of the pool calls the function
    itself.
    """
    function.__dict__ |= {"remote_mark": "at once", "remote_trial": trial}
    return function


SHARED_BYTES = 2**16  # minimum total size of a message's large tensors; below, they are sent over the socket
MOST_BLOCKS = 32
LEAST_BYTES = 2**20
_MOST_BYTES = 2**33  # limit for the shared memory of one end of a connection; only written pages take memory
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Placed(NamedTuple):
    """Data that was written into shared memory.

    Attributes:
        descriptor: descriptor of the memory; None if the receiver has already mapped this memory.
    """

    number: int
    size: int
    descriptor: int | None


class OwnMemory:
    """Shared memory of this end, which the other end reads. Not thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._free: set[int] = set()

    def __len__(self) -> int:
        return len(self._segments)

    def place(self, parts: Collection[memoryview], nbytes: int) -> Placed | None:
        """Copy parts consecutively into free memory; return None if no memory is free.

        The caller closes `descriptor`. The memory stays in use until `returned` is called with its number.
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
        """Reclaim memory that the other end no longer uses.

        Raises:
            ChannelError: the peer returned memory that it did not hold.
        """
        for number in numbers:
            if number not in self._segments or number in self._free:
                raise ChannelError(
                    "shared.return_unknown",
                    "the peer returned shared memory {number}, which was never sent to it",
                    number=number,
                )
            self._free.add(number)

    def _make(self, nbytes: int) -> tuple[int, int] | None:
        """Allocate memory. At the limit, free memory that is too small is replaced."""
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
    """Shared memory of the other end, which this end reads."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._lent: set[int] = set()
        # the thread that frees the last tensor of a block appends the number of the memory
        self._ended: deque[int] = deque()

    def add(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map memory, and close its descriptor.

        Raises:
            ChannelError: the memory has a size, number or seal that a paceline peer never sends.
        """
        try:
            if not 0 <= number < MOST_BLOCKS or number in self._lent or not 0 < nbytes <= _MOST_BYTES:
                raise ChannelError(
                    "shared.size_impossible",
                    "the peer sent shared memory {number} of {nbytes:,} bytes, which is not valid",
                    number=number,
                    nbytes=nbytes,
                )
            held = sum(segment.size for other, segment in self._segments.items() if other != number)
            if held + nbytes > _MOST_BYTES:
                raise ChannelError(
                    "shared.too_much", "the peer sent more than {limit:,} bytes of shared memory", limit=_MOST_BYTES
                )
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ChannelError(
                    "shared.shrinkable", "the peer sent shared memory that is not sealed against shrinking"
                )
            if os.fstat(descriptor).st_size != nbytes + TOKEN_BYTES:
                raise ChannelError(
                    "shared.size_differs",
                    "the size of the shared memory from the peer differs from the announced {nbytes:,} bytes",
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
        """Return the bytes of a message. `returned` reports their memory once it is unused.

        Raises:
            ChannelError: the memory does not exist, or this process still uses its bytes.
        """
        segment = self._segments.get(number)
        if segment is None or number in self._lent or not 0 < nbytes <= segment.size:
            raise ChannelError(
                "shared.range_impossible",
                "the peer sent {nbytes:,} bytes in shared memory {number}, at an invalid position",
                nbytes=nbytes,
                number=number,
            )
        self._lent.add(number)
        data: memoryview = np.asarray(_Loan(segment, nbytes, number, self._ended)).data
        return data

    @property
    def has_ended(self) -> bool:
        """Return True if this process no longer uses some memory."""
        return bool(self._ended)

    def returned(self) -> list[int]:
        """Return the numbers of memory that this process no longer uses, each number once."""
        numbers = []
        while self._ended:
            numbers.append(self._ended.popleft())
        self._lent.difference_update(numbers)
        return numbers

    def not_returned(self, numbers: list[int]) -> None:
        """Put back numbers from `returned`, which a later call returns again."""
        self._lent.update(numbers)
        self._ended.extend(numbers)


class _Loan:
    """Bytes of a segment for numpy, freed with the last array that uses them."""

    def __init__(self, segment: Segment, nbytes: int, number: int, ended: deque[int]) -> None:
        self._segment, self._number, self._ended = segment, number, ended
        place = (segment.address, False)
        self.__array_interface__: dict[str, Any] = {"shape": (nbytes,), "typestr": "|u1", "data": place, "version": 3}

    def __del__(self) -> None:
        # runs in any thread at any time, so it must be atomic
        self._ended.append(self._number)
