"""A forward pass that is not a training step leaves the model unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.engine.model_loss import random_module
from paceline.job.job import Job
from paceline.planning.model.recording.model_state import restored
from paceline.planning.model.recording.record import record_graph
from paceline.planning.model.tensor.degrees import TensorDegrees
from paceline.planning.plan import Plan
from paceline.run.build import build_engine
from paceline.run.dry_run.preflight import Preflight
from paceline.split.context_parallel import examine
from paceline.split.fsdp import watched
from paceline.split.pipeline.record_forward import trace_forward
from small_jobs import small_job

CPU = torch.device("cpu")
CODE = '''
import random

import numpy as np
import torch
from torch import nn


class Counting(nn.Module):
    """A model that draws random numbers, and counts its calls in buffers, in a tensor and in attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("past_autograd", torch.zeros(()))
        self.tensor, self.number, self.numbers = torch.zeros(()), 0, []

    def forward(self, x):
        self.replaced = self.replaced + 1
        self.changed += 1
        self.past_autograd.data += 1
        self.tensor += 1
        self.number += 1
        self.numbers.append(self.number)
        for layer in self.layers:
            x = torch.relu(layer(x + 0 * torch.rand(()) + 0 * (random.random() + np.random.rand())))
        return x


class Averaging(nn.Module):
    """A model with a running average of its activations' range in a buffer, as in quantization-aware training."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        h = torch.relu(self.up(x))
        self.largest = 0.9 * self.largest + 0.1 * h.data.max()
        return x + self.down(h)


def averaging():
    return nn.Sequential(Averaging(), Averaging(), nn.Linear(6, 3))


class WithLoss(Counting):
    """A model that computes its own loss."""

    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}
'''


def counting(kind: str = "Counting") -> nn.Module:
    names: dict[str, Any] = {}
    exec(CODE, names)
    model: nn.Module = names[kind]()
    return model


def call(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch[0])
    return output


def run(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    with restored(model):
        call(model, batch)


def random_states() -> list[object]:
    state = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), random.getstate(), str(state)]


LOOKS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], object]] = {
    "a forward pass": run,
    "the trace of fsdp and pp": lambda model, batch: trace_forward(model, batch, call, CPU, whole={""}),
    "the trace of tp and the planner": lambda model, batch: record_graph(model, batch, call),
    "the degrees of tp": lambda model, batch: TensorDegrees(model, batch, call),
    "the choice of fsdp's units": lambda model, batch: watched(model, batch, call, CPU),
    "the examination for cp": lambda model, batch: examine(model, 2, batch, call),
}


def marks(model: Any) -> list[object]:
    names = ("replaced", "changed", "past_autograd", "tensor", "number")
    return [*(float(getattr(model, name)) for name in names), list(model.numbers), set(vars(model))]


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_a_model_leaves_no_mark_on_it(look: str) -> None:
    model, batch = counting(), (torch.ones(4, 6), torch.zeros(4))
    before, states = marks(model), random_states()
    LOOKS[look](model, batch)
    assert marks(model) == before
    assert random_states() == states


def job(folder: Path, kind: str = "Counting", **changes: Any) -> Job:
    (folder / "counting.py").write_text(CODE)
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    return small_job(model={"factory": f"{folder}/counting.py:{kind}"}, data=data, **changes)


def test_looks_of_an_engine_leave_no_mark(tmp_path: Path) -> None:
    for kind, loss in (("Counting", "cross_entropy"), ("WithLoss", "model")):
        own, model = job(tmp_path, kind, loss=loss), counting(kind)
        engine = build_engine(own, Plan(), model, own.data.build(input_shape=None, seed=0), Group())
        before, states = marks(model), random_states()
        random_module(engine.compute, engine.loader.example(4))
        engine.compute.normalization.prepare()
        assert marks(model) == before
        assert model.training
        assert random_states() == states
        engine.close()


@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
def test_a_plan_is_checked_without_drawing_from_the_random_states(tmp_path: Path, loss: str) -> None:
    own = job(tmp_path, "WithLoss" if loss == "model" else "Counting", loss=loss)
    states = random_states()
    for plan in ("tp=2", "pp=2 microbatches=2", "dp=2"):
        Preflight(own).refusal(Plan.parse(plan), discover())
    assert random_states() == states


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Counting", "tp=2"),
        pytest.param("Counting", "fsdp=2", marks=pytest.mark.slow),
        pytest.param("averaging", "tp=2", marks=pytest.mark.slow),
        ("averaging", "pp=2 microbatches=2"),
    ],
)
def test_buffers_that_forward_replaces_are_those_of_one_process(tmp_path: Path, kind: str, plan: str) -> None:
    found = paceline.check(job(tmp_path, kind), f"{plan} precision=fp64", steps=2)
    assert found.holds
    assert found.largest.buffer < 1e-9
