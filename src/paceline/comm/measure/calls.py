"""Timed and checked collectives on buffers with exactly known results.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.allreduce import Algorithm, OwnAllReduce
from paceline.comm.backend import joined
from paceline.comm.group import Group
from paceline.comm.links import timed, timed_with_cpu
from paceline.comm.process_group import register
from paceline.device import is_accelerator
from paceline.planning.calibrate import Collective

_PERIOD = 251  # period of the numbers in a buffer: a prime, so that a misplaced block is noticed
_BUDGET_S, _CALLS = 0.25, (5, 200)  # per measurement
_LONG_S = 0.2  # a call that takes longer is not repeated
MESSAGES = {"send_receive": 2}  # sequential messages in a call: there and back; else one


@dataclass(frozen=True)
class TimedCollective:
    """Collective that can be called repeatedly.

    Attributes:
        source: this rank's input buffer, initially zero.
        result: this rank's output buffer; the same buffer as `source` if the call is in place.
        mine: this rank's input numbers, which are small integers, so that every sum is exact.
        expected: expected numbers in `result` after `fill` and `run`.
        run: function that makes the call.
        release: function that frees the buffers.
    """

    source: Tensor
    result: Tensor
    mine: Tensor
    expected: Tensor
    run: Callable[[], object]
    release: Callable[[], object] = lambda: None

    def fill(self) -> None:
        """Write this rank's input numbers to `source`, and clear the result."""
        self.result.fill_(-1.0)
        self.source.copy_(self.mine)

    def wrong(self) -> int:
        """Count the wrong results on this rank, after `fill` and `run`."""
        return int((self.result != self.expected).sum().item())

    def clear(self) -> None:
        """Zero the buffers, because repeated sums of zeros do not overflow."""
        self.result.zero_()
        self.source.zero_()


def measure_call(group: Group, collective: str, size_bytes: int, algorithm: Algorithm | None = None) -> CollectiveSpeed:
    """Measure the time of a collective, and check its results before and after.

    Every rank must call this function, and gets the same result.

    Args:
        collective: one of `BUS_FACTORS`.
        size_bytes: size of the larger buffer. The size is rounded down so that all ranks have equal shares, with at
            least one number per rank.
        algorithm: algorithm of an all-reduce; None means the transport's own algorithm.
    """
    numel = shared_evenly(group, size_bytes)
    call = prepared(group, collective, numel, algorithm or group)
    try:
        call.fill()
        one_s = timed(group, call.run)
        wrong = call.wrong()
        call.clear()
        calls = 1 if one_s > _LONG_S else repeats_within(one_s, _BUDGET_S, _CALLS)
        time_s = timed(group, call.run, calls) if calls > 1 else one_s
        if calls > 1:
            call.fill()
            call.run()
            wrong += call.wrong()
    finally:
        call.release()
    everywhere = torch.tensor([wrong], dtype=torch.int64, device=group.device)
    group.all_reduce(everywhere)
    return CollectiveSpeed(
        group.transport.name,
        group.size,
        4 * numel,
        time_s / MESSAGES.get(collective, 1),
        collective=collective,
        algorithm=algorithm.name if isinstance(algorithm, OwnAllReduce) else "flat",
        calls=calls,
        wrong=int(everywhere.item()),
    )


SIZES = (2**10, 2**20, 2**24)


@dataclass(frozen=True)
class Speeds:
    """Measurements of one launch.

    `note` is the reason why a faster transport was not measured, or None.
    """

    speeds: list[CollectiveSpeed]
    note: str | None = None


def measure_all_reduces(sizes: tuple[int, ...]) -> Speeds:
    """Join the other ranks of a launch, and measure all-reduces.

    If the transport is shared memory, gloo is measured as well.
    """
    with (
        joined(deadline_s=60) as group,
        over(group, "gloo" if group.transport.shares_memory else group.transport.name) as other,
    ):
        groups = (group,) if other is group else (other, group)
        speeds = [measure_call(each, "all_reduce", size) for size in sizes for each in groups]
        group.barrier()
        # on accelerators, which do not use shared memory, the store's note does not explain the transport
        return Speeds(speeds, None if is_accelerator(group.device) else group.transport_note)


@contextmanager
def over(group: Group, transport: str) -> Iterator[Group]:
    """Return a context with a group of the same ranks over another transport."""
    if transport == group.transport.name:
        yield group
        return
    register(transport)
    backend = dist.new_group(backend=transport, timeout=timedelta(seconds=group.deadline_s))
    other = Group(group.rank, group.size, backend, deadline_s=group.deadline_s, hosts=group.hosts)
    try:
        yield other
    finally:
        other.close()


def pair(hosts: Sequence[int]) -> tuple[int, int]:
    """Choose two ranks that exchange messages: rank 0, and the first rank of another host.

    If there is only one host, the second rank is rank 1.
    """
    return 0, next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)


