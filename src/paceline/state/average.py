"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# The average is part of the optimizer's state, so checkpoints, peers and other plans handle it in the same way.
AVERAGE = "ema"


class WeightAverage:
    """Moving average of an optimizer's weights over its updates.

    It begins with the first weights, and moves by `1 - decay` of the difference after each update. It is elementwise,
    so each shard of a model has its shard of the average. A weight without updates has no stored average: its average
    is the weight itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.optimizer, self.decay = optimizer, decay
        self._first: dict[Tensor, Tensor] = {}  # weights before their first update

    def before_update(self) -> None:
        """Copy weights before their first update."""
        self._first = {p: p.detach().clone() for p in self._updated() if AVERAGE not in self.optimizer.state.get(p, {})}

    def after_update(self) -> None:
        """Move the average towards the new weights."""
        # only now: some optimizers mistake any existing state for initialized state
        for parameter, first in self._first.items():
            self.optimizer.state[parameter][AVERAGE] = first
        self._first = {}
        held = self.of_parameters()
        averages, weights = list(held.values()), [p.detach() for p in held]
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the parameters have the averaged weights."""
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
            # `data` does not change the version counter, by which an interrupted step is undone
            weights = parameter.data.clone()
            parameter.data.copy_(average)
            average.copy_(weights)


def is_average(full_name: str) -> bool:
    """Return True if a tensor of a state is the average of a parameter."""
    return full_name.startswith("optimizer/") and full_name.endswith(f"/{AVERAGE}")


def drop_average(optimizer: torch.optim.Optimizer) -> None:
    """Forget the average of an earlier run, which is no longer updated."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
