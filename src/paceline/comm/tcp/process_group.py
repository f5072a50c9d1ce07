"""The process group `tcp`: c10d's collectives and messages between ranks on several hosts.

Every rank sends small tensors directly to every other rank, with a single wait. Large tensors go around a ring in
chunks, and one chunk is added while the next chunk is in transit. In an all-reduce of two ranks, the ranks exchange
whole tensors instead. Every element is added along one chain of ranks, or by all ranks in the same order. Therefore,
the result has the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.messages import Receive
from paceline.comm.operation import OperationQueue, Steps
from paceline.comm.process_group import Collectives, DrivenProcessGroup, MessageSteps, Reduction, Transport
from paceline.comm.ring import around
from paceline.comm.tcp.link import PeerLink
from paceline.comm.tcp.mesh import COLLECTIVE, MESSAGE, CurrentCall, LinkMesh, TcpSend
from paceline.comm.tcp.progress import TcpProgress


class TcpProcessGroup(DrivenProcessGroup):
    """Process group over links that survive lost connections.

    The group supports CPU tensors of any dtype, contiguous or not. Once `paceline.comm.tcp` is imported,
    `dist.init_process_group("tcp")` and `dist.new_group(backend="tcp")` create such groups.

    Attributes:
        mesh: the links to the other ranks, until the group ends.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        loop = TcpProgress.acquire()
        try:
            self.mesh = LinkMesh(loop, store, rank, size, timeout.total_seconds())
        except BaseException:
            TcpProgress.release()
            raise
        super().__init__(rank, size, timeout, name, loop, TcpCollectives(self.mesh))
        self._operations = OperationQueue(self.mesh)

    @property
    def transport(self) -> Transport:
        """Transport for `Group`, with the number of unauthenticated peers of this process so far."""
        described = Transport("tcp")
        described.unauthenticated = 0 if self._closed else self.mesh.loop.unauthenticated
        return described

    def _sending(self, receiver: int, flat: Tensor, tag: int) -> MessageSteps:
        mesh, under_way = self.mesh, list[TcpSend | Receive]()

        def steps() -> Steps:
            message = mesh.send(receiver, MESSAGE, _message(flat, tag), flat)
            under_way.append(message)
            while not message.done:
                yield
            message.end_loan()

        return OperationQueue(mesh), steps(), lambda: mesh.links_of(under_way)

    def _receiving(self, sender: int | None, flat: Tensor, tag: int) -> MessageSteps:
        mesh, under_way = self.mesh, list[TcpSend | Receive]()

        def steps() -> Steps:
            message = mesh.receive(sender, MESSAGE, _message(flat, tag), flat)
            under_way.append(message)
            while not message.done:
                yield
            return message.source

        return OperationQueue(mesh), steps(), lambda: mesh.links_of(under_way)

    # Shutdown

    def shutdown(self) -> None:
        """Wait until the other ranks have received all bytes, and close all connections."""
        self._end(self._timeout_s)

    def abort(self) -> None:
        """Close all connections at once."""
        self._end(0.0)

    def end_within(self, seconds: float) -> None:
        """Close all connections once the failure notice is sent, or after `seconds`."""
        self._end(seconds)

    def _end(self, linger_s: float) -> None:
        if not self._closed:
            self._closed = True
            self.mesh.close(linger_s)
            # torch's caches may keep this object for as long as the process lives.
            del self._collectives, self.mesh, self._operations, self._progress
            TcpProgress.release()

    def getBackendName(self) -> str:
        return "tcp"


def _message(flat: Tensor, tag: int) -> CurrentCall:
    return CurrentCall.of("message", flat.dtype, flat.numel())._replace(tag=tag)


_SMALL_BYTES = 2**16  # limit in bytes up to which a rank sends a tensor directly to all other ranks
_CHUNK_BYTES = (2**17, 2**20)  # smallest and largest
_CHUNKS = 8  # minimum number of chunks per rank's share, unless the chunks would be too small
_SWAP_BYTES = 2**20  # size of a chunk in an all-reduce of two ranks
_AHEAD_BYTES = 2**22  # bytes in transit at a time: the volume of a link of 1 Gbit/s in 30 ms


