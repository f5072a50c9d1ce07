"""Compression of messages from a single rank, without collective operations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.errors import CheckpointError, PlanError, ServerRefused
from paceline.sync.compress.codecs import CodedSum, Scratch
from paceline.sync.compress.compressor import made_codec, square
from paceline.sync.rule import Traffic

_RANDOM = "random"


class MessageCodec:
    """Codec for flat tensors of one length, without error feedback.

    Args:
        text: codec as in a plan's `compress=`: `int8`, `topk:0.01+bf16`.
        numel: number of values in each tensor.
        generator: random generator for rounding.

    Attributes:
        nbytes: size of an encoded tensor in bytes.

    Raises:
        PlanError: the codec is unknown, or the codec supports only sums over ranks.
    """

    def __init__(self, text: str, numel: int, generator: torch.Generator) -> None:
        flat = torch.zeros(1).expand(numel)
        made = made_codec(text, generator, Group(), flat, [flat], Traffic(), Scratch(torch.device("cpu")))
        if made is None or isinstance(made, CodedSum):
            raise PlanError(
                "compress.code_of_sums",
                "{text} compresses sums over ranks, but this message comes from one rank without a sum. Use int8 or "
                "topk:0.01.",
                text=text,
            )
        self._codec, self.numel = made, numel
        self._padded = -(-numel // made.block) * made.block
        self.nbytes = made.nbytes(self._padded)

    def encode(self, flat: Tensor) -> Tensor:
        """Encode a tensor of shape (numel,) as a uint8 tensor of shape (nbytes,)."""
        rows = torch.zeros(1, self._padded)
        rows[0, : self.numel] = flat
        coded = torch.zeros(1, self.nbytes, dtype=torch.uint8)
        self._codec.encode(rows, coded)
        return coded[0]

    def decode(self, coded: Tensor) -> Tensor:
        """Decode the result of `encode` to an fp32 tensor of shape (numel,)."""
        rows = torch.empty(1, self._padded)
        self._codec.decode(coded.unsqueeze(0), rows)
        return rows[0, : self.numel]


class Feedback:
    """Encoder of named tensors, with error feedback.

    The compression error is added to the next tensor of the same name.

    Args:
        seed: seed of the random rounding.
        traffic: counters to which compression errors are added; None disables the counters.
    """

    def __init__(self, text: str, *, seed: int = 0, traffic: Traffic | None = None) -> None:
        self.text, self._traffic = text, traffic
        self._generator = torch.Generator().manual_seed(seed)
        self._codecs: dict[int, MessageCodec] = {}
        self._errors: dict[str, Tensor] = {}

    def encode(self, name: str, flat: Tensor) -> Tensor | None:
        """Encode a flat tensor.

        The result is None if the encoded tensor would not be smaller, or if a value is not finite.

        Raises:
            CheckpointError: the checkpoint's compression error for this name and the tensor have different lengths.
        """
        codec = self._codecs.get(flat.numel())
        if codec is None:
            codec = self._codecs[flat.numel()] = MessageCodec(self.text, flat.numel(), self._generator)
        if codec.nbytes >= flat.nbytes:
            return None
        wanted = flat.float()
        if (error := self._errors.get(name)) is not None:
            if error.shape != wanted.shape:
                raise CheckpointError(
                    "compress.kept_size",
                    "the state of compress={text} for {name} has {kept} numbers, but the tensor has {here}. "
                    "Continue with the plan that wrote the state, or with compress=none.",
                    text=self.text,
                    name=name,
                    kept=error.numel(),
                    here=wanted.numel(),
                )
            wanted = wanted + error
        signal = square(wanted)
        if not math.isfinite(signal):
            return None
        coded = codec.encode(wanted)
        error = self._errors[name] = wanted - codec.decode(coded)
        if self._traffic is not None:
            self._traffic.signal_square += signal
            self._traffic.error_square += square(error)
        return coded

    def state_dict(self) -> dict[str, Tensor]:
        """Return the compression errors by name, and the random state."""
        return {name: error.clone() for name, error in self._errors.items()} | {_RANDOM: self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        self._errors = {name: tensor.clone() for name, tensor in state.items() if name != _RANDOM}
        if _RANDOM in state:
            self._generator.set_state(state[_RANDOM].cpu())


def decoder(text: str) -> Callable[[Tensor, int], Tensor]:
    """Return a function that decodes a codec's messages.

    The function takes the bytes and the number of values, and returns an fp32 tensor. The function raises ServerRefused
    if the number of bytes is wrong.
    """
    codecs: dict[int, MessageCodec] = {}

    def decode(coded: Tensor, numel: int) -> Tensor:
        codec = codecs.get(numel)
        if codec is None:
            codec = codecs[numel] = MessageCodec(text, numel, torch.Generator())
        if coded.dtype is not torch.uint8 or coded.shape != (codec.nbytes,):
            raise ServerRefused(
                "compress.size_differs",
                "{text} encodes {numel:,} numbers in {nbytes:,} bytes, but {found} bytes of {dtype} were received",
                numel=numel,
                nbytes=codec.nbytes,
                text=text,
                found=tuple(coded.shape),
                dtype=coded.dtype,
            )
        return codec.decode(coded)

    return decode
