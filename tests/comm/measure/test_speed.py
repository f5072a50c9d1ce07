"""The speed of collectives. Wrong here: bandwidths that nobody can hold against nccl-tests', or ranks that disagree on how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.comm.backend import joined
from paceline.comm.measure.speed import SIZES, CollectiveSpeed, Speeds, measure
from paceline.launch.local import launch
from ranks import Ranks


def test_bandwidths_are_those_of_nccl_tests() -> None:
    speed = CollectiveSpeed("gloo", ranks=4, size_bytes=2**20, time_s=1e-3)
    assert speed.algorithm_bandwidth == pytest.approx(2**20 / 1e-3)
    assert speed.bus_bandwidth == pytest.approx(2**20 / 1e-3 * 2 * 3 / 4)


def test_ranks_started_for_it_write_the_speeds_of_every_transport(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    launch(["paceline.comm.measure.speed:run_rank", str(file)], ranks=2, threads=1, pin_cores=None, deadline_s=60)
    found = Speeds.load(file)
    transports = ["gloo"] if found.note else ["gloo", "shm"]  # a note says why there is no shared memory
    assert [(s.size_bytes, s.transport) for s in found.speeds] == [(size, name) for size in SIZES for name in transports]
    assert all(speed.ranks == 2 and 1e-7 < speed.time_s < 60 for speed in found.speeds)


def one_size() -> Any:
    with joined(deadline_s=30) as group:
        return measure(group, 2**10)


def test_every_rank_gets_the_time_of_the_slowest(ranks: Ranks) -> None:
    first, second, third = ranks(3, one_size)
    assert first == second == third
