"""Optimizers on stacked parameters, one row per client, which do not mix rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.job.optimizer import OptimizerSpec


class StackedOptimizer:
    """Steps of a job's optimizer on stacks of parameters (k, …), begun anew.

    Attributes:
        stacks: the parameters, which `narrow` replaces.
    """

    def __init__(self, spec: OptimizerSpec, lr: float, stacks: list[Tensor]) -> None:
        self.spec, self.lr, self.stacks = spec, lr, stacks
        self._velocity: list[Tensor] = []
        self._adam: torch.optim.Optimizer | None = None
        if spec.name != "sgd":
            self._parameters = [nn.Parameter(stack) for stack in stacks]
            self._adam = spec.model_copy(update={"lr": lr}).build(self._parameters)

    def step(self, gradients: list[Tensor]) -> None:
        """One step on gradients of the stacks' shapes."""
        if self._adam is not None:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._adam.step()
            return
        if self.spec.weight_decay:
            gradients = list(torch._foreach_add(gradients, self.stacks, alpha=self.spec.weight_decay))
        if self.spec.momentum:
            gradients = self._with_momentum(gradients)
        torch._foreach_add_(self.stacks, gradients, alpha=-self.lr)

    def narrow(self, rows: int) -> None:
        """Go on with the first rows only."""
        if rows >= len(self.stacks[0]):
            return
        self.stacks = [stack[:rows] for stack in self.stacks]
        self._velocity = [velocity[:rows] for velocity in self._velocity]
        if self._adam is not None:
            for parameter, stack in zip(self._parameters, self.stacks, strict=True):
                state = self._adam.state[parameter]
                shape = parameter.shape
                parameter.grad = None
                parameter.data = stack
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == shape:
                        state[key] = value[:rows]

    def _with_momentum(self, gradients: list[Tensor]) -> list[Tensor]:
        if not self._velocity:
            self._velocity = [gradient.clone() for gradient in gradients]
        else:
            torch._foreach_mul_(self._velocity, self.spec.momentum)
            torch._foreach_add_(self._velocity, gradients)
        if not self.spec.nesterov:
            return self._velocity
        return list(torch._foreach_add(gradients, self._velocity, alpha=self.spec.momentum))


def clip(gradients: list[Tensor], most: float) -> list[Tensor]:
    """Gradients (k, …) of which each client's L2 norm is at most `most`."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]
