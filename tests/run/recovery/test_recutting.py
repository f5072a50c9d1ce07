"""A pipeline with a slow rank is cut anew, the slow rank is named, and the losses are those of the uncut model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import (
    ended,
    events,
    kill_rank,
    losses,
    paceline,
    training,
    wait_for_events,
    wait_for_step,
    write_job,
)
from paceline.comm import Group
from paceline.elastic.membership import StepBoundary, newest_of
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.goodput import goodput
from paceline.run.record.progress import event_sentence
from paceline.run.record.run import Run
from paceline.run.recovery.recutting import Recut, Stages, follows_times
from paceline.run.recovery.run import train_in
from ranks import Ranks
from small_jobs import new_run, points, small_job, train_as_rank

TESTS = Path(__file__).parents[2]
OPTIMIZER = {"name": "sgd", "lr": 0.01, "momentum": 0.9}


def job(steps: int, *, block_s: float = 0.0, **changes: Any) -> Job:
    """Six blocks, which take five times as long on rank 1."""
    args = {"features": 6, "blocks": 6, "block_s": block_s, "rank": 1, "factor": 5.0}
    settings: dict[str, Any] = {
        "model": {"factory": "sleepy_blocks:SleepyBlocks", "args": args},
        "data": points(samples=120, held_out=0.2),
        "global_batch": 16,
        "precision": "fp64",
        "optimizer": OPTIMIZER,
        "stop": {"steps": steps},
    }
    return small_job(**settings | changes)


def trained_alone(path: Path, alone: Job, microbatches: int) -> Run:
    run = new_run(path, alone, f"dp=1 microbatches={microbatches}")
    train_in(run, Group())
    return run


@pytest.mark.slow
def test_a_pipeline_with_a_slow_rank_is_cut_anew_and_no_loss_changes(tmp_path: Path, ranks: Ranks) -> None:
    # sleeping takes most of a step on any machine, and is the slow rank's share of it
    new_run(tmp_path / "run", job(45, block_s=0.01), "pp=2 microbatches=4")
    ranks(2, train_as_rank, tmp_path / "run")
    run = Run(tmp_path / "run")
    [told] = events(run.path, "recut")  # and no other: the stages are even then
    assert (told["pp_rank"], told["ranks"], told["hosts"]) == (1, [1], [0])
    assert (told["cut_before"], told["cut"]) == ("blocks.3", "blocks.5")
    assert told["since_step"] < told["step"] < 45
    assert told["share"] > 0.7
    assert goodput(run).parts_s["recut"] > 0
    assert not goodput(run).failures
    alone = trained_alone(tmp_path / "alone", job(45), 4)
    assert run.losses == pytest.approx(alone.losses, rel=1e-9)
    assert run.metrics == pytest.approx(alone.metrics, rel=1e-9)


def train_with_cuts(path: Path, cuts: dict[int, tuple[int, ...]]) -> None:
    """Train as a rank that decides after these steps on stages of so many segments."""
    decided: list[tuple[int, ...]] = []

    def step(self: Stages, step: int, busy_s: object) -> bool:
        decided[:] = [cuts[step]] if step in cuts else []
        return bool(decided)

    Stages.step = step  # type: ignore[method-assign]
    Stages.better = lambda self, costs, lengths: Recut(decided[0], 1e9, 0.1, 0, 1, 0.6)  # type: ignore[method-assign]
    train_as_rank(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "cuts", "changes"),
    [
        ("pp=2 microbatches=2", {4: (2, 6), 12: (6, 2)}, {"num_workers": 2}),
        ("dp=2 pp=2", {4: (2, 6)}, {"clip_norm": 0.5, "batch_norm": "sync"}),
        ("pp=2 schedule=zero-bubble microbatches=4", {5: (1, 1, 1, 5)}, {"checkpoint": {"every_steps": 2}}),
        ("fsdp=2 pp=2", {4: (2, 6)}, {"batch_norm": "sync"}),
    ],
)
def test_losses_and_metrics_do_not_depend_on_when_the_stages_move(
    tmp_path: Path, ranks: Ranks, plan: str, cuts: dict[int, tuple[int, ...]], changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    data = points(samples=120, held_out=0.2) | {"num_workers": changes.pop("num_workers", 0)}
    new_run(tmp_path / "run", job(20, data=data, **changes), plan)
    ranks(Plan.parse(plan).ranks, train_with_cuts, tmp_path / "run", cuts)
    run = Run(tmp_path / "run")
    told = events(run.path, "recut")
    assert len(told) == len(cuts)
    assert all(event["cut"] != event["cut_before"] for event in told)
    alone = trained_alone(tmp_path / "alone", job(20, **changes), Plan.parse(plan).microbatches)
    assert run.losses == pytest.approx(alone.losses, rel=1e-9)
    assert run.metrics == pytest.approx(alone.metrics, rel=1e-9)
    assert [step["step"] for step in run.steps(1)] == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "lost", "slow"), [("dp=2 pp=2", 3, "ranks 1, 3"), ("pp=2", 1, "rank 1")])
def test_ranks_that_recover_go_on_with_the_new_cut(tmp_path: Path, plan: str, lost: int, slow: str) -> None:
    args = {"features": 4, "blocks": 6, "block_s": 0.02, "rank": 1, "factor": 5.0, "norm": False}
    file = write_job(
        tmp_path / "job.yaml",
        model={"factory": f"{TESTS / 'sleepy_blocks.py'}:SleepyBlocks", "args": args},
        data={"kind": "dataset", "factory": f"{TESTS / 'faults' / 'what_goes_wrong.py'}:Points", "held_out": 0},
        precision="fp64",
        optimizer=OPTIMIZER,
        stop={"steps": 60},
        checkpoint={"memory_every_steps": 3},
        deadline_s=60,
    )
    alone = paceline("train", file, "--plan", "dp=1", "--run", "alone", folder=tmp_path)
    assert alone.code == 0, alone.err
    with training(file, tmp_path, f"{plan} microbatches=2") as (process, path):
        wait_for_step(1, path, process)
        wait_for_events(path, "recut", 1, process)
        wait_for_step(events(path, "recut")[0]["step"] + 8, path, process)
        kill_rank(lost, process)
        wait_for_events(path, "generation", 1, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert outcome.says(f"{slow} computed", "stages begin at blocks.5 instead of blocks.3")
    assert len(events(path, "recut")) == 1, "the new cut was kept over the loss of a rank"
    assert not events(path, "resume")
    assert not events(path, "restart")
    assert losses(path) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    board = EventAccumulator(str(path / "tensorboard"))
    board.Reload()
    assert board.Scalars("train/loss")[0].step == 1, "those of the first generation, too"


def test_stages_stay_where_the_plan_names_them_or_ranks_have_state_of_their_own() -> None:
    assert follows_times(Plan.parse("pp=2"))
    for plan in ("dp=2", "pp=2 balance=off", "pp=2 cut=blocks.2", "pp=2 compile=on", "dp=2 pp=2 sync=local:2"):
        assert not follows_times(Plan.parse(plan)), plan


def test_people_are_told_which_rank_is_slow_and_where_stages_begin() -> None:
    event = {"event": "recut", "step": 21, "pp_rank": 1, "ranks": [1, 3], "hosts": [1, 3], "since_step": 6}
    event |= {"share": 0.8185, "cut_before": "blocks.3", "cut": "blocks.5", "gain": 0.5705}
    assert event_sentence(event) == (
        "ranks 1, 3 (hosts 1, 3) computed 82% of the pipeline's time since step 6; after step 21 stages begin at "
        "blocks.5 instead of blocks.3, which is expected to save 57% of each step"
    )
    assert event_sentence(event | {"ranks": [1], "hosts": [0]}).startswith("rank 1 computed")  # type: ignore[union-attr]


def test_parts_of_two_cuts_are_not_put_together() -> None:
    """Ranks may be lost while some have the new cut already."""
    old, new = (StepBoundary(step=7, generation=1, cut=cut) for cut in ("blocks.3", "blocks.5"))
    start = newest_of([old, old, new, new], replica_size=2)
    assert (start.boundary.cut, start.behind) == ("blocks.5", [0, 1])
    start = newest_of([old, old, old, new], replica_size=2)
    assert (start.boundary.cut, start.behind) == ("blocks.3", [3])
    assert newest_of([old, new], replica_size=2).begins, "from the checkpoint that was saved for the change"