class TcpCollectives(Collectives):
    """Collectives of one group."""

    def __init__(self, mesh: LinkMesh) -> None:
        self._mesh, self.rank, self.size = mesh, mesh.rank, mesh.size
        self._others = [r for r in range(self.size) if r != self.rank]
        self._left, self._right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self._number = 0
        self._under_way: Sequence[TcpSend | Receive] = ()

    def waits_for(self) -> list[PeerLink]:
        return self._mesh.links_of(self._under_way)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        call = self._call("all_reduce", tensor, how=reduction.name)
        if self._is_small(tensor.nbytes):
            parts = yield from self._all_of(call, tensor)
            _combine(reduction, tensor, parts)
        elif self.size == 2:
            yield from self._swap(call, tensor, reduction)
        else:
            yield from self._ring(call, tensor.tensor_split(self.size), range(2 * (self.size - 1)), reduction)

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        call = self._call("reduce", tensor, how=reduction.name, root=root)
        if self._is_small(tensor.nbytes):
            parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == root else []
            yield from self._to_root(call, parts, tensor, root)
            if self.rank == root:
                _combine(reduction, tensor, [tensor if rank == root else part for rank, part in enumerate(parts)])
            return
        whole = tensor if self.rank == root else tensor.clone()
        shares = whole.tensor_split(self.size)
        yield from self._ring(call, shares, range(self.size - 1), reduction)
        yield from self._to_root(call, shares if self.rank == root else [], shares[self.rank], root)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        call = self._call("broadcast", tensor, root=root)
        if self._is_small(tensor.nbytes):
            if self.rank == root:
                yield from self._done([self._send(to, call, tensor) for to in self._others])
            else:
                yield from self._done([self._receive(root, call, tensor)])
            return
        chunks, last = tensor.split(self._chunk(tensor)), self._right == root
        receives = [] if self.rank == root else [self._receive(self._left, call, chunk) for chunk in chunks]
        sends: list[TcpSend] = []
        for i, chunk in enumerate(chunks):
            if receives:
                yield from self._wait([receives[i]])
            if not last:
                sends.append(self._send(self._right, call, chunk))
        yield from self._done(sends)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        call = self._call("all_gather", tensor)
        outputs[self.rank].copy_(tensor)
        if self._is_small(tensor.nbytes):
            receives = [self._receive(r, call, outputs[r]) for r in self._others]
            yield from self._done([*receives, *(self._send(r, call, tensor) for r in self._others)])
        else:
            yield from self._ring(call, outputs, range(self.size - 1, 2 * (self.size - 1)))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
        call = self._call("gather", tensor, root=root)
        if self.rank == root:
            outputs[root].copy_(tensor)
        yield from self._to_root(call, outputs, tensor, root)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
        call = self._call("scatter", output, root=root)
        if self.rank == root:
            yield from self._done([self._send(r, call, tensors[r]) for r in self._others])
            output.copy_(tensors[root])
        else:
            yield from self._done([self._receive(root, call, output)])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        call = self._call("reduce_scatter", output, how=reduction.name)
        if self._is_small(output.nbytes):
            parts = [inputs[r] if r == self.rank else torch.empty_like(output) for r in range(self.size)]
            receives = [self._receive(r, call, parts[r]) for r in self._others]
            yield from self._done([*receives, *(self._send(r, call, inputs[r]) for r in self._others)])
            _combine(reduction, output, parts)
        else:
            shares = torch.cat(list(inputs)).chunk(self.size)
            yield from self._ring(call, shares, range(self.size - 1), reduction)
            output.copy_(shares[self.rank])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        call = self._call("all_to_all", inputs[self.rank][:0])
        receives = [self._receive(r, call, outputs[r]) for r in self._others]
        yield from self._done([*receives, *(self._send(r, call, inputs[r]) for r in self._others)])
        if outputs[self.rank].numel() != inputs[self.rank].numel():
            raise ValueError(
                f"all_to_all: rank {self.rank} sends {len(inputs[self.rank])} to itself and expects "
                f"{len(outputs[self.rank])}"
            )
        outputs[self.rank].copy_(inputs[self.rank])

    def barrier(self) -> Steps:
        nothing = torch.empty(0, dtype=torch.uint8)
        yield from self._all_of(self._call("barrier", nothing), nothing)

    # Parts of collectives

    def _ring(
        self, call: CurrentCall, shares: Sequence[Tensor], steps: range, reduction: Reduction | None = None
    ) -> Steps:
        """Run some steps of a ring all-reduce in the order of the ranks (see `comm.ring`)."""
        chunk, sends = self._chunk(max(shares, key=len)), list[TcpSend]()
        ahead = max(1, _AHEAD_BYTES // (chunk * shares[0].element_size()))

        def start(sent: Tensor, target: Tensor) -> list[Receive]:
            receives = [self._receive(self._left, call, target)] if len(target) else []
            if len(sent):
                sends.append(self._send(self._right, call, sent))
            return receives

        for _, receives in around(shares, self.rank, steps, start, chunk=chunk, ahead=ahead, reduction=reduction):
            yield from self._wait(receives)
        yield from self._done(sends)

    def _swap(self, call: CurrentCall, tensor: Tensor, reduction: Reduction) -> Steps:
        """Exchange whole tensors with the only other rank, and add both.

        A ring of two ranks sends the same number of bytes, but its second step waits for its first step.
        """
        chunks = tensor.split(max(1, _SWAP_BYTES // tensor.element_size()))
        buffers = [torch.empty_like(chunk) for chunk in chunks[: _AHEAD_BYTES // _SWAP_BYTES]]
        theirs = [buffers[i % len(buffers)][: len(chunk)] for i, chunk in enumerate(chunks)]
        receives = [self._receive(self._right, call, target) for target in theirs[: len(buffers)]]
        sends = [self._send(self._right, call, chunk) for chunk in chunks]
        for i, (own, other) in enumerate(zip(chunks, theirs, strict=True)):
            yield from self._done([receives[i], sends[i]])
            reduction.into(own, [own, other] if self.rank == 0 else [other, own])
            if i + len(buffers) < len(chunks):
                receives.append(self._receive(self._right, call, theirs[i + len(buffers)]))

    def _all_of(self, call: CurrentCall, tensor: Tensor) -> Steps:
        """Return the tensors of all ranks, in rank order; this rank's entry is `tensor` itself."""
        parts = [tensor if r == self.rank else torch.empty_like(tensor) for r in range(self.size)]
        receives = [self._receive(r, call, parts[r]) for r in self._others]
        yield from self._done([*receives, *(self._send(r, call, tensor) for r in self._others)])
        return parts

    def _to_root(self, call: CurrentCall, parts: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
        if self.rank == root:
            yield from self._done([self._receive(r, call, parts[r]) for r in self._others])
        else:
            yield from self._done([self._send(root, call, tensor)])

    def _done(self, messages: Sequence[TcpSend | Receive]) -> Steps:
        """Wait until all messages are done; afterwards, the sent tensors may change.

        Memory that goes around a ring is lent to its stream until the ring is done. An earlier overwrite happens only
        when the sum has come back, so the next rank has already received the lent bytes.
        """
        yield from self._wait(messages)
        for message in messages:
            if isinstance(message, TcpSend):
                message.end_loan()

    def _wait(self, messages: Sequence[TcpSend | Receive]) -> Steps:
        if not all(message.done for message in messages):
            self._under_way = messages
            yield
            while not all(message.done for message in messages):
                yield
            self._under_way = ()

    def _send(self, to: int, call: CurrentCall, tensor: Tensor) -> TcpSend:
        return self._mesh.send(to, COLLECTIVE, call, tensor)

    def _receive(self, source: int, call: CurrentCall, tensor: Tensor) -> Receive:
        return self._mesh.receive(source, COLLECTIVE, call, tensor)

    def _call(self, what: str, tensor: Tensor, *, how: str = "", root: int = -1) -> CurrentCall:
        self._number += 1
        return CurrentCall.of(what, tensor.dtype, tensor.numel(), how=how, root=root, number=self._number)

    def _is_small(self, nbytes: int) -> bool:
        return nbytes * (self.size - 1) <= _SMALL_BYTES

    def _chunk(self, share: Tensor) -> int:
        """Return the number of elements of a chunk, equal on all ranks."""
        least, most = _CHUNK_BYTES
        return max(1, min(most, max(least, share.nbytes // _CHUNKS)) // share.element_size())


def _combine(reduction: Reduction, out: Tensor, parts: Sequence[Tensor]) -> None:
    """Reduce the parts in rank order; `out` may be one of the parts."""
    total = torch.empty_like(out)
    reduction.into(total, parts)
    out.copy_(total)
