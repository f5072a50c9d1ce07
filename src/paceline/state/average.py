"""Copies of the weights in an optimizer's state: moving averages, and weights before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

# Copies are stored under these keys in the optimizer's state, so that checkpoints, peers and other plans include them.
AVERAGE, FIRST = "ema", "reference"


class FirstWeights:
    """The weights that an optimizer's parameters had before their first update.

    Each shard of a model has a shard of the copy. For a weight without updates, no copy is stored, because the copy
    equals the weight. Frozen weights are therefore never copied.
    """

    key = FIRST

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._first: dict[Tensor, Tensor] = {}  # weights before their first update

    def before_update(self) -> None:
        """Copy the weights that are about to get their first update."""
        self._first = {
            p: p.detach().clone() for p in self._updated() if self.key not in self.optimizer.state.get(p, {})
        }

    def after_update(self) -> None:
        """Store the copies of `before_update`."""
        # stored only after the update, because some optimizers mistake any existing state for initialized state
        for parameter, first in self._first.items():
            self.optimizer.state[parameter][self.key] = first
        self._first = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the copied weights inside the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def of_parameters(self) -> dict[Tensor, Tensor]:
        """Return the copy of every parameter that has one."""
        state = self.optimizer.state
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {p: state[p][self.key] for p in held if p in state and self.key in state[p]}

    def named(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the copies by the names of their parameters."""
        found = self.of_parameters()
        return {name: found[p] for name, p in parameters.items() if p in found}

    def _updated(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _exchange(self) -> None:
        for parameter, stored in self.of_parameters().items():
            # Changes of `data` do not increase the version counter, by which changes of an interrupted step are
            # detected.
            weights = parameter.data.clone()
            parameter.data.copy_(stored)
            stored.copy_(weights)


class WeightAverage(FirstWeights):
    """Moving average of an optimizer's weights over its updates.

    The average begins with the first weights. After each update, it moves towards the new weights by the fraction `1 -
    decay` of the difference. The average is elementwise.
    """

    key = AVERAGE

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        super().__init__(optimizer)
        self.decay = decay

    def after_update(self) -> None:
        """Move the average towards the new weights."""
        super().after_update()
        held = self.of_parameters()
        averages, weights = list(held.values()), [p.detach() for p in held]
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)


def is_average(full_name: str) -> bool:
    """Return True if this name in a state belongs to the average of a parameter."""
    return full_name.startswith("optimizer/") and full_name.endswith(f"/{AVERAGE}")


def drop_copies(optimizer: torch.optim.Optimizer, kept: set[str]) -> None:
    """Delete the copies of an earlier run, except the keys in `kept`.

    The deleted copies would no longer be updated.
    """
    for state in optimizer.state.values():
        for key in {AVERAGE, FIRST} - kept:
            state.pop(key, None)
