"""Large tensors within a host, in memory that sender and receiver map.

Each end owns the memory that it sends in. It is a memfd, sealed against shrinking, so that a tensor in it never ends in
a fault; its descriptor goes over the Unix socket. Received tensors lie in it, without a copy; when the last of a
message's is gone, the receiver says so with its next message, and the sender writes the next tensors there.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from paceline.comm.shm.segment import _TOKEN_BYTES, Segment
from paceline.errors import ChannelError

SHARED_BYTES = 2**16  # in all of a message's large tensors; shorter ones go through the socket
_MOST_BLOCKS = 32
_LEAST_BYTES = 2**20
_MOST_BYTES = 2**33  # of all blocks of one end of a connection; they take memory where they were written
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
                raise ChannelError(f"the peer returned shared memory {number}, which it did not have")
            self._free.add(number)

    def _make(self, nbytes: int) -> tuple[int, int] | None:
        """New memory for so many bytes. It replaces free one that is too small where there is too much."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        held = sum(segment.size for segment in self._segments.values())
        number = len(self._segments)
        if number >= _MOST_BLOCKS or held + size > _MOST_BYTES:
            number = min(self._free, key=lambda number: self._segments[number].size, default=-1)
            if number < 0 or held - self._segments[number].size + size > _MOST_BYTES:
                return None
        try:
            descriptor = os.memfd_create("paceline-remote", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, size + _TOKEN_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
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
            if not 0 <= number < _MOST_BLOCKS or number in self._lent or not 0 < nbytes <= _MOST_BYTES:
                raise ChannelError(f"the peer sent shared memory {number} of {nbytes:,} bytes, which cannot be")
            held = sum(segment.size for other, segment in self._segments.items() if other != number)
            if held + nbytes > _MOST_BYTES:
                raise ChannelError(f"the peer sent more than {_MOST_BYTES:,} bytes of shared memory")
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ChannelError("the peer sent shared memory that it may still shrink")
            if os.fstat(descriptor).st_size != nbytes + _TOKEN_BYTES:
                raise ChannelError(f"the peer sent shared memory of another size than the {nbytes:,} bytes it says")
            self._segments[number] = Segment(descriptor, nbytes)
        except OSError as error:
            raise ChannelError(f"shared memory of the peer cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)

    def block(self, number: int, nbytes: int) -> memoryview:
        """The bytes of a message. Its memory is returned when nothing uses them any more.

        Raises:
            ChannelError: there is no such memory, or its bytes are still in use here.
        """
        segment = self._segments.get(number)
        if segment is None or number in self._lent or not 0 < nbytes <= segment.size:
            raise ChannelError(f"the peer sent {nbytes:,} bytes in shared memory {number}, where they cannot be")
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
