"""Differentiable all-gather of rows, for losses over a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group


def gather(group: Group, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Gather the rows of all ranks, in rank order.

    Rank r has `counts[r]` rows. The shapes of the ranks' tensors may differ only in dim 0.

    The gradient of a rank's rows is the sum of the gradients of all ranks' losses. If all ranks compute the same loss
    from the gathered rows, each rank must multiply the loss by 1 / ranks to get the gradients of a single process.
    """
    if group.size == 1:
        return rows
    if not rows.is_floating_point():
        return torch.cat(group.gather_rows(rows, counts))
    gathered: Tensor = _GatherRows.apply(rows, group, tuple(counts))
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, counts: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return torch.cat(group.gather_rows(rows, counts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole = gradients[0].contiguous().clone()
        ctx.group.all_reduce(whole)
        return whole.split(ctx.counts)[ctx.group.rank], None, None
