"""Parameters in flat tensors, one per collective: the whole model, or one fragment after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from paceline.comm.bucket import Memory
from paceline.partition import contiguous


@dataclass
class FlatParameters:
    """Parameters with their place in one flat tensor, to and from which values are copied.

    Attributes:
        values: 1-D, of one dtype.
        views: each parameter's part of `values`, in its shape.
    """

    parameters: list[Tensor]
    values: Tensor
    views: list[Tensor]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], values: Tensor) -> FlatParameters:
        """The place of `parameters`, in this order, in `values` of as many elements."""
        pieces = values.split([p.numel() for p in parameters])
        return cls(list(parameters), values, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)])

    @torch.no_grad()
    def copy_in(self) -> None:
        """Copy the parameters into the flat tensor."""
        torch._foreach_copy_(self.views, self.parameters)

    @torch.no_grad()
    def copy_out(self) -> None:
        """Copy the flat tensor to the parameters."""
        torch._foreach_copy_(self.parameters, self.views)

    @torch.no_grad()
    def add(self) -> None:
        """Add the flat tensor to the parameters."""
        torch._foreach_add_(self.parameters, self.views)


def flats(parameters: Sequence[nn.Parameter], memory: Memory) -> list[FlatParameters]:
    """A flat tensor for the parameters of each dtype."""
    return [
        FlatParameters.of(same_dtype, memory.empty(sum(p.numel() for p in same_dtype), same_dtype[0].dtype))
        for same_dtype in by_dtype(parameters)
    ]


def by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each dtype, in order."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def cut(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Divide parameters into at most `count` runs of neighbours, the largest as small as possible.

    Parameters stay whole, so a layer mostly stays together.
    """
    if not parameters:
        return []
    lengths = contiguous([p.nbytes for p in parameters], min(count, len(parameters)))
    left = iter(parameters)
    return [list(islice(left, length)) for length in lengths]
