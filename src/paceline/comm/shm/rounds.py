"""Shared state of a group's ranks: round counters, announced calls, and two data slots each.

A *round* is: write into one's own slot, count up, wait until all ranks have counted as far, read the others' slots. The
slots alternate, so a slot is written again only after every rank has begun the round after the one it was read in, that
is, has read it. One wait a round is enough for any collective.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.shm import futex
from paceline.comm.shm.progress import Peer, ShmProgress
from paceline.comm.shm.segment import Handle, OwnedSegment, Segment, attach, create
from paceline.errors import SyncError

# of a tensor that is copied through the slots: small enough for a core's cache, large enough to outlast a wait
CHUNK_BYTES = 2**20
_SLOT_BYTES = 2 * CHUNK_BYTES  # contributions for the other ranks, then this rank's result
MAIL_BYTES = 2**21  # a ring for messages to each of the other ranks
MAIL_WORDS_BYTES = 128  # how far it was written, how far read, on cache lines of their own
_WORDS_AT, _CALLS_AT, _SLOTS_AT = 0, 256, 4096
_CALL_BYTES = 512
_PLACE = struct.Struct("<QQ")


def segment_bytes(size: int) -> int:
    """Bytes of the segment that every rank of a group of `size` shares."""
    return _SLOTS_AT + 2 * _SLOT_BYTES + size * (MAIL_BYTES + MAIL_WORDS_BYTES)


@dataclass(frozen=True)
class Arena:
    """Memory for shared tensors, with a segment of every rank."""

    number: int
    segments: list[Segment]


class Rounds:
    """The shared control of one group, seen from one rank.

    `met` and `count` are all that collectives need to wait for each other.
    """

    def __init__(self, store: Store, rank: int, size: int, progress: ShmProgress, timeout_s: float) -> None:
        self.rank, self.size, self.progress, self.timeout_s = rank, size, progress, timeout_s
        self.round = 0
        self.arenas: dict[int, Arena] = {}
        self._arenas_made = 0  # the same on all ranks
        own = create(segment_bytes(size), "group")
        try:
            handles = _exchange(store, rank, size, own.handle, progress.doorbell, timeout_s)
            self.segments = [own.segment if r == rank else attach(handle) for r, (handle, _) in enumerate(handles)]
            self.peers = [progress.meet(r, doorbell) for r, (_, doorbell) in enumerate(handles)]
            _all_are_here(store, rank, size, timeout_s)
        finally:
            own.close_descriptor()
        self.others = [peer for peer in self.peers if peer.rank != rank]
        self._counters = [segment.words(_WORDS_AT, 1) for segment in self.segments]
        self._own_counter = self._counters[rank]
        self._others_counters = [self._counters[peer.rank] for peer in self.others]
        slots = [s.bytes[_SLOTS_AT : _SLOTS_AT + 2 * _SLOT_BYTES].view(2, 2, CHUNK_BYTES) for s in self.segments]
        self._slots = [[slot[parity] for slot in slots] for parity in (0, 1)]
        self._typed: dict[tuple[torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}

    # Rounds

    def count(self) -> None:
        """Say that this rank's slot is written, and wake who waits for that."""
        self.round += 1
        self._own_counter[0] = self.round
        futex.fence()
        for peer in self.others:
            peer.ring()

    def met(self) -> bool:
        """True once all ranks have counted as far as this one."""
        this_round = self.round
        return all(counter[0] >= this_round for counter in self._others_counters)

    def missing(self) -> list[Peer]:
        """The peers that have not counted as far."""
        return [peer for peer in self.others if self._counters[peer.rank][0] < self.round]

    def slots(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Slots of the next round by rank: (contributions, result), each of `CHUNK_BYTES`."""
        parity = (self.round + 1) & 1
        typed = self._typed.get((dtype, parity))
        if typed is None:
            typed = [(slot[0].view(dtype), slot[1].view(dtype)) for slot in self._slots[parity]]
            self._typed[dtype, parity] = typed
        return typed

    # What the ranks are about to do

    def announce(self, call: bytes, place: tuple[int, int] = (0, 0)) -> bytes:
        """Record a collective and its tensor's place in an arena for the next round."""
        line = _PLACE.pack(*place) + call
        at = _CALLS_AT + ((self.round + 1) & 1) * _CALL_BYTES
        self.segments[self.rank].map[at : at + len(line) + 1] = line + b"\0"
        return line

    def agree(self, line: bytes) -> bool:
        """After the round: whether all ranks announced the very same, places included.

        Raises:
            SyncError: they announced different collectives, types or sizes; names both.
        """
        at = _CALLS_AT + (self.round & 1) * _CALL_BYTES
        end = at + len(line) + 1
        own = line + b"\0"
        same = True
        for peer in self.others:
            if self.segments[peer.rank].map[at:end] != own:
                same = False
                self._compare(peer.rank, at, line[_PLACE.size :])
        return same

    def _compare(self, rank: int, at: int, own: bytes) -> None:
        """Equal but for the place is well."""
        theirs = bytes(self.segments[rank].map[at + _PLACE.size : at + _CALL_BYTES]).split(b"\0", 1)[0]
        if theirs != own:
            raise SyncError(
                f"the ranks called different collectives: rank {self.rank} {own.decode()}, rank {rank} "
                f"{theirs.decode()}. Every rank of a group must make the same calls in the same order, with tensors of "
                "the same type and size."
            )

    # Memory that all share

    def add_arena(self, own: OwnedSegment, handles: list[Handle]) -> Arena:
        """Map the segments that the ranks made for tensors."""
        segments = [own.segment if r == self.rank else attach(handle) for r, handle in enumerate(handles)]
        self._arenas_made += 1
        arena = self.arenas[self._arenas_made] = Arena(self._arenas_made, segments)
        return arena

    def place_of(self, tensor: Tensor, nbytes: int) -> tuple[int, int]:
        """Arena number and byte offset of a contiguous tensor; (0, 0) if it lies elsewhere."""
        address = tensor.data_ptr()
        for arena in self.arenas.values():
            segment = arena.segments[self.rank]
            offset = address - segment.address
            if 0 <= offset <= segment.size - nbytes:
                return arena.number, offset
        return 0, 0

    def mailbox(self, sender: int, receiver: int) -> tuple[memoryview, memoryview, Tensor]:
        """The ring buffer for messages between two ranks.

        Returns the written and read counts, and its bytes, for Python and for torch.
        """
        at = _SLOTS_AT + 2 * _SLOT_BYTES + receiver * (MAIL_BYTES + MAIL_WORDS_BYTES)
        segment, ring = self.segments[sender], slice(at + MAIL_WORDS_BYTES, at + MAIL_WORDS_BYTES + MAIL_BYTES)
        return segment.words(at, MAIL_WORDS_BYTES // 8), segment.map[ring], segment.bytes[ring]


def _exchange(
    store: Store, rank: int, size: int, own: Handle, doorbell: Handle, timeout_s: float
) -> list[tuple[Handle, Handle]]:
    """Every rank's handles, by rank."""
    store.set(f"shm/{rank}", json.dumps([asdict(own), asdict(doorbell)]))
    _wait(store, [f"shm/{r}" for r in range(size)], timeout_s)
    found = [json.loads(store.get(f"shm/{r}")) for r in range(size)]
    return [(Handle(**a), Handle(**b)) for a, b in found]


def _all_are_here(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Return once every rank has mapped what it needs."""
    store.set(f"shm/mapped/{rank}", "yes")
    _wait(store, [f"shm/mapped/{r}" for r in range(size)], timeout_s)


def _wait(store: Store, keys: list[str], timeout_s: float) -> None:
    store.wait(keys, timedelta(seconds=timeout_s))
