"""Tree all-reduce for small tensors: up a binomial tree of ranks and down again.

It takes 2 log2 n messages one after the other; a ring needs 2 (n - 1). As in Thakur, Rabenseifner & Gropp, 2005,
"Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.allreduce.flat import PointToPointAllReduce
from paceline.comm.allreduce.ring import Wires
from paceline.comm.c10d.collectives import Reduction
from paceline.comm.group import Op
from paceline.comm.measure.transports import ranks_by_host


class TreeAllReduce(PointToPointAllReduce):
    """The tree over a group, whose ranks stand in it host by host."""

    name = "tree"

    def reduce(self, flat: Tensor, op: Op) -> None:
        tree_all_reduce(self.group, flat, "max" if op == "max" else "sum", order=ranks_by_host(self.group))

    def predicted_s(self, nbytes: int) -> float | None:
        return self.links.tree_s(nbytes) if self.links is not None else None


def tree_all_reduce(
    wires: Wires, tensor: Tensor, op: Literal["sum", "max"] = "sum", *, order: Sequence[int] | None = None
) -> None:
    """Replace a flat contiguous tensor by the sum or maximum over the ranks.

    The bits are the same everywhere, as only the root adds the last parts.

    Args:
        order: the ranks from the root on; ascending by default. Those of one host should be neighbours: near ones meet
            first.

    Raises:
        SyncError: a rank is gone, or did not come within the deadline (from `wires`).
    """
    ranks = list(order) if order is not None else list(range(wires.size))
    place = ranks.index(wires.rank)
    parent, children = family(place, len(ranks))
    reduction = Reduction.of(dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, tensor.dtype, wires.size)
    if children:
        received = torch.empty_like(tensor)
    for child in children:
        wires.start_exchange([], [(ranks[child], received)]).wait()
        reduction.into(tensor, [tensor, received])
    if parent is not None:
        wires.start_exchange([(ranks[parent], tensor)], []).wait()
        wires.start_exchange([], [(ranks[parent], tensor)]).wait()
    for child in reversed(children):  # the one with most behind it first
        wires.start_exchange([(ranks[child], tensor)], []).wait()


def family(place: int, size: int) -> tuple[int | None, list[int]]:
    """The parent (None: it is the root) and the children, nearest first, of a place in a binomial tree."""
    children, distance = [], 1
    while distance < size and not place & distance:
        if place + distance < size:
            children.append(place + distance)
        distance *= 2
    return (place - distance if place else None), children
