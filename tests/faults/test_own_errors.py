"""A run reports the exception of the rank that raised it, not a failed connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import paceline, write_job
from paceline.elastic.attempt import launch
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting
from paceline.errors import LaunchError
from refusals import assert_problem

FAULTY = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import paceline

WHERE = {where!r}
BEFORE = 3  # forward passes of the set-up, at most
forwards = 0


def fault(where, *_):
    if where == WHERE and forwards > BEFORE and os.environ.get("RANK") == "1":
        raise RuntimeError("a fault of rank 1")


register_optimizer_step_pre_hook(lambda *_: fault("update"))


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 200), nn.Linear(200, 3)

    def forward(self, x):
        global forwards
        forwards += "RANK" in os.environ
        fault("forward")
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda _: fault("backward"))
        if WHERE == "collective" and forwards > BEFORE:
            mine = torch.ones(4)  # within the collective, torch cannot read rank 1's tensor
            dist.all_reduce(mine.to_mkldnn() if dist.get_rank() == 1 else mine)
        return self.outer(y)


def loss(output, target):
    fault("loss")
    return cross_entropy(output, target)


def loop(arguments):
    torch.manual_seed(1)
    model = Faulty()
    loader = DataLoader(TensorDataset(torch.randn(48, 6), torch.arange(48) % 3), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loss=loss, loader=loader, plan=arguments[0])
    for _ in range(3):
        for batch in engine.loader:
            engine.step(batch)
"""
PLACES = ["forward", "loss", "backward", "update", "collective"]
TYPES = {"collective": "NotImplementedError"}


def written(folder: Path, where: str) -> Path:
    script = folder / "faulty.py"
    script.write_text(FAULTY.format(where=where))
    return script


def assert_blames(error: BaseException | None, where: str) -> None:
    assert error is not None
    assert_problem(error, "launch.rank_raised", rank=1, type=TYPES.get(where, "RuntimeError"))
    assert "faulty.py" in str(error)


SLOW = [(plan, where) for plan in ("dp=2 transport=tcp", "fsdp=2") for where in PLACES]


@pytest.mark.parametrize(
    ("plan", "where"),
    [("dp=2", where) for where in PLACES] + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW],
)
def test_a_loop_of_ones_own_reports_the_rank_that_raised(tmp_path: Path, plan: str, where: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(Setting([f"{written(tmp_path, where)}:loop", plan], on_this_machine(2)))
    assert_blames(caught.value, where)


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=2 transport=gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", PLACES)
def test_a_job_reports_the_rank_that_raised(tmp_path: Path, where: str, plan: str) -> None:
    written(tmp_path, where)
    data = {"kind": "synthetic", "samples": 48, "held_out": 0, "shape": [6], "classes": 3}
    job = write_job(tmp_path / "job.yaml", model="faulty.py:Faulty", loss="faulty.py:loss", data=data)
    outcome = paceline("train", job, "--plan", plan, folder=tmp_path)
    assert outcome.code == 1
    assert_blames(outcome.cause, where)
