"""Ring all-reduce: a pipelined reduce-scatter and all-gather around a ring of ranks.

Every rank sends 2 (n - 1) / n of the tensor, the least that is possible: Patarasuk & Yuan, 2009, "Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations". A piece goes on as soon as it has arrived and was added, while
others are still on their way. Every element is summed along the ring by one chain of ranks and then copied, so that it
has the same bits everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.allreduce.flat import PointToPointAllReduce
from paceline.comm.group import Messages, Op
from paceline.comm.links import ranks_by_host
from paceline.comm.process_group import Reduction

PIECE_BYTES = 2**18  # long against the cost of starting a message, short against what a rank has to send
IN_FLIGHT = 4  # pieces: one arrives, one is added, and the others wait in the buffers of the connection


class RingAllReduce(PointToPointAllReduce):
    """The ring over a group, whose ranks stand in it host by host."""

    name = "ring"

    def reduce(self, flat: Tensor, op: Op) -> None:
        ring_all_reduce(self.group, flat, "max" if op == "max" else "sum", order=ranks_by_host(self.group))

    def predicted_s(self, nbytes: int) -> float | None:
        return self.links.ring_s(nbytes) if self.links is not None else None


class Wait(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when they are received and sent."""


class Wires(Protocol):
    """The part of a group that a ring needs: messages between ranks."""

    rank: int
    size: int

    def start_exchange(self, send: Messages, receive: Messages) -> Wait:
        """Begin to send and receive contiguous tensors, to and from ranks."""


class OnPiece(Protocol):
    """A callback for consecutive elements of the tensor.

    They are prepared before the ring reads them, or handed on when they are final.
    """

    def __call__(self, start: int, end: int, /) -> None: ...


def ring_all_reduce(
    wires: Wires,
    tensor: Tensor,
    op: Literal["sum", "max"] = "sum",
    *,
    order: Sequence[int] | None = None,
    prepare: OnPiece | None = None,
    finish: OnPiece | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Replace a flat contiguous tensor by the sum or maximum over the ranks.

    Args:
        order: the ranks around the ring; ascending by default. Neighbours should be near each other.
        prepare: called for every piece before its elements are read, while others are on their way.
        finish: called for every piece when its elements are those of the result, while others are on their way.

    Raises:
        SyncError: a rank is gone, or did not come within the deadline (from `wires`).
    """
    ranks = list(order) if order is not None else list(range(wires.size))
    ring = _Ring(wires, tensor, ranks, max(1, piece_bytes // tensor.element_size()))
    reduction = Reduction.of(dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, tensor.dtype, wires.size)
    moves, under_way = ring.moves(), deque[_UnderWay]()
    buffers = [tensor.new_empty(ring.piece) for _ in range(ring.in_flight)]
    span = _Spans(ring)
    for number, move in enumerate(moves):
        if len(under_way) == ring.in_flight:
            _end(under_way.popleft(), tensor, reduction, prepare, finish, span)
        if prepare is not None and move.step == 0:
            prepare(*move.sends)
        target = tensor[slice(*move.receives)]
        if move.adds:
            target = buffers[number % ring.in_flight][: len(target)]
        under_way.append(_UnderWay(move, target, ring.start(tensor[slice(*move.sends)], target)))
    while under_way:
        _end(under_way.popleft(), tensor, reduction, prepare, finish, span)
    span.close()


@dataclass(frozen=True)
class _Move:
    """One piece to the next rank and one from the one before; (start, end) in elements.

    `adds`: it is a contribution, not a result.
    """

    step: int
    sends: tuple[int, int]
    receives: tuple[int, int]
    adds: bool
    is_last: bool  # what is received is then the sum of all ranks


@dataclass(frozen=True)
class _UnderWay:
    move: _Move
    target: Tensor
    wait: Wait | None


def _end(
    under_way: _UnderWay,
    tensor: Tensor,
    reduction: Reduction,
    prepare: OnPiece | None,
    finish: OnPiece | None,
    span: _Spans,
) -> None:
    """See a piece in, add it up, and hand it on if it is final."""
    move = under_way.move
    span.enter(move.step)
    if prepare is not None and move.adds:
        prepare(*move.receives)  # while it is on its way
    if under_way.wait is not None:
        under_way.wait.wait()
    if move.adds:
        own = tensor[slice(*move.receives)]
        reduction.into(own, [own, under_way.target])
    if finish is not None and (move.is_last or not move.adds):
        finish(*move.receives)


class _Ring:
    """The schedule of a ring: which rank sends which elements in which step.

    Segment s is summed on its way from the rank at place s to the one before that.
    """

    def __init__(self, wires: Wires, tensor: Tensor, ranks: Sequence[int], longest: int) -> None:
        self.wires, self.size, self.numel, self.itemsize = wires, len(ranks), tensor.numel(), tensor.element_size()
        self.place = ranks.index(wires.rank)
        self.following, self.before = ranks[(self.place + 1) % self.size], ranks[self.place - 1]
        self.segment = -(-self.numel // self.size)
        self.pieces = max(1, -(-self.segment // longest))
        self.piece = -(-self.segment // self.pieces)
        # A piece may start when it came in by the step before, so no more are under way than a step has.
        self.in_flight = min(IN_FLIGHT, self.pieces)

    def moves(self) -> list[_Move]:
        """All of them, in order."""
        last = self.size - 2  # step of the reduce-scatter
        return [
            _Move(
                step,
                self._bounds(self.place - step, piece),
                self._bounds(self.place - step - 1, piece),
                step <= last,
                step == last,
            )
            for step in range(2 * (self.size - 1))
            for piece in range(self.pieces)
        ]

    def _bounds(self, segment: int, piece: int) -> tuple[int, int]:
        start = segment % self.size * self.segment
        end = min(start + self.segment, self.numel)
        return min(start + piece * self.piece, end, self.numel), min(start + (piece + 1) * self.piece, end)

    def start(self, sent: Tensor, target: Tensor) -> Wait | None:
        """Begin a move.

        Where there are fewer elements than places for them, some messages have none and are not sent.
        """
        send = [(self.following, sent)] if len(sent) else []
        receive = [(self.before, target)] if len(target) else []
        return self.wires.start_exchange(send, receive) if send or receive else None

    def title(self, step: int) -> str:
        """The name of a step in the profiler's trace."""
        phase, steps = ("reduce-scatter", step) if step < self.size - 1 else ("all-gather", step - self.size + 1)
        megabytes = self.segment * self.itemsize / 1e6
        return (
            f"ring {phase} step {steps + 1} of {self.size - 1}: {self.wires.rank} → {self.following}, "
            f"{megabytes:.3g} MB"
        )


class _Spans:
    """The ring's steps in the profiler's trace; each lasts until its last piece is in."""

    def __init__(self, ring: _Ring) -> None:
        self.ring, self.step = ring, -1
        self.traced = torch._C._autograd._profiler_enabled()
        self.span: AbstractContextManager[object] = nullcontext()

    def enter(self, step: int) -> None:
        """A piece of this step is waited for next."""
        if self.traced and step != self.step:
            self.close()
            self.step = step
            self.span = torch.profiler.record_function(self.ring.title(step))
            self.span.__enter__()

    def close(self) -> None:
        """The last step is over."""
        self.span.__exit__(None, None, None)
        self.span = nullcontext()
