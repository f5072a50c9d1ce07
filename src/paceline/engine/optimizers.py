"""Several optimizers seen as one, by steps and checkpoints alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import CheckpointError


class Optimizers:
    """Several optimizers with the interface of one: parameter groups and states in order."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The states of all, by parameter."""
        together: dict[Tensor, Any] = {}
        for optimizer in self.optimizers:
            if shared := [p for p in optimizer.state if p in together]:
                raise CheckpointError(
                    f"a parameter of shape {tuple(shared[0].shape)} is stepped on by two optimizers, so its "
                    "state has no single name; "
                    "give each parameter to one optimizer"
                )
            together |= optimizer.state
        return together

    def step(self) -> None:
        """Step every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """State as `Optimizer.state_dict` gives it, parameters numbered over all."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, own in zip(self._firsts(), (o.state_dict() for o in self.optimizers), strict=True):
            states |= {first + number: state for number, state in own["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each optimizer its part of what `state_dict` said."""
        groups = list(state["param_groups"])
        for first, optimizer in zip(self._firsts(), self.optimizers, strict=True):
            own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            numbers = {number for group in own for number in group["params"]}
            optimizer.load_state_dict(
                {
                    "state": {number - first: value for number, value in state["state"].items() if number in numbers},
                    "param_groups": [
                        {**group, "params": [number - first for number in group["params"]]} for group in own
                    ],
                }
            )

    def _firsts(self) -> list[int]:
        firsts, count = [], 0
        for optimizer in self.optimizers:
            firsts.append(count)
            count += sum(len(group["params"]) for group in optimizer.param_groups)
        return firsts
