"""Sums over ranks that send fewer bytes, by the codec that a plan names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.errors import CheckpointError, JobError, PlanError, SyncError
from paceline.job.spec import load_object
from paceline.planning.sync_info import CODECS, CompressSpec
from paceline.sync.compress.chunked import Chunked, chunk_size
from paceline.sync.compress.codec import Codec, CodedSum, Coding, Scratch
from paceline.sync.compress.half import Cast
from paceline.sync.traffic import Traffic, ring_bytes

_RANDOM = "random"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SumCoder(Protocol):
    """Sums of coded tensors, by collectives or by servers. `messages`: decisions worth knowing, as text."""

    messages: list[str]

    def sum(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` by its sum over the ranks; what follows the views is summed exactly."""

    def state_dict(self) -> dict[str, Tensor]:
        """Error feedback and random state of this rank."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""


class Compressor:
    """Sums flat tensors over a group in coded form.

    What a code leaves out is added to the next tensor of its name (error feedback).

    A tensor that the codec would not make smaller is summed as it is, and so are the matrices that PowerSGD would not.
    Not for two threads at once.

    Args:
        codec: as in the plan: `int8`, `topk:0.01+bf16`, `powersgd:4`.
        group: the ranks; every one makes the same calls in the same order.
        traffic: its counts go up with every sum.
        seed: of the random rounding; each rank draws its own numbers.

    Attributes:
        messages: decisions worth knowing, as text.
    """

    def __init__(self, codec: str, group: Group, traffic: Traffic, *, seed: int = 0) -> None:
        self.text, self.group, self.traffic = codec, group, traffic
        self.messages: list[str] = []
        self._spec = CompressSpec.parse(codec)
        self._generator = torch.Generator(group.device).manual_seed(seed * 2**20 + group.rank)
        self._scratch = Scratch(group.device)
        self._sums: dict[str, CodedSum] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}

    def sum(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` (1-D) on all ranks by its sum over the group, the same bits everywhere.

        Args:
            name: what error feedback is kept under; the same for the same tensor at every step.
            views: the parameters' views of the beginning of `flat`, in order. What follows them (losses, votes) is
                summed exactly.

        If a coded number is not finite on some rank, all of them come out as NaN on every rank, and no error feedback
        changes.

        Raises:
            PlanError: the codec does not take the dtype.
            SyncError: a rank did not come; or a name stands for a tensor of another size than before.
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
                f'"{name}" stood for {summer.numel} numbers before and now for {coded}: give each tensor a '
                "name of its own"
            )
        with self.traffic.counting(self.group, ring_bytes(flat.nbytes, self.group.size)):
            summer.sum(flat, views)

    def state_dict(self) -> dict[str, Tensor]:
        """Error feedback, PowerSGD's start of the next iteration, and the random state of this rank."""
        state = {
            f"{name}/{key}": tensor
            for name, summer in self._sums.items()
            for key, tensor in summer.state_dict().items()
        }
        state |= {f"{name}/{key}": tensor for name, tensors in self._loaded.items() for key, tensor in tensors.items()}
        return {key: tensor.clone() for key, tensor in state.items()} | {_RANDOM: self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave on this rank of a group of the same size.

        Raises:
            CheckpointError: (at the first sum of a tensor) what was kept of it has another size.
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
                f'what compress={self.text} kept of "{name}" in the checkpoint does not fit: {_sizes(loaded)} '
                f"there, {_sizes(own)} here. "
                "Continue with the plan and the number of ranks that wrote it, or with compress=none"
            )
        for key, tensor in own.items():
            tensor.copy_(loaded[key])

    def _sum_for(self, name: str, flat: Tensor, views: Sequence[Tensor]) -> CodedSum:
        """The sum for a tensor: coded, or exact if coding would not make it smaller."""
        group, numel = self.group, sum(view.numel() for view in views)
        plain = _Plain(group, numel)
        if not views:
            return plain
        if flat.dtype not in _FLOATS:
            raise PlanError(
                f'compress={self.text} codes 32-bit and 16-bit floats; "{name}" is '
                f"{str(flat.dtype).removeprefix('torch.')}. "
                "Use precision=fp32 or bf16, or compress=none"
            )
        codec = self._codec(flat, views)
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

    def _codec(self, flat: Tensor, views: Sequence[Tensor]) -> Codec | CodedSum | None:
        """The plan's codec for a tensor; a second one codes what it keeps."""
        made: Codec | CodedSum | None = Cast(torch.float32)
        for name, value in reversed(self._spec.codecs):
            numbers = made if CODECS[name].keeps_numbers and not isinstance(made, CodedSum) else None
            coding = Coding(value, numbers, self._generator, self.group, flat, views, self.traffic, self._scratch)
            try:
                made = load_object(CODECS[name].codec)(coding)
            except (JobError, TypeError, ValueError) as error:
                raise PlanError(
                    f"compress={self.text}: the codec {CODECS[name].codec} cannot be made: {error}"
                ) from error
        return made


class _Plain:
    """Sums a tensor as it is."""

    def __init__(self, group: Group, numel: int) -> None:
        self.group, self.numel = group, numel

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        self.group.all_reduce(flat)

    def state_dict(self) -> dict[str, Tensor]:
        return {}


def _sizes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in sorted(tensors.items())) or "nothing"
