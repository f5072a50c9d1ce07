"""A run that rewinds goes back to its last good state: in memory, else on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.run.record.run import Run
from paceline.run.recovery.mirror import FEWEST, MOST, steps_between
from paceline.state.reader import load_latest
from ranks import Ranks
from small_jobs import new_run, points, small_job, train_as_rank, train_here


def dealt_in(step: int) -> int:
    """A sample of a batch of the first epoch."""
    dealt = Partition(PartitionSpec(), samples=70, global_batch=8, seed=0, replica=0, replicas=1)
    return int(list(dealt.batches(0))[step - 1][0])


def job_of(*bad_steps: int, memory_every_steps: int | None = None, **changes: Any) -> Job:
    """A job whose batches of these steps are not finite."""
    values: dict[str, Any] = {
        "model": {"factory": "small_jobs:with_dropout"},
        "data": points(nan_at=[dealt_in(step) for step in bad_steps], noise=0.1),
        "nonfinite": "rewind",
        "checkpoint": {"memory_every_steps": memory_every_steps},
        "stop": {"steps": 9},
    }
    return small_job(**(values | changes))


def rewinds(run: Run) -> list[tuple[int, int, str]]:
    return [(e["from_step"], e["to_step"], e["kept"]) for e in run.events() if e["event"] == "rewind"]


def test_a_run_goes_back_to_the_state_in_memory_and_computes_the_same_again(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", job_of(6, memory_every_steps=3))
    assert rewinds(run) == [(6, 3, "memory")]
    lines = (run.path / "steps" / "rank-0.jsonl").read_text().splitlines()
    found = [line.split('"loss":')[1].split(",")[0] for line in lines]
    assert found[3:5] == found[6:8], "steps 4 and 5"
    assert run.reason == "steps: 9 done"


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, "dp=2"),
        pytest.param(2, "fsdp=2", marks=pytest.mark.slow),
        pytest.param(2, "pp=2 microbatches=2", marks=pytest.mark.slow),
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
    ],
)
def test_every_rank_of_a_plan_goes_back_to_its_part(tmp_path: Path, ranks: Ranks, size: int, plan: str) -> None:
    changes: dict[str, Any] = {"model": {"factory": "small_jobs:plain"}, "data": points(nan_at=[dealt_in(6)])}
    new_run(tmp_path / "run", job_of(memory_every_steps=3, **changes), plan)
    ranks(size, train_as_rank, tmp_path / "run")
    run = Run(tmp_path / "run")
    ((_, to_step, kept),) = rewinds(run)
    assert (to_step, kept) == (3, "memory")
    assert run.reason == "steps: 9 done"
    left_out = [step["step"] for step in run.steps() if step["loss"] is None]
    on_disk = train_here(tmp_path / "disk", job_of(**changes, checkpoint={"every_steps": 3}))
    assert [step["step"] for step in on_disk.steps() if step["loss"] is None] == left_out
    assert run.losses == pytest.approx(on_disk.losses, rel=1e-4, nan_ok=True)


def test_a_newer_checkpoint_is_gone_back_to_in_place_of_memory(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", job_of(6, checkpoint={"memory_every_steps": 3, "every_steps": 4}))
    assert rewinds(run) == [(6, 4, "disk")]


def test_where_the_next_step_from_memory_fails_too_the_run_goes_back_to_disk(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", job_of(6, 7, memory_every_steps=5))
    assert rewinds(run) == [(6, 5, "memory"), (7, 0, "disk")]
    assert [step["step"] for step in run.steps() if step["loss"] is None] == [6, 7]
    assert run.reason == "steps: 9 done"


def test_the_last_checkpoint_of_a_run_that_went_back_is_of_its_end(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", job_of(6, checkpoint={"memory_every_steps": 1, "every_steps": 4}))
    found = load_latest(run.checkpoints, rank=0, world=1, report=lambda *_: None)
    assert found is not None
    assert found.step == 9
    assert found.values["loop"]["rejected"] == [6]


def test_states_that_are_dear_to_take_are_taken_seldom() -> None:
    assert [steps_between(cost) for cost in (0.0, 0.002, 0.5, 2000.0)] == [FEWEST, FEWEST, 50, MOST]
