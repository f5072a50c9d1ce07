"""A single worker, of one rank or several, computes what one process does."""

from __future__ import annotations

import pydoc_data
from pathlib import Path

import pytest

from commands import events, losses, paceline, write_job
from paceline.report.run_page import view_of
from paceline.run.record.goodput import goodput
from paceline.run.record.run import Run

STEPS = 24
# a single worker computes what one process does, also in rounds with the outer step of a plain sum
ALONE = "server:staleness=1,servers=2,backup=off precision=fp64"
ROUNDS = "server:staleness=1,servers=2,backup=off,period=5,lr=1,momentum=0 precision=fp64"


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


def test_a_worker_trains_as_one_process(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    alone = pytest.approx(trained(job, "dp=1 precision=fp64", "alone"), rel=1e-9)
    assert trained(job, f"dp=1 sync={ROUNDS}", "rounds") == alone
    assert trained(job, f"dp=1 tp=2 sync={ALONE}", "served") == alone
    assert [event["step"] for event in events(tmp_path / "served", "evaluation")] == [12, 24]
    view = view_of(Run(tmp_path / "served"))
    assert not view["record"].gaps
    assert "replay" not in {part for *_, part in goodput(view["run"]).spans}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "sync"),
    [
        *((split, ALONE) for split in ("fsdp=2", "pp=2 microbatches=2", "cp=2", "tp=2")),
        *((split, ROUNDS) for split in ("", "fsdp=2", "tp=2", "pp=2 microbatches=2")),
    ],
)
def test_parameters_and_optimizer_go_over_to_the_servers_and_back(split: str, sync: str, tmp_path: Path) -> None:
    job, begun = job_in(tmp_path), job_in(tmp_path, steps=17, name="begun")
    alone = trained(job, "dp=1 precision=fp64", "alone")
    plan = f"dp=1 {split} sync={sync}"
    trained(begun, plan, "served")
    assert trained(job, plan, "served", "--resume") == pytest.approx(alone, rel=1e-9)
    assert [event["step"] for event in events(tmp_path / "served", "resume")] == [17]
    [told] = events(tmp_path / "served", "served")[-1]["workers"].values()
    # the steps from 17 to 24; in rounds, one of 5 and what is left
    assert told["pushes"] == (2 if sync == ROUNDS else 7)


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


@pytest.mark.slow
def test_the_outer_momentum_goes_over_to_the_checkpoint_and_back(tmp_path: Path) -> None:
    job, begun = job_in(tmp_path), job_in(tmp_path, steps=12, name="begun")
    plan = "dp=1 sync=server:staleness=1,backup=off,period=5,momentum=0.6 precision=fp64"
    whole = trained(job, plan, "whole")
    trained(begun, plan, "parts")
    assert trained(job, plan, "parts", "--resume") == pytest.approx(whole, rel=1e-9)
