"""The speed of collectives. Wrong here: bandwidths that nobody can hold against nccl-tests'."""

from __future__ import annotations

import pytest

from paceline.comm.measure.calls import SIZES, CollectiveSpeed, measure_all_reduces
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks


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
