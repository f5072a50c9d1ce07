"""Sparse gradients of embedding tables, summed on each rank and over replicas.

A batch looks up few rows of a large table. The other rows have no gradient, so they are neither sent nor updated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.process_group import added_up, rows_to_send, sum_of_rows


def dense_and_sparse(parameters: Iterable[nn.Parameter]) -> tuple[list[Tensor], list[nn.Parameter]]:
    """Return the dense gradients, and the parameters that have sparse gradients."""
    dense, sparse = [], []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            sparse.append(parameter)
        else:
            dense.append(gradient)
    return dense, sparse


def numbers_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return dense gradients, and the values of sparse gradients, each exactly once.

    Afterwards, each sparse gradient contains each row once and shares its values with the returned tensors.
    """
    numbers, sparse = dense_and_sparse(parameters)
    tables = []
    for parameter in sparse:
        assert parameter.grad is not None
        if _is_of_rows(parameter.grad):
            tables.append(parameter)
        else:  # sparse elements instead of rows, as from torch.gather with sparse_grad=True
            parameter.grad = parameter.grad.coalesce()
            numbers.append(parameter.grad._values())
    return numbers + [kind.hand_out(kind.added_up()) for kind in _kinds(tables)]


class LateNorm:
    """L2 norm of a finite gradient with sparse parts; `float` computes it.

    The norm needs the sums of equal rows. These can take longer than the optimizer's step.

    Args:
        dense: L2 norm of the dense gradients.
        sparse: the sparse gradients, which may contain a row several times.
    """

    def __init__(self, dense: float, sparse: list[Tensor]) -> None:
        # copies that share the values, because `zero_grad(set_to_none=False)` and `+=` change the original tensors
        self._dense, self._sparse = dense, [gradient.detach() for gradient in sparse]

    @classmethod
    def if_finite(cls, dense: list[Tensor], sparse: list[Tensor]) -> LateNorm | None:
        """Return the norm if it is certainly finite, whichever rows are equal; otherwise None."""
        values = [gradient._values() for gradient in sparse]
        if not all(own.dtype is torch.float32 or own.dtype is torch.float64 for own in values):
            return None
        norms = [norm.item() for norm in torch._foreach_norm([*dense, *values])]
        # the square of a sum of n numbers is at most n times the sum of their squares
        most = sum(own.numel() for own in values) * sum(norm * norm for norm in norms[len(dense) :])
        found = cls(math.hypot(*norms[: len(dense)]), sparse)
        return found if math.isfinite(found._dense) and most < _LARGEST_SQUARE else None

    def __float__(self) -> float:
        norms = torch._foreach_norm([gradient.coalesce()._values() for gradient in self._sparse])
        return math.hypot(self._dense, *map(float, norms))


_LARGEST_SQUARE = 1e37  # so far below the largest float32 number that rounding errors do not matter


def sum_rows(tables: Sequence[nn.Parameter], group: Group) -> list[Tensor]:
    """Replace the gradients of tables with their sums over the group.

    A table that no replica used has no gradient afterwards. Every rank sends its rows to all ranks, and adds the rows
    of all ranks in rank order.

    Returns:
        Tensors that together contain every gradient once, as from `numbers_of`.
    """
    kinds = _kinds(tables)
    own = [kind.added_up() for kind in kinds]
    told = torch.tensor([rows._nnz() for rows in own] + [int(table.grad is not None) for table in tables])
    everyones = told.new_empty(group.size * len(told))
    group.all_gather(everyones, told)
    by_rank = everyones.view(group.size, -1).tolist()
    used = {table for table, *flags in zip(tables, *(n[len(kinds) :] for n in by_rank), strict=True) if any(flags)}
    gradients = []
    for number, (kind, rows) in enumerate(zip(kinds, own, strict=True)):
        gradients.append(kind.hand_out(kind.gathered(rows, [n[number] for n in by_rank], group)))
        for table in set(kind.tables) - used:
            table.grad = None
    return gradients


@dataclass(frozen=True)
class _Kind:
    """Tables of the same width and dtype, treated as one table.

    `starts` contains the first row of each table, followed by the total number of rows.
    """

    tables: list[nn.Parameter]
    starts: list[int]

    def added_up(self) -> Tensor:
        """Sum this rank's rows into one sparse tensor that contains each row once."""
        found = [(t.grad, start) for t, start in zip(self.tables, self.starts, strict=False) if t.grad is not None]
        sparse = [g if _is_of_rows(g) else g.to_dense().to_sparse(1) for g, _ in found]
        like = self.tables[0]
        shape = torch.Size((self.starts[-1], like.shape[1]))
        if not sparse:
            return added_up(torch.empty(1, 0, dtype=torch.int64), like.new_empty(0, like.shape[1]), shape)
        # one call of torch for all tables, because calls for each table would take longer than the sums
        numbers = torch.cat([g._indices()[0] for g in sparse])
        numbers += _repeated([start for _, start in found], [g._nnz() for g in sparse])
        return added_up(numbers[None], torch.cat([g._values() for g in sparse]), shape)

    def gathered(self, own: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """Gather and sum the rows of all ranks."""
        return sum_of_rows(group.gather_rows(rows_to_send(own), counts), own) if any(counts) else own

    def hand_out(self, rows: Tensor) -> Tensor:
        """Set each table's gradient; return the tensor with the values of all tables."""
        numbers, values = rows._indices()[0], rows._values()
        cuts = torch.searchsorted(numbers, torch.tensor(self.starts)).tolist()
        counts = [last - first for first, last in pairwise(cuts)]
        own = (numbers - _repeated(self.starts[:-1], counts))[None].split(counts, 1)
        for table, rows_of_it, held in zip(self.tables, own, values.split(counts), strict=True):
            table.grad = torch.sparse_coo_tensor(
                rows_of_it, held, table.shape, is_coalesced=True, check_invariants=False
            )
        return values


def _is_of_rows(gradient: Tensor) -> bool:
    return gradient.is_sparse and gradient.sparse_dim() == 1 and gradient.dim() == 2


def _kinds(tables: Iterable[nn.Parameter]) -> list[_Kind]:
    kinds: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    for table in tables:
        kinds.setdefault((table.shape[1], table.dtype), []).append(table)
    return [_Kind(alike, list(accumulate((len(t) for t in alike), initial=0))) for alike in kinds.values()]


def _repeated(starts: list[int], counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(starts), torch.tensor(counts))
