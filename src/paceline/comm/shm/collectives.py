"""Collectives between processes of one host, as generators (see `progress`).

In a *round*, a rank writes to its own slot, increments its counter, waits until all ranks have the same count, and
reads the other ranks' slots. Each rank alternates between two slots. A rank writes a slot again only after every rank
has begun the next round and has therefore read the slot. One wait per round is enough for any collective.

A tensor that is in shared memory (an arena) on every rank is reduced in place. Each rank reduces one share of the
tensor from all ranks' memory and writes the result to all ranks, so every byte moves once. Other tensors are copied
through the slots in chunks that stay in the cache, with the reduce-scatter and all-gather of Rabenseifner, 2004
("Optimization of Collective Reduction Operations"). Every element is reduced by one rank, or by all ranks in the same
order. Therefore, the result has the same bits on all ranks. The work of a large all-reduce is divided over all ranks,
or over the first `reducers` ranks if only these ranks serve sums.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.operation import Steps
from paceline.comm.process_group import Collectives, Reduction, different_calls
from paceline.comm.rendezvous import tell_all
from paceline.comm.shm.progress import Peer, ShmProgress
from paceline.comm.shm.segment import Handle, OwnedSegment, Segment, attach, create
from paceline.errors import SyncError
from paceline.shared_words import acquiring, publish

SMALL_BYTES = 2**15  # up to this size, every rank reduces all elements; beyond it, dividing the work is faster
# bytes of each rank's memory at a time, so that they stay in a core's cache until the result is written
_CACHED_BYTES = 2**18


class ShmCollectives(Collectives):
    """Collectives of one group."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.rank, self.size = rounds, rounds.rank, rounds.size
        self.reducers = self.size  # number of ranks that divide the work of a large all-reduce
        self._calls: dict[object, bytes] = {}
        self._small: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        self._shares: dict[tuple[int, int, int, torch.dtype], list[list[Tensor]]] = {}

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        nbytes = tensor.numel() * tensor.element_size()
        call = self.call_of("all_reduce", reduction.name, tensor)
        if nbytes <= SMALL_BYTES:
            parts = self._small_slots(tensor)
            parts[self.rank].copy_(tensor)
            yield from self._meet(call)
            reduction.into(tensor, parts)
            return
        place = self.rounds.place_of(tensor, nbytes)
        line = self.rounds.announce(call, place)
        self.rounds.count()
        while not self.rounds.met():
            yield
        if self.rounds.calls_match(line) and place[0]:
            yield from self._reduce_in_place(tensor, reduction, place)
        else:
            yield from self._reduce_through_slots(tensor, reduction)

    def _reduce_in_place(self, tensor: Tensor, reduction: Reduction, place: tuple[int, int]) -> Steps:
        for parts in self._share_of(tensor, place):
            reduction.into(parts[0], parts)
            for other in parts[1:]:
                other.copy_(parts[0])
        self.rounds.count()
        while not self.rounds.met():
            yield

    def _reduce_through_slots(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """All-reduce through the slots, with one wait per chunk.

        Each wait is for the contributions to chunk k and the results of chunk k - 1.
        """
        rank, size, rounds = self.rank, self.size, self.rounds
        piece = CHUNK_BYTES // tensor.element_size() // self.reducers
        chunks = [chunk.split(piece) for chunk in tensor.split(piece * self.reducers)]
        before: Sequence[Tensor] = ()
        for chunk in [*chunks, ()]:
            slots = rounds.slots(tensor.dtype)
            for owner, part in enumerate(chunk):
                if owner != rank:
                    slots[rank][0][owner * piece : owner * piece + len(part)].copy_(part)
            rounds.count()
            while not rounds.met():
                yield
            for owner, part in enumerate(before):
                if owner != rank:
                    part.copy_(slots[owner][1][: len(part)])
            if rank < len(chunk):
                mine = chunk[rank]
                theirs = [slots[r][0][rank * piece : rank * piece + len(mine)] for r in range(size) if r != rank]
                reduction.into(mine, [mine, *theirs])
                rounds.slots(tensor.dtype)[rank][1][: len(mine)].copy_(mine)
            before = chunk

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        yield from self._meet(self.call_of("reduce", f"{reduction.name} to rank {root}", tensor))
        for chunk in tensor.split(CHUNK_BYTES // tensor.element_size()):
            slots = self.rounds.slots(tensor.dtype)
            if self.rank != root:
                slots[self.rank][0][: len(chunk)].copy_(chunk)
            yield from self._round()
            if self.rank == root:
                theirs = [slots[r][0][: len(chunk)] for r in range(self.size) if r != root]
                reduction.into(chunk, [chunk, *theirs])

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        yield from self._meet(self.call_of("broadcast", f"from rank {root}", tensor))
        for chunk in _bytes(tensor).split(CHUNK_BYTES):
            slot = self.rounds.slots(torch.uint8)[root][0][: len(chunk)]
            if self.rank == root:
                slot.copy_(chunk)
            yield from self._round()
            if self.rank != root:
                chunk.copy_(slot)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        yield from self._meet(self.call_of("all_gather", "", tensor))
        yield from self._gather([_bytes(output) for output in outputs], _bytes(tensor))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
        yield from self._meet(self.call_of("gather", f"to rank {root}", tensor))
        yield from self._gather([_bytes(output) for output in outputs], _bytes(tensor))

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        for start in range(0, len(tensor), CHUNK_BYTES):
            slots = self.rounds.slots(torch.uint8)
            chunk = tensor[start : start + CHUNK_BYTES]
            slots[self.rank][0][: len(chunk)].copy_(chunk)
            yield from self._round()
            for rank, output in enumerate(outputs):
                part = chunk if rank == self.rank else slots[rank][0][: len(chunk)]
                output[start : start + len(chunk)].copy_(part)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
        yield from self._meet(self.call_of("scatter", f"from rank {root}", output))
        flat, sources, piece = _bytes(output), [_bytes(t) for t in tensors], CHUNK_BYTES // self.size
        for start in range(0, len(flat), piece):
            slot = self.rounds.slots(torch.uint8)[root][0]
            for rank, source in enumerate(sources):
                part = source[start : start + piece]
                slot[rank * piece : rank * piece + len(part)].copy_(part)
            yield from self._round()
            target = flat[start : start + piece]
            target.copy_(slot[self.rank * piece : self.rank * piece + len(target)])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        yield from self._meet(self.call_of("reduce_scatter", reduction.name, output))
        piece = CHUNK_BYTES // output.element_size() // self.size
        for start in range(0, len(output), piece):
            slots = self.rounds.slots(output.dtype)
            for rank, tensor in enumerate(inputs):
                if rank != self.rank:
                    part = tensor[start : start + piece]
                    slots[self.rank][0][rank * piece : rank * piece + len(part)].copy_(part)
            yield from self._round()
            own = inputs[self.rank][start : start + piece]
            at = slice(self.rank * piece, self.rank * piece + len(own))
            theirs = [slots[rank][0][at] for rank in range(self.size) if rank != self.rank]
            reduction.into(output[start : start + piece], [own, *theirs])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        sources, targets = [_bytes(t) for t in inputs], [_bytes(t) for t in outputs]
        slots = self.rounds.slots(torch.int64)
        slots[self.rank][0][: 2 * self.size] = torch.tensor([len(t) for t in (*sources, *targets)])
        yield from self._meet(b"all_to_all")
        sizes = [slot[: 2 * self.size].tolist() for slot, _ in slots]
        # all ranks check all pairs, so that all ranks stop if one pair is wrong
        for a, b in itertools.product(range(self.size), repeat=2):
            if sizes[a][b] != sizes[b][self.size + a]:
                raise SyncError(
                    "ranks.all_to_all_sizes",
                    "all_to_all: rank {source} sends {sent} bytes to rank {target}, which expects {expected}",
                    source=a,
                    sent=sizes[a][b],
                    target=b,
                    expected=sizes[b][self.size + a],
                )
        piece = CHUNK_BYTES // self.size
        for start in range(0, max(map(max, sizes)), piece):
            slots = self.rounds.slots(torch.uint8)
            for rank, source in enumerate(sources):
                part = source[start : start + piece]
                slots[self.rank][0][rank * piece : rank * piece + len(part)].copy_(part)
            yield from self._round()
            for rank, target in enumerate(targets):
                part = target[start : start + piece]
                part.copy_(slots[rank][0][self.rank * piece : self.rank * piece + len(part)])

    def barrier(self) -> Steps:
        yield from self._meet(b"barrier")

    def waits_for(self) -> Sequence[Peer]:
        return self.rounds.missing()

    def forget(self, arena: int) -> None:
        """Drop all views of an arena."""
        for key in [key for key in self._shares if key[0] == arena]:
            del self._shares[key]

    # Rounds

    def _round(self) -> Steps:
        self.rounds.count()
        while not self.rounds.met():
            yield

    def _meet(self, call: bytes) -> Steps:
        """Run the first round of a collective, in which the ranks compare their calls."""
        line = self.rounds.announce(call)
        self.rounds.count()
        while not self.rounds.met():
            yield
        self.rounds.calls_match(line)

    def call_of(self, name: str, how: str, tensor: Tensor) -> bytes:
        """Return the text by which the ranks check that they make the same call."""
        key = (name, how, tensor.dtype, len(tensor))
        call = self._calls.get(key)
        if call is None:
            words = [name, how, "of", str(tensor.dtype).removeprefix("torch."), "x", str(len(tensor))]
            call = self._calls[key] = " ".join(word for word in words if word).encode()
        return call

    def _small_slots(self, tensor: Tensor) -> list[Tensor]:
        """View the first `len(tensor)` elements of every rank's slot for the next round."""
        key = (tensor.dtype, len(tensor), (self.rounds.round + 1) & 1)
        found = self._small.get(key)
        if found is None:
            if len(self._small) > 256:
                self._small.clear()
            found = self._small[key] = [
                contributions[: len(tensor)] for contributions, _ in self.rounds.slots(tensor.dtype)
            ]
        return found

    def _share_of(self, tensor: Tensor, place: tuple[int, int]) -> list[list[Tensor]]:
        """Return this rank's share of an arena's tensor, in parts that fit a cache.

        Each part is a list of views, one per rank. This rank's view comes first.
        """
        key = (*place, len(tensor), tensor.dtype)
        found = self._shares.get(key)
        if found is None:
            if len(self._shares) > 64:
                self._shares.clear()
            found = self._shares[key] = self._split_share(tensor, place)
        return found

    def _split_share(self, tensor: Tensor, place: tuple[int, int]) -> list[list[Tensor]]:
        number, offset = place
        line = 64 // tensor.element_size()  # two ranks never write to the same cache line
        share = ceil(len(tensor) / self.reducers / line) * line
        start, end = (min(len(tensor), share * min(r, self.reducers)) for r in (self.rank, self.rank + 1))
        order = [self.rank, *(r for r in range(self.size) if r != self.rank)]
        size = tensor.element_size()
        segments = self.rounds.arenas[number].segments
        shares = [segments[r].bytes[offset + start * size : offset + end * size].view(tensor.dtype) for r in order]
        step = _CACHED_BYTES // size
        return [[share[at : at + step] for share in shares] for at in range(0, end - start, step)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


# chunk of a tensor that is copied through the slots; it fits a core's cache, and copying it takes longer than a wait
CHUNK_BYTES = 2**20
_SLOT_BYTES = 2 * CHUNK_BYTES  # contributions for the other ranks, then this rank's result
MAIL_BYTES = 2**21  # a ring for messages to each of the other ranks
MAIL_WORDS_BYTES = 128  # positions of the writer and of the reader, on separate cache lines
_WORDS_AT, _CALLS_AT, _SLOTS_AT = 0, 256, 4096
_CALL_BYTES = 512
_PLACE = struct.Struct("<QQ")


def segment_bytes(size: int) -> int:
    """Size in bytes of each rank's segment in a group of `size` ranks."""
    return _SLOTS_AT + 2 * _SLOT_BYTES + size * (MAIL_BYTES + MAIL_WORDS_BYTES)


@dataclass(frozen=True)
class Arena:
    """Shared memory for tensors, with one segment per rank."""

    number: int
    segments: list[Segment]


class Rounds:
    """Shared control state of one group, as seen from one rank.

    Collectives synchronize only with `met` and `count`.
    """

    def __init__(self, store: Store, rank: int, size: int, progress: ShmProgress, timeout_s: float) -> None:
        self.rank, self.size, self.progress, self.timeout_s = rank, size, progress, timeout_s
        self.round = 0
        self.arenas: dict[int, Arena] = {}
        self._arenas_made = 0  # equal on all ranks
        own = create(segment_bytes(size), "group")
        try:
            told = tell_all(store, "shm", rank, size, timeout_s, [asdict(own.handle), asdict(progress.doorbell)])
            self.segments = [own.segment if r == rank else attach(Handle(**one)) for r, (one, _) in enumerate(told)]
            self.peers = [progress.meet(r, Handle(**doorbell)) for r, (_, doorbell) in enumerate(told)]
            tell_all(store, "mapped", rank, size, timeout_s, None)
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
        """Mark this rank's slot as written, and wake waiting ranks."""
        self.round += 1
        publish(self._own_counter, 0, self.round)
        for peer in self.others:
            peer.ring()

    @acquiring
    def met(self) -> bool:
        """Return True once all ranks have reached this rank's count."""
        this_round = self.round
        for counter in self._others_counters:  # noqa: SIM110 - `all` with a generator is slower, and waiting ranks poll
            if counter[0] < this_round:
                return False
        return True

    def missing(self) -> list[Peer]:
        """Return the peers that have not reached this rank's count."""
        return [peer for peer in self.others if self._counters[peer.rank][0] < self.round]

    def slots(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return the next round's slots by rank: (contributions, result), each of `CHUNK_BYTES`."""
        return self.slots_of(dtype, (self.round + 1) & 1)

    def slots_of(self, dtype: torch.dtype, parity: int) -> list[tuple[Tensor, Tensor]]:
        """Return the slots of even rounds (`parity` 0) or odd rounds (1); see `slots`."""
        typed = self._typed.get((dtype, parity))
        if typed is None:
            typed = [(slot[0].view(dtype), slot[1].view(dtype)) for slot in self._slots[parity]]
            self._typed[dtype, parity] = typed
        return typed

    # Announced calls

    def announce(self, call: bytes, place: tuple[int, int] = (0, 0)) -> bytes:
        """Record a collective, and its tensor's place in an arena, for the next round."""
        line = _PLACE.pack(*place) + call
        at = _CALLS_AT + ((self.round + 1) & 1) * _CALL_BYTES
        self.segments[self.rank].map[at : at + len(line) + 1] = line + b"\0"
        return line

    def calls_match(self, line: bytes) -> bool:
        """After the round, return True if all ranks announced the same call and place.

        Raises:
            SyncError: two ranks announced different collectives, types or sizes; the error names both calls.
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
        """Compare two announcements, except for the place of the tensor."""
        theirs = bytes(self.segments[rank].map[at + _PLACE.size : at + _CALL_BYTES]).split(b"\0", 1)[0]
        if theirs != own:
            raise different_calls(f"rank {self.rank} {own.decode()}", f"rank {rank} {theirs.decode()}")

    # Shared memory

    def add_arena(self, own: OwnedSegment, handles: list[Handle]) -> Arena:
        """Map the segments that the ranks have created for tensors."""
        segments = [own.segment if r == self.rank else attach(handle) for r, handle in enumerate(handles)]
        self._arenas_made += 1
        arena = self.arenas[self._arenas_made] = Arena(self._arenas_made, segments)
        return arena

    def place_of(self, tensor: Tensor, nbytes: int) -> tuple[int, int]:
        """Return the arena number and byte offset of a contiguous tensor; (0, 0) if elsewhere."""
        address = tensor.data_ptr()
        for arena in self.arenas.values():
            segment = arena.segments[self.rank]
            offset = address - segment.address
            if 0 <= offset <= segment.size - nbytes:
                return arena.number, offset
        return 0, 0

    def mailbox(self, sender: int, receiver: int) -> tuple[memoryview, memoryview, Tensor]:
        """Return the ring buffer for messages from one rank to another.

        The result contains the counts of written and read bytes, the buffer as a memoryview, and the buffer as a
        tensor.
        """
        at = _SLOTS_AT + 2 * _SLOT_BYTES + receiver * (MAIL_BYTES + MAIL_WORDS_BYTES)
        segment, ring = self.segments[sender], slice(at + MAIL_WORDS_BYTES, at + MAIL_WORDS_BYTES + MAIL_BYTES)
        return segment.words(at, MAIL_WORDS_BYTES // 8), segment.map[ring], segment.bytes[ring]
