"""Sums and the like over tensors of several ranks, for every type of number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

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
