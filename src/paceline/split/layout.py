"""Layouts: intervals of a tensor's dimensions that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Interval = tuple[int, int]  # (start, stop)


class Box(NamedTuple):
    """A block that is contiguous in a rank's shard and in the full tensor. `own` and `full` are its start in each."""

    own: tuple[int, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, own: Tensor) -> Tensor:
        """The block as a view of the rank's shard."""
        for dim, (start, length) in enumerate(zip(self.own, self.shape, strict=True)):
            own = own.narrow(dim, start, length)
        return own

    def within(self, full: Tensor) -> Tensor:
        """The block as a view of the full tensor."""
        for dim, (start, length) in enumerate(zip(self.full, self.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full


@dataclass(frozen=True)
class ShardLayout:
    """A rank's shard of a tensor of shape `full`.

    `kept[d]` are the intervals of dimension d that the rank holds, in their order in its shard: one interval for a
    simple shard, three for a shard of a fused query-key-value matrix. Splits compose: each divides the remainder of the
    one before.
    """

    full: tuple[int, ...]
    kept: tuple[tuple[Interval, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardLayout:
        """The layout of an undivided tensor."""
        return cls(tuple(shape), tuple(((0, n),) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's shard."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.kept)

    @property
    def is_whole(self) -> bool:
        """True if the rank holds the full tensor, in its order."""
        return self == ShardLayout.whole(self.full)

    @property
    def numel(self) -> int:
        """Number of elements that the rank holds."""
        return prod(self.shape)

    def divide(self, dim: int, part: int, parts: int, sections: Sequence[int] | None = None) -> ShardLayout:
        """Layout of part `part` of `parts` equal parts along `dim`.

        With `sections` (sizes that sum to the shard's size), each section is divided.

        Raises:
            ValueError: a section is not a multiple of `parts`.
        """
        kept: list[Interval] = []
        start = 0
        for size in sections or (self.shape[dim],):
            if size % parts:
                raise ValueError(f"{size} is not a multiple of {parts}")
            kept += self._intervals(dim, start + size // parts * part, start + size // parts * (part + 1))
            start += size
        if start != self.shape[dim]:
            raise ValueError(f"the sections sum to {start}, not to {self.shape[dim]}")
        return self._with(dim, kept)

    def narrow(self, dim: int, start: int, stop: int) -> ShardLayout:
        """Layout of the interval from `start` to `stop` of this shard along `dim`."""
        return self._with(dim, self._intervals(dim, start, stop))

    def take(self, full: Tensor) -> Tensor:
        """The rank's shard of `full`, a copy or a view."""
        if tuple(full.shape) != self.full:
            raise ValueError(f"the tensor has shape {tuple(full.shape)}, not {self.full}")
        for dim, intervals in enumerate(self.kept):
            if len(intervals) == 1:
                full = full.narrow(dim, intervals[0][0], intervals[0][1] - intervals[0][0])
            else:
                full = (
                    torch.cat([full.narrow(dim, start, stop - start) for start, stop in intervals], dim)
                    if intervals
                    else full.narrow(dim, 0, 0)
                )
        return full

    def put(self, own: Tensor, full: Tensor) -> None:
        """Copy the rank's shard into its place in `full`."""
        for box in self.boxes():
            box.within(full).copy_(box.of(own))

    def boxes(self) -> Iterator[Box]:
        """The contiguous blocks of the shard. None if it is empty, one without dimensions for a scalar."""
        if not self.numel:
            return
        # per dimension: (own start, full start, length)
        placed: list[list[tuple[int, int, int]]] = []
        for intervals in self.kept:
            own, entries = 0, []
            for start, stop in intervals:
                entries.append((own, start, stop - start))
                own += stop - start
            placed.append(entries)
        for choice in product(*placed):
            yield Box(tuple(c[0] for c in choice), tuple(c[1] for c in choice), tuple(c[2] for c in choice))

    def _intervals(self, dim: int, start: int, stop: int) -> list[Interval]:
        """The intervals of the full tensor that the shard's interval [start, stop) covers."""
        found: list[Interval] = []
        passed = 0
        for low, high in self.kept[dim]:
            a, b = max(start - passed, 0), min(stop - passed, high - low)
            if a < b:
                found.append((low + a, low + b))
            passed += high - low
        return found

    def _with(self, dim: int, intervals: Sequence[Interval]) -> ShardLayout:
        merged: list[Interval] = []
        for start, stop in intervals:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return replace(self, kept=(*self.kept[:dim], tuple(merged) or ((0, 0),), *self.kept[dim + 1 :]))
