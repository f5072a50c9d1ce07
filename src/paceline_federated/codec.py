"""Coded updates and weights, by the codecs of synchronisation rules, without error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import JobError, PlanError
from paceline.planning.sync_info import CODECS, CompressSpec
from paceline.sync.compress.alone import MessageCodec
from paceline_federated.order import one_key


class UpdateCodec:
    """Codes flat tensors of one length. The random rounding follows from the seed and the numbers given with each.

    Args:
        text: as in a plan's `compress=`, e.g. `int8`, `topk:0.01+bf16`; or `none`.
        numel: numbers of a tensor.
        weights: the tensors are weights, of which every number is needed.

    Attributes:
        exact: nothing is coded.
        nbytes: bytes of a coded tensor.

    Raises:
        JobError: an unknown codec, or one that does not code one client's numbers by themselves.
    """

    def __init__(self, text: str, numel: int, *, seed: int, weights: bool = False, dtype: torch.dtype) -> None:
        self.text, self.numel, self.seed, self.dtype = text, numel, seed, dtype
        self.exact = text == "none"
        self.nbytes = numel * dtype.itemsize
        if self.exact:
            return
        key = "federate.compress_down" if weights else "federate.compress"
        self._generator = torch.Generator()
        try:
            self._codec = MessageCodec(text, numel, self._generator)
        except PlanError as error:
            raise JobError(f"{key}: {error}") from None
        if weights and any(CODECS[name].keeps_numbers for name, _ in CompressSpec.parse(text).codecs):
            raise JobError(f"{key}: {text} sends some numbers only, and clients need every weight; take bf16 or int8")
        plain, self.nbytes = self.nbytes, self._codec.nbytes
        if self.nbytes >= plain:
            raise JobError(
                f"{key}: {text} would send {self.nbytes} bytes in the place of {plain}; leave it out for a model of "
                f"{numel} numbers"
            )

    def encode(self, flat: Tensor, *numbers: int) -> Tensor:
        """A tensor (numel,) as bytes, uint8; `numbers` are those of round and client."""
        if self.exact:
            return flat.detach().contiguous().view(torch.uint8)
        self._generator.manual_seed(one_key(self.seed, *numbers))
        return self._codec.encode(flat)

    def decode(self, coded: Tensor) -> Tensor:
        """The tensor that `encode` kept, (numel,)."""
        if self.exact:
            return coded.view(self.dtype)
        return self._codec.decode(coded).to(self.dtype)

    def round_trip(self, flat: Tensor, *numbers: int) -> Tensor:
        """The tensor that the other end gets."""
        return flat if self.exact else self.decode(self.encode(flat, *numbers))
