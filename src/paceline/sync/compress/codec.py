"""The protocol of a codec: numbers to bytes, in a length that their count determines.

To add one, write a class like `half.Cast` and describe it in a `paceline.planning.sync_info.CodecInfo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.sync.traffic import Traffic

# numbers: what a codec needs beside them stays in a processor's cache, which makes coding several times faster
_IN_CACHE = 2**18
ALIGNMENT = 8  # every section of a message starts at a multiple of it, so that it can be viewed as any dtype


class Codec(Protocol):
    """Codes rows of numbers.

    Every rank knows the length of a message in advance, and all decode the same bytes to the same bits.

    Attributes:
        block: numbers that are coded together; a row holds a multiple of it.
    """

    block: int

    def nbytes(self, numel: int) -> int:
        """The coded size of a row of `numel` numbers, a multiple of 8."""
        ...

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        """Code each row of `rows` into the row of `coded`.

        `rows` is fp32 of shape (k, numel), `coded` uint8 of shape (k, nbytes(numel)).
        """
        ...

    def decode(self, coded: Tensor, rows: Tensor) -> None:
        """Overwrite `rows` by what `encode` kept of them. Shapes as there."""
        ...


@runtime_checkable
class CodedSum(Protocol):
    """Sum of one tensor, for codecs that are more than numbers to bytes.

    PowerSGD is one.

    Attributes:
        numel: numbers that are coded.
    """

    numel: int

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` by its sum over the ranks; see `Compressor.sum`."""

    def state_dict(self) -> dict[str, Tensor]:
        """State of this rank, without the tensor's name; see `Compressor.state_dict`."""
        ...


@dataclass(frozen=True)
class Coding:
    """Tensor that a codec is made for, which a rule sums in every step.

    A codec's factory takes it and returns a `Codec`, a `CodedSum`, or None where nothing of the tensor gains.

    Attributes:
        value: after the colon in the plan, converted as the description says; None where the codec takes none.
        numbers: codec of the numbers that this one keeps, for a codec that keeps some.
        generator: random numbers of this rank, on the tensors' device.
        group: the ranks that sum.
        flat, views: the tensor and its coded parts, as for `Compressor.sum`.
        traffic, scratch: counts of bytes, and memory for work in progress.
    """

    value: Any
    numbers: Codec | None
    generator: torch.Generator
    group: Group
    flat: Tensor
    views: Sequence[Tensor]
    traffic: Traffic
    scratch: Scratch


def section(coded: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """A view of `count` numbers per row of `coded`, from byte `start` on.

    `coded` is uint8 (k, bytes); the view has the shape (k, count).
    """
    return coded[:, start : start + count * dtype.itemsize].view(dtype)


def aligned(nbytes: int) -> int:
    """The next multiple of 8."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slabs(rows: Tensor, block: int) -> Iterator[slice]:
    """Column ranges of `rows` (k, numel), in whole blocks, as large as is fast on the device."""
    k, numel = rows.shape
    width = max(1, _IN_CACHE // (k * block)) * block if rows.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, width):
        yield slice(start, min(start + width, numel))


def per_block(rows: Tensor, block: int) -> Tensor:
    """(k, numel) as (k, blocks, block)."""
    blocks: Tensor = rows.unflatten(1, (-1, block))
    return blocks


class Scratch:
    """Flat fp32 tensors by purpose, each as large as the largest that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def get(self, purpose: str, numel: int) -> Tensor:
        """`numel` numbers of any value, until the same purpose is asked for again."""
        if purpose not in self.held or self.held[purpose].numel() < numel:
            self.held[purpose] = torch.empty(numel, device=self.device)
        return self.held[purpose][:numel]

    def filled(self, purpose: str, numel: int, numbers: Tensor) -> Tensor:
        """Memory for a purpose, with `numbers` (any dtype) at the beginning and zeros after them."""
        memory = self.get(purpose, numel)
        memory[: len(numbers)].copy_(numbers)
        memory[len(numbers) :].zero_()
        return memory
