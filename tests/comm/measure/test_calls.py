"""Collectives that are timed and checked at once. Wrong here: a wrong sum that is taken for a fast one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.allreduce import algorithm_for
from paceline.comm.backend import joined
from paceline.comm.group import Group
from paceline.comm.measure.calls import BUS_FACTORS, SIZES, CollectiveSpeed, measure_all_reduces, measure_call, pair
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from ranks import Backend, Ranks


def all_of_them(size: int) -> Any:
    with joined(deadline_s=30) as group:
        return [measure_call(group, collective, size) for collective in BUS_FACTORS]


@pytest.mark.parametrize(("backend", "size", "shared"), [("gloo", 10**5, 99996), ("shm", 1, 12)])
def test_every_collective_is_measured_and_right(ranks: Ranks, backend: Backend, size: int, shared: int) -> None:
    first, *others = ranks(3, all_of_them, size, backend=backend)
    assert all(other == first for other in others), "the slowest rank's time, the same on every rank"
    assert [s.wrong for s in first] == [0] * len(BUS_FACTORS)
    assert {s.transport for s in first} == {backend}
    assert {s.size_bytes for s in first} == {shared}, "shared evenly by three ranks, a number for each at least"
    assert all(1e-8 < s.time_s < 30 and s.calls >= 1 for s in first)


def by_algorithms() -> Any:
    with joined(deadline_s=30) as group:
        return [measure_call(group, "all_reduce", 2**14, algorithm_for(group, name)[0]) for name in ("ring", "flat")]


def test_the_algorithms_of_the_all_reduce_are_measured_by_name(ranks: Ranks) -> None:
    first, _ = ranks(2, by_algorithms)
    assert [(s.algorithm, s.wrong) for s in first] == [("ring", 0), ("flat", 0)]


class Careless(Group):
    """Sums that lose a block, messages and copies that arrive in the wrong place."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> None:
        super().all_reduce(tensor, op)
        if tensor.numel() > 500:
            tensor[100:200] = 0

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, op: Any = "sum") -> None:
        super().reduce_scatter(own, whole, op)
        own[:2] = own[:2].flip(0)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        super().receive(tensor, source)
        tensor.copy_(tensor.roll(1))


def carelessly(collective: str) -> Any:
    with joined(deadline_s=30) as group:
        careless = Careless(group.rank, group.size, group.backend, group.store, group.deadline_s, group.hosts)
        return measure_call(careless, collective, 2**12).wrong


@pytest.mark.parametrize(
    ("collective", "least"), [("all_reduce", 2 * 2 * 100), ("reduce_scatter", 2 * 2 * 2), ("send_receive", 1000)]
)
def test_wrong_results_are_counted_over_all_ranks(ranks: Ranks, collective: str, least: int) -> None:
    first, second = ranks(2, carelessly, collective)
    assert first == second
    assert first >= least


def test_messages_go_to_another_host_where_there_is_one() -> None:
    assert pair((0, 0)) == (0, 1)
    assert pair((0, 0, 1, 1)) == (0, 2)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    speed = CollectiveSpeed("gloo", ranks=4, size_bytes=2**20, time_s=1e-3)
    assert speed.algorithm_bandwidth == pytest.approx(2**20 / 1e-3)
    assert speed.bus_bandwidth == pytest.approx(2**20 / 1e-3 * 2 * 3 / 4)


def test_ranks_started_for_it_measure_every_transport() -> None:
    found, other = run_on_ranks(measure_all_reduces, SIZES, places=on_this_machine(2))
    assert found == other
    transports = ["gloo"] if found.note else ["gloo", "shm"]  # a note says why there is no shared memory
    assert [(s.size_bytes, s.transport) for s in found.speeds] == [
        (size, name) for size in SIZES for name in transports
    ]
    assert all(speed.ranks == 2 and 1e-7 < speed.time_s < 60 for speed in found.speeds)
