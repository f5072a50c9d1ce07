"""Other load on the machine is seen, and what it may have cost a run is stated, never taken off."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.discover import discover
from paceline.elastic.attempt import launch
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting
from paceline.stats import Interval
from paceline_lab.scaling.summary import NOISE_CORES, OtherLoad, _own_cpu_s, stolen_share, undisturbed


def test_a_process_is_a_load_of_others_until_it_was_waited_for_as_our_own() -> None:
    load, own_s = OtherLoad(discover().hosts[0]), _own_cpu_s()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        child, started = psutil.Process(process.pid), time.monotonic()
        while sum(child.cpu_times()[:2]) < 0.3:
            time.sleep(0.02)
        passed_s = time.monotonic() - started
        others = load.busy_cores()
        process.kill()
    assert others is not None
    assert others * passed_s > 0.1, "the kernel counts by ticks, and time in interrupts is left out"
    assert _own_cpu_s() - own_s > 0.3


def burn(arguments: list[str]) -> None:
    started_s = time.process_time()
    while time.process_time() - started_s < float(arguments[0]):
        pass


def test_ranks_are_our_own_load() -> None:
    launch(Setting([f"{__file__}:burn", "0.01"], on_this_machine(1)))
    own_s, ended_s = _own_cpu_s(), 0.6
    launch(Setting([f"{__file__}:burn", str(ended_s)], on_this_machine(1)))
    assert _own_cpu_s() - own_s >= 0.9 * ended_s


@given(others=st.floats(0, 64), devices=st.integers(1, 64), cores=st.integers(1, 64))
def test_what_fits_on_free_cores_costs_nothing_and_no_load_takes_a_core_away_whole(
    others: float, devices: int, cores: int
) -> None:
    share = stolen_share(others, devices=devices, cores=cores)
    assert 0 <= share <= 0.9
    assert share == 0 or others > max(0, cores - devices) + NOISE_CORES
    assert stolen_share(None, devices=devices, cores=cores) == 0


def test_times_of_disturbed_runs_may_have_been_shorter_and_not_longer() -> None:
    widened = undisturbed(Interval(8.0, 9.0, 10.0), stolen_share(0.25, devices=2, cores=2))
    assert (widened.low, widened.middle, widened.high) == pytest.approx((6.0, 9.0, 10.0))
