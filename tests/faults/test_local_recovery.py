"""Replicas that take steps of their own are killed while a run trains: the others go on, and they come back."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from commands import (
    ended_well,
    events,
    kill_rank,
    losses,
    paceline,
    points,
    training,
    wait_for_events,
    wait_for_step,
    write_job,
)

WHAT = Path(__file__).with_name("what_goes_wrong.py")
STEPS = 120


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 steps of some milliseconds, 6 in an epoch, with an evaluation after each epoch."""
    data = points(0.15, samples=112, sleep_s=0.005)
    return write_job(
        tmp_path_factory.mktemp("job") / "job.yaml",
        model={"factory": f"{WHAT}:net", "args": {"width": 16}},
        data=data,
        optimizer={"name": "adamw", "lr": 0.01},
        stop={"steps": STEPS},
        checkpoint={"every_steps": 20},
        deadline_s=60,
    )


@pytest.mark.parametrize("sync", ["local:4", "diloco:4", "diloco:6,fragments=2,overlap=2"])
@pytest.mark.slow
def test_replicas_that_take_steps_of_their_own_are_replaced_while_the_others_go_on(
    sync: str, job: Path, tmp_path: Path
) -> None:
    plan = f"dp=3 sync={sync}"
    alone = paceline("train", job, "--plan", plan, "--run", "undisturbed", folder=tmp_path)
    assert alone.code == 0, alone.err
    with training(job, tmp_path, plan) as (process, run):
        for count, (rank, step) in enumerate([(2, 9), (0, 30), (1, 54)], 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
        ended_well(process)
    assert [event["replicas"] for event in events(run, "generation")] == [2, 3] * 3
    assert [event["rank"] for event in events(run, "healed")] == [2, 0, 1]
    assert not events(run, "resume"), "nothing was read from the disk"
    assert sorted(losses(run)) == list(range(1, STEPS + 1)), "the record has every step"
    assert newest_epochs(run) == pytest.approx(newest_epochs(tmp_path / "undisturbed"), abs=0.15)


def newest_epochs(run: Path) -> float:
    """Mean loss of the newest steps."""
    found = losses(run)
    return statistics.mean(found[step] for step in range(STEPS - 29, STEPS + 1))


@pytest.mark.slow
def test_where_one_replica_is_left_it_trains_alone_until_the_others_are_back(job: Path, tmp_path: Path) -> None:
    with training(job, tmp_path, "dp=3 sync=diloco:4") as (process, run):
        wait_for_step(10, run, process)
        kill_rank(0, process)
        kill_rank(1, process)
        ended_well(process)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert events(run, "generation")[-1]["replicas"] == 3
    assert not events(run, "resume")


@pytest.mark.slow
def test_divided_replicas_that_take_steps_of_their_own_all_start_again(job: Path, tmp_path: Path) -> None:
    with training(job, tmp_path, "dp=2 fsdp=2 sync=local:4", "--restarts", "1") as (process, run):
        wait_for_step(25, run, process)
        kill_rank(3, process)
        ended_well(process)
    assert events(run, "resume")
    assert not events(run, "lost")
