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
from paceline.job.job import Job
from paceline.split.pipeline.record_forward import trace_forward
from paceline.trace.recording.model_state import restored
from paceline.trace.recording.record import record_graph
from small_jobs import small_job

CPU = torch.device("cpu")
CODE = '''
import torch
from torch import nn


class Counting(nn.Module):
    """Counts its calls in new and old buffers, in a tensor and in attributes."""

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
            x = torch.relu(layer(x + 0 * torch.rand(())))
        return x
'''


def counting() -> nn.Module:
    names: dict[str, Any] = {}
    exec(CODE, names)
    model: nn.Module = names["Counting"]()
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


def job(folder: Path) -> Job:
    (folder / "counting.py").write_text(CODE)
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    return small_job(model={"factory": f"{folder}/counting.py:Counting"}, data=data)


@pytest.mark.parametrize("plan", ["tp=2", "fsdp=2"])
def test_buffers_that_forward_replaces_are_those_of_one_process(tmp_path: Path, plan: str) -> None:
    found = paceline.check(job(tmp_path), f"{plan} precision=fp64", steps=2)
    assert found.holds
    assert found.largest.buffer == 0.0
