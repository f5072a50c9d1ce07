"""Detection of attention and other operations that mix tokens, and division of token rows."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from paceline.comm import Group
from paceline.errors import PlanError
from paceline.planning.model.record import record_graph
from paceline.planning.model.recorder import Entry, Graph, PythonCall, Ref
from paceline.split.layout import Parts, first_names
from paceline.split.tensor_layers import copy

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Other functions that mix the tokens of a sequence, listed by name because each is a function, a method and an
# operator.
_OTHER_ATTENTION = ("multi_head_attention_forward", "flex_attention")
_RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_ALONG_A_DIMENSION = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "roll", "flip")


@dataclass(frozen=True)
class AttentionCall:
    """One call of `F.scaled_dot_product_attention`.

    `query` and `key` are shapes. `module` names the innermost module that makes the call.
    """

    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    masked: bool
    dropout: float

    @property
    def where(self) -> str:
        """Name of the calling module, for messages."""
        return self.module or "the model itself"


def attention_calls(graph: Graph) -> list[AttentionCall]:
    """List the attention calls of a forward pass, in order."""
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
    """True if a forward pass contains attention.

    A call counts as attention if it is one of torch's attention functions, or a softmax over a tensor (…, tokens,
    tokens).
    """
    attention = ("scaled_dot_product_attention", *_OTHER_ATTENTION)
    scores = (len(shape_of(graph, call.args[0])) for call in graph.calls if call.name == "softmax" and call.args)
    return any(call.name in attention for call in graph.calls) or any(dims >= 3 for dims in scores)


def other_meetings(graph: Graph, tokens: int) -> list[str]:
    """List other operations that mix the tokens of sequences of length `tokens`.

    An example of an entry is `cumsum along the tokens in blocks.0`. The list may be incomplete.
    """
    found = ((call, _meeting(call, shape_of(graph, call.args[0]), tokens)) for call in graph.calls if call.args)
    return list(dict.fromkeys(f"{what} in {call.path or 'the model itself'}" for call, what in found if what))


def _meeting(call: PythonCall, shape: tuple[int, ...], tokens: int) -> str | None:
    """Describe how a call on a tensor of `shape` mixes tokens; None if it doesn't."""
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
    named = call.kwargs.get("dim", call.kwargs.get("dims", call.args[-1]))
    yield from (dim for dim in (named if isinstance(named, (tuple, list)) else (named,)) if isinstance(dim, int))


def shape_of(graph: Graph, argument: Any) -> tuple[int, ...]:
    """Return the shape of a call's argument; () if it is not a tensor."""
    return graph.values[argument.value].shape if isinstance(argument, Ref) else ()


def replace_forward(module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's forward pass with `run(forward, …)`; return a function that restores it."""
    before = module.__dict__.get("forward")
    inner = module.forward.__func__ if inspect.ismethod(module.forward) else type(module).forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(inner, self), *args, **kwargs)

    def undo() -> None:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before

    # a bound method, which a deep copy of the module binds to the copy
    module.__dict__["forward"] = MethodType(forward, module)
    return undo


def replace_attention(module: nn.Module, attend: Callable[..., Tensor]) -> Callable[[], None]:
    """Replace a module's attention with `attend`; return a function that restores it.

    The replacement also applies to recomputation and compiled code. `attend` has the signature of
    `F.scaled_dot_product_attention`, including the keywords `scale` and `enable_gqa`.
    """
    mode = _OwnAttention(attend)

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return replace_forward(module, run)


class _OwnAttention(TorchFunctionMode):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.attend if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


_OF_LAST_DIM = (
    "softmax",
    "_softmax",
    "log_softmax",
    "chunk",
    "split",
    "split_with_sizes",
    "tensor_split",
    "glu",
    "cat",
)
_REDUCTIONS = ("mean", "sum", "amax", "amin", "var", "std")
_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
_SAME = ("dropout", "native_dropout", "clone", "contiguous", "alias", "detach", "_to_copy")


