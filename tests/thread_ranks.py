"""Ranks as threads that pass tensors through queues, for algorithms on messages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import Any

from torch import Tensor

Pair = tuple[int, int]
_DEADLINE_S = 10.0


@dataclass
class Wires:
    """One rank's end."""

    rank: int
    size: int
    queues: dict[Pair, Queue[Tensor]]
    sent_bytes: int = 0

    def start_exchange(self, send: Sequence[tuple[int, Tensor]], receive: Sequence[tuple[int, Tensor]]) -> Arrival:
        """Send at once; what comes is taken by `wait`."""
        for to, tensor in send:
            self.sent_bytes += tensor.nbytes
            self.queues[self.rank, to].put(tensor.clone())
        return Arrival(self, receive)


@dataclass
class Arrival:
    """Messages that are still to be taken."""

    wires: Wires
    receive: Sequence[tuple[int, Tensor]]

    def wait(self) -> None:
        """Take them."""
        for source, tensor in self.receive:
            came = self.wires.queues[source, self.wires.rank].get(timeout=_DEADLINE_S)
            assert (came.shape, came.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(came)


def in_threads(size: int, call: Callable[[Wires], Any]) -> list[Any]:
    """The results of `call` on so many ranks at once."""
    queues: dict[Pair, Queue[Tensor]] = {(a, b): Queue() for a in range(size) for b in range(size)}
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(call, [Wires(rank, size, queues) for rank in range(size)]))
    assert all(queue.empty() for queue in queues.values()), "a message was never taken"
    return results
