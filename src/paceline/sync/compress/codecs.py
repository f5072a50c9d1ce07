"""The protocol of a codec, which converts numbers to bytes, and the built-in codecs.

The number of bytes depends only on the count of the numbers, not on their values.

To add a codec, write a class like `Cast` and describe it in a `paceline.planning.sync_info.CodecInfo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.sync.rule import Traffic

# numbers per slab; a codec's working memory then fits the processor's cache, and coding is several times faster
_IN_CACHE = 2**18
ALIGNMENT = 8  # alignment in bytes of a message's sections, which can then be viewed as any dtype


class Codec(Protocol):
    """Codec for rows of numbers.

    Every rank knows the length of a message in advance. All ranks decode the same bytes to bit-equal values.

    Attributes:
        block: count of numbers that are encoded together; the length of every row is a multiple of `block`.
    """

    block: int

    def nbytes(self, numel: int) -> int:
        """Return the size in bytes of an encoded row, a multiple of 8."""
        ...

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        """Encode each row of `rows` into a row of `coded`.

        `rows` is fp32 of shape (k, numel), `coded` uint8 of shape (k, nbytes(numel)).
        """
        ...

    def decode(self, coded: Tensor, rows: Tensor) -> None:
        """Overwrite `rows` with the decoded values of `coded`; shapes are as in `encode`."""
        ...


@runtime_checkable
class CodedSum(Protocol):
    """Compressed sum of one tensor, for codecs that do more than convert numbers to bytes.

    PowerSGD is such a codec.

    Attributes:
        numel: count of encoded numbers.
    """

    numel: int

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` with its sum over the ranks; see `Compressor.sum`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's state without the tensor's name; see `Compressor.state_dict`."""
        ...


@dataclass(frozen=True)
class Coding:
    """Arguments of a codec's factory, for a tensor that a rule sums in every step.

    The factory returns a `Codec`, a `CodedSum`, or None if compression does not help.

    Attributes:
        value: the codec's argument after the colon in the plan, converted to its type; None if the codec has no
            argument.
        numbers: second codec, which encodes the numbers that this codec keeps.
        generator: random generator of this rank, on the tensors' device.
        group: the ranks over which the tensor is summed.
        flat: the tensor to sum; see `Compressor.sum`.
        views: the encoded parts of `flat`; see `Compressor.sum`.
        traffic: byte counters.
        scratch: temporary memory.
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
    """View `count` numbers per row of `coded`, starting at byte `start`.

    `coded` is uint8 of shape (k, bytes). The view has shape (k, count).
    """
    return coded[:, start : start + count * dtype.itemsize].view(dtype)


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`, which is 8."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slabs(rows: Tensor, block: int) -> Iterator[slice]:
    """Split `rows` of shape (k, numel) into ranges of columns that fit the cache."""
    k, numel = rows.shape
    width = max(1, _IN_CACHE // (k * block)) * block if rows.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, width):
        yield slice(start, min(start + width, numel))


def per_block(rows: Tensor, block: int) -> Tensor:
    """View a tensor of shape (k, numel) as (k, blocks, block)."""
    blocks: Tensor = rows.unflatten(1, (-1, block))
    return blocks


class Scratch:
    """Temporary flat fp32 tensors by purpose, each of the largest requested size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def get(self, purpose: str, numel: int) -> Tensor:
        """Return `numel` uninitialised numbers, valid until the next request for this purpose."""
        if purpose not in self.held or self.held[purpose].numel() < numel:
            self.held[purpose] = torch.empty(numel, device=self.device)
        return self.held[purpose][:numel]

    def filled(self, purpose: str, numel: int, numbers: Tensor) -> Tensor:
        """Return memory for a purpose, filled with `numbers` (any dtype) and padded with zeros."""
        memory = self.get(purpose, numel)
        memory[: len(numbers)].copy_(numbers)
        memory[len(numbers) :].zero_()
        return memory


_FP16_MOST = torch.finfo(torch.float16).max


