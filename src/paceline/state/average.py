"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# The average is stored under this key in the optimizer's state, so that checkpoints, peers and other plans include it.
AVERAGE = "ema"


class WeightAverage:
    """Moving average of an optimizer's weights over its updates.

    The average begins with the first weights. After each update, it moves towards the new weights by the fraction `1 -
    decay` of the difference. The average is elementwise, so each shard of a model has a shard of the average. For a
    weight without updates, no average is stored, because the average equals the weight.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.optimizer, self.decay = optimizer, decay
        self._first: dict[Tensor, Tensor] = {}  # weights before their first update

    def before_update(self) -> None:
        """Copy the weights that are about to get their first update."""
        self._first = {p: p.detach().clone() for p in self._updated() if AVERAGE not in self.optimizer.state.get(p, {})}

    def after_update(self) -> None:
        """Move the average towards the new weights."""
        # stored only after the update, because some optimizers mistake any existing state for initialized state
        for parameter, first in self._first.items():
            self.optimizer.state[parameter][AVERAGE] = first
        self._first = {}
        held = self.of_parameters()
        averages, weights = list(held.values()), [p.detach() for p in held]
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the averaged weights inside the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def of_parameters(self) -> dict[Tensor, Tensor]:
        """Return the average of every parameter that has one."""
        state = self.optimizer.state
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {p: state[p][AVERAGE] for p in held if p in state and AVERAGE in state[p]}

    def _updated(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _exchange(self) -> None:
        for parameter, average in self.of_parameters().items():
            # Changes of `data` do not increase the version counter, by which changes of an interrupted step are
            # detected.
            weights = parameter.data.clone()
            parameter.data.copy_(average)
            average.copy_(weights)


def is_average(full_name: str) -> bool:
    """Return True if this name in a state belongs to the average of a parameter."""
    return full_name.startswith("optimizer/") and full_name.endswith(f"/{AVERAGE}")


def drop_average(optimizer: torch.optim.Optimizer) -> None:
    """Delete the average of an earlier run, which would no longer be updated."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
