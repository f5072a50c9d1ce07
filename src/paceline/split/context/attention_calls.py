"""Attention calls of a model's forward pass, and other operations that mix tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.planning.model.recording.recorder import Graph, PythonCall, Ref

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Further functions that mix the tokens of a sequence. By name, since each exists as a function, a method and an
# operator.
_OTHER_ATTENTION = ("multi_head_attention_forward", "flex_attention")
_RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_ALONG_A_DIMENSION = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "roll", "flip")


@dataclass(frozen=True)
class AttentionCall:
    """One call of `F.scaled_dot_product_attention`.

    `query` and `key` are shapes; `module` is the innermost module that makes the call.
    """

    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    masked: bool
    dropout: float

    @property
    def where(self) -> str:
        """The calling module, for messages."""
        return self.module or "the model itself"


def attention_calls(graph: Graph) -> list[AttentionCall]:
    """Attention calls of a forward pass, in order."""
    found = []
    for call in graph.calls:
        if call.name == "scaled_dot_product_attention":
            given = {**dict(zip(_PARAMETERS, call.args, strict=False)), **call.kwargs}
            query, key = (shape_of(graph, given[name]) for name in ("query", "key"))
            found.append(
                AttentionCall(call.path, query, key, given.get("attn_mask") is not None, given.get("dropout_p", 0.0))
            )
    return found


def attends(graph: Graph) -> bool:
    """True if tokens attend to others. They do so by torch's functions or by a softmax over (…, tokens, tokens)."""
    attention = ("scaled_dot_product_attention", *_OTHER_ATTENTION)
    scores = (len(shape_of(graph, call.args[0])) for call in graph.calls if call.name == "softmax" and call.args)
    return any(call.name in attention for call in graph.calls) or any(dims >= 3 for dims in scores)


def other_meetings(graph: Graph, tokens: int) -> list[str]:
    """Further operations that mix the tokens of sequences of `tokens`.

    Each reads like `cumsum along the tokens in blocks.0`. The list is not exhaustive.
    """
    found = ((call, _meeting(call, shape_of(graph, call.args[0]), tokens)) for call in graph.calls if call.args)
    return list(dict.fromkeys(f"{what} in {call.path or 'the model itself'}" for call, what in found if what))


def _meeting(call: PythonCall, shape: tuple[int, ...], tokens: int) -> str | None:
    """Kind of mixing of tokens in a call on a tensor of `shape`, or None."""
    if call.name in _OTHER_ATTENTION:
        return f"{call.name}, where only attention by scaled_dot_product_attention can be divided,"
    if call.name in _RECURRENCES:
        return f"a recurrence ({call.name})"
    if call.name in _CONVOLUTIONS and tokens in shape[2:]:
        return f"a convolution ({call.name}) along the tokens"
    if call.name in _ALONG_A_DIMENSION and any(
        shape[d] == tokens for d in _dims(call) if -len(shape) <= d < len(shape)
    ):
        return f"{call.name} along the tokens"
    if call.name == "softmax" and len(shape) >= 4 and shape[-2:] == (tokens, tokens):
        return "attention by softmax, where only that by scaled_dot_product_attention can be divided,"
    return None


def _dims(call: PythonCall) -> Iterator[int]:
    """Dimensions that a call names, as `dim`, `dims` or the last argument."""
    named = call.kwargs.get("dim", call.kwargs.get("dims", call.args[-1]))
    yield from (dim for dim in (named if isinstance(named, (tuple, list)) else (named,)) if isinstance(dim, int))


def shape_of(graph: Graph, argument: Any) -> tuple[int, ...]:
    """Shape of an argument of a call; () if it is not a tensor."""
    return graph.values[argument.value].shape if isinstance(argument, Ref) else ()


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
