"""Speed of a collective: its time, and its bandwidths as nccl-tests (github.com/NVIDIA/nccl-tests) define them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.comm.backend import joined
from paceline.comm.group import Group

SIZES = (2**10, 2**20, 2**24)
_BUDGET_S = 0.25  # per size
_REPEATS = (5, 200)  # at least, at most
_LONG_S = 0.2  # a call of so long is not repeated

# Bus bandwidth / algorithm bandwidth over n ranks, by collective:
# the share of the size that has to pass each rank's link, each way.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,  # of n parts, n - 1 have to come in to be added up, and as many sums again
    "all_gather": lambda n: (n - 1) / n,  # size: that of the whole; all parts but the own one come in
    "reduce_scatter": lambda n: (n - 1) / n,  # size: that of the whole; a rank's part of it comes in from all others
    "all_to_all": lambda n: (n - 1) / n,  # size: what each rank hands out; all but its own part leaves
    "broadcast": lambda n: 1.0,  # all of it comes in
    "send_receive": lambda n: 1.0,  # size: that of the message
}


@dataclass(frozen=True)
class CollectiveSpeed:
    """Time of a collective on fp32 numbers over `ranks` ranks.

    `time_s` is the slowest rank's median over `calls` calls, after a warm-up.

    Attributes:
        size_bytes: size of the larger one of a rank's two buffers, as nccl-tests count it.
        time_s: for `send_receive`, half of the round-trip time.
        algorithm: algorithm of an all-reduce (`flat` is the transport's own).
        wrong: numbers with a wrong value, over all ranks; None if not checked.
    """

    transport: str
    ranks: int
    size_bytes: int
    time_s: float
    collective: str = "all_reduce"
    algorithm: str = "flat"
    calls: int = 1
    wrong: int | None = None

    @property
    def label(self) -> str:
        """The call as text: `gloo, all-reduce by ring`."""
        return f"{self.transport}, {self.collective.replace('_', '-')}" + (f" by {self.algorithm}" if self.algorithm != "flat" else "")

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second: size / time."""
        return self.size_bytes / self.time_s

    @property
    def bus_bandwidth(self) -> float:
        """Bus bandwidth in bytes per second and direction: size / time × the collective's factor.

        Each rank's link carries at least that, so it can be compared with the hardware's rate, whatever the number of
        ranks.
        """
        return self.algorithm_bandwidth * BUS_FACTORS[self.collective](self.ranks)


@dataclass(frozen=True)
class Speeds:
    """One launch's measurements. `note` says why a faster transport was not among them, or is None."""

    speeds: list[CollectiveSpeed]
    note: str | None = None


def measure_on_rank(sizes: tuple[int, ...]) -> Speeds:
    """Measure all-reduces of these sizes on every transport of this launch's ranks. Every rank gets the same."""
    with joined(deadline_s=60) as group, _beside(group) as others:
        speeds = [measure(each, size) for size in sizes for each in (*others, group)]
        group.barrier()
        return Speeds(speeds, group.transport_note)


def measure(group: Group, size_bytes: int) -> CollectiveSpeed:
    """Time all-reduces of a tensor of `group.empty`. Every rank of the group calls this, and gets the same."""
    tensor = group.empty(size_bytes // 4, torch.float32)
    for _ in range(2):  # the first meets untouched memory, and connections that are still to be made
        one_s = timed(group, lambda: group.all_reduce(tensor), 1)
    time_s, calls = median_s(group, lambda: group.all_reduce(tensor), one_s)
    return CollectiveSpeed(group.transport.name, group.size, size_bytes, time_s, calls=calls)


def median_s(group: Group, call: Callable[[], object], one_s: float) -> tuple[float, int]:
    """The slowest rank's median seconds over repeated calls, and the number of calls.

    Calls are repeated for a quarter of a second. `one_s` is the time of an earlier one, the same on every rank; a long
    one is taken as it is.
    """
    if one_s > _LONG_S:
        return one_s, 1
    least, most = _REPEATS
    repeats = min(max(least, int(_BUDGET_S / one_s)), most)
    return timed(group, call, repeats), repeats


def timed(group: Group, call: Callable[[], object], repeats: int) -> float:
    """The slowest rank's median time of `repeats` calls, the same on every rank. All ranks begin at the same time."""
    wait = torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    times_s = []
    group.barrier()
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        wait()
        times_s.append(time.perf_counter() - started)
    return _slowest(group, times_s)


def _slowest(group: Group, times_s: Sequence[float]) -> float:
    median = torch.tensor([statistics.median(times_s)], dtype=torch.float64, device=group.device)
    group.all_reduce(median, "max")
    return float(median.item())


@contextmanager
def _beside(group: Group) -> Iterator[list[Group]]:
    """A group of the same ranks over gloo, if their transport is shared memory."""
    if not group.transport.shares_memory:
        yield []
        return
    other = Group(group.rank, group.size, dist.new_group(backend="gloo"), deadline_s=group.deadline_s, hosts=group.hosts)
    try:
        yield [other]
    finally:
        other.backend = None  # as `leave` does: whoever holds it keeps its threads alive