def divide_rows(model: nn.Module, parts: Parts, group: Group, graph: Graph) -> tuple[list[Callable[[], object]], str]:
    """Make each rank compute only its own tokens in modules that process tokens separately.

    Every rank of `group` still has all tokens. The result is a list of functions that undo the change, and a line for
    the report.

    Raises:
        PlanError: no module processes each token separately.
    """
    names = tokenwise_modules(graph, model)
    if not names:
        raise PlanError(
            "plan.no_modules_by_token",
            "cp={size}: no module of the model computes each token separately, so ranks cannot divide the tokens. "
            "Use cp=1",
            size=group.size,
        )
    modules = dict(model.named_modules())
    undo: list[Callable[[], object]] = []
    for name in names:
        undo.append(replace_forward(modules[name], partial(_own_tokens, group, name)))
        for parameter, _ in modules[name].named_parameters(prefix=name):
            # `parts` lists a tied parameter under its first name only; these modules have no tied parameters
            if parameter in parts:
                parts[parameter].summed.add("cp")
    calls = list(dict.fromkeys(call.module for call in attention_calls(graph)))
    for name in calls:
        undo.append(replace_attention(modules[name], partial(_own_queries, group)))
    attention = f"attention ({len(calls)} modules) for its own queries" if calls else "attention for all tokens"
    line = (
        f"cp={group.size}: every rank has all tokens; it computes {len(names)} modules for its own, {attention}, "
        "the remainder for all"
    )
    return undo, line


def tokenwise_modules(graph: Graph, model: nn.Module) -> list[str]:
    """Find the outermost modules that process (n, tokens, features) token by token.

    Modules whose parameters are also used elsewhere are omitted, because the gradient of a parameter must be a partial
    sum in all uses or complete in all uses.
    """
    by_path: dict[str, list[Entry]] = {}
    for entry in graph.entries:
        by_path.setdefault(entry.path, []).append(entry)
    found: list[str] = []
    for path, entries in by_path.items():
        inside = any(path.startswith(f"{other}.") for other in found)
        if not path or inside or path in graph.opaque or not all(_treats_tokens_alone(graph, e) for e in entries):
            continue
        if _asks_for_no_length(graph, model.get_submodule(path), entries[0]):
            found.append(path)
    names = first_names(model.named_parameters)
    holders = Counter(first for first, _ in {(first, name.rpartition(".")[0]) for name, first in names.items()})
    shared = {first for first, count in holders.items() if count > 1}
    while True:
        spans = [(entry.start, entry.stop) for path in found for entry in by_path[path]]
        elsewhere = shared | {
            value.name
            for value in graph.values
            if value.kind == "parameter" and not all(any(a <= node < b for a, b in spans) for node, _ in value.uses)
        }
        own = {path: {first for name, first in names.items() if name.startswith(f"{path}.")} for path in found}
        kept = [path for path in found if elsewhere.isdisjoint(own[path])]
        if kept == found:
            return found
        found = kept


