"""Optimizers for large batches: LARS and LAMB."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor


class _Layerwise(torch.optim.Optimizer):
    """Optimizer with one update per layer.

    `_update` gets the parameters of a group whose steps are scaled by norms, and then the exempt parameters.
    """

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
        for group in self.param_groups:
            for parameters, adapted in _adapted_and_exempt(group["params"]):
                self._update(parameters, group, adapted)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], group: dict[str, Any], adapted: bool) -> None: ...


class LARS(_Layerwise):
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

    def _update(self, parameters: list[Tensor], group: dict[str, Any], adapted: bool) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        velocity: list[Tensor] = [self.state[p]["momentum"] for p in parameters]
        updates = [_gradient(p) for p in parameters]
        decay = group["weight_decay"]
        if adapted:
            weight_norms, gradient_norms = _norms(parameters), _norms(updates)
            ratios = group["trust"] * weight_norms / (gradient_norms + decay * weight_norms)
            ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
            updates = _scaled(list(torch._foreach_add(updates, parameters, alpha=decay)), ratios)
        torch._foreach_mul_(velocity, group["momentum"])
        torch._foreach_add_(velocity, updates, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocity)


class LAMB(_Layerwise):
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

    def _update(self, parameters: list[Tensor], group: dict[str, Any], adapted: bool) -> None:
        updates = self._adam(parameters, group)
        if adapted:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            weight_norms, update_norms = _norms(parameters), _norms(updates)
            ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
            updates = _scaled(updates, ratios)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _adam(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return Adam's bias-corrected directions."""
        for p in parameters:
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
        gradients = [_gradient(p) for p in parameters]
        means: list[Tensor] = [self.state[p]["mean"] for p in parameters]
        squares: list[Tensor] = [self.state[p]["square"] for p in parameters]
        # the step counters are on the CPU, so reading them does not wait for a device
        steps = [self.state[p]["step"].item() for p in parameters]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scale = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        updates = list(torch._foreach_div(means, [1 - beta1**step for step in steps]))
        torch._foreach_div_(updates, scale)
        return updates


def _adapted_and_exempt(parameters: list[Tensor]) -> list[tuple[list[Tensor], bool]]:
    """Yield parameters with gradients: True for matrices and filters, False for biases and norms."""
    present = [p for p in parameters if p.grad is not None]
    parts = [([p for p in present if p.dim() > 1], True), ([p for p in present if p.dim() <= 1], False)]
    return [(part, adapted) for part, adapted in parts if part]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # `_adapted_and_exempt` has excluded parameters without a gradient
    return parameter.grad


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms of all tensors in one vector."""
    return torch.stack(list(torch._foreach_norm(tensors)))


def _scaled(tensors: list[Tensor], ratios: Tensor) -> list[Tensor]:
    return list(torch._foreach_mul(tensors, list(ratios.unbind())))
