"""A run that is saved under one plan and resumed under another goes on as if it had never stopped.

Same data order, same losses.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import losses
from paceline.job.job import Job
from paceline.planning.plan import Plan
from ranks import Ranks
from small_jobs import new_run, small_job, train_as_rank, train_here

TEXT = "to be or not to be, that is the question. " * 40
STEPS, SAVED_AT = 7, 3


def job(folder: Path, steps: int) -> Job:
    """A transformer with a tied embedding, dropout excepted; float64, so that only a wrong state makes a difference."""
    (folder / "words.txt").write_text(TEXT)
    return small_job(
        model={"zoo": "gpt", "args": {"layers": 2, "hidden": 16, "heads": 2, "context": 16}},
        data={"kind": "text", "path": str(folder / "words.txt"), "context": 16, "held_out": 0},
        optimizer={"name": "adamw", "lr": 0.01},
        global_batch=12,
        precision="fp64",
        stop={"steps": steps},
        checkpoint={"every_steps": SAVED_AT, "keep": 5},
    )


def train(path: Path, work: Job, plan: str, ranks: Ranks) -> None:
    """Train a run from its newest checkpoint, if it has one, to the job's last step."""
    new_run(path, work, plan)
    size = Plan.parse(plan).ranks
    if size == 1:
        train_here(path, work)
    else:
        ranks(size, train_as_rank, path, backend="shm" if "tp" in plan else "gloo")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that never stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_here(folder / "run", job(folder, STEPS))
    return losses(folder / "run")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2 tp=2", ["fsdp=2 pp=2 microbatches=2", "dp=1", "dp=3"]),
        pytest.param("dp=1", ["fsdp=2 tp=2", "pp=2 microbatches=2"], marks=pytest.mark.slow),
        pytest.param("pp=2 microbatches=2", ["cp=2", "fsdp=3", "dp=1"], marks=pytest.mark.slow),
        pytest.param("fsdp=4", ["tp=2", "dp=2"], marks=pytest.mark.slow),
    ],
)
def test_a_run_moves_between_plans(
    tmp_path: Path, ranks: Ranks, undisturbed: dict[int, float], before: str, after: list[str]
) -> None:
    train(tmp_path / "saved", job(tmp_path, SAVED_AT), before, ranks)
    for plan in after:
        run = tmp_path / plan.replace(" ", "-")
        shutil.copytree(tmp_path / "saved", run)
        train(run, job(tmp_path, STEPS), plan, ranks)
        # a rank's loss is noted in float32
        assert losses(run) == pytest.approx(undisturbed, rel=1e-6), f"{before} to {plan}"
