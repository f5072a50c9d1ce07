"""Layers and collectives of tensor parallelism, after Megatron-LM.

The autograd functions form conjugate pairs: copy and reduce, gather and take, gather and reduce-scatter along the
tokens (Shoeybi et al., 2019, arXiv:1909.08053; Korthikanti et al., 2022, arXiv:2205.05198). While torch.compile traces
the model, these functions use functional collectives, which inductor can overlap with matrix products on GPUs
(asynchronous TP). Otherwise they call the group directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm import Group
from paceline.device import random_state, seed, set_random_state
from paceline.errors import PlanError
from paceline.job.experts import without_values
from paceline.planning.limits import undivided_tokens
from paceline.planning.model.recorder import Graph, Node, is_transposed, weighted
from paceline.planning.model.tensor.rules import Label, bound
from paceline.split.layout import ShardLayout

# the dimension of (samples, tokens, features) that sequence parallelism divides
TOKENS = 1


@dataclass
class HeadSwitch:
    """Setting of a divided output head, which gathers its logits or keeps them divided.

    If `gather` is False, each rank keeps the columns `start` to `stop` of the vocabulary.
    """

    start: int
    stop: int
    gather: bool = True


def copy(x: Tensor, group: Group, fresh: bool = False, layer: str = "") -> Tensor:
    """Return `x` unchanged, and all-reduce its gradients, which are partial sums.

    With `fresh`, the gradients are reduced in place, because no other code reads them. `layer` is the module that uses
    the result, for errors about hung ranks (`comm/positions.py`).
    """
    result: Tensor = _Copy.apply(x, group, fresh, layer)
    return result


def reduce(x: Tensor, group: Group) -> Tensor:
    """All-reduce `x` in place.

    The gradient is the same on every rank.
    """
    result: Tensor = _Reduce.apply(x, group)
    return result


def gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """All-gather `x` along `dim`.

    The gradient of `x` is this rank's slice of the output's gradient.

    Every rank must use the result in the same way, so that the output's gradient is the same on all ranks.
    """
    return _applied("gather", x, group, dim)


def take(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """Return this rank's shard of a replicated `x`, and all-gather the shards' gradients."""
    return _applied("take", x, group, dim)


def gather_partial(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """All-gather `x`, and reduce-scatter its gradients, which are partial sums.

    Each rank may use the result differently.
    """
    return _applied("gather_partial", x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """Reduce-scatter `x`, and all-gather the gradients of the shards."""
    return _applied("reduce_scatter", x, group, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, fresh: bool, layer: str) -> Tensor:
        ctx.group, ctx.fresh, ctx.layer = group, fresh, layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # every backward pass is one of these functions, too, which makes gradients of gradients possible
        if torch.is_grad_enabled():
            return reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None, None, None
        own = grad.contiguous() if ctx.fresh else grad.clone(memory_format=torch.contiguous_format)
        return _summed(own, ctx.group), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        if torch.compiler.is_compiling() or _only_traced(x, group):
            return _summed(x, group)
        ctx.mark_dirty(x)
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return copy(grad, ctx.group) if torch.is_grad_enabled() else grad, None


class _Conjugate(torch.autograd.Function):
    """Autograd function for a collective of `_CONJUGATES`.

    The backward pass is the conjugate collective, so double gradients are exact.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, name: str) -> Tensor:
        ctx.group, ctx.dim, ctx.name = group, dim, name
        return _CONJUGATES[name][0](x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _applied(_CONJUGATES[ctx.name][1], grad, ctx.group, ctx.dim), None, None, None


def _applied(name: str, x: Tensor, group: Group, dim: int) -> Tensor:
    result: Tensor = _Conjugate.apply(x, group, dim % x.dim(), name)
    return result


def _only_traced(x: Tensor, group: Group) -> bool:
    """Return True for a tensor without values, for which no data is sent.

    A dry run, in contrast, sends tensors without values to simulated ranks.
    """
    return without_values(x) and not group.is_fake


def _summed(x: Tensor, group: Group) -> Tensor:
    if _only_traced(x, group):
        return x.clone()
    if torch.compiler.is_compiling():
        summed: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", _torch_group(group)))
        return summed
    group.all_reduce(x)
    return x


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    if _only_traced(x, group):
        return torch.cat([x] * group.size, dim)
    if torch.compiler.is_compiling():
        whole: Tensor = functional.wait_tensor(functional.all_gather_tensor(x.contiguous(), dim, _torch_group(group)))
        return whole
    # gloo supports only this shape
    shards = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    _all_gather(shards, x.contiguous(), group=group.backend)
    return shards.view(group.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def _scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    if _only_traced(x, group):
        return _own(x, group, dim)
    if torch.compiler.is_compiling():
        cut: Tensor = functional.wait_tensor(
            functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, _torch_group(group))
        )
        return cut
    shards = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(shards[0])
    _reduce_scatter(own, shards.flatten(0, 1), group=group.backend)
    return own


# since torch 2.13, the older names raise warnings
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _own(x: Tensor, group: Group, dim: int) -> Tensor:
    size = x.shape[dim] // group.size
    if reason := undivided_tokens(x.shape[dim], "tp", group.size):
        raise PlanError.of_problems([reason.about(f"sequence=on tp={group.size}")])
    return x.narrow(dim, group.rank * size, size).contiguous()


# for each function: the collective of the forward pass, and the name of the function for the backward pass
_CONJUGATES: dict[str, tuple[Callable[[Tensor, Group, int], Tensor], str]] = {
    "gather": (_gathered, "take"),
    "take": (_own, "gather"),
    "gather_partial": (_gathered, "reduce_scatter"),
    "reduce_scatter": (_scattered, "gather_partial"),
}


def _torch_group(group: Group) -> dist.ProcessGroup:
    assert group.backend is not None, "a group of one rank has no tensor parallel"
    return group.backend


Forward = Callable[..., Tensor]


def row_forward(module: nn.Module, join: Callable[[Tensor], Tensor]) -> Forward:
    """Run a linear layer with sharded inputs.

    `join` combines the partial sums of the ranks. The bias is added once afterwards.
    """
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        joined = join(F.linear(input, weight.T if transposed else weight))
        # in the precision of the bias, even with autocast
        return joined if bias is None else joined.add_(bias)

    return forward


def column_forward(module: nn.Module) -> Forward:
    """Run a `Conv1D` with sharded outputs.

    The code of `Conv1D` itself would use the full width.
    """
    layer = weighted(module)
    return lambda input: F.linear(input, layer.weight.T, layer.bias)


def part_forward(module: nn.Module, weight: ShardLayout, bias: ShardLayout | None) -> Forward:
    """Run a linear layer with some rows of its weight and bias."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        rows = weight.take(layer.weight)
        own = bias.take(layer.bias) if bias is not None and layer.bias is not None else None
        return F.linear(input, rows.T if transposed else rows, own)

    return forward


def gathered_forward(module: nn.Module, group: Group, switch: HeadSwitch | None) -> Forward:
    """Run a linear layer with sharded outputs; gather them unless `switch` disables this."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        own = F.linear(copy(input, group, fresh=True), weight.T if transposed else weight, bias)
        return own if switch is not None and not switch.gather else gather(own, group)

    return forward


def vocabulary_forward(module: nn.Module, group: Group, rows: int) -> Forward:
    """Run an embedding whose table is divided over the ranks, with `rows` rows each.

    For each token, one rank looks up the row, and all other ranks contribute zeros to the sum.
    """
    assert isinstance(module, nn.Embedding)
    start, padding = group.rank * rows, module.padding_idx
    padding = padding - start if padding is not None and start <= padding < start + rows else None

    def forward(input: Tensor) -> Tensor:
        own = input - start
        elsewhere = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), module.weight, padding)
        return reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)

    return forward


