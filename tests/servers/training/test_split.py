"""Workers of servers that are several ranks each: the mathematics of one process, and losses of ranks cost no piece."""

from __future__ import annotations

import pydoc_data
from pathlib import Path

import pytest

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
from paceline.report.run_page import view_of
from paceline.run.record.goodput import goodput
from paceline.run.record.run import Run

STEPS = 24
ALONE = "server:staleness=1,servers=2,backup=off precision=fp64"  # a single worker computes what one process does


def job_in(folder: Path, *, steps: int = STEPS, name: str = "job", **changes: object) -> Path:
    values = {
        "model": {"zoo": "gpt", "args": {"layers": 2, "hidden": 32, "heads": 2, "context": 16}},
        "data": {"kind": "text", "path": str(Path(pydoc_data.__file__).parent), "context": 16, "held_out": 0.002},
        "global_batch": 8,
        "clip_norm": 1.0,
        "optimizer": {"name": "adamw", "lr": 0.003},
        "loss": "cross_entropy",
        "evaluate": {"every_steps": 12},
        "checkpoint": {"every_steps": 12},
        "stop": {"steps": steps},
        "deadline_s": 60,
    }
    return write_job(folder / f"{name}.yaml", **values | changes)


def trained(job: Path, plan: str, name: str, *more: str) -> dict[int, float]:
    found = paceline("train", job, "--plan", plan, "--run", name, *more, folder=job.parent)
    assert found.code == 0, found.err
    return losses(job.parent / name)


def test_a_worker_of_two_ranks_trains_as_one_process(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    alone = trained(job, "dp=1 precision=fp64", "alone")
    assert trained(job, f"dp=1 tp=2 sync={ALONE}", "served") == pytest.approx(alone, rel=1e-9)
    assert [event["step"] for event in events(tmp_path / "served", "evaluation")] == [12, 24]
    view = view_of(Run(tmp_path / "served"))
    assert not view["record"].gaps
    assert "replay" not in {part for *_, part in goodput(view["run"]).spans}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["fsdp=2", "pp=2 microbatches=2", "cp=2", "tp=2"])
def test_parameters_and_optimizer_go_over_to_the_servers_and_back_on_any_split(split: str, tmp_path: Path) -> None:
    job, begun = job_in(tmp_path), job_in(tmp_path, steps=17, name="begun")
    alone = trained(job, "dp=1 precision=fp64", "alone")
    plan = f"dp=1 {split} sync={ALONE}"
    trained(begun, plan, "served")
    assert trained(job, plan, "served", "--resume") == pytest.approx(alone, rel=1e-9)
    assert [event["step"] for event in events(tmp_path / "served", "resume")] == [17]


@pytest.mark.slow
def test_ranks_of_workers_that_are_killed_cost_no_piece(tmp_path: Path) -> None:
    plan = "dp=2 tp=2 sync=server:staleness=inf"
    with training(job_in(tmp_path, steps=400), tmp_path, plan) as (process, run):
        # one of the first worker's, one of the other's, the server, and the first worker's first
        for losses_before, number in enumerate([1, 2, 4, 0]):
            wait_for_step(max([20, *(step + 20 for step in losses(run))]), run, process)
            kill_rank(number, process)
            wait_for_events(run, "lost", losses_before + 1, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert [event["rank"] for event in events(run, "lost")] == [1, 2, 4, 0]
    assert sorted(losses(run)) == list(range(1, 401))
    assert not events(run, "resume")
    assert not events(run, "restart")


@pytest.mark.slow
def test_a_worker_of_two_ranks_leaves_and_comes_back(tmp_path: Path) -> None:
    plan = "dp=2 fsdp=2 sync=server:staleness=2,backup=off"
    with training(job_in(tmp_path, steps=400), tmp_path, plan) as (process, run):
        wait_for_step(10, run, process)
        assert paceline("scale", run, "-1", folder=tmp_path).says("ranks 2, 3 will leave after this piece")
        wait_for_events(run, "scaled", 1, process)
        wait_for_step(max(losses(run)) + 10, run, process)
        assert paceline("scale", run, "+1", folder=tmp_path).says("ranks 2, 3 will take pieces as soon as started")
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert [event["ranks"] for event in events(run, "scaled")] == [[2, 3], [2, 3]]
    assert sorted(losses(run)) == list(range(1, 401))
    told = events(run, "served")[-1]["workers"]
    assert sum(worker["pushes"] for worker in told.values()) == 800, "every piece once"


TABLE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net():
    return nn.Sequential(nn.Embedding(100, 16, sparse=True), nn.Flatten(), nn.Linear(256, 16), nn.Linear(16, 4))


def words():
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 100, (64, 16), generator=draw), torch.randint(0, 4, (64,), generator=draw))
"""


@pytest.mark.slow
def test_a_sparse_table_in_a_worker_of_several_ranks_is_a_dense_one(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text(TABLE)
    model, data = ({"factory": f"{tmp_path}/table.py:{name}"} for name in ("net", "words"))
    job = job_in(tmp_path, model=model, data={"kind": "dataset", **data}, optimizer={"name": "sgd", "lr": 0.1})
    alone = trained(job, "dp=1 precision=fp64", "alone")
    assert trained(job, f"dp=1 fsdp=2 sync={ALONE}", "served") == pytest.approx(alone, rel=1e-9)
