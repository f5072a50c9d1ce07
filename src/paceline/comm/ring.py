"""Ring all-reduce: a pipelined reduce-scatter and all-gather around some ranks.

On n ranks, every rank sends 2 (n - 1) / n of the tensor, which is the minimum (Patarasuk & Yuan, 2009, "Bandwidth
Optimal All-reduce Algorithms for Clusters of Workstations"). A rank forwards a chunk as soon as the chunk has arrived
and was added, while other chunks are in transit. Every element is summed along the ring and then copied, so the result
has the same bits on all ranks. The algorithm `ring` uses this code over any group, and the transport `tcp` uses it
within collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Messages
from paceline.comm.process_group import Reduction

CHUNK_BYTES = 2**18  # large compared with the cost of a message, small compared with the bytes that a rank sends
IN_FLIGHT = 4  # number of chunks: one arrives, one is added, and the others wait in the connection's buffers

T = TypeVar("T")
OnChunk = Callable[[int, int], object]  # arguments: first and end index of a chunk's elements


class Wait(Protocol):
    """Handle of messages in transit."""

    def wait(self) -> None:
        """Wait until the messages are received and sent."""


class Wires(Protocol):
    """Interface of a group for a ring: messages between ranks."""

    rank: int
    size: int

    def start_exchange(self, send: Messages, receive: Messages) -> Wait:
        """Begin to send and receive contiguous tensors."""


def ring_all_reduce(
    wires: Wires,
    tensor: Tensor,
    op: Literal["sum", "max"] = "sum",
    *,
    order: Sequence[int] | None = None,
    prepare: OnChunk | None = None,
    finish: OnChunk | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Replace a flat contiguous tensor with the sum or maximum over the ranks.

    Args:
        order: order of the ranks in the ring (default: ascending). Ranks on the same host should be neighbours.
        prepare: function called for every chunk before its elements are read, while other chunks are in transit.
        finish: function called for every chunk when its elements are final, while other chunks are in transit.

    Raises:
        SyncError: a rank is gone, or missed the deadline (from `wires`).
    """
    ranks = list(order) if order is not None else list(range(wires.size))
    n, place = len(ranks), ranks.index(wires.rank)
    following, before = ranks[(place + 1) % n], ranks[place - 1]
    share = -(-tensor.numel() // n)
    chunks = max(1, -(-share // max(1, chunk_bytes // tensor.element_size())))
    reduction = Reduction.of(dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, tensor.dtype, n)

    def start(sent: Tensor, target: Tensor) -> Wait:
        return wires.start_exchange([(following, sent)] if len(sent) else [], [(before, target)] if len(target) else [])

    moves = around(
        [tensor[i * share : (i + 1) * share] for i in range(n)],
        place,
        range(2 * (n - 1)),
        start,
        reduction=reduction,
        chunk=-(-share // chunks),
        ahead=IN_FLIGHT,
        prepare=prepare,
        finish=finish,
    )
    traced, shown = torch._C._autograd._profiler_enabled(), -1
    with ExitStack() as span:  # span of a step in the profiler's trace, until the step's last chunk has arrived
        for step, exchange in moves:
            if traced and step != shown:
                span.close()
                phase, number = ("reduce-scatter", step + 1) if step < n - 1 else ("all-gather", step - n + 2)
                title = f"ring {phase} step {number} of {n - 1}: {wires.rank} → {following}"
                megabytes = share * tensor.element_size() / 1e6
                span.enter_context(torch.profiler.record_function(f"{title}, {megabytes:.3g} MB"))
                shown = step
            exchange.wait()


def around(
    shares: Sequence[Tensor],
    place: int,
    steps: range,
    start: Callable[[Tensor, Tensor], T],
    *,
    chunk: int,
    ahead: int,
    reduction: Reduction | None = None,
    prepare: OnChunk | None = None,
    finish: OnChunk | None = None,
) -> Iterator[tuple[int, T]]:
    """Run some of the 2 (n - 1) steps of a ring all-reduce among n ranks.

    After the first half of the steps, the rank at place p has the sum of share p over all ranks. After the second half,
    every rank has the sums of all shares. In step t, the rank receives share p - t - 2 from the previous place, and it
    forwards this share in the next step.

    Args:
        shares: n flat tensors, each with the same length on every rank.
        start: function that begins to send one tensor to the next place and to receive another from the previous place.
            Either tensor may be empty if there are fewer elements than places.
        chunk: number of elements that are sent at once.
        ahead: maximum number of chunks in transit.
        reduction: operation that combines received elements in the first half of the steps.
        prepare: as in `ring_all_reduce`, with element indices over all shares.
        finish: as in `ring_all_reduce`, with element indices over all shares.

    Yields:
        A step and the handle from `start`, which the caller waits for before the ring continues.
    """
    n, summing = len(shares), len(shares) - 1  # number of steps of the first half
    begins = [0, *accumulate(map(len, shares))]
    chunks = max(1, -(-max(map(len, shares)) // max(1, chunk)))
    # A chunk is sent after it has arrived in the previous step, so at most one step's chunks are in transit.
    window = min(ahead, chunks)
    buffers = [shares[0].new_empty(chunk) for _ in range(window if steps.start < summing else 0)]
    under_way: deque[tuple[int, int, Tensor, Tensor, T]] = deque()

    def cut(share: int, part: int) -> tuple[int, Tensor]:
        """Return the index of a chunk's first element, and the chunk."""
        whole, begin = shares[share % n], begins[share % n]
        skipped = min(part * chunk, len(whole))
        return begin + skipped, whole[skipped : skipped + chunk]

    def end() -> Iterator[tuple[int, T]]:
        """Wait for the oldest chunk and add it; if the sum is final, call `finish`."""
        step, at, own, target, exchange = under_way.popleft()
        if prepare is not None and step < summing:
            prepare(at, at + len(own))  # while it is in transit
        yield step, exchange
        if step < summing:
            assert reduction is not None
            reduction.add(own, [own, target])
            if step == summing - 1:
                reduction.scale(own)
        if finish is not None and step >= summing - 1:
            finish(at, at + len(own))

    for number, (step, part) in enumerate((step, part) for step in steps for part in range(chunks)):
        if len(under_way) == window:
            yield from end()
        (sent_at, sent), (at, own) = cut(place - step - 1, part), cut(place - step - 2, part)
        if prepare is not None and step == 0:
            prepare(sent_at, sent_at + len(sent))
        target = buffers[number % window][: len(own)] if step < summing else own
        under_way.append((step, at, own, target, start(sent, target)))
    while under_way:
        yield from end()
