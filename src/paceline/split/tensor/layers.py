"""Layers and collectives of tensor parallelism: Megatron-LM's conjugate pairs as autograd functions.

The pairs are copy and reduce, gather and take, gather and reduce-scatter along the tokens (Shoeybi et al., 2019,
arXiv:1909.08053; Korthikanti et al., 2022, arXiv:2205.05198). While torch.compile traces, they are functional
collectives, which inductor can overlap with the matrix products (asynchronous TP, on GPUs); otherwise they call the
group directly.
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
from paceline.planning.limits import undivided_tokens
from paceline.planning.model.recording.layers import is_transposed, weighted
from paceline.split.layout import ShardLayout

# the dimension of (samples, tokens, features) that sequence parallelism divides
TOKENS = 1


@dataclass
class HeadSwitch:
    """Switch of a divided output head: gather its logits, or keep them divided.

    If `gather` is False, each rank keeps the columns `start` to `stop` of the vocabulary.
    """

    start: int
    stop: int
    gather: bool = True


def copy(x: Tensor, group: Group, fresh: bool = False) -> Tensor:
    """`x` unchanged; its gradients, partial sums on each rank, are all-reduced.

    This happens in place if they are `fresh`, that is, read by nobody else.
    """
    result: Tensor = _Copy.apply(x, group, fresh)
    return result


def reduce(x: Tensor, group: Group) -> Tensor:
    """All-reduced sum of `x`, written into `x`; its gradient is the same on every rank."""
    result: Tensor = _Reduce.apply(x, group)
    return result


def gather(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """All-gather of `x` along `dim`; the gradient is this rank's slice.

    Every rank must use the result in the same way.
    """
    return _applied("gather", x, group, dim)


def take(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """This rank's part of a replicated `x`; the gradients of the parts are all-gathered."""
    return _applied("take", x, group, dim)


def gather_partial(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """All-gather of `x` whose gradients are partial sums: they are reduce-scattered.

    Each rank uses the result in another way.
    """
    return _applied("gather_partial", x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int = TOKENS) -> Tensor:
    """Reduce-scattered sum of `x`; the gradients of the parts are all-gathered."""
    return _applied("reduce_scatter", x, group, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, fresh: bool) -> Tensor:
        ctx.group, ctx.fresh = group, fresh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # for gradients of gradients, every backward pass is one of these functions again
        if torch.is_grad_enabled():
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


class _Conjugate(torch.autograd.Function):
    """A collective of `_CONJUGATES`, with the other of its pair as backward pass.

    So gradients of gradients are exact, too.
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
    """True if a trace has shapes only, so that nothing is sent.

    A dry run sends its shapes all the same, to ranks that do not exist.
    """
    return without_values(x) and not group.is_fake


def _summed(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, in place unless compiled or traced."""
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
    # gloo supports this shape only
    parts = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=group.backend)
    return (
        parts.view(group.size, *x.shape)
        .movedim(0, dim)
        .reshape(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])
    )


def _scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    if _only_traced(x, group):
        return _own(x, group, dim)
    if torch.compiler.is_compiling():
        cut: Tensor = functional.wait_tensor(
            functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, _torch_group(group))
        )
        return cut
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=group.backend)
    return own


# the older names warn from torch 2.13 on
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _own(x: Tensor, group: Group, dim: int) -> Tensor:
    size = x.shape[dim] // group.size
    if reason := undivided_tokens(x.shape[dim], "tp", group.size):
        raise PlanError(f"sequence=on tp={group.size} {reason}")
    return x.narrow(dim, group.rank * size, size).contiguous()


# collective of the forward pass, and the name of the one of its backward pass
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
    """Forward of a linear layer with sharded inputs. It joins the partial sums with `join`, then adds the bias once."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        joined = join(F.linear(input, weight.T if transposed else weight))
        # in its own precision, also under autocast
        return joined if bias is None else joined.add_(bias)

    return forward


def column_forward(module: nn.Module) -> Forward:
    """Forward of a `Conv1D` with sharded outputs; its own code uses the full width."""
    layer = weighted(module)

    def forward(input: Tensor) -> Tensor:
        return F.linear(input, layer.weight.T, layer.bias)

    return forward


def part_forward(module: nn.Module, weight: ShardLayout, bias: ShardLayout | None) -> Forward:
    """Forward of a linear layer that uses the kept rows of its weight and bias."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        rows = weight.take(layer.weight)
        own = bias.take(layer.bias) if bias is not None and layer.bias is not None else None
        return F.linear(input, rows.T if transposed else rows, own)

    return forward


def gathered_forward(module: nn.Module, group: Group, switch: HeadSwitch | None) -> Forward:
    """Forward of a linear layer with sharded outputs, gathered unless `switch` keeps them sharded."""
    layer, transposed = weighted(module), is_transposed(module)

    def forward(input: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        own = F.linear(copy(input, group, fresh=True), weight.T if transposed else weight, bias)
        return own if switch is not None and not switch.gather else gather(own, group)

    return forward


def vocabulary_forward(module: nn.Module, group: Group, rows: int) -> Forward:
    """Forward of an embedding that holds `rows` rows, from `rows` times its rank on.

    One rank looks each token up; the others add zeros.
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
