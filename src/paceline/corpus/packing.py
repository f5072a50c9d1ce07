"""Placement of documents in sequences of a fixed length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


class Piece(NamedTuple):
    """Adjacent tokens of one document: `length` tokens, starting at its token `first`."""

    document: int
    first: int
    length: int


@dataclass(frozen=True)
class Packing:
    """Sequences of a fixed length (packs), and the pieces of documents in each of them.

    Every token of every document is in exactly one piece, and every piece in exactly one pack.

    Attributes:
        context: number of tokens of a pack, including padding.
        starts: number of the first piece of each pack, then the number of pieces, shape (packs + 1,).
        groups: number of the first pack of each group of documents, then the number of packs, shape (groups + 1,).
        documents: document of each piece.
        firsts: position of each piece's first token in its document.
        lengths: number of tokens of each piece.
    """

    context: int
    starts: Numbers
    groups: Numbers
    documents: Numbers
    firsts: Numbers
    lengths: Numbers

    @classmethod
    def of(cls, lengths: Iterable[NDArray[np.integer]], context: int, *, join: bool) -> Self:
        """Pack documents; each group of documents is packed by itself.

        A document longer than the context is cut into pieces of `context` tokens and a remainder. With `join`, the
        remainders and shorter documents are packed best-fit decreasing, which needs about 11/9 of the smallest possible
        number of packs at worst (Johnson, 1973). Otherwise, every piece is its own pack. The result depends only on the
        arguments.

        Args:
            lengths: number of tokens of each document, one array per group, such as a file. Documents are numbered
                across all groups. Documents without tokens are in no pack.
            context: largest number of tokens of a pack.
            join: True to put several pieces into a pack.
        """
        parts, document = [], 0
        for group in lengths:
            parts.append(_group(np.asarray(group, dtype=np.int64), context, document, join=join))
            document += len(group)
        pieces = np.cumsum([0, *(len(part.lengths) for part in parts)], dtype=np.int64)
        return cls(
            context,
            _joined([*(part.starts[:-1] + first for part, first in zip(parts, pieces[:-1], strict=True)), pieces[-1:]]),
            np.cumsum([0, *map(len, parts)], dtype=np.int64),
            _joined([part.documents for part in parts]),
            _joined([part.firsts for part in parts]),
            _joined([part.lengths for part in parts]),
        )

    def save(self, file: Path) -> None:
        """Write the packing to a new file."""
        parts = (self.starts, self.groups, self.documents, self.firsts, self.lengths)
        with file.open("wb") as out:  # numpy would append .npy to the name of a path
            np.save(out, np.concatenate([[self.context], [len(part) for part in parts], *parts]).astype(np.int64))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Open a file that `save` wrote. The file is memory-mapped, so the processes of a host share one copy."""
        numbers = np.load(file, mmap_mode="r", allow_pickle=False)
        bounds = np.cumsum([6, *numbers[1:6]]).tolist()
        return cls(int(numbers[0]), *(numbers[first:end] for first, end in pairwise(bounds)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pieces(self, pack: int) -> list[Piece]:
        """Return the pieces of a pack, in the order of their documents."""
        own = slice(int(self.starts[pack]), int(self.starts[pack + 1]))
        columns = (self.documents[own].tolist(), self.firsts[own].tolist(), self.lengths[own].tolist())
        return [Piece(*values) for values in zip(*columns, strict=True)]

    @property
    def tokens(self) -> int:
        """Number of tokens in all packs, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def padding_share(self) -> float:
        """Share of the positions in all packs that hold no token."""
        return 1.0 - self.tokens / (len(self) * self.context) if len(self) else 0.0


def _group(lengths: Numbers, context: int, first_document: int, *, join: bool) -> Packing:
    """Pack the documents of one group."""
    counts = -(-lengths // context)
    documents = np.repeat(np.arange(len(lengths)), counts)
    before = np.cumsum(counts) - counts
    firsts = (np.arange(len(documents)) - before[documents]) * context
    sizes = np.minimum(lengths[documents] - firsts, context)
    order, starts = _packs(sizes, context) if join else (np.arange(len(sizes)), np.arange(len(sizes) + 1))
    return Packing(
        context,
        starts.astype(np.int64),
        np.array([0, len(starts) - 1]),
        documents[order] + first_document,
        firsts[order],
        sizes[order],
    )


def _joined(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _packs(sizes: Numbers, context: int) -> tuple[Numbers, Numbers]:
    """Assign pieces to packs, best-fit decreasing.

    Returns:
        The pieces sorted by pack, and the position of each pack's first piece in this order followed by the number of
        pieces. Packs are sorted by their first piece.
    """
    pack_of = _best_fit_decreasing(sizes, context)
    packs = int(pack_of.max(initial=-1)) + 1
    leader = np.full(packs, len(sizes), dtype=np.int64)
    np.minimum.at(leader, pack_of, np.arange(len(sizes)))
    order = np.lexsort((np.arange(len(sizes)), leader[pack_of]))
    counts = np.bincount(pack_of, minlength=packs)[np.argsort(leader)]
    return order, np.concatenate([[0], np.cumsum(counts)])


def _best_fit_decreasing(sizes: Numbers, context: int) -> Numbers:
    """Return the pack of each piece.

    Pieces of equal size are placed together, into the packs with the least sufficient space, as many per pack as fit.
    The result is the same as placing one piece at a time, but the time depends on the number of distinct sizes.
    """
    pack_of = np.empty(len(sizes), dtype=np.int64)
    if not len(sizes):
        return pack_of
    by_size = np.argsort(-sizes, kind="stable")
    distinct, first = np.unique(-sizes[by_size], return_index=True)
    space = _Space()
    made = 0
    for size, waiting in zip((-distinct).tolist(), np.split(by_size, first[1:]), strict=True):
        while len(waiting):
            if (room := space.least(size)) is None:
                room, needed = context, -(-len(waiting) // (context // size))
                found = np.arange(made, made + needed)
                made += needed
            else:
                found = space.take(room, -(-len(waiting) // (room // size)))
            each = room // size
            placed, waiting = waiting[: each * len(found)], waiting[each * len(found) :]
            pack_of[placed] = np.repeat(found, each)[: len(placed)]
            full, rest = divmod(len(placed), each)
            space.put(room - each * size, found[:full])
            space.put(room - rest * size, found[full:])
    return pack_of


class _Space:
    """Unfilled packs, grouped by the number of tokens that still fit."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._packs: dict[int, list[Numbers]] = {}

    def least(self, size: int) -> int | None:
        """Return the smallest free space of at least `size` tokens; None if none exists."""
        at = bisect_left(self._rooms, size)
        return self._rooms[at] if at < len(self._rooms) else None

    def take(self, room: int, count: int) -> Numbers:
        """Remove and return at most `count` of the packs with this free space."""
        packs = self._packs[room]
        found = packs.pop()
        if len(found) > count:
            packs.append(found[count:])
        if not packs:
            del self._packs[room]
            self._rooms.remove(room)
        return found[:count]

    def put(self, room: int, packs: Sequence[int] | Numbers) -> None:
        """Add packs with this free space; full packs are not stored."""
        if not len(packs) or not room:
            return
        if room not in self._packs:
            insort(self._rooms, room)
            self._packs[room] = []
        self._packs[room].append(np.asarray(packs))
