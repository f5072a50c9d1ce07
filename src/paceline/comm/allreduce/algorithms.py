"""All-reduce algorithms by the word that a plan uses: flat, ring, tree, hierarchical, auto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from paceline.cluster.doctor.link_speed import GroupLinks
from paceline.comm.allreduce.hierarchical import Hierarchical
from paceline.comm.allreduce.ring import ring_all_reduce
from paceline.comm.allreduce.tree import tree_all_reduce
from paceline.comm.group import Group, Op
from paceline.comm.measure.transports import measure_links, ranks_by_host
from paceline.errors import PlanError
from paceline.units import size

NAMES = ("flat", "ring", "tree", "hierarchical", "auto")
AddUp = Callable[[Tensor, Op], None]
Cost = Callable[[int], float]
_SIZES = tuple(2**k for k in range(6, 31))  # bytes, at which `auto` compares
_CLEARLY = 0.9  # of flat's time is what another must promise: measurements and formulas are off by some per cent
_EXAMPLE = 2**24  # bytes; for which it shows its reckoning


class Algorithm(Protocol):
    """An all-reduce algorithm over a group. The result has the same bits on every rank."""

    name: str
    why: str
    group: Group

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros in memory that suits the algorithm; see `Group.empty`."""

    def release(self, tensor: Tensor) -> None:
        """Let go of a tensor from `empty`."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace `tensor` on every rank by the sum, mean or maximum over the ranks."""

    def predicted_s(self, nbytes: int) -> float | None:
        """Predicted seconds by the formula (see `cluster.doctor.link_speed`); None if nothing was measured."""

    def close(self) -> None:
        """End the groups that the algorithm made for itself."""


def algorithm_for(group: Group, name: str, links: GroupLinks | None = None) -> Algorithm:
    """The algorithm of a name.

    Every rank of the group calls this; `auto` measures the links between hosts for a fraction of a second.

    Args:
        links: what `auto` goes by instead, measured before by the same ranks.

    Raises:
        PlanError: there is none of that name.
    """
    if name not in NAMES:
        raise PlanError(f"there is no all-reduce algorithm called {name!r}; there are {', '.join(NAMES)}")
    if name == "auto":
        return (
            Auto(group, links)
            if group.spans_hosts
            else BackendAllReduce(
                group, name, f"flat: all ranks are on one host, where {group.transport.name} is fastest"
            )
        )
    if name == "hierarchical" and not group.spans_hosts:
        return BackendAllReduce(
            group, name, f"flat: the ranks are on one host, so there is nothing beyond {group.transport.name}"
        )
    return _made(group, name, f"{name}: as the plan says")


class BackendAllReduce:
    """The transport's own all-reduce."""

    def __init__(self, group: Group, name: str, why: str, links: GroupLinks | None = None) -> None:
        self.group, self.name, self.why, self._links = group, name, why, links

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.group.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.group.release(tensor)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self.group.all_reduce(tensor, op)

    def predicted_s(self, nbytes: int) -> float | None:
        return self._links.flat_s(nbytes) if self._links is not None else None

    def close(self) -> None:
        """Nothing to end."""


class PointToPointAllReduce(BackendAllReduce):
    """An all-reduce of paceline's own, made of messages between ranks.

    `reduce` replaces a flat contiguous tensor by the sum or maximum over the ranks.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        why: str,
        reduce: Callable[[Tensor, Op], None],
        cost: Callable[[int], float] | None,
    ) -> None:
        super().__init__(group, name, why)
        self._reduce, self._cost = reduce, cost

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        if self.group.size == 1:
            return
        self.group.counts.reduced_bytes += tensor.nbytes
        flat = tensor.detach().contiguous().view(-1)
        self._reduce(flat, op)
        if op == "mean":
            flat.div_(self.group.size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def predicted_s(self, nbytes: int) -> float | None:
        return self._cost(nbytes) if self._cost is not None else None


class HierarchicalAllReduce(PointToPointAllReduce):
    """The hierarchical all-reduce, whose tensors lie in memory that a host's ranks share."""

    def __init__(self, group: Group, name: str, why: str, links: GroupLinks | None = None) -> None:
        self.hierarchical = Hierarchical(group)
        super().__init__(group, name, why, self.hierarchical.all_reduce, links.hierarchical_s if links else None)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.hierarchical.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.hierarchical.release(tensor)

    def close(self) -> None:
        self.hierarchical.close()


class Auto(BackendAllReduce):
    """Chooses for each size the algorithm with the lowest predicted time, from measured links."""

    def __init__(self, group: Group, links: GroupLinks | None = None) -> None:
        self.links = links or measure_links(group)
        several = len(set(group.hosts)) < group.size  # ranks on some host
        names = [name for name in NAMES[:-1] if several or name != "hierarchical"]
        self.choices: list[Algorithm] = [_made(group, name, "", self.links) for name in names]
        super().__init__(group, "auto", self._reasons(group))

    def best(self, nbytes: int) -> Algorithm:
        """The algorithm for a size; equal on all ranks, as all use the same numbers."""
        flat, *others = self.choices
        best = min(others, key=lambda choice: choice.predicted_s(nbytes) or 0.0)
        return best if (best.predicted_s(nbytes) or 0.0) < _CLEARLY * (flat.predicted_s(nbytes) or 0.0) else flat

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.best(numel * dtype.itemsize).empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.best(tensor.nbytes).release(tensor)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self.best(tensor.nbytes).all_reduce(tensor, op)

    def predicted_s(self, nbytes: int) -> float | None:
        return self.best(nbytes).predicted_s(nbytes)

    def close(self) -> None:
        for choice in self.choices:
            choice.close()

    def _reasons(self, group: Group) -> str:
        """The chosen algorithm from each size on, and the measurements behind the choice, as text."""
        best = [(nbytes, self.best(nbytes).name) for nbytes in _SIZES]
        starts = [(nbytes, name) for i, (nbytes, name) in enumerate(best) if i == 0 or name != best[i - 1][1]]
        ranges = ", ".join(name if i == 0 else f"{name} from {size(nbytes)}" for i, (nbytes, name) in enumerate(starts))
        predicted = ", ".join(
            f"{choice.name} {(choice.predicted_s(_EXAMPLE) or 0.0) * 1e3:.3g} ms" for choice in self.choices
        )
        between, hosts = self.links.between, len(set(group.hosts))
        return (
            f"auto: {ranges} (predicted for {size(_EXAMPLE)}: {predicted}), with {group.size} ranks on {hosts} hosts, "
            f"{between.bandwidth / 1e6:.3g} MB/s and {between.latency_s * 1e3:.2g} ms between them"
        )


def _made(group: Group, name: str, why: str, links: GroupLinks | None = None) -> Algorithm:
    if name == "flat":
        return BackendAllReduce(group, name, why, links)
    if name == "hierarchical":
        return HierarchicalAllReduce(group, name, why, links)
    near = ranks_by_host(group)
    by, cost = (
        (ring_all_reduce, links.ring_s if links else None)
        if name == "ring"
        else (tree_all_reduce, links.tree_s if links else None)
    )
    return PointToPointAllReduce(
        group, name, why, lambda flat, op: by(group, flat, "max" if op == "max" else "sum", order=near), cost
    )
