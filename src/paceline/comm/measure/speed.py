"""Speed of a collective: its time, and its bandwidths as nccl-tests (github.com/NVIDIA/nccl-tests) define them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.comm.group import Group
from paceline.device import synchronize

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
        size_bytes: size of the larger one of a rank's two buffers, as NVIDIA's tests count it.
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
        return f"{self.transport}, {self.collective.replace('_', '-')}" + (
            f" by {self.algorithm}" if self.algorithm != "flat" else ""
        )

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


def timed(group: Group, call: Callable[[], object], repeats: int = 1) -> float:
    """The slowest rank's median seconds of `repeats` calls, the same on every rank.

    All ranks begin at the same time.
    """
    return timed_with_cpu(group, call, repeats)[0]


def timed_with_cpu(group: Group, call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Seconds of calls, as `timed`, and the mean CPU seconds of a call."""
    times_s = []
    group.barrier()
    cpu_s = time.process_time()
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        synchronize(group.device)
        times_s.append(time.perf_counter() - started)
    cpu_s = (time.process_time() - cpu_s) / repeats
    own = torch.zeros((2, group.size), dtype=torch.float64, device=group.device)
    own[:, group.rank] = torch.tensor([statistics.median(times_s), cpu_s], dtype=torch.float64)
    group.all_reduce(own)
    return float(own[0].max()), float(own[1].mean())


def repeats_within(one_s: float, budget_s: float, limits: tuple[int, int]) -> int:
    """Number of timed repetitions that a budget allows, within limits.

    Args:
        one_s: seconds of one call.
    """
    return min(max(limits[0], int(budget_s / max(one_s, 1e-9))), limits[1])
