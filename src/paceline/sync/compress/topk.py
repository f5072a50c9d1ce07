"""Only the largest numbers, with where they were.

Aji & Heafield, 2017, "Sparse Communication for Distributed Gradient Descent" (arXiv:1704.05021). They are chosen in
each block of 4096 and not in the whole tensor, as in Chen et al., 2020, "ScaleCom" (arXiv:2104.11125), so that a place
takes 2 bytes and all messages are equally long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.compress.codec import Codec, Coding, aligned, per_block, section, slabs

_LANES = 256  # a block is looked through in 256 lanes of 16 numbers first


class TopK:
    """Codec that keeps a share of each block of 4096: the numbers furthest from 0.

    At least one is kept; the others are decoded as 0.

    Args:
        share: above 0, at most 1.
        numbers: codec of what is kept.
    """

    block = 4096

    def __init__(self, share: float, numbers: Codec) -> None:
        self.kept = max(1, round(share * self.block))
        self.numbers = numbers

    def nbytes(self, numel: int) -> int:
        return self._places_at(numel) + aligned(numel // self.block * self.kept * 2)

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        k, numel = rows.shape
        kept, places_at = rows.new_zeros(k, self._padded(numel)), self._places_at(numel)
        places = section(coded, places_at, numel // self.block * self.kept, torch.int16)
        for part in slabs(rows, self.block):
            blocks = per_block(rows[:, part], self.block)
            largest = self._largest(blocks)
            where = slice(part.start // self.block * self.kept, part.stop // self.block * self.kept)
            kept[:, where] = blocks.gather(2, largest).flatten(1)
            places[:, where] = largest.flatten(1)
        self.numbers.encode(kept, coded[:, :places_at])

    def decode(self, coded: Tensor, rows: Tensor) -> None:
        k, numel = rows.shape
        count, places_at = numel // self.block * self.kept, self._places_at(numel)
        kept = rows.new_empty(k, self._padded(numel))
        self.numbers.decode(coded[:, :places_at], kept)
        places = section(coded, places_at, count, torch.int16).long()
        rows.zero_()
        per_block(rows, self.block).scatter_(
            2, places.view(k, -1, self.kept), kept[:, :count].reshape(k, -1, self.kept)
        )

    def _largest(self, blocks: Tensor) -> Tensor:
        """The places in its block of the largest numbers, shape (k, blocks, kept).

        They lie in the `kept` lanes with the largest maxima, so the slow search needs to see no other. On a GPU it is
        not slow.
        """
        sizes = blocks.abs()
        if self.kept * 4 > _LANES or blocks.device.type != "cpu":
            return sizes.topk(self.kept, dim=2, sorted=False).indices
        lanes = sizes.unflatten(2, (-1, _LANES))
        candidates = lanes.amax(dim=2).topk(self.kept, dim=2, sorted=False).indices
        depth = lanes.shape[2]
        chosen = lanes.gather(3, candidates.unsqueeze(2).expand(-1, -1, depth, -1)).flatten(2)
        best = chosen.topk(self.kept, dim=2, sorted=False).indices
        lane: Tensor = candidates.gather(2, best % self.kept)
        return lane.add_(best.div_(self.kept, rounding_mode="floor"), alpha=_LANES)

    def _padded(self, numel: int) -> int:
        count = numel // self.block * self.kept
        return -(-count // self.numbers.block) * self.numbers.block

    def _places_at(self, numel: int) -> int:
        return self.numbers.nbytes(self._padded(numel))


def topk(coding: Coding) -> TopK:
    """`compress=topk:SHARE`."""
    assert coding.numbers is not None
    return TopK(coding.value, coding.numbers)
