"""Weight gradients computed after the activation gradients, to fill a zero-bubble pipeline's idle time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeferredWeights:
    """Weight gradients of a stage's linear layers, deferred in a backward pass until requested.

    All other gradients come with the backward pass. torch's own split of it (`stage_backward_input`) finds the weights
    in the autograd graph; where tensors computed from weights reach several layers (T5's position bias) it raises or
    counts gradients twice (torch 2.13), so `dw_builder`, its hook for a custom split, is used.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._pending: list[Callable[[], None]] = []
        for module in stage.modules():
            if (
                isinstance(module, nn.Linear)
                and type(module).forward is nn.Linear.forward
                and "forward" not in module.__dict__
            ):
                module.__dict__["forward"] = partial(_linear, module, self._pending)

    def __call__(self) -> Callable[[], None]:
        """A function that computes the gradients deferred since the last call."""
        taken = list(self._pending)
        self._pending.clear()
        return partial(_compute, taken)


def _compute(pending: list[Callable[[], None]]) -> None:
    for compute in pending:
        compute()


def _linear(module: nn.Linear, pending: list[Callable[[], None]], x: Tensor) -> Tensor:
    # looked up once, as a parametrised weight is computed on access
    weight = module.weight
    # A computed weight gets its gradient in the backward pass; a hook on a deferred one would be called with None.
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf) or weight._backward_hooks:
        return F.linear(x, weight, module.bias)
    y: Tensor = _Linear.apply(x, weight, module.bias, pending)
    return y


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward pass defers the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pending: list[Callable[[], None]]) -> Tensor:
        y = F.linear(x, weight, bias)
        # under autocast y may have a narrower type than x
        ctx.save_for_backward(x.to(y.dtype))
        ctx.weight, ctx.pending, ctx.dtypes = weight, pending, (x.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        dy, (x,), weight = gradients[0], ctx.saved_tensors, ctx.weight
        of_x, of_bias = ctx.dtypes
        ctx.pending.append(partial(_add_gradient, weight, dy, x))
        dx = (dy @ weight.to(dy.dtype)).to(of_x) if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return dx, None, db, None


def _add_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        dw = (dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
    # runs the parameter's hooks, as any backward pass does
    torch.autograd.backward(weight, dw)
