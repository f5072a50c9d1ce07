"""One bit a number: its sign, and the mean size of its block.

Seide et al., 2014, "1-Bit Stochastic Gradient Descent" (Interspeech). With error feedback it converges (Karimireddy et
al., 2019, arXiv:1901.09847) if the steps are small: what a code leaves out, which is much here, comes some steps late.
A learning rate at the edge of what exact training bears diverges, above all with momentum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.compress.codec import Coding, aligned, per_block, section, slabs


class Sign:
    """One-bit codec: the sign of each number, times its block's mean absolute value.

    The scale of a block of 256 is bf16, which makes 1.0625 bits per number.
    """

    block = 256

    def nbytes(self, numel: int) -> int:
        return self._scales_at(numel) + aligned(numel // self.block * 2)

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        k, numel = rows.shape
        packed, scales = self._sections(numel, coded)
        for part in slabs(rows, self.block):
            scales[:, part.start // self.block : part.stop // self.block].copy_(
                per_block(rows[:, part].abs(), self.block).mean(dim=2)
            )
        eighths = torch.signbit(rows).view(torch.uint8).view(k, 8, -1)
        packed.copy_(eighths[:, 0])
        for i in range(1, 8):
            packed.bitwise_or_(eighths[:, i] << i)

    def decode(self, coded: Tensor, rows: Tensor) -> None:
        packed, scales = self._sections(rows.shape[1], coded)
        eighths = rows.view(len(rows), 8, -1)
        for i in range(8):
            eighths[:, i].copy_((packed >> i) & 1)
        for part in slabs(rows, self.block):
            scale = scales[:, part.start // self.block : part.stop // self.block].float().unsqueeze(2)
            per_block(rows[:, part], self.block).mul_(-2 * scale).add_(scale)

    def _sections(self, numel: int, coded: Tensor) -> tuple[Tensor, Tensor]:
        """The signs and the scales. Bit i of byte j is the sign of number i * numel / 8 + j."""
        return coded[:, : numel // 8], section(coded, self._scales_at(numel), numel // self.block, torch.bfloat16)

    def _scales_at(self, numel: int) -> int:
        return aligned(numel // 8)


def one_bit(coding: Coding) -> Sign:
    """`compress=1bit`."""
    return Sign()