def _asks_for_no_length(graph: Graph, module: nn.Module, entry: Entry) -> bool:
    """True if the number of tokens does not change a module's operations."""
    ((place, given),) = entry.arguments.items()
    n, tokens, size = graph.values[given].shape

    def call(module: nn.Module, batch: Any) -> Any:
        return module(batch[0]) if isinstance(place, int) else module(**{place: batch[0]})

    def done(tokens: int) -> list[Any]:
        seen = record_graph(module, (torch.empty(n, tokens, size, device="meta"),), call)
        return [
            tree_map(lambda x: "tensor" if isinstance(x, Ref) else x, (str(node.op), node.args, node.kwargs))
            for node in seen.nodes
        ]

    try:
        return done(tokens) == done(-(-tokens // 2)) == done(1)
    except Exception:  # noqa: BLE001 - any error of a module called without the arguments it has in the model
        return False


def _treats_tokens_alone(graph: Graph, entry: Entry) -> bool:
    """True if all operations of a call process tokens separately."""
    values = graph.values
    if len(entry.arguments) != 1 or len(entry.results) != 1:
        return False
    [given], [result] = entry.arguments.values(), entry.results
    tokens = values[given].shape[:2]
    if len(values[given].shape) != 3 or not values[given].floating or values[result].shape[:2] != tokens:
        return False
    alone, weights, matrices = {given}, set[int](), 0
    for node in graph.nodes[entry.start : entry.stop]:
        of_weights = [v for v in node.inputs if v in weights or values[v].kind == "parameter" or _is_vector(graph, v)]
        if len(of_weights) == len(node.inputs) and node.name != "opaque" and not _mutable(node.op):
            weights.update(node.outputs)
        elif _keeps_tokens(graph, node, alone, set(of_weights), given):
            matrices += node.name in ("linear", "matmul")
            alone.update(node.outputs)
        else:
            return False
    return result in alone and matrices > 0 and len(values[result].shape) == 3


def _keeps_tokens(graph: Graph, node: Any, alone: set[int], weights: set[int], given: int) -> bool:
    inputs, shape_of = node.inputs, lambda v: graph.values[v].shape
    streams = [v for v in inputs if v in alone]
    if not streams or any(v not in alone and v not in weights for v in inputs):
        return False
    if any(len(shape_of(v)) != 3 for v in (*streams, *node.outputs)):
        return False
    if _mutable(node.op) and inputs[0] in (given, *weights):
        return False
    if node.name in ("linear", "matmul"):
        return inputs[0] in alone and all(v in weights and len(shape_of(v)) <= 2 for v in inputs[1:])
    if node.name in _NORMS:
        return len(node.args[1]) == 1
    if node.name in _SAME:
        return True
    if node.name in _REDUCTIONS:
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        keeps = bool(node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False))
        return keeps and (dims if isinstance(dims, (list, tuple)) else [dims]) in ([-1], [2])
    if node.name in _OF_LAST_DIM:
        dim = node.kwargs.get("dim", node.args[-1] if node.name in ("glu", "cat") else _dim_of(node))
        return dim in (-1, 2)
    pointwise = not isinstance(node.op, str) and torch.Tag.pointwise in node.op.tags
    return pointwise and all(len(shape_of(v)) <= 1 for v in weights)


def _dim_of(node: Any) -> Any:
    place = 1 if "softmax" in node.name else 2
    return node.args[place] if len(node.args) > place else 0


def _is_vector(graph: Graph, value: int) -> bool:
    """True if a value is a buffer or number that all tokens share."""
    return graph.values[value].kind == "constant" and len(graph.values[value].shape) <= 1


def _mutable(op: Any) -> bool:
    return not isinstance(op, str) and bool(op._schema.is_mutable)


def _own_tokens(group: Group, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module on this rank's tokens, and gather the outputs of all ranks."""
    [given] = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if given.is_meta:  # a tensor without values
        return forward(*args, **kwargs)
    if given.dim() != 3:
        raise PlanError(
            "plan.rows_changed_shape",
            "cp={size}: the input of {name} has shape {shape!s}, but it had (n, tokens, features) when the model "
            "was divided. Use cp=1",
            size=group.size,
            name=name,
            shape=list(given.shape),
        )
    own = _Own.apply(given, 1, group)
    args = tuple(own if x is given else x for x in args)
    kwargs = {k: own if x is given else x for k, x in kwargs.items()}
    return _Gathered.apply(forward(*args, **kwargs), 1, given.shape[1], group)


def _own_queries(
    group: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Compute attention for this rank's queries and gather all outputs.

    The function has the signature of `F.scaled_dot_product_attention`.
    """
    if query.is_meta:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    tokens, keys = query.shape[-2], key.shape[-2]
    if is_causal:
        attn_mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        whole = attn_mask.dim() < 2 or attn_mask.shape[-2] == 1
        attn_mask = copy(attn_mask, group) if whole else _Own.apply(attn_mask, attn_mask.dim() - 2, group)
    key, value = copy(key, group), copy(value, group)
    own = _Own.apply(query, query.dim() - 2, group)
    mixed = F.scaled_dot_product_attention(own, key, value, attn_mask, dropout_p, **kwargs)
    whole_output: Tensor = _Gathered.apply(mixed, mixed.dim() - 2, tokens, group)
    return whole_output


class _Own(torch.autograd.Function):
    """Function that returns this rank's rows of a replicated tensor.

    The last row is repeated so that all ranks have the same number of rows.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.rows = dim, group, whole.shape[dim]
        size = -(-ctx.rows // group.size)
        places = torch.arange(group.rank * size, (group.rank + 1) * size, device=whole.device).clamp_(max=ctx.rows - 1)
        return whole.index_select(dim, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gathered(grad, ctx.dim, ctx.rows, ctx.group), None, None


class _Gathered(torch.autograd.Function):
    """Function that gathers all rows of a tensor from all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, rows: int, group: Group) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, own.shape[dim]
        return _gathered(own, dim, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, rows = ctx.group.rank * ctx.size, grad.shape[ctx.dim]
        own = grad.narrow(ctx.dim, min(first, rows), max(0, min(ctx.size, rows - first)))
        # rows that only repeat the last row; their outputs are not used
        missing = ctx.size - own.shape[ctx.dim]
        if missing:
            own = F.pad(own, (0, 0) * (own.dim() - 1 - ctx.dim) + (0, missing))
        return own.contiguous(), None, None, None


def _gathered(own: Tensor, dim: int, rows: int, group: Group) -> Tensor:
    own = own.contiguous()
    flat = own.new_empty(own.numel() * group.size)
    group.all_gather(flat, own.view(-1))
    whole = torch.cat(list(flat.view(group.size, *own.shape)), dim)
    # a copy instead of a view, because the model may write to the result
    return whole if whole.shape[dim] == rows else whole.narrow(dim, 0, rows).clone()
