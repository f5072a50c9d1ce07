"""All-reduce algorithms by their name in a plan: flat, ring, hierarchical, auto.

`flat` is the transport's own all-reduce (the `Group` itself). The other algorithms exchange messages between ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Group, Op
from paceline.comm.links import measure_links, ranks_by_host
from paceline.comm.process_group import Reduction, Transport
from paceline.comm.ring import ring_all_reduce
from paceline.errors import PlanError, SyncError
from paceline.planning.sync_info import ALGORITHMS
from paceline.units import size

_SIZES = tuple(2**k for k in range(6, 31))  # bytes, at which `auto` compares
_CLEARLY = 0.9  # of flat's time that another algorithm must promise, because predictions are off by some per cent
_EXAMPLE = 2**24  # bytes, for which it shows its predictions
BLOCK_BYTES = 2**26  # reduced at a time; size of the shared block that stages tensors outside shared memory


class Algorithm(Protocol):
    """All-reduce over a group: the group itself, or an `OwnAllReduce`. All ranks get the same bits."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor of zeros in memory that suits the algorithm; see `Group.empty`."""

    def release(self, tensor: Tensor) -> None:
        """Free a tensor that `empty` returned."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace `tensor` on every rank with the sum, mean or maximum over the ranks."""


def algorithm_for(group: Group, name: str) -> tuple[Algorithm, str]:
    """Return the algorithm called `name`, and the reason for the choice.

    Every rank of the group must call this. `auto` measures the links between hosts, which takes a fraction of a second,
    unless the group already has the speeds. Call `close_algorithm` at the end.

    Raises:
        PlanError: no algorithm has this name.
    """
    if name not in (*ALGORITHMS, "auto"):
        raise PlanError(
            "plan.allreduce_unknown",
            "unknown all-reduce algorithm {name!r}. Use one of {algorithms}, auto.",
            name=name,
            algorithms=list(ALGORITHMS),
        )
    if name == "auto" and group.spans_hosts:
        auto = Auto(group)
        return auto, auto.reasons()
    if name == "auto":
        return group, f"flat: all ranks are on one host, where {group.transport.name} is fastest"
    if name == "hierarchical" and not group.spans_hosts:
        return group, f"flat: the ranks are on one host, so there is nothing beyond {group.transport.name}"
    return group if name == "flat" else _OWN[name](group), f"{name}: as the plan says"


def close_algorithm(algorithm: Algorithm) -> None:
    """Close the resources of an algorithm; the group stays open."""
    if isinstance(algorithm, OwnAllReduce):
        algorithm.close()


class OwnAllReduce:
    """All-reduce that paceline implements with messages between ranks, or with servers."""

    name: ClassVar[str]

    def __init__(self, group: Group) -> None:
        self.group = group

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.group.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.group.release(tensor)

    def reduce(self, flat: Tensor, op: Any) -> None:
        """Replace a flat contiguous tensor with the sum or maximum over the ranks.

        Raises:
            SyncError: a rank is gone, missed the deadline, or passed a tensor of another size.
        """
        raise NotImplementedError

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

    def close(self) -> None:
        """Close the groups that the algorithm has created."""


class RingAllReduce(OwnAllReduce):
    """Ring all-reduce over a group, with the ranks ordered by host."""

    name = "ring"

    def reduce(self, flat: Tensor, op: Any) -> None:
        ring_all_reduce(self.group, flat, op, order=ranks_by_host(self.group))


