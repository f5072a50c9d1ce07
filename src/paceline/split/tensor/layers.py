"""What tensor-parallel layers compute and exchange: the conjugate pairs of Megatron-LM as small autograd functions over a group.

copy and reduce, gather and take, gather and reduce-scatter along the tokens (Shoeybi et al., 2019, arXiv:1909.08053; Korthikanti et al.,
2022, arXiv:2205.05198). While torch.compile traces, they are functional collectives, which inductor can overlap with the matrix products
(asynchronous TP, on GPUs); otherwise they go straight to the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import Group
from paceline.errors import PlanError
from paceline.job.zoo.models.moe import without_values
from paceline.split.tensor.trace import is_transposed, weighted

TOKENS = 1  # the dimension of (samples, tokens, features) that sequence parallel divides


@dataclass
class HeadSwitch:
    """Whether the model's output head gathers its logits; without, each rank keeps the columns `start` to `stop` of the vocabulary."""

    start: int
    stop: int
    gather: bool = True


def copy(x: Tensor, group: Group, fresh: bool = False) -> Tensor:
    """`x` as it is; its gradients, an addend on each rank, are summed: in place where they are `fresh`, read by nobody else."""
    result: Tensor = _Copy.apply(x, group, fresh)
    return result


def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks, written into `x`; its gradient is the same on every rank."""
    result: Tensor = _Reduce.apply(x, group)
    return result


def gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """The parts of all ranks side by side along `dim`, which every rank then reads in the same way: gradients are only cut."""
    result: Tensor = _Gather.apply(x, group, dim % x.dim())
    return result


def take(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """This rank's part of `x`, which is the same on all ranks; the gradients of the parts are put side by side."""
    result: Tensor = _Take.apply(x, group, dim % x.dim())
    return result


def gather_addends(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """The parts of all ranks side by side, of which each rank reads something else: gradients are summed and cut."""
    result: Tensor = _GatherAddends.apply(x, group, dim % x.dim())
    return result


def reduce_scatter(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """This rank's part of the sum of `x` over the ranks; the gradients of the parts are put side by side."""
    result: Tensor = _ReduceScatter.apply(x, group, dim % x.dim())
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, fresh: bool) -> Tensor:
        ctx.group, ctx.fresh = group, fresh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # a gradient of gradients: every backward pass is one of these functions again
            return reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None, None
        own = grad.contiguous() if ctx.fresh else grad.clone(memory_format=torch.contiguous_format)
        return _summed(own, ctx.group), None, None


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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take(grad, ctx.group, ctx.dim), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.group, ctx.dim), None, None


class _GatherAddends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _scattered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_addends(grad, ctx.group, ctx.dim), None, None


def _only_traced(x: Tensor, group: Group) -> bool:
    """Whether there is nothing to send: a trace has shapes only. Those of a dry run are sent, to its ranks that are not there."""
    return without_values(x) and group.transport != "fake"


def _summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in place outside of a compiler and a trace."""
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
    parts = x.new_empty((group.size * x.shape[0], *x.shape[1:]))  # gloo takes this shape only
    _all_gather(parts, x.contiguous(), group=group.backend)
    return parts.view(group.size, *x.shape).movedim(0, dim).reshape(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])


def _scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    if _only_traced(x, group):
        return _own(x, group, dim)
    if torch.compiler.is_compiling():
        cut: Tensor = functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, _torch_group(group)))
        return cut
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=group.backend)
    return own


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older names warn from torch 2.13 on
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _own(x: Tensor, group: Group, dim: int) -> Tensor:
    size, rest = divmod(x.shape[dim], group.size)
    if rest:
        wanted = (size + 1) * group.size
        raise PlanError(
            f"sequence: {x.shape[dim]} tokens do not divide over tp={group.size}; pad or cut them to a multiple, such as {wanted}"
        )
    return x.narrow(dim, group.rank * size, size).contiguous()


def _torch_group(group: Group) -> dist.ProcessGroup:
    assert group.backend is not None, "a group of one rank has no tensor parallel"
    return group.backend


Forward = Callable[..., Tensor]


def row_forward(module: nn.Module, join: Callable[[Tensor], Tensor]) -> Forward:
    """The forward of a linear layer whose inputs are divided: `join` the addends of the ranks, then add the bias once."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        joined = join(F.linear(input, weight.T if transposed else weight))
        return joined if bias is None else joined.add_(bias)  # in its own precision, also under autocast

    return forward


def column_forward(module: nn.Module) -> Forward:
    """The forward of a `Conv1D`, whose own names its full width, with divided outputs."""
    layer = weighted(module)

    def forward(input: Tensor) -> Tensor:
        return F.linear(input, layer.weight.T, layer.bias)

    return forward


def gathered_forward(module: nn.Module, group: Group, switch: HeadSwitch | None) -> Forward:
    """The forward of a linear layer whose outputs are divided and gathered, unless `switch` says that they stay divided."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        own = F.linear(copy(input, group, fresh=True), weight.T if transposed else weight, bias)
        return own if switch is not None and not switch.gather else gather(own, group)

    return forward


def vocabulary_forward(module: nn.Module, group: Group, rows: int) -> Forward:
    """The forward of an embedding that holds `rows` rows from `rows` times its rank on: each token is looked up by one rank."""
    assert isinstance(module, nn.Embedding)
    start, padding = group.rank * rows, module.padding_idx
    padding = padding - start if padding is not None and start <= padding < start + rows else None

    def forward(input: Tensor) -> Tensor:
        own = input - start
        elsewhere = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), module.weight, padding)
        return reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)

    return forward
