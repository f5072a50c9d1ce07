"""Times of training's collectives over each transport, at a few sizes, in about two seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.comm.backend import joined
from paceline.comm.c10d.transport import register
from paceline.comm.group import Group
from paceline.planner.calibrate import Collective

SIZES = (2**10, 2**16, 2**20, 2**22)
_BUDGET_S, _CALLS = 0.05, (4, 60)


def measure_on_rank(transport: str) -> list[Collective]:
    """Join the other ranks of the launch over a transport, and measure. Every rank gets the same times."""
    with joined(deadline_s=60, transport=transport) as group:
        found = measure_collectives(group, [group.transport.name])
        group.barrier()
        return found


def measure_collectives(group: Group, transports: Sequence[str]) -> list[Collective]:
    """The all-reduce, all-gather, reduce-scatter and message over each transport. Every rank calls this, and gets the same."""
    found = []
    for transport in transports:
        with _over(group, transport) as ranks:
            found += [_measured(ranks, transport, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "send_receive")]
    return found


@contextmanager
def _over(group: Group, transport: str) -> Iterator[Group]:
    """A group of the same ranks over another transport."""
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


def _measured(group: Group, transport: str, name: str) -> Collective:
    times = [_one(group, name, size) for size in SIZES]
    return Collective(transport, name, group.size, SIZES, tuple(t for t, _ in times), tuple(c for _, c in times))


def _one(group: Group, name: str, size_bytes: int) -> tuple[float, float]:
    """Wall-clock seconds of a call on the slowest rank, and mean CPU seconds."""
    call, per_call = _call(group, name, size_bytes // 4)
    for _ in range(2):
        one_s = _timed(call)
    count = min(max(_CALLS[0], int(_BUDGET_S / max(_agreed(group, one_s, "max"), 1e-6))), _CALLS[1])
    group.barrier()
    cpu_s = time.process_time()
    times_s = [_timed(call) for _ in range(count)]
    cpu_s = (time.process_time() - cpu_s) / count
    return _agreed(group, statistics.median(times_s), "max") / per_call, _agreed(group, cpu_s, "mean") / per_call


def _call(group: Group, name: str, numel: int) -> tuple[Callable[[], None], int]:
    """The call to time, and how many messages it makes one after the other."""
    whole, part = torch.zeros(numel), torch.zeros(numel // group.size)
    if name == "all_reduce":
        return lambda: group.all_reduce(whole), 1
    if name == "all_gather":
        return lambda: group.all_gather(whole[: part.numel() * group.size], part), 1
    if name == "reduce_scatter":
        return lambda: group.reduce_scatter(part, whole[: part.numel() * group.size]), 1

    def there_and_back() -> None:
        if group.rank == 0:
            group.send(whole, 1)
            group.receive(whole, 1)
        elif group.rank == 1:
            group.receive(whole, 0)
            group.send(whole, 0)

    return there_and_back, 2


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _agreed(group: Group, value: float, op: str) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    group.all_reduce(tensor, op)  # type: ignore[arg-type]
    return float(tensor)
