"""How much of a run may be lost, and what a disk that takes no more does to it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from commands import checkpoints, events
from paceline.comm import Group
from paceline.engine.reduction import StepSignals
from paceline.errors import CheckpointError
from paceline.job.job import CheckpointSpec
from paceline.run.checkpoints import CheckpointSchedule
from paceline.run.record.run import Run
from paceline.state import writer as checkpoint
from paceline.state.writer import Checkpointer, Snapshot
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, small_job, train_as_rank, train_here


@contextmanager
def after_each_step(look: Callable[[int], object]) -> Iterator[None]:
    """Call `look` with the number of optimizer steps made so far, at the end of each."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        look(steps)

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()


def most_behind(run: Path, worst: list[int]) -> Callable[[int], None]:
    """Notes how many steps would be trained again if the run were killed now, at most."""

    def look(step: int) -> None:
        whole = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????")]
        worst.append(step - max(whole, default=0))

    return look


def train_slowly_written(run: Path) -> None:
    """Train as a rank whose checkpoints would never be finished beside the training."""
    checkpoint.REST = 10_000.0
    worst: list[int] = []
    with after_each_step(most_behind(run, worst)):
        train_as_rank(run)
    # A rank may be ahead of rank 0, which publishes, by the step under way.
    assert max(worst) <= 5 + (os.environ["RANK"] != "0"), worst


def test_no_more_steps_than_the_cadence_are_ever_lost_however_slowly_a_checkpoint_is_written(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", small_job(checkpoint={"every_steps": 5}, stop={"steps": 22}), "dp=2").path
    ranks(2, train_slowly_written, run)
    assert [event["step"] for event in events(run, "checkpoint_saved")][-1] == 22


class Slow(Checkpointer):
    """Takes 5 s to complete a checkpoint when training waits for it."""

    def complete(self) -> float:
        super().complete()
        return 5.0


def test_a_checkpoint_that_training_waited_for_is_begun_earlier_the_next_time_and_only_once(tmp_path: Path) -> None:
    signals = StepSignals(Group())
    slow = Slow(tmp_path, rank=0, world=1, keep=9, deadline_s=60, report=lambda *_: None)
    saving = CheckpointSchedule(slow, CheckpointSpec(every_steps=10), signals, lambda *_: None)
    begun: list[int] = []
    for step in range(1, 61):
        saving.ask(step, 0.0)
        saving.before_update(step)
        if saving.due(step, signals.read([0.0, 0.0]).votes):
            begun.append(step)
            saving.begin(step, Snapshot({"model/w": torch.ones(3)}), 0.0)
    saving.finish()
    assert begun[0] == 10
    assert max(b - a for a, b in pairwise(begun)) <= 10
    assert begun[1] == 15, "as early as may be"
    assert len(begun) <= 2 * 6


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(file: Path) -> None:
    """Take all the room that the disk has."""
    with file.open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)


@pytest.mark.needs_root
def test_a_full_disk_is_said_training_goes_on_and_saves_again_when_there_is_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed = train_here(tmp_path / "undisturbed", job(steps=30)).losses

    def look(step: int) -> None:
        ballast = disk / "ballast"
        if step == 7:
            fill(ballast)
        elif step == 17:
            ballast.unlink()

    with mounted(tmp_path / "disk", 2**20) as disk:
        with after_each_step(look):
            run = train_here(disk / "run", job(steps=30))
        saved = [event["step"] for event in events(run.path, "checkpoint_saved")]
        lost = {event["file"]: event["lines"] for event in events(run.path, "lines_lost")}
        recorded, newest = len(run.losses), run.losses[-1]
    said = capfd.readouterr().err
    assert saved == [5, 20, 25, 30]
    assert "checkpoint of step 10" in said
    assert "No space left on device" in said
    assert "step-00000005" in said
    assert lost["steps/rank-0.jsonl"] == 30 - recorded
    assert newest == undisturbed[-1]


def job(steps: int, **checkpoint: Any) -> Any:
    return small_job(checkpoint={"every_steps": 5, **checkpoint}, stop={"steps": steps})


@pytest.mark.needs_root
def test_a_disk_that_turned_read_only_is_said_and_saved_to_again_when_it_is_not(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", job(steps=30)).path

    def look(step: int) -> None:
        if step in (7, 17):
            subprocess.run(["mount", "-o", f"remount,{'ro' if step == 7 else 'rw'}", run / "checkpoints"], check=True)

    with mounted(run / "checkpoints", 2**20):
        with after_each_step(look):
            train_here(run, job(steps=30))
        assert checkpoints(run) == ["step-00000020", "step-00000025", "step-00000030"]
    failed = events(run, "checkpoint_failed")
    assert ["Read-only file system" in event["reason"] for event in failed] == [True, True]
    assert [event["failures"] for event in failed] == [1, 2]


@pytest.mark.needs_root
@pytest.mark.parametrize(("most", "last"), [(1, 10), (3, 20)])
def test_a_run_ends_when_as_many_checkpoints_in_a_row_have_failed_as_the_job_says(
    tmp_path: Path, most: int, last: int
) -> None:
    run = new_run(tmp_path / "run", job(steps=60, max_failures=most)).path

    def look(step: int) -> None:
        if step == 7:
            fill(run / "checkpoints" / "ballast")

    with mounted(run / "checkpoints", 2**20):
        with (
            after_each_step(look),
            raises(CheckpointError, "checkpoint.failures_exhausted"),
        ):
            train_here(run, job(steps=60, max_failures=most))
        assert [name for name in checkpoints(run) if name != "ballast"] == ["step-00000005"]
    assert len(Run(run).losses) < last + 7


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", job(steps=12)).path

    def look(step: int) -> None:
        if step == 11:
            (run / "checkpoints").rename(run / "gone")

    with after_each_step(look), raises(CheckpointError, "checkpoint.not_written", step=12):
        train_here(run, job(steps=12))
