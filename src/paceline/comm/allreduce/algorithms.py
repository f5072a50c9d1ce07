"""All-reduce algorithms by the word that a plan uses: flat, ring, hierarchical, auto."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.allreduce.flat import FlatAllReduce
from paceline.comm.group import Group, Op
from paceline.comm.links import GroupLinks, measure_links
from paceline.errors import PlanError
from paceline.planning.sync_info import ALGORITHMS
from paceline.units import size

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
        """Predicted seconds by the formula (see `comm.link_speed`); None if nothing was measured."""

    def close(self) -> None:
        """End the groups that the algorithm made for itself."""


def algorithm_for(group: Group, name: str) -> Algorithm:
    """The algorithm of a name.

    Every rank of the group calls this; `auto` measures the links between hosts for a fraction of a second, unless the
    group has their speeds.

    Raises:
        PlanError: there is none of that name.
    """
    if name not in (*ALGORITHMS, "auto"):
        raise PlanError(f"there is no all-reduce algorithm called {name!r}; there are {', '.join(ALGORITHMS)}, auto")
    if name == "auto" and group.spans_hosts:
        return Auto(group)
    if name == "auto":
        return FlatAllReduce(group, f"flat: all ranks are on one host, where {group.transport.name} is fastest")
    kind = _kind(name)
    if not group.spans_hosts and not kind.pays(group):
        return FlatAllReduce(
            group, f"flat: the ranks are on one host, so there is nothing beyond {group.transport.name}"
        )
    return kind(group, f"{name}: as the plan says")


class Auto(FlatAllReduce):
    """Chooses for each size the algorithm with the lowest predicted time, from measured links."""

    name = "auto"

    def __init__(self, group: Group) -> None:
        group.links = links = group.links or measure_links(group)
        super().__init__(group, "", links)
        kinds = [kind for kind in map(_kind, ALGORITHMS) if kind.pays(group)]
        self.choices = [kind(group, "", links) for kind in kinds]
        self.why = self._reasons(group, links)

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

    def _reasons(self, group: Group, links: GroupLinks) -> str:
        """The chosen algorithm from each size on, and the measurements behind the choice, as text."""
        best = [(nbytes, self.best(nbytes).name) for nbytes in _SIZES]
        starts = [(nbytes, name) for i, (nbytes, name) in enumerate(best) if i == 0 or name != best[i - 1][1]]
        ranges = ", ".join(name if i == 0 else f"{name} from {size(nbytes)}" for i, (nbytes, name) in enumerate(starts))
        predicted = ", ".join(
            f"{choice.name} {(choice.predicted_s(_EXAMPLE) or 0.0) * 1e3:.3g} ms" for choice in self.choices
        )
        between, hosts = links.between, len(set(group.hosts))
        return (
            f"auto: {ranges} (predicted for {size(_EXAMPLE)}: {predicted}), with {group.size} ranks on {hosts} hosts, "
            f"{between.bandwidth / 1e6:.3g} MB/s and {between.latency_s * 1e3:.2g} ms between them"
        )


def _kind(name: str) -> type[FlatAllReduce]:
    """The class of an algorithm."""
    module, _, attribute = ALGORITHMS[name].partition(":")
    found: type[FlatAllReduce] = getattr(import_module(module), attribute)
    return found