# the random stream of a device that all ranks share, saved while a module uses a stream of its own
_common: list[tuple[torch.device, Tensor]] = []


def separate_random_streams(model: nn.Module, graph: Graph, labels: Mapping[int, Label], rank: int) -> set[str]:
    """Give modules that draw random numbers for sharded tensors a different stream on each rank.

    The result has the paths of these modules.

    A module that draws random numbers for both sharded and replicated tensors draws the same numbers on all ranks.
    """
    divided, whole = set[str](), set[str]()
    for node in graph.nodes:
        if _draws(node):
            (divided if any(v in labels for v in (*node.inputs, *node.outputs)) else whole).add(node.path)
    separate = {path for path in divided - whole if path}
    for path in separate:
        module = model.get_submodule(path)
        module.__dict__["forward"] = partial(_with_own_masks, module.forward, module, rank)
    for path in whole - divided:
        if any(path.startswith(f"{outer}.") for outer in separate):
            module = model.get_submodule(path)
            module.__dict__["forward"] = partial(_with_common_masks, module.forward)
    return separate


def _draws(node: Node) -> bool:
    if isinstance(node.op, str) or torch.Tag.nondeterministic_seeded not in node.op.tags:
        return False
    given = bound(node)
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    return not ("dropout" in node.name and (given.get("p") == 0 or given.get("train") is False))


def _with_own_masks(forward: Callable[..., Any], module: nn.Module, rank: int, *args: Any, **kwargs: Any) -> Any:
    tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not without_values(x))
    device = next((x.device for x in tensors), None)
    if device is None or not module.training or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    number = int(torch.randint(1 << 62, (), device="cpu"))
    _common.append((device, random_state(device)))
    try:
        seed(device, number + rank)
        return forward(*args, **kwargs)
    finally:
        set_random_state(*_common.pop())


def _with_common_masks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _common or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    device, common = _common[-1]
    own = random_state(device)
    try:
        set_random_state(device, common)
        return forward(*args, **kwargs)
    finally:
        _common[-1] = device, random_state(device)
        set_random_state(device, own)