class HierarchicalAllReduce(OwnAllReduce):
    """All-reduce that sums within each host first, so that only sums cross the network.

    With L ranks per host, each rank handles one L-th of the tensor. The rank sums the L contributions, reduces the sum
    in a ring with its counterparts on the other hosts, and writes the result into the memory of all L ranks. With h
    hosts, a link between hosts carries 2 (h - 1) / h of the tensor, independent of L. Memory access and messages
    overlap, one chunk at a time (see `ring`). The division of the tensor follows Cho et al., 2019, "BlueConnect".
    """

    name = "hierarchical"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.host = group.host
        on_hosts = [[r for r in range(group.size) if group.hosts[r] == host] for host in dict.fromkeys(group.hosts)]
        self.parts = min(len(ranks) for ranks in on_hosts)
        # ranks that handle the same part; if hosts have different numbers of ranks, some ranks have no part
        self.across: Group | None = None
        if self.host.rank < self.parts:
            self.across = group.subgroup(sorted(ranks[self.host.rank] for ranks in on_hosts))
            self.across.counts = group.counts
        self._scratch: Tensor | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros in the host's shared memory; all ranks must call this together."""
        return self.host.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.host.release(tensor)

    def close(self) -> None:
        if self._scratch is not None:
            self.host.release(self._scratch)
        if self.across is not None:
            self.across.close()

    def reduce(self, flat: Tensor, op: Any) -> None:
        # the same blocks on all hosts, wherever the tensors are
        for block in flat.split(BLOCK_BYTES // flat.element_size()):
            self._sum_block(block, op)

    def _sum_block(self, block: Tensor, op: Any) -> None:
        memory = self.host.transport
        if not memory.shares_memory:
            self._over_messages(block, op)
        elif self._lies_alike(memory, block):
            self._in_memory(memory, block, op)
        else:
            if self._scratch is None:
                self._scratch = self.host.empty(BLOCK_BYTES, torch.uint8)
            shared = self._scratch[: block.nbytes].view(block.dtype)
            shared.copy_(block)
            if self._lies_alike(memory, shared):
                self._in_memory(memory, shared, op)
                block.copy_(shared)
            else:  # the host has no shared memory left
                self._over_messages(block, op)

    def _lies_alike(self, memory: Transport, flat: Tensor) -> bool:
        """Wait until the contributions of the host's ranks are ready.

        Return True if all contributions are at the same place in shared memory.
        """
        arena, start = memory.place_of(flat)
        own = torch.tensor([arena, start, flat.nbytes])
        both = torch.cat((own, -own))
        self.host.all_reduce(both, "max")
        most, least = both[:3], -both[3:]
        if most[2] != least[2]:
            raise SyncError(
                "ranks.sizes_differ",
                "the ranks of a host passed tensors of {least} to {most} bytes to the same all-reduce (this rank: "
                "{own}). Every rank of a group must make the same calls in the same order, with tensors of the "
                "same type and size.",
                least=least[2],
                most=most[2],
                own=flat.nbytes,
            )
        return arena != 0 and torch.equal(most, least)

    def _in_memory(self, memory: Transport, flat: Tensor, op: Any) -> None:
        """Reduce in shared memory.

        Different ranks of a host access different elements, so they synchronize only before and after the reduction.
        """
        part = self._part(flat)
        if self.across is not None and len(part):
            others = [theirs for r, theirs in enumerate(memory.everywhere(part)) if r != self.host.rank]
            reduction = Reduction.of(dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, flat.dtype, 1)

            def add_up(start: int, end: int) -> None:
                own = part[start:end]
                reduction.into(own, [own, *(theirs[start:end] for theirs in others)])

            def spread(start: int, end: int) -> None:
                for theirs in others:
                    theirs[start:end].copy_(part[start:end])

            ring_all_reduce(self.across, part, op, prepare=add_up, finish=spread)
        self.host.barrier()

    def _over_messages(self, flat: Tensor, op: Any) -> None:
        """Reduce without shared memory, over the transport between the host's ranks.

        Afterwards, each rank sends the part that it handled to the other ranks of the host.
        """
        self.host.all_reduce(flat, op)
        if self.across is not None:
            ring_all_reduce(self.across, self._part(flat), op)
        for carrier, part in enumerate(self._parts(flat)):
            if len(part):
                self.host.broadcast(part, root=carrier)

    def _part(self, flat: Tensor) -> Tensor:
        """Return the part of the tensor that this rank handles; empty if it handles none."""
        return self._parts(flat)[self.host.rank] if self.across is not None else flat[:0]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of the tensor; all but the last consist of whole cache lines."""
        line = 64 // flat.element_size()
        length = -(-flat.numel() // (self.parts * line)) * line
        return [flat[i * length : (i + 1) * length] for i in range(self.parts)]


class Auto(OwnAllReduce):
    """All-reduce with the algorithm that is predicted to be fastest for each size.

    The prediction uses the measured speeds of the links.

    Attributes:
        choices: algorithms by name.
    """

    name = "auto"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        group.links = self.links = group.links or measure_links(group)
        self.choices: dict[str, Algorithm] = {"flat": group, "ring": RingAllReduce(group)}
        if len(set(group.hosts)) < group.size:  # otherwise no host has several ranks
            self.choices["hierarchical"] = HierarchicalAllReduce(group)

    def best(self, nbytes: int) -> str:
        """Choose the algorithm for a size.

        All ranks make the same choice, because they use the same measurements.
        """
        flat_s, *others_s = [self.links.all_reduce_s(name, nbytes) for name in self.choices]
        least_s = min(others_s)
        return [*self.choices][1 + others_s.index(least_s)] if least_s < _CLEARLY * flat_s else "flat"

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.choices[self.best(numel * dtype.itemsize)].empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.choices[self.best(tensor.nbytes)].release(tensor)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self.choices[self.best(tensor.nbytes)].all_reduce(tensor, op)

    def close(self) -> None:
        for choice in self.choices.values():
            close_algorithm(choice)

    def reasons(self) -> str:
        """Describe the algorithm for each range of sizes, and the measurements."""
        best = [(nbytes, self.best(nbytes)) for nbytes in _SIZES]
        starts = [(nbytes, name) for i, (nbytes, name) in enumerate(best) if i == 0 or name != best[i - 1][1]]
        ranges = ", ".join(name if i == 0 else f"{name} from {size(nbytes)}" for i, (nbytes, name) in enumerate(starts))
        predicted = ", ".join(f"{name} {self.links.all_reduce_s(name, _EXAMPLE) * 1e3:.3g} ms" for name in self.choices)
        between, hosts = self.links.between, len(set(self.group.hosts))
        return (
            f"auto: {ranges} (predicted for {size(_EXAMPLE)}: {predicted}), with {self.group.size} ranks on {hosts} "
            f"hosts, {between.bandwidth / 1e6:.3g} MB/s and {between.latency_s * 1e3:.2g} ms between them"
        )


_OWN: dict[str, type[OwnAllReduce]] = {each.name: each for each in (RingAllReduce, HierarchicalAllReduce)}
