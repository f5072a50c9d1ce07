"""`benchmarks/faults.py` kills ranks of a run, and finds the run whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_lose_no_step_and_no_digit() -> None:
    options = ["--faults", "2", "--transports", "shm", "--rounds", "1", "--no-goodput", "--json"]
    outcome = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["figures"]
    assert (figures["shm_steps_lost"], figures["shm_inexact"], figures["shm_hangs"]) == (0, 0, 0)
    assert figures["shm_kill_gap_worst_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_are_killed_on_accelerators_cost_no_step_and_the_others_keep_their_memory() -> None:
    options = ["--device", "sim", "--count", "2", "--plans", "dp=2;dp=2 fsdp=2", "--json"]
    outcome = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["figures"]
    counts = ("kills", "steps_lost", "hangs", "wrong", "moved", "memory_lost")
    assert [figures[f"sim_{name}"] for name in counts] == [2, 0, 0, 0, 0, 0]
