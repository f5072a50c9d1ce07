"""Quantisation to 8-bit or 4-bit integers times a scale per block, with stochastic rounding.

Stochastic rounding keeps the expectation exact: Alistarh et al., 2017, "QSGD" (arXiv:1610.02132). A scale per block:
Dettmers, 2016 (arXiv:1511.04561).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.compress.codec import Coding, aligned, per_block, section, slabs

_LEAST = 2.0**-100  # numbers of blocks that are all smaller count as 0: the inverse of their scale would overflow
# the scale is rounded to bf16, by at most 2**-8: never so far that the largest number does not fit
_ABOVE = 1 + 2.0**-7


class Quantise:
    """Codec of 8 or 4 bits per number, with a bf16 scale per 128 numbers.

    That makes 8.125 or 4.125 bits per number.

    Args:
        bits: 8 or 4.
        generator: generator of the random numbers that decide how to round, on the tensors' device.
    """

    block = 128

    def __init__(self, bits: int, generator: torch.Generator) -> None:
        self.bits = bits
        self.most = 2 ** (bits - 1) - 1
        self.generator = generator

    def nbytes(self, numel: int) -> int:
        return self._scales_at(numel) + aligned(numel // self.block * 2)

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        scales, numbers = self._sections(rows.shape[1], coded)
        for part in slabs(rows, self.block):
            blocks = per_block(rows[:, part], self.block)
            scale = scales[:, part.start // self.block : part.stop // self.block]
            levels = torch.abs(blocks)
            scale.copy_(levels.amax(dim=2).clamp_(min=_LEAST).mul_(_ABOVE / self.most))
            torch.mul(blocks, scale.float().reciprocal_().unsqueeze(2), out=levels)
            levels.add_(self._below_half(levels)).round_()
            if self.bits == 8:
                numbers[:, part].copy_(levels.flatten(1))
            else:
                low, high = levels.add_(8).to(torch.uint8).unflatten(2, (2, -1)).unbind(2)
                numbers[:, part.start // 2 : part.stop // 2].copy_(
                    high.bitwise_left_shift_(4).bitwise_or_(low).flatten(1)
                )

    def decode(self, coded: Tensor, rows: Tensor) -> None:
        scales, numbers = self._sections(rows.shape[1], coded)
        for part in slabs(rows, self.block):
            if self.bits == 8:
                rows[:, part].copy_(numbers[:, part])
            else:
                pairs = numbers[:, part.start // 2 : part.stop // 2].unflatten(1, (-1, self.block // 2))
                halves = per_block(rows[:, part], self.block).unflatten(2, (2, -1))
                halves[:, :, 0].copy_(pairs & 15)
                halves[:, :, 1].copy_(pairs >> 4)
                rows[:, part].sub_(8)
            scale = scales[:, part.start // self.block : part.stop // self.block]
            per_block(rows[:, part], self.block).mul_(scale.float().unsqueeze(2))

    def _sections(self, numel: int, coded: Tensor) -> tuple[Tensor, Tensor]:
        """The scales and the numbers.

        Numbers are int8, or two in a byte, the second half of a block above the first.
        """
        scales = section(coded, self._scales_at(numel), numel // self.block, torch.bfloat16)
        return scales, section(coded, 0, numel, torch.int8) if self.bits == 8 else coded[:, : numel // 2]

    def _scales_at(self, numel: int) -> int:
        return aligned(numel * self.bits // 8)

    def _below_half(self, like: Tensor) -> Tensor:
        """Random numbers in (-1/2, 1/2), shaped `like`.

        They have 8 bits each and are drawn 8 at a time, which is good enough and much faster.
        """
        words = torch.empty(like.numel() // 8, dtype=torch.int64, device=like.device)
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.int8).view(like.shape).float().add_(0.5).mul_(2.0**-8)


def int8(coding: Coding) -> Quantise:
    """`compress=int8`."""
    return Quantise(8, coding.generator)


def int4(coding: Coding) -> Quantise:
    """`compress=int4`."""
    return Quantise(4, coding.generator)
