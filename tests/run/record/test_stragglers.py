"""Spread of ranks' compute times, from a run's record."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from paceline.cluster.discover import discover
from paceline.errors import RunError
from paceline.planning.plan import Plan
from paceline.run.record.run import Run
from paceline.run.record.slow_ranks import step_time_sigma
from small_jobs import small_job


def run_of(folder: Path, *ranks: list[float]) -> Run:
    """A run whose ranks computed for these seconds in each step."""
    run = Run.create(folder / "run", small_job(), discover(), Plan(dp=len(ranks)))
    for rank, times in enumerate(ranks):
        lines = [json.dumps({"step": step, "compute_s": time}) for step, time in enumerate(times, 1)]
        (run.path / "steps" / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_the_spread_of_the_steps_is_found_whatever_the_first_ones_took(tmp_path: Path) -> None:
    dice = random.Random(1)
    ranks = [[9.0] * 5 + [dice.gauss(mean, 0.05 * mean) for _ in range(2000)] for mean in (0.1, 0.3)]
    assert step_time_sigma(run_of(tmp_path, *ranks)) == pytest.approx(0.05, rel=0.05)


def test_a_rank_that_is_always_slow_is_no_spread(tmp_path: Path) -> None:
    assert step_time_sigma(run_of(tmp_path, [0.1] * 30, [0.2] * 30)) == pytest.approx(0, abs=1e-9)


def test_a_run_of_few_steps_says_that_it_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--straggler-sigma"):
        step_time_sigma(run_of(tmp_path, [0.1] * 8))
