"""Times of training's collectives over each transport, at a few sizes, in about two seconds."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.backend import joined
from paceline.comm.group import Group
from paceline.comm.measure.calls import MESSAGES, over, prepared, shared_evenly
from paceline.comm.measure.speed import repeats_within, timed, timed_with_cpu
from paceline.planning.calibrate import Collective

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
    call, messages = prepared(group, name, shared_evenly(group, size_bytes)), MESSAGES.get(name, 1)
    for _ in range(2):
        one_s = timed(group, call.run)
    time_s, cpu_s = timed_with_cpu(group, call.run, repeats_within(one_s, _BUDGET_S, _CALLS))
    return time_s / messages, cpu_s / messages
