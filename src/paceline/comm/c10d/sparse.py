"""All-reduce of sparse (COO) tensors: every rank gets all indices and values, and adds them up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.c10d.collectives import Collectives
from paceline.comm.c10d.operation import Steps
from paceline.comm.c10d.reduction import Op


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
