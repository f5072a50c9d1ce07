"""The transport's own all-reduce, and the shape of those that paceline makes of messages."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from paceline.comm.group import Group, Op
from paceline.comm.links import GroupLinks


class FlatAllReduce:
    """The transport's own all-reduce.

    Args:
        why: why it is taken, for the record of the run.
        links: measured speed of the links, for `predicted_s`.
    """

    name = "flat"

    def __init__(self, group: Group, why: str, links: GroupLinks | None = None) -> None:
        self.group, self.why, self.links = group, why, links

    @classmethod
    def pays(cls, group: Group) -> bool:
        """False where the ranks of a group have nothing to gain by it."""
        return True

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.group.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.group.release(tensor)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self.group.all_reduce(tensor, op)

    def predicted_s(self, nbytes: int) -> float | None:
        return self.links.flat_s(nbytes) if self.links is not None else None

    def close(self) -> None:
        """Nothing to end."""


class PointToPointAllReduce(FlatAllReduce):
    """An all-reduce of paceline's own, made of messages between ranks."""

    @abstractmethod
    def reduce(self, flat: Tensor, op: Op) -> None:
        """Replace a flat contiguous tensor by the sum or maximum over the ranks."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.group.size == 1:
            return
        self.group.count(0, reduced_bytes=tensor.nbytes)
        flat = tensor.detach().contiguous().view(-1)
        self.reduce(flat, "max" if op == "max" else "sum")
        if op == "mean":
            flat.div_(self.group.size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
