"""Optimizers for large batches (LARS and LAMB), and the step that all optimizers of the zoo share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, overload

import torch
from torch import Tensor


class Norms(Protocol):
    """Ranks that together compute norms of parameters, of which each rank holds a part."""

    def norms(self, parameters: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the L2 norms of whole tensors, as one vector for each entry of `tensors`."""
        ...


class StepOptimizer(torch.optim.Optimizer):
    """Optimizer whose subclasses define only the update of the parameters."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimizer step.

        If `closure` is given, it first computes the loss and the gradients, and its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Change the parameters that have a gradient, and the state; gradients are not recorded."""


class Layerwise(StepOptimizer):
    """Optimizer that scales the step of each parameter by norms.

    A step changes neither weights nor state before all norms are known, so a step that was interrupted in the exchange
    with other ranks can be repeated.

    Attributes:
        ranks: the ranks that hold parts of the same parameters; None if this rank holds whole parameters.
    """

    ranks: Norms | None = None

    def update(self) -> None:
        """See `StepOptimizer.update`."""
        parts = [(group, *part) for group in self.param_groups for part in _adapted_and_exempt(group["params"])]
        directions = [self._directions(parameters, group, adapted) for group, parameters, adapted in parts]
        weight_norms, norms = self._norms(
            [p for _, parameters, adapted in parts if adapted for p in parameters],
            [d for (*_, adapted), own in zip(parts, directions, strict=True) if adapted for d in own],
        )
        at = 0
        for (group, parameters, adapted), own in zip(parts, directions, strict=True):
            end = at + len(own) if adapted else at
            ratios = self._ratios(weight_norms[at:end], norms[at:end], group) if adapted else None
            self._update(parameters, own, ratios, group)
            at = end

    @abstractmethod
    def _directions(self, parameters: list[Tensor], group: dict[str, Any], adapted: bool) -> list[Tensor]:
        """Return tensors whose norms determine the steps, without changing the state."""

    @abstractmethod
    def _ratios(self, weight_norms: Tensor, norms: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the factor of each parameter's step."""

    @abstractmethod
    def _update(
        self, parameters: list[Tensor], directions: list[Tensor], ratios: Tensor | None, group: dict[str, Any]
    ) -> None:
        """Change the state and the parameters."""

    def _norms(self, parameters: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        if self.ranks is not None:
            return self.ranks.norms(parameters, [parameters, directions])
        return [
            torch.stack(list(torch._foreach_norm(own))) if own else torch.empty(0) for own in (parameters, directions)
        ]


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg, 2017, arXiv:1708.03888, algorithm 1).

    Each parameter's step is scaled by `trust * |w| / (|g| + weight_decay * |w|)`. Parameters with fewer than two
    dimensions (biases, norms) are neither scaled nor decayed, as is usual with LARS, because their norms mean little
    and decay harms them.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def _directions(self, parameters: list[Tensor], group: dict[str, Any], adapted: bool) -> list[Tensor]:
        return [_gradient(p) for p in parameters]

    def _ratios(self, weight_norms: Tensor, norms: Tensor, group: dict[str, Any]) -> Tensor:
        ratios = group["trust"] * weight_norms / (norms + group["weight_decay"] * weight_norms)
        return torch.where((weight_norms > 0) & (norms > 0), ratios, 1.0)

    def _update(
        self, parameters: list[Tensor], directions: list[Tensor], ratios: Tensor | None, group: dict[str, Any]
    ) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        velocity: list[Tensor] = [self.state[p]["momentum"] for p in parameters]
        if ratios is not None:
            decayed = torch._foreach_add(directions, parameters, alpha=group["weight_decay"])
            directions = _scaled(list(decayed), ratios)
        torch._foreach_mul_(velocity, group["momentum"])
        torch._foreach_add_(velocity, directions, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocity)


class LAMB(Layerwise):
    """Layer-wise adaptive moments for batch training (You et al., 2020, arXiv:1904.00962, algorithm 2).

    A step is Adam's step with bias correction plus decoupled weight decay. It is scaled by the ratio of the parameter's
    norm to the step's norm. Parameters with fewer than two dimensions (biases, norms) are neither scaled nor decayed,
    as in the authors' BERT training, so their update is the update of Adam.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._moved: dict[Tensor, dict[str, Tensor]] = {}

    def _directions(self, parameters: list[Tensor], group: dict[str, Any], adapted: bool) -> list[Tensor]:
        for p in parameters:
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), mean=torch.zeros_like(p), square=torch.zeros_like(p))
        means, squares = self._moments(parameters, group)
        # the step counters are on the CPU, so reading them does not wait for a device
        steps = [self.state[p]["step"].item() + 1 for p in parameters]
        beta1, beta2 = group["betas"]
        scale = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        updates = list(torch._foreach_div(means, [1 - beta1**step for step in steps]))
        torch._foreach_div_(updates, scale)
        if adapted:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        return updates

    def _ratios(self, weight_norms: Tensor, norms: Tensor, group: dict[str, Any]) -> Tensor:
        return torch.where((weight_norms > 0) & (norms > 0), weight_norms / norms, 1.0)

    def _update(
        self, parameters: list[Tensor], directions: list[Tensor], ratios: Tensor | None, group: dict[str, Any]
    ) -> None:
        for p in parameters:
            self.state[p]["step"] += 1
            self.state[p].update(self._moved.pop(p, {}))
        scaled = directions if ratios is None else _scaled(directions, ratios)
        torch._foreach_add_(parameters, scaled, alpha=-group["lr"])

    def _moments(self, parameters: list[Tensor], group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the moments of this step.

        They replace the moments in the state at once, or in `_update` if the step could still be interrupted.
        """
        gradients = [_gradient(p) for p in parameters]
        means: list[Tensor] = [self.state[p]["mean"] for p in parameters]
        squares: list[Tensor] = [self.state[p]["square"] for p in parameters]
        if self.ranks is not None:
            means, squares = [mean.clone() for mean in means], [square.clone() for square in squares]
            moved = ({"mean": mean, "square": square} for mean, square in zip(means, squares, strict=True))
            self._moved |= dict(zip(parameters, moved, strict=True))
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        return means, squares


def _adapted_and_exempt(parameters: list[Tensor]) -> list[tuple[list[Tensor], bool]]:
    """Yield parameters with gradients: True for matrices and filters, False for biases and norms."""
    present = [p for p in parameters if p.grad is not None]
    parts = [([p for p in present if p.dim() > 1], True), ([p for p in present if p.dim() <= 1], False)]
    return [(part, adapted) for part, adapted in parts if part]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # `_adapted_and_exempt` has excluded parameters without a gradient
    return parameter.grad


def _scaled(tensors: list[Tensor], ratios: Tensor) -> list[Tensor]:
    return list(torch._foreach_mul(tensors, list(ratios.unbind())))
