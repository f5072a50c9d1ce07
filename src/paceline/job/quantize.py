"""Kinds of quantized weights, and their sizes."""

from __future__ import annotations

from typing import Literal

Quantize = Literal["int8", "nf4"]
QUANTIZED_TOGETHER = 64  # elements of a row of a quantized weight that share a scale


def quantized_row_bytes(kind: Quantize, columns: int) -> int:
    """Return the bytes of a row of a quantized weight.

    Each block of the row has its codes and a float32 scale.
    """
    codes = QUANTIZED_TOGETHER if kind == "int8" else QUANTIZED_TOGETHER // 2
    return -(-columns // QUANTIZED_TOGETHER) * (codes + 4)
