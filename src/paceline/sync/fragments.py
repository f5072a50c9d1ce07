"""Parameters in flat tensors, which one collective each carries: a whole model at once, or one fragment of it after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm.bucket import Memory


@dataclass
class Flat:
    """The place of some parameters in one flat tensor. They stay where they are: values are copied here and back.

    Attributes:
        values: 1-D, of one dtype.
        views: of each parameter, its part of `values`, in its shape.
    """

    parameters: list[Tensor]
    values: Tensor
    views: list[Tensor]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], values: Tensor) -> Flat:
        """The place of `parameters`, in this order, in `values`, which has as many elements as they have."""
        pieces = values.split([p.numel() for p in parameters])
        return cls(list(parameters), values, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)])

    @torch.no_grad()
    def take(self) -> None:
        """Copy the parameters here."""
        torch._foreach_copy_(self.views, self.parameters)

    @torch.no_grad()
    def give(self) -> None:
        """Copy what is here to the parameters."""
        torch._foreach_copy_(self.parameters, self.views)

    @torch.no_grad()
    def add(self) -> None:
        """Add what is here to the parameters."""
        torch._foreach_add_(self.parameters, self.views)


def flats(parameters: Sequence[nn.Parameter], memory: Memory) -> list[Flat]:
    """A flat tensor for the parameters of each dtype."""
    return [Flat.of(alike, memory.empty(sum(p.numel() for p in alike), alike[0].dtype)) for alike in by_dtype(parameters)]


def by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each dtype, in order."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def cut(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """At most `count` runs of neighbours, of which the largest is as small as whole parameters allow: a layer stays together, mostly."""
    low, high = max((p.nbytes for p in parameters), default=0), sum(p.nbytes for p in parameters)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(parameters, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _filled(parameters, low)


def _filled(parameters: Sequence[nn.Parameter], limit_bytes: int) -> list[list[nn.Parameter]]:
    """Runs of neighbours, each as long as the limit allows."""
    runs: list[list[nn.Parameter]] = []
    size = limit_bytes
    for parameter in parameters:
        if not runs or size + parameter.nbytes > limit_bytes:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += parameter.nbytes
    return runs
