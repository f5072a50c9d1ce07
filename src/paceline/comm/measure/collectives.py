"""Times of training's collectives over each transport, at a few sizes, in about two seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.comm.backend import joined
from paceline.comm.group import Group
from paceline.comm.measure.calls import over
from paceline.comm.measure.speed import repeats_within, timed, timed_with_cpu
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
    """The all-reduce, all-gather, reduce-scatter and message over each transport.

    Every rank calls this, and gets the same.
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
    times = [_one(group, name, size) for size in SIZES]
    return Collective(transport, name, group.size, SIZES, tuple(t for t, _ in times), tuple(c for _, c in times))


def _one(group: Group, name: str, size_bytes: int) -> tuple[float, float]:
    """Wall-clock seconds of a call on the slowest rank, and mean CPU seconds."""
    call, per_call = _call(group, name, size_bytes // 4)
    for _ in range(2):
        one_s = timed(group, call)
    time_s, cpu_s = timed_with_cpu(group, call, repeats_within(one_s, _BUDGET_S, _CALLS))
    return time_s / per_call, cpu_s / per_call


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
