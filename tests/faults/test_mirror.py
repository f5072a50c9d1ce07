"""Ranks of a model's only replica are killed while a run trains: it goes on from copies in memory, exactly."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from commands import (
    ended_well,
    events,
    kill_rank,
    losses,
    paceline,
    points,
    processes_of,
    rank_of,
    training,
    wait_for_events,
    wait_for_step,
    write_job,
)

pytestmark = pytest.mark.slow
WHAT = Path(__file__).with_name("what_goes_wrong.py")
STEPS, EVERY = 40, 4
Losses = Callable[[str], dict[int, float]]
FSDP, PP = "fsdp=2", "pp=2 microbatches=2 balance=off"


def long_job(**changes: object) -> dict[str, object]:
    """40 steps, 6 in an epoch, with an evaluation after each epoch, and copies every 4 steps."""
    return {
        "model": {"factory": f"{WHAT}:net", "args": {"width": 16}},
        "data": points(0.15, samples=112, sleep_s=0.002),
        "optimizer": {"name": "adamw", "lr": 0.01},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": 1000, "memory_every_steps": EVERY},
        "deadline_s": 60,
        **changes,
    }


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job") / "job.yaml", **long_job())


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> Losses:
    """The losses of a plan when nothing happens."""
    return cache(partial(losses_of, job))


def losses_of(job: Path, plan: str) -> dict[int, float]:
    """The losses of one run."""
    run = job.parent / plan.replace(" ", "-")
    outcome = paceline("train", job, "--plan", plan, "--run", run.name, folder=job.parent)
    assert outcome.code == 0, outcome.err
    return losses(run)


@pytest.mark.parametrize(
    ("plan", "kills"),
    [
        (FSDP, [(0, 9), (1, 18), (0, 27)]),
        (PP, [(1, 9), (0, 18), (1, 27)]),
        ("fsdp=2 tp=2", [(3, 9), (0, 18), (2, 27)]),
    ],
)
def test_a_lost_part_comes_back_from_another_ranks_memory_and_losses_are_those_of_the_undisturbed_run(
    plan: str, kills: list[tuple[int, int]], job: Path, undisturbed: Losses, tmp_path: Path
) -> None:
    with training(job, tmp_path, plan) as (process, run):
        for count, (rank, step) in enumerate(kills, 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", count, process)
        ended_well(process)
    assert {event["code"] for event in events(run, "lost")} == {"launch.rank_killed"}
    assert losses(run) == undisturbed(plan)
    assert [event["rank"] for event in events(run, "healed")] == [rank for rank, _ in kills]
    back = events(run, "went_back")
    assert [event["step"] > 0 for event in back] == [True] * len(kills)
    assert all(0 <= event["lost_steps"] <= 2 * EVERY + 2 for event in back)
    assert not events(run, "resume"), "nothing was read from the disk"


def test_a_rank_that_is_lost_with_the_one_that_has_its_copy_comes_back_from_the_disk(
    undisturbed: Losses, tmp_path: Path
) -> None:
    checkpoint = {"every_steps": 8, "memory_every_steps": EVERY}
    job = write_job(tmp_path / "job.yaml", **long_job(checkpoint=checkpoint))
    with training(job, tmp_path, FSDP) as (process, run):
        wait_for_step(12, run, process)
        for rank in (0, 1):
            kill_rank(rank, process)
        ended_well(process)
    assert events(run, "resume")
    assert losses(run) == undisturbed(FSDP)


def test_a_checkpoint_that_is_newer_than_the_copies_is_taken(undisturbed: Losses, tmp_path: Path) -> None:
    checkpoint = {"every_steps": 8, "memory_every_steps": 1000}
    job = write_job(tmp_path / "job.yaml", **long_job(checkpoint=checkpoint))
    with training(job, tmp_path, FSDP) as (process, run):
        wait_for_step(20, run, process)
        kill_rank(1, process)
        ended_well(process)
    assert events(run, "resume")
    assert not events(run, "restart"), "the other rank kept its process"
    assert losses(run) == undisturbed(FSDP)


def test_a_stopped_rank_is_replaced(job: Path, undisturbed: Losses, tmp_path: Path) -> None:
    with training(job, tmp_path, FSDP) as (process, run):
        wait_for_step(14, run, process)
        [stopped] = [p for p in processes_of(process) if rank_of(p) == 1]
        stopped.send_signal(signal.SIGSTOP)
        ended_well(process)
    assert [(event["rank"], event["code"]) for event in events(run, "lost")] == [(1, "launch.rank_hung")]
    assert [event["rank"] for event in events(run, "healed")] == [1]
    assert losses(run) == undisturbed(FSDP)
