"""Replacement of `F.scaled_dot_product_attention` within chosen modules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.split.context.replace_forward import replace_forward


class OwnAttention(TorchFunctionMode):
    """Function mode that calls `attend` instead of torch's attention."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.attend(*args, **kwargs) if func is F.scaled_dot_product_attention else func(*args, **kwargs)

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Attention with the signature of torch's function; `kwargs` are `scale` and `enable_gqa`."""

    def install(self, module: nn.Module) -> Callable[[], None]:
        """Run one module under this attention, in recomputation and compiled code too.

        Returns a function that undoes this.
        """

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return replace_forward(module, run)
