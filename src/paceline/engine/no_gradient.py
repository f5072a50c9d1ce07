"""Losses of parts that have no items: 0, with a gradient of exactly zero.

A mean over no items is 0/0. Replacing its value or multiplying it by 0 is not enough: the derivative of such a division
is NaN, so the gradient has to be stopped on its way. The backward pass still runs, because the hooks and collectives of
the parameters wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.planning.model.recorder import tensors_in


class NoGradient:
    """A loss whose value is 0 and whose gradient is exactly zero everywhere.

    Attributes:
        loss: the loss to call `backward` on, in the graph of the original loss.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        # AccumulateGrad nodes (those with a `variable`) belong to parameters, which other losses use too
        self._hooks = [n.register_prehook(_zeros) for n in graph_nodes(loss) if not hasattr(n, "variable")]

    def release(self) -> None:
        """Let gradients of other losses pass through the graph again (`retain_graph`)."""
        for hook in self._hooks:
            hook.remove()


def stop_gradient_unless(counts: Tensor, output: Any) -> None:
    """Zero the gradients that reach a model's output, unless `counts` (0-dimensional, on its device) is true.

    The value stays on the device, so the host does not wait for it.
    """
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: torch.where(counts, gradient, 0.0))


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


def graph_nodes(loss: Tensor, descends: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Iterate over the nodes of the autograd graph of a loss.

    The nodes below a node for which `descends` returns False are left out.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if descends(node):
                waiting += [below for below, _ in node.next_functions]
