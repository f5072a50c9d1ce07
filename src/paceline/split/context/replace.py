"""Replacements within one module: of its forward pass, or of `F.scaled_dot_product_attention` in it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def replace_forward(module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Make `run(forward, …)` a module's forward pass; returns a function that undoes this."""
    before = module.__dict__.get("forward")
    inner = module.forward.__func__ if inspect.ismethod(module.forward) else type(module).forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(inner, self), *args, **kwargs)

    def undo() -> None:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before

    # bound, so that a deep copy of the module is bound to the copy
    module.__dict__["forward"] = MethodType(forward, module)
    return undo


def replace_attention(module: nn.Module, attend: Callable[..., Tensor]) -> Callable[[], None]:
    """Make `attend` a module's attention; returns a function that undoes this.

    It holds in recomputation and compiled code, too. It is called as `F.scaled_dot_product_attention`; its keywords
    beyond those are `scale` and `enable_gqa`.
    """
    mode = _OwnAttention(attend)

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return replace_forward(module, run)


class _OwnAttention(TorchFunctionMode):
    """Function mode that calls `attend` instead of torch's attention."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.attend if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))
