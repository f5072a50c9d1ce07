"""Compressed sums over ranks, with the codec that a plan names.

The compression error is added to the next tensor of the same name (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.errors import CheckpointError, JobError, PlanError, SyncError
from paceline.job.spec import load_object
from paceline.planning.sync_info import CODECS, CompressSpec
from paceline.sync.compress.codecs import ALIGNMENT, Cast, Codec, CodedSum, Coding, Scratch, aligned, section
from paceline.sync.rule import Traffic, ring_bytes
from paceline.wire.status import refuse_aborted

_RANDOM = "random"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SumCoder(Protocol):
    """Sums of encoded tensors, computed by collectives or by servers.

    `messages` lists notable decisions as text.
    """

    messages: list[str]

    def sum(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` with its sum over the ranks; values after `views` are summed exactly."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback and random state."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""


class Compressor:
    """Compressed sums of flat tensors over a group.

    The compression error is added to the next tensor of the same name (error feedback).

    Tensors (or matrices, with PowerSGD) that the codec would not make smaller are summed exactly. A compressor is not
    thread-safe.

    Args:
        codec: codec as in the plan, such as `int8`, `topk:0.01+bf16` or `powersgd:4`.
        group: the ranks over which tensors are summed. Every rank must make the same calls in the same order.
        traffic: byte counters, to which every sum adds.
        seed: seed of the random rounding. Each rank draws different random numbers.

    Attributes:
        messages: notable decisions as text.
    """

    def __init__(self, codec: str, group: Group, traffic: Traffic, *, seed: int = 0) -> None:
        self.text, self.group, self.traffic = codec, group, traffic
        self.messages: list[str] = []
        CompressSpec.parse(codec)  # raises an error for an unknown codec
        self._generator = torch.Generator(group.device).manual_seed(seed * 2**20 + group.rank)
        self._scratch = Scratch(group.device)
        self._sums: dict[str, CodedSum] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}

    def sum(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` (1-D) with its sum over the group, bit-equal on all ranks.

        Args:
            name: key of the tensor's error feedback; a tensor must have the same name in every step.
            views: the parameters' views at the beginning of `flat`, in order. Values after the views (losses, votes)
                are summed exactly.

        If a number to encode is not finite on one rank, all encoded numbers become NaN on every rank, and error
        feedback does not change.

        Raises:
            PlanError: the codec does not support the dtype.
            SyncError: a rank did not arrive, or the tensor with this name had another size before.
        """
        if self.group.size == 1:
            return
        if name not in self._sums:
            self._sums[name] = self._sum_for(name, flat, views)
            self._take_over(name)
        summer = self._sums[name]
        coded = sum(view.numel() for view in views)
        if summer.numel != coded:
            raise SyncError(
                "compress.name_reused",
                '"{name}" had {before} numbers before and now has {now}. Give each tensor a different name.',
                name=name,
                before=summer.numel,
                now=coded,
            )
        with self.traffic.counting(self.group, ring_bytes(flat.nbytes, self.group.size)):
            summer.sum(flat, views)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback, PowerSGD start values, and random state."""
        state = {
            f"{name}/{key}": tensor
            for name, summer in self._sums.items()
            for key, tensor in summer.state_dict().items()
        }
        state |= {f"{name}/{key}": tensor for name, tensors in self._loaded.items() for key, tensor in tensors.items()}
        return {key: tensor.clone() for key, tensor in state.items()} | {_RANDOM: self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned on this rank, for the same group size.

        Raises:
            CheckpointError: the saved state of a tensor has another size. The error is raised at the tensor's first
                sum.
        """
        self._loaded = {}
        for key, tensor in state.items():
            if key == _RANDOM:
                self._generator.set_state(tensor.cpu())
            else:
                name, _, kind = key.rpartition("/")
                self._loaded.setdefault(name, {})[kind] = tensor.clone()
        for name in self._sums:
            self._take_over(name)

    def _take_over(self, name: str) -> None:
        loaded, own = self._loaded.pop(name, None), self._sums[name].state_dict()
        if loaded is None:
            return
        if {key: tensor.shape for key, tensor in loaded.items()} != {key: tensor.shape for key, tensor in own.items()}:
            raise CheckpointError(
                "compress.kept_in_checkpoint",
                'the state of compress={text} for "{name}" has shape {saved} in the checkpoint, but this run needs '
                "shape {here}. Continue with the plan and the number of ranks of the checkpoint, or with "
                "compress=none.",
                text=self.text,
                name=name,
                saved=_sizes(loaded),
                here=_sizes(own),
            )
        for key, tensor in own.items():
            tensor.copy_(loaded[key])

    def _sum_for(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> CodedSum:
        """Return a tensor's encoded sum, or its exact sum if encoding saves no bytes."""
        group, numel = self.group, sum(view.numel() for view in views)
        plain = _Plain(group, numel)
        if not views:
            return plain
        if flat.dtype not in _FLOATS:
            raise PlanError(
                "compress.dtype",
                'compress={text} supports 32-bit and 16-bit floats, but "{name}" is {dtype}. Use precision=fp32 or '
                "bf16, or compress=none.",
                text=self.text,
                name=name,
                dtype=str(flat.dtype).removeprefix("torch."),
            )
        codec = made_codec(self.text, self._generator, group, flat, views, self.traffic, self._scratch)
        if codec is None:
            self.messages.append(
                f"compress={self.text}: no part of {name} is large enough to gain; it is summed as it is"
            )
            return plain
        if isinstance(codec, CodedSum):
            return codec
        coded_bytes = group.size * codec.nbytes(chunk_size(codec, numel, group.size))
        if coded_bytes >= numel * flat.element_size():
            size = f"{numel * flat.element_size()} bytes of {str(flat.dtype).removeprefix('torch.')}"
            self.messages.append(
                f"compress={self.text}: {name} is summed as it is, for its {size} would become {coded_bytes}"
            )
            return plain
        return Chunked(group, codec, numel, flat.numel() - numel, self.traffic, self._scratch)


def made_codec(
    text: str,
    generator: torch.Generator,
    group: Group,
    flat: Tensor,
    views: Sequence[Tensor],
    traffic: Traffic,
    scratch: Scratch,
) -> Codec | CodedSum | None:
    """Build the codec that a plan names, for one tensor.

    If the plan names two codecs, the second codec encodes the numbers that the first codec keeps. See `Coding` for the
    arguments.

    Raises:
        PlanError: the codec is unknown or cannot be created.
    """
    made: Codec | CodedSum | None = Cast(torch.float32)
    for name, value in reversed(CompressSpec.parse(text).codecs):
        numbers = made if CODECS[name].keeps_numbers and not isinstance(made, CodedSum) else None
        try:
            made = load_object(CODECS[name].codec)(
                Coding(value, numbers, generator, group, flat, views, traffic, scratch)
            )
        except (JobError, TypeError, ValueError) as error:
            raise PlanError(
                "compress.not_made",
                "compress={text}: the codec {codec} cannot be created: {error}",
                text=text,
                codec=CODECS[name].codec,
                error=error,
            ) from error
    return made


class _Plain:
    def __init__(self, group: Group, numel: int) -> None:
        self.group, self.numel = group, numel

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        self.group.all_reduce(flat)

    def state_dict(self) -> dict[str, Tensor]:
        return {}


def _sizes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in sorted(tensors.items())) or "nothing"


