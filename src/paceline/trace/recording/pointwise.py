"""Check that an autograd function is element-wise, so that ranks may run it on shards."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operations without the tag `pointwise` that keep every element's position, or only allocate.
_IN_PLACE = (
    "detach",
    "alias",
    "clone",
    "_to_copy",
    "empty_like",
    "zeros_like",
    "ones_like",
    "new_empty_strided",
    "empty_strided",
)


def is_pointwise(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a function's results and gradients are element-wise, whatever the shape.

    Constants must be the same for any shape.

    The function and its backward pass are run on tensors without data, of the given shape and of a larger one.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors or any(x.shape != tensors[0].shape or not x.dim() for x in tensors):
        return False
    shape = tensors[0].shape
    steps = [_steps(function, args, kwargs, size) for size in (shape, torch.Size(n + 1 for n in shape))]
    return steps[0] is not None and steps[0] == steps[1]


def _steps(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size
) -> list[Any] | None:
    """Operations of both passes with their constants; None if one is not pointwise or fails."""
    found: list[list[Any] | None] = [None]

    def run() -> None:
        try:
            found[0] = _run(function, args, kwargs, shape)
        except Exception:  # noqa: BLE001 - any error of the function's code: nothing is shown then
            found[0] = None

    # A thread of its own, because a trace is active in this one, below autograd.
    thread = threading.Thread(target=run, name="pointwise")
    thread.start()
    thread.join()
    return found[0]


def _run(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size
) -> list[Any] | None:
    def without_data(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.is_floating_point() or x.is_complex())

    args, kwargs = tree_map(without_data, (args, kwargs))
    with _Pointwise(shape) as seen:
        outputs = [y for y in tree_leaves(function.apply(*args, **kwargs)) if isinstance(y, Tensor) and y.requires_grad]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs], allow_unused=True)
    return seen.steps if seen.holds and all(y.shape == shape for y in outputs) else None


class _Pointwise(TorchDispatchMode):
    """Dispatch mode that checks that every operation is pointwise, on one shape and scalars."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.holds, self.steps = shape, True, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs, result))
        shaped = all(x.shape in (self.shape, torch.Size()) for x in leaves if isinstance(x, Tensor))
        self.holds &= shaped and (torch.Tag.pointwise in func.tags or name in _IN_PLACE)
        self.steps.append(
            (name, [x for x in leaves if isinstance(x, (int, float, complex))] if name not in _IN_PLACE else [])
        )
        return result
