"""Collectives as calls on buffers with known exact results, to be timed and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.allreduce.algorithms import Algorithm
from paceline.comm.backend import joined
from paceline.comm.c10d.transport import register
from paceline.comm.group import Group
from paceline.comm.measure.speed import CollectiveSpeed, repeats_within, timed

_PERIOD = 251  # of the numbers in a buffer: a prime, so that a block that lands in the wrong place does not look right
_BUDGET_S, _CALLS = 0.25, (5, 200)  # of each measurement
_LONG_S = 0.2  # a call of so long is not repeated


@dataclass(frozen=True)
class TimedCollective:
    """A collective that is ready to be called again and again.

    Attributes:
        run: the call.
        fill: puts this rank's numbers into the buffers; they are small and whole, so that every sum of them is exact.
        wrong: after `fill` and `run`: how many numbers are not what they have to be on this rank.
        clear: zeros everywhere, which stay what they are however often they are summed.
        release: lets go of the buffers.
    """

    run: Callable[[], object]
    fill: Callable[[], object]
    wrong: Callable[[], int]
    clear: Callable[[], object]
    release: Callable[[], object] = lambda: None


def measure_call(group: Group, collective: str, size_bytes: int, algorithm: Algorithm | None = None) -> CollectiveSpeed:
    """Time a collective and check its results, before and after the timing. Every rank calls this, and gets the same.

    Args:
        collective: one of `BUS_FACTORS`.
        size_bytes: of the larger buffer; rounded down to what the ranks can share evenly, and to one number for each of
            them at least.
        algorithm: of an all-reduce; None is the transport's own.
    """
    call, numel = _prepared(group, collective, size_bytes, algorithm)
    per_call = 2 if collective == "send_receive" else 1  # there and back
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
        time_s / per_call,
        collective=collective,
        algorithm=algorithm.name if algorithm else "flat",
        calls=calls,
        wrong=int(everywhere.item()),
    )


SIZES = (2**10, 2**20, 2**24)


@dataclass(frozen=True)
class Speeds:
    """One launch's measurements. `note` says why a faster transport was not among them, or is None."""

    speeds: list[CollectiveSpeed]
    note: str | None = None


def measure_all_reduces(sizes: tuple[int, ...]) -> Speeds:
    """Join the other ranks of a launch, and measure all-reduces.

    Beside shared memory, gloo is measured as well.
    """
    with (
        joined(deadline_s=60) as group,
        over(group, "gloo" if group.transport.shares_memory else group.transport.name) as other,
    ):
        groups = (group,) if other is group else (other, group)
        speeds = [measure_call(each, "all_reduce", size) for size in sizes for each in groups]
        group.barrier()
        return Speeds(speeds, group.transport_note)


@contextmanager
def over(group: Group, transport: str) -> Iterator[Group]:
    """A group of the same ranks over a transport, which may be the group itself."""
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
    """Two ranks that exchange messages: rank 0, and the first rank of another host.

    On one host the second is the next rank.
    """
    return 0, next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)


def _prepared(
    group: Group, collective: str, size_bytes: int, algorithm: Algorithm | None
) -> tuple[TimedCollective, int]:
    numel = max(1, size_bytes // 4 // group.size) * group.size
    match collective:
        case "all_reduce":
            return _all_reduce(group, numel, algorithm), numel
        case "broadcast":
            return _broadcast(group, numel), numel
        case "send_receive":
            return _send_receive(group, numel), numel
    part, whole = numel // group.size, slice(group.rank * numel // group.size, (group.rank + 1) * numel // group.size)
    device, ranks = group.device, range(group.size)
    pattern = _pattern(numel, group)
    own, large = torch.zeros(part, device=device), torch.zeros(numel, device=device)
    if collective == "all_gather":
        expected = torch.cat([pattern[r * part : (r + 1) * part] + r for r in ranks])
        return _call(own, large, pattern[whole] + group.rank, expected, lambda: group.all_gather(large, own)), numel
    if collective == "reduce_scatter":
        return _call(
            large, own, pattern + group.rank, _sum(pattern, group)[whole], lambda: group.reduce_scatter(own, large)
        ), numel
    received = torch.zeros_like(large)
    expected = torch.cat([pattern[whole] + r for r in ranks])
    return _call(large, received, pattern + group.rank, expected, lambda: group.all_to_all(received, large)), numel


def _all_reduce(group: Group, numel: int, algorithm: Algorithm | None) -> TimedCollective:
    by: Algorithm | Group = algorithm or group
    tensor = by.empty(numel, torch.float32)
    pattern = _pattern(numel, group)
    call = _call(tensor, tensor, pattern + group.rank, _sum(pattern, group), lambda: by.all_reduce(tensor))
    return TimedCollective(call.run, call.fill, call.wrong, call.clear, lambda: by.release(tensor))


def _broadcast(group: Group, numel: int) -> TimedCollective:
    tensor, pattern = torch.zeros(numel, device=group.device), _pattern(numel, group)
    mine = pattern if group.rank == 0 else torch.zeros_like(pattern)
    return _call(tensor, tensor, mine, pattern, lambda: group.broadcast(tensor))


def _send_receive(group: Group, numel: int) -> TimedCollective:
    """There and back between the two ranks of `pair`: the second sends what it got."""
    tensor, pattern = torch.zeros(numel, device=group.device), _pattern(numel, group)
    first, second = pair(group.hosts)
    received = torch.zeros_like(tensor)
    if group.rank == first:

        def run() -> None:
            group.send(tensor, second)
            group.receive(received, second)

        return _call(tensor, received, pattern, pattern, run)
    if group.rank == second:

        def answer() -> None:
            group.receive(received, first)
            group.send(received, first)

        return _call(tensor, received, torch.zeros_like(pattern), pattern, answer)
    return _call(tensor, tensor, pattern, pattern, lambda: None)  # only there


def _call(source: Tensor, result: Tensor, mine: Tensor, expected: Tensor, run: Callable[[], object]) -> TimedCollective:
    def fill() -> None:
        result.fill_(-1.0)
        source.copy_(mine)

    def clear() -> None:
        result.zero_()
        source.zero_()

    return TimedCollective(run, fill, lambda: int((result != expected).sum().item()), clear)


def _pattern(numel: int, group: Group) -> Tensor:
    return (torch.arange(numel, device=group.device) % _PERIOD).to(torch.float32)


def _sum(pattern: Tensor, group: Group) -> Tensor:
    """Over the ranks, of `pattern` + rank."""
    return pattern * group.size + group.size * (group.size - 1) / 2