class Chunked:
    """Compressed sum of a tensor's first `numel` numbers, and exact sum of the others.

    The tensor ends with `exact` numbers that are summed exactly.

    Between steps, the object keeps one fp32 number per encoded number for this rank's coding errors. On n ranks, the
    object also keeps 1/n as many numbers for the coding errors of the sum.
    """

    def __init__(self, group: Group, codec: Codec, numel: int, exact: int, traffic: Traffic, scratch: Scratch) -> None:
        self.phases = TwoPhase(group, codec, numel, exact)
        self.numel, self.traffic, self.scratch = numel, traffic, scratch
        self.error = torch.zeros(group.size, self.phases.chunk, device=group.device)
        self.sum_error = torch.zeros(self.phases.chunk, device=group.device)

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        coded, tail = self.scratch.get("coded", self.phases.numel), flat[self.numel :]
        torch.add(flat[: self.numel], self.error.view(-1)[: self.numel], out=coded[: self.numel])
        coded[self.numel :].zero_()
        exact = self.scratch.filled("exact", self.phases.share * len(self.error), tail)
        signal = square(coded)
        finite = math.isfinite(signal)
        rows = coded.view_as(self.error)
        done = self.phases.sum(
            rows, exact.view(len(rows), -1), finite=finite, error=self.error, sum_error=self.sum_error
        )
        tail.copy_(exact[: len(tail)])
        if not done:
            flat[: self.numel] = math.nan
            return
        self.phases.read(flat[: self.numel])
        self.traffic.signal_square += signal
        self.traffic.error_square += square(self.error.view(-1))

    def state_dict(self) -> dict[str, Tensor]:
        return {"error": self.error, "sum_error": self.sum_error}


def square(numbers: Tensor) -> float:
    """Return the squared L2 norm of a flat fp32 tensor.

    The result is not finite if an element is not finite.
    """
    total = float(torch.dot(numbers, numbers))
    if math.isfinite(total) or not bool(torch.isfinite(numbers).all()):
        return total
    return float(numbers.cpu().double().square().sum())  # the numbers are finite but large