class Cast:
    """Codec that casts numbers to another floating dtype, rounded to nearest.

    Numbers outside of the range of fp16 become the largest fp16 number instead of infinity.
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
    """Create the codec of `compress=fp16`."""
    return Cast(torch.float16)


def bf16(coding: Coding) -> Cast:
    """Create the codec of `compress=bf16`."""
    return Cast(torch.bfloat16)


# if all numbers of a block are smaller, the block counts as 0, because its inverse scale would overflow
_LEAST = 2.0**-100
# rounding the scale to bf16 changes it by at most 2**-8, so the largest number still fits
_ABOVE = 1 + 2.0**-7


class Quantise:
    """Codec of 8 or 4 bits per number, with a bf16 scale per 128 numbers.

    The total is 8.125 or 4.125 bits per number. Stochastic rounding keeps the expectation exact (QSGD: Alistarh et al.,
    2017, arXiv:1610.02132). Scales per block follow Dettmers, 2016 (arXiv:1511.04561).

    Args:
        bits: 8 or 4.
        generator: random generator for the rounding, on the tensors' device.
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
        """View the scales and the numbers.

        Numbers are int8, or two 4-bit numbers per byte. The high bits contain the second half of a block.
        """
        scales = section(coded, self._scales_at(numel), numel // self.block, torch.bfloat16)
        return scales, section(coded, 0, numel, torch.int8) if self.bits == 8 else coded[:, : numel // 2]

    def _scales_at(self, numel: int) -> int:
        return aligned(numel * self.bits // 8)

    def _below_half(self, like: Tensor) -> Tensor:
        """Draw random numbers in (-1/2, 1/2), shaped `like`.

        Each number has 8 random bits, which are sufficient, and 8 numbers are drawn at a time, which is much faster.
        """
        words = torch.empty(like.numel() // 8, dtype=torch.int64, device=like.device)
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.int8).view(like.shape).float().add_(0.5).mul_(2.0**-8)


def int8(coding: Coding) -> Quantise:
    """Create the codec of `compress=int8`."""
    return Quantise(8, coding.generator)


def int4(coding: Coding) -> Quantise:
    """Create the codec of `compress=int4`."""
    return Quantise(4, coding.generator)


class Sign:
    """One-bit codec: each number's sign, times its block's mean absolute value.

    Each block of 256 numbers has a bf16 scale, so a number takes 1.0625 bits (Seide et al., 2014, "1-Bit Stochastic
    Gradient Descent", Interspeech).

    With error feedback, training converges if the steps are small (Karimireddy et al., 2019, arXiv:1901.09847), because
    the large coding error is applied some steps late. With a learning rate close to the limit of uncompressed training,
    training diverges, especially with momentum.
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
        """View the signs and the scales.

        Bit i of byte j is the sign of number i * numel / 8 + j.
        """
        return coded[:, : numel // 8], section(coded, self._scales_at(numel), numel // self.block, torch.bfloat16)

    def _scales_at(self, numel: int) -> int:
        return aligned(numel // 8)


def one_bit(coding: Coding) -> Sign:
    """Create the codec of `compress=1bit`."""
    return Sign()


_LANES = 256  # the first search of a block uses 256 lanes of 16 numbers


class TopK:
    """Codec that keeps the numbers furthest from 0 in each block of 4096.

    The codec keeps at least one number per block, and decodes all other numbers as 0 (Aji & Heafield, 2017, "Sparse
    Communication for Distributed Gradient Descent", arXiv:1704.05021). Numbers are selected per block instead of per
    tensor, as in Chen et al., 2020, "ScaleCom" (arXiv:2104.11125). Therefore an index takes 2 bytes, and all messages
    have the same length.

    Args:
        share: fraction of numbers to keep, above 0 and at most 1.
        numbers: codec of the kept numbers.
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
        """Find the indices of the largest numbers of each block, shape (k, blocks, kept).

        The largest numbers are in the `kept` lanes with the largest maxima. On a CPU, the slow search is therefore
        limited to these lanes. On a GPU, the search is fast.
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
    """Create the codec of `compress=topk:SHARE`."""
    assert coding.numbers is not None
    return TopK(coding.value, coding.numbers)
