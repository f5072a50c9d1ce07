"""Hierarchical all-reduce: ranks of a host sum in shared memory; only sums travel between hosts.

With L ranks a host, each takes one L-th of the tensor: it sums the L contributions, carries the sum around a ring of
its counterparts on the other hosts, and writes the result into the memory of all L. So a link between hosts carries 2
(h - 1) / h of the tensor for h hosts, whatever L is, all ranks work, and work in memory overlaps with messages: both go
piece by piece (see `ring`). The division of the work is that of Cho et al., 2019, "BlueConnect".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.allreduce.flat import PointToPointAllReduce
from paceline.comm.allreduce.ring import OnPiece, ring_all_reduce
from paceline.comm.group import Group, Op
from paceline.comm.links import GroupLinks
from paceline.comm.process_group import Reduction, Transport
from paceline.errors import SyncError

_BLOCK_BYTES = 2**26  # at a time: so much shared memory is kept, once a tensor came that does not lie in any


class HierarchicalAllReduce(PointToPointAllReduce):
    """An all-reduce over hosts: sums in each host's memory, and rings between hosts."""

    name = "hierarchical"

    def __init__(self, group: Group, why: str = "", links: GroupLinks | None = None) -> None:
        super().__init__(group, why, links)
        self.host = group.host
        on_hosts = [[r for r in range(group.size) if group.hosts[r] == host] for host in dict.fromkeys(group.hosts)]
        self.parts = min(len(ranks) for ranks in on_hosts)
        # ranks that carry the same part; a host with more ranks than another has some that carry none
        self.across: Group | None = None
        if self.host.rank < self.parts:
            self.across = group.subgroup(sorted(ranks[self.host.rank] for ranks in on_hosts))
            self.across.counts = group.counts
        self._scratch: Tensor | None = None

    @classmethod
    def pays(cls, group: Group) -> bool:
        """True with several hosts, and several ranks on one of them."""
        return group.spans_hosts and len(set(group.hosts)) < group.size

    def predicted_s(self, nbytes: int) -> float | None:
        return self.links.hierarchical_s(nbytes) if self.links is not None else None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros in the host's shared memory; all ranks ask together."""
        return self.host.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        """Let go of a tensor from `empty`."""
        self.host.release(tensor)

    def close(self) -> None:
        """End what is not the group's own."""
        if self._scratch is not None:
            self.host.release(self._scratch)
        if self.across is not None:
            self.across.close()

    def reduce(self, flat: Tensor, op: Op) -> None:
        """Replace a flat contiguous tensor by the sum or maximum over the ranks, bit-identical everywhere.

        Raises:
            SyncError: a rank is gone, did not come within the deadline, or brought a tensor of another size.
        """
        # on every host alike, however its ranks' tensors lie
        for block in flat.split(_BLOCK_BYTES // flat.element_size()):
            self._sum_block(block, op)

    def _sum_block(self, block: Tensor, op: Op) -> None:
        memory = self.host.transport
        if not memory.shares_memory:
            self._over_messages(block, op)
        elif self._lies_alike(memory, block):
            self._in_memory(memory, block, op)
        else:
            if self._scratch is None:
                self._scratch = self.host.empty(_BLOCK_BYTES, torch.uint8)
            shared = self._scratch[: block.nbytes].view(block.dtype)
            shared.copy_(block)
            if self._lies_alike(memory, shared):
                self._in_memory(memory, shared, op)
                block.copy_(shared)
            else:  # the host has no memory left to be shared
                self._over_messages(block, op)

    def _lies_alike(self, memory: Transport, flat: Tensor) -> bool:
        """Meet the ranks of the host: what each has to contribute is there now.

        Whether all lie at the same place of shared memory.
        """
        arena, start = memory.place_of(flat)
        own = torch.tensor([arena, start, flat.nbytes])
        both = torch.cat((own, -own))
        self.host.all_reduce(both, "max")
        most, least = both[:3], -both[3:]
        if most[2] != least[2]:
            raise SyncError(
                f"the ranks of a host brought tensors of {least[2]} to {most[2]} bytes to one all-reduce (this rank: "
                f"{flat.nbytes}). Every rank of a group must make the same calls in the same order, with tensors of "
                "the same type and size."
            )
        return arena != 0 and torch.equal(most, least)

    def _in_memory(self, memory: Transport, flat: Tensor, op: Op) -> None:
        """Reduce in shared memory.

        No two ranks of a host read or write the same elements of anyone's memory, so they meet only before and after.
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

            self._carry(self.across, part, op, add_up, spread)
        self.host.barrier()

    def _over_messages(self, flat: Tensor, op: Op) -> None:
        """Reduce without shared memory, over the host's own transport.

        Each part is then sent by the rank that carried it.
        """
        self.host.all_reduce(flat, op)
        if self.across is not None:
            self._carry(self.across, self._part(flat), op)
        for carrier, part in enumerate(self._parts(flat)):
            if len(part):
                self.host.broadcast(part, root=carrier)

    def _carry(
        self, across: Group, part: Tensor, op: Op, prepare: OnPiece | None = None, finish: OnPiece | None = None
    ) -> None:
        ring_all_reduce(across, part, "max" if op == "max" else "sum", prepare=prepare, finish=finish)

    def _part(self, flat: Tensor) -> Tensor:
        """The part that this rank carries; empty if it carries none."""
        return self._parts(flat)[self.host.rank] if self.across is not None else flat[:0]

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The part of each carrier; whole cache lines, except for the last one."""
        line = 64 // flat.element_size()
        length = -(-flat.numel() // (self.parts * line)) * line
        return [flat[i * length : (i + 1) * length] for i in range(self.parts)]
