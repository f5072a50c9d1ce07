"""Collectives that a transport offers to c10d's calls, over flat, contiguous tensors.

Each is a generator that yields while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.c10d.operation import Steps
from paceline.comm.c10d.reduction import Op, Reduction


class Collectives(Protocol):
    """The collectives of one group. Reductions have the same bits on every rank."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    def waits_for(self) -> Sequence[Any]:
        """The peers that the current collective waits for, in the transport's own terms."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """Replace `tensor` by the combination of all ranks'."""

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        """Replace `tensor` on rank `root` by the combination of all ranks'."""

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Replace `tensor` by that of rank `root`."""

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        """Give every rank the tensors of all."""

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
        """Give rank `root` the tensors of all; the others have no outputs."""

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
        """Send `tensors[r]` of rank `root` to each rank r; other ranks have no tensors."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        """Give rank r the reduction of all ranks' `inputs[r]`, each of `output`'s size."""

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """Give rank r this rank's `inputs[r]`, and get `outputs[r]` from it. Sizes may differ from pair to pair."""

    def barrier(self) -> Steps:
        """Wait until all ranks are here."""


def all_reduce_sparse(collectives: Collectives, tensor: Tensor, op: Op) -> Steps:
    """Replace a sparse tensor by the sum of all ranks'.

    Raises:
        ValueError: another reduction than the sum.
    """
    if op != ReduceOp.SUM:
        raise ValueError(f"sparse tensors can only be summed, not {op}")
    own = tensor.detach().coalesce()
    size = collectives.size
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    yield from collectives.all_gather(counts, torch.tensor([own._nnz()]))
    most = max(int(count) for count in counts)
    indices = yield from _gathered(collectives, own.indices().t().contiguous(), most)
    values = yield from _gathered(collectives, own.values(), most)
    total = torch.sparse_coo_tensor(
        torch.cat([rows[: int(count)] for rows, count in zip(indices, counts, strict=True)]).t(),
        torch.cat([rows[: int(count)] for rows, count in zip(values, counts, strict=True)]),
        own.shape,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)  # not of `tensor.detach()`, whose indices and values are others once they are replaced


def _gathered(collectives: Collectives, rows: Tensor, most: int) -> Steps:
    """The rows of every rank, filled up to `most`."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(collectives.size)]
    yield from collectives.all_gather([part.view(-1) for part in parts], padded.view(-1))
    return parts
