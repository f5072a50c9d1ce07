"""Gradients of a user's own loop: accumulated over passes, measured, and clipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.sync.rows import numbers_of

if TYPE_CHECKING:
    from paceline.split.apply import Split


@contextmanager
def summed_apart(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context of a backward pass without the gradients of earlier passes, which it adds again.

    Those are summed over the ranks already; a sum over the ranks within the context is without them.
    """
    earlier: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            earlier[parameter] = parameter.grad.clone()  # it may lie in the memory of the next sum
            parameter.grad = None
    yield
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def total_norm(parameters: Sequence[nn.Parameter], split: Split | None, group: Group) -> float:
    """L2 norm of these parameters' gradients; of the whole model's where it is divided."""
    if split is not None:
        square = split.gradient_square()
        group.all_reduce(square)
        return math.sqrt(float(square))
    gradients = numbers_of(parameters)
    return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0


def clip(parameters: Iterable[nn.Parameter], norm: float, largest: float | None) -> None:
    """Scale the gradients, whose L2 norm is `norm`, down to the norm `largest`."""
    if largest is not None and norm > largest:
        torch._foreach_mul_(numbers_of(parameters), largest / (norm + 1e-6))
