"""Sparse gradients: rows of embedding tables, added up on a rank and summed over replicas.

A batch looks up few rows of a large table; the others have no gradient, are not sent, and not stepped on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.process_group import added_up, rows_to_send, sum_of_rows


def numbers_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Tensors that hold every gradient once: dense ones, and the rows of sparse ones, flat.

    A sparse gradient then has each row once, and changes with these tensors.
    """
    numbers, tables = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if _is_of_rows(parameter.grad):
            tables.append(parameter)
            continue
        if parameter.grad.is_sparse:  # of single numbers, as torch.gather's with sparse_grad=True
            parameter.grad = parameter.grad.coalesce()
        numbers.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return numbers + [kind.hand_out(kind.added_up()) for kind in _kinds(tables)]


def sum_rows(tables: Sequence[nn.Parameter], group: Group) -> list[Tensor]:
    """Replace the gradients of tables with their sums over the group.

    A table that no replica used has no gradient. Every rank sends its rows, and adds the rows of all ranks in rank
    order.

    Returns:
        tensors that hold every gradient once, see `numbers_of`.
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
    """Tables of one width and dtype, taken as one table.

    `starts` has the first row of each, and the end.
    """

    tables: list[nn.Parameter]
    starts: list[int]

    def added_up(self) -> Tensor:
        """The rows of this rank's gradients, each once, as one sparse tensor."""
        found = [(t.grad, start) for t, start in zip(self.tables, self.starts, strict=False) if t.grad is not None]
        sparse = [g if _is_of_rows(g) else g.to_dense().to_sparse(1) for g, _ in found]
        like = self.tables[0]
        shape = torch.Size((self.starts[-1], like.shape[1]))
        if not sparse:
            return added_up(torch.empty(1, 0, dtype=torch.int64), like.new_empty(0, like.shape[1]), shape)
        # a call of torch for all tables: for each one they would take longer than the sums
        numbers = torch.cat([g._indices()[0] for g in sparse])
        numbers += _repeated([start for _, start in found], [g._nnz() for g in sparse])
        return added_up(numbers[None], torch.cat([g._values() for g in sparse]), shape)

    def gathered(self, own: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """Gather the sum of all ranks' rows."""
        return sum_of_rows(group.gather_rows(rows_to_send(own), counts), own) if any(counts) else own

    def hand_out(self, rows: Tensor) -> Tensor:
        """Give each table its rows, which all lie in the tensor that is returned."""
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