def shared_evenly(group: Group, size_bytes: int) -> int:
    """Return the number of fp32 values in a buffer that all ranks can share evenly."""
    return max(1, size_bytes // 4 // group.size) * group.size


def prepared(group: Group, collective: str, numel: int, by: Algorithm | None = None) -> TimedCollective:
    """Prepare a collective of `BUS_FACTORS` on `numel` fp32 numbers.

    Args:
        by: algorithm of the all-reduce, which also allocates the buffer; None means `group` with ordinary memory.
    """
    rank, size, part = group.rank, group.size, numel // group.size
    own = slice(rank * part, (rank + 1) * part)
    whole, share = torch.zeros(numel, device=group.device), torch.zeros(part, device=group.device)
    pattern = (torch.arange(numel, device=group.device) % _PERIOD).to(torch.float32)
    match collective:
        case "all_reduce":
            tensor = by.empty(numel, torch.float32) if by else whole
            release = partial(by.release, tensor) if by else lambda: None
            run = partial((by or group).all_reduce, tensor)
            return TimedCollective(tensor, tensor, pattern + rank, _sum(pattern, size), run, release)
        case "all_gather":
            expected = torch.cat([pattern[r * part : (r + 1) * part] + r for r in range(size)])
            return TimedCollective(share, whole, pattern[own] + rank, expected, partial(group.all_gather, whole, share))
        case "reduce_scatter":
            total = _sum(pattern, size)[own]
            return TimedCollective(whole, share, pattern + rank, total, partial(group.reduce_scatter, share, whole))
        case "all_to_all":
            received, expected = torch.zeros_like(whole), torch.cat([pattern[own] + r for r in range(size)])
            run = partial(group.all_to_all, received, whole)
            return TimedCollective(whole, received, pattern + rank, expected, run)
        case "broadcast":
            mine = pattern if rank == 0 else torch.zeros_like(pattern)
            return TimedCollective(whole, whole, mine, pattern, partial(group.broadcast, whole))
    return _there_and_back(group, whole, pattern)


def _there_and_back(group: Group, tensor: Tensor, pattern: Tensor) -> TimedCollective:
    """Prepare a message from the first rank of `pair` to the second rank, and back."""
    first, second = pair(group.hosts)
    received = torch.zeros_like(tensor)

    def ask() -> None:
        group.send(tensor, second)
        group.receive(received, second)

    def answer() -> None:
        group.receive(received, first)
        group.send(received, first)

    if group.rank == first:
        return TimedCollective(tensor, received, pattern, pattern, ask)
    if group.rank == second:
        return TimedCollective(tensor, received, torch.zeros_like(pattern), pattern, answer)
    return TimedCollective(tensor, tensor, pattern, pattern, lambda: None)


def _sum(pattern: Tensor, ranks: int) -> Tensor:
    """Return the sum of `pattern` + rank over all ranks."""
    return pattern * ranks + ranks * (ranks - 1) / 2


# Bus bandwidth / algorithm bandwidth over n ranks, by collective:
# the share of the size that must pass each rank's link, in each direction.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,  # out of n parts, n - 1 are received to be added, and then n - 1 sums
    "all_gather": lambda n: (n - 1) / n,  # size of the whole; all parts except the rank's own are received
    "reduce_scatter": lambda n: (n - 1) / n,  # size of the whole; a rank's part is received from all others
    "all_to_all": lambda n: (n - 1) / n,  # size that each rank sends, except its own part
    "broadcast": lambda n: 1.0,  # all of it is received
    "send_receive": lambda n: 1.0,  # size of the message
}


@dataclass(frozen=True)
class CollectiveSpeed:
    """Time of a collective on fp32 numbers over `ranks` ranks.

    Attributes:
        size_bytes: size of the larger of a rank's two buffers, as in nccl-tests.
        time_s: the slowest rank's median time of `calls` calls after a warm-up; for `send_receive`, half of the
            round-trip time.
        algorithm: algorithm of an all-reduce; `flat` is the transport's own algorithm.
        wrong: count of wrong values over all ranks; None if not checked.
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
        """Description of the call, such as `gloo, all-reduce by ring`."""
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

        Each rank's link carries at least this many bytes per second. Therefore, the bus bandwidth is comparable with
        the hardware's bandwidth for any number of ranks.
        """
        return self.algorithm_bandwidth * BUS_FACTORS[self.collective](self.ranks)


def repeats_within(one_s: float, budget_s: float, limits: tuple[int, int]) -> int:
    """Return the number of repetitions that fit a time budget, within limits.

    Args:
        one_s: time of one call in seconds.
    """
    return min(max(limits[0], int(budget_s / max(one_s, 1e-9))), limits[1])


CALIBRATION_SIZES = (2**10, 2**16, 2**20, 2**22)
_CALIBRATION_S, _CALIBRATION_CALLS = 0.05, (4, 60)


def measure_on_rank(transport: str) -> list[Collective]:
    """Join the other ranks of the launch over a transport, and measure collectives.

    All ranks get the same times.
    """
    with joined(deadline_s=60, transport=transport) as group:
        found = measure_collectives(group, [group.transport.name])
        group.barrier()
        return found


def measure_collectives(group: Group, transports: Sequence[str]) -> list[Collective]:
    """Measure all-reduce, all-gather, reduce-scatter and messages over each transport.

    Every rank must call this function, and gets the same result.
    """
    found = []
    for transport in transports:
        with over(group, transport) as ranks:
            found += [
                _measured(ranks, transport, name)
                for name in ("all_reduce", "all_gather", "reduce_scatter", "send_receive")
            ]
    return found


def _measured(group: Group, transport: str, name: str) -> Collective:
    times = [_one(group, name, size) for size in CALIBRATION_SIZES]
    return Collective(
        transport, name, group.size, CALIBRATION_SIZES, tuple(t for t, _ in times), tuple(c for _, c in times)
    )


def _one(group: Group, name: str, size_bytes: int) -> tuple[float, float]:
    """Measure the slowest rank's wall-clock time and the mean CPU time of a call."""
    call, messages = prepared(group, name, shared_evenly(group, size_bytes)), MESSAGES.get(name, 1)
    for _ in range(2):
        one_s = timed(group, call.run)
    time_s, cpu_s = timed_with_cpu(group, call.run, repeats_within(one_s, _CALIBRATION_S, _CALIBRATION_CALLS))
    return time_s / messages, cpu_s / messages
