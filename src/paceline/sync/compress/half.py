"""Numbers in a narrower float: half the bytes of fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.compress.codec import Coding, aligned, section

_FP16_MOST = torch.finfo(torch.float16).max


class Cast:
    """Codes numbers as another floating dtype, rounded to nearest.

    What fp16 cannot hold becomes its largest number, not infinity.
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def nbytes(self, numel: int) -> int:
        return aligned(numel * self.dtype.itemsize)

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        if self.dtype is torch.float16:
            rows = rows.clamp(-_FP16_MOST, _FP16_MOST)
        section(coded, 0, rows.shape[1], self.dtype).copy_(rows)

    def decode(self, coded: Tensor, rows: Tensor) -> None:
        rows.copy_(section(coded, 0, rows.shape[1], self.dtype))


def fp16(coding: Coding) -> Cast:
    """`compress=fp16`."""
    return Cast(torch.float16)


def bf16(coding: Coding) -> Cast:
    """`compress=bf16`."""
    return Cast(torch.bfloat16)