class TwoPhase:
    """Sum of an encoded part and an exact part over ranks, in the same messages.

    Each rank sums one chunk. First, every rank sends each chunk to the rank that sums it. Then every rank sends the sum
    of its chunk to all ranks.

    On n ranks, each rank sends 2 (n - 1) / n of the encoded size, in two phases. All ranks decode the same bytes, so
    the results are bit-equal. Chunks are added in fp32.

    Args:
        coded: count of encoded numbers.
        exact: count of numbers that are summed exactly.

    Attributes:
        chunk: count of encoded numbers that one rank sums. The encoded part has shape (size, chunk), padded with zeros.
        share: count of exact numbers that one rank sums.
        numel: count of all encoded numbers, including the padding.
    """

    def __init__(self, group: Group, codec: Codec, coded: int, exact: int) -> None:
        self.group, self.codec = group, codec
        self.chunk = chunk_size(codec, coded, group.size)
        self.share = -(-exact // group.size)
        self.numel = group.size * self.chunk
        self._exact_at = codec.nbytes(self.chunk)
        self._flag_at = self._exact_at + aligned(self.share * 4)
        messages = torch.zeros(2, group.size, self._flag_at + ALIGNMENT, dtype=torch.uint8, device=group.device)
        self._own, self._theirs = messages
        self._piece = torch.empty(self.chunk, device=group.device)

    def sum(
        self,
        coded: Tensor,
        exact: Tensor,
        *,
        finite: bool = True,
        error: Tensor | None = None,
        sum_error: Tensor | None = None,
    ) -> bool:
        """Sum `coded`, shape (size, chunk), and `exact`, shape (size, share), both fp32.

        `exact` is replaced with its sum. Call `read` for the sum of `coded`.

        Args:
            finite: True if all of this rank's encoded numbers are finite.
            error: output tensor for this rank's coding error, in the shape of `coded`.
            sum_error: tensor of shape (chunk,), which is added to this rank's sum and then set to the sum's coding
                error.

        Returns:
            True if the encoded numbers and their sums are finite on all ranks. If False, `exact` is still correct, but
                `read` must not be called, and the errors are unchanged.
        """
        me = self.group.rank
        for part in (slice(0, me), slice(me + 1, None)):  # a rank's own chunk is not encoded
            if self.chunk and len(coded[part]):
                self.codec.encode(coded[part], self._own[part, : self._exact_at])
        self._exact(self._own).copy_(exact)
        self._own[:, self._flag_at] = not finite
        others = [r for r in range(self.group.size) if r != me]
        self.group.exchange([(r, self._own[r]) for r in others], [(r, self._theirs[r]) for r in others])
        self._theirs[me] = self._own[me]
        finite = not bool(self._theirs[:, self._flag_at].any())
        refuse_aborted()  # a kernel that decodes undefined indices may fail, which ends the process

        total = self._add_up(coded[me], sum_error)
        finite = finite and bool(torch.isfinite(total.sum()))
        self._own[me, self._flag_at] = not finite
        if self.chunk:
            self.codec.encode(total.view(1, -1), self._own[me : me + 1, : self._exact_at])
        self.group.exchange([(r, self._own[me]) for r in others], [(r, self._theirs[r]) for r in others])
        self._theirs[me] = self._own[me]
        exact.copy_(self._exact(self._theirs))
        finite = not bool(self._theirs[:, self._flag_at].any())
        refuse_aborted()
        if not finite:
            return False
        if error is not None:
            for r in others:
                torch.sub(coded[r], self._decoded(self._own[r]), out=error[r])
            error[me].zero_()
        if sum_error is not None:
            torch.sub(total, self._decoded(self._own[me]), out=sum_error)
        return True

    def read(self, sums: Tensor) -> None:
        """Overwrite `sums` with the sums of the encoded numbers, bit-equal on every rank.

        `sums` is 1-D and has any floating dtype.
        """
        for r, part in enumerate(sums.split(self.chunk)):
            if part.dtype is torch.float32 and len(part) == self.chunk:
                self.codec.decode(self._theirs[r : r + 1, : self._exact_at], part.view(1, -1))
            else:
                part.copy_(self._decoded(self._theirs[r])[: len(part)])

    def _add_up(self, own: Tensor, sum_error: Tensor | None) -> Tensor:
        total = own.clone() if sum_error is None else own + sum_error
        for r in range(self.group.size):
            if r != self.group.rank and self.chunk:
                total.add_(self._decoded(self._theirs[r]))
        self._exact(self._own)[self.group.rank] = self._exact(self._theirs).sum(dim=0)
        return total

    def _decoded(self, message: Tensor) -> Tensor:
        """Decode one message; the result is valid until the next call."""
        self.codec.decode(message[: self._exact_at].view(1, -1), self._piece.view(1, -1))
        return self._piece

    def _exact(self, messages: Tensor) -> Tensor:
        return section(messages, self._exact_at, self.share, torch.float32)


def chunk_size(codec: Codec, numel: int, ranks: int) -> int:
    """Return the count of encoded numbers per rank, a multiple of the block size."""
    return -(-numel // (ranks * codec.block)) * codec.block
