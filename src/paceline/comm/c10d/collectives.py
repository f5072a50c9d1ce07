"""Collectives that a transport offers to c10d's calls, and the reductions that they take.

Tensors are flat and contiguous. Each is a generator that yields while it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.c10d.operation import Steps

_BINARY: dict[ReduceOp.RedOpType, tuple[str, Callable[..., Tensor]]] = {
    ReduceOp.SUM: ("sum", torch.add),
    ReduceOp.AVG: ("mean", torch.add),
    ReduceOp.PRODUCT: ("product", torch.mul),
    ReduceOp.MIN: ("min", torch.minimum),
    ReduceOp.MAX: ("max", torch.maximum),
    ReduceOp.BAND: ("and", torch.bitwise_and),
    ReduceOp.BOR: ("or", torch.bitwise_or),
    ReduceOp.BXOR: ("xor", torch.bitwise_xor),
}


Op = Any  # torch's ReduceOp, or a member of its enumeration


class Reduction:
    """One way to combine the tensors of several ranks."""

    @classmethod
    def of(cls, op: Op, dtype: torch.dtype, size: int) -> Reduction:
        """The way that torch's `op` names.

        Raises:
            ValueError: it is not offered.
        """
        return _reduction(getattr(op, "op", op), dtype, size)

    def __init__(self, kind: ReduceOp.RedOpType, dtype: torch.dtype, size: int) -> None:
        if kind not in _BINARY:
            raise ValueError(
                f"{kind} is not offered between CPUs; there are {', '.join(n for n, _ in _BINARY.values())}"
            )
        self.name, self._binary = _BINARY[kind]
        self._divisor = size if self.name == "mean" else 0
        self._whole = not (dtype.is_floating_point or dtype.is_complex)
        # torch has no arithmetic for 8-bit floating point: it is done in fp32 and rounded once.
        self._through = torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else None

    def into(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Reduce `parts`, of all ranks and in their order, into `out`.

        `out` may be the first of them.
        """
        if self._through is not None:
            out.copy_(self._scaled(self._wide(parts)))
        else:
            self.add(out, parts)
            if self._divisor:
                self._scaled(out)

    def add(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Reduce the parts of some ranks into `out`; a mean is a sum until `scale`."""
        if self._through is not None:
            out.copy_(self._wide(parts))
        elif len(parts) == 1:
            if out is not parts[0]:
                out.copy_(parts[0])
        else:
            self._binary(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self._binary(out, part, out=out)

    def scale(self, total: Tensor) -> None:
        """Make the mean of a sum over all ranks, where a mean is asked for."""
        if self._divisor and self._through is not None:
            total.copy_(self._scaled(total.to(self._through)))
        else:
            self._scaled(total)

    def _wide(self, parts: Sequence[Tensor]) -> Tensor:
        wide = parts[0].to(self._through)
        for part in parts[1:]:
            self._binary(wide, part.to(self._through), out=wide)
        return wide

    def _scaled(self, total: Tensor) -> Tensor:
        if self._divisor:
            total.div_(self._divisor, rounding_mode="trunc" if self._whole else None)
        return total


_reduction = cache(Reduction)


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
