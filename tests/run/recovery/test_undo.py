"""A step that was broken off leaves no trace in what forward passes write."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.run.recovery.kept import StepUndo
from refusals import raises


class Writing(nn.Module):
    """A model that writes all that a forward pass may write."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=0.1)
        self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("counted", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("none_yet", None)
        self.mean: Tensor
        self.counted: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.counted += 1
        self.mean = self.mean * 0.9 + x.mean(dim=0) * random.random()
        with torch.no_grad():
            self.target.weight.lerp_(self.online.weight, 0.1)
        y: Tensor = self.target(x) + self.table(torch.tensor([1])) + torch.randn(()) + float(np.random.rand())
        return y


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if name != "table.weight"}


def test_what_a_broken_step_wrote_and_drew_is_undone() -> None:
    model = Writing()
    undo, x = StepUndo(model), torch.ones(2, 3)
    for step in range(3):
        undo.remember(step)
        model(x)
    undo.remember(3)
    before, expected = state_of(model), model(x)
    undo.undo(3)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    undo.remember(3)
    assert torch.equal(model(x), expected), "the random numbers are those of before"


def test_parameters_that_no_step_writes_are_not_copied() -> None:
    model = Writing()
    undo = StepUndo(model)
    for step in range(3):
        undo.remember(step)
        model(torch.ones(2, 3))
    undo.remember(3)
    assert list(undo.written) == ["target.weight"]


def test_a_first_step_that_wrote_parameters_is_refused_by_name_and_may_be_tried_again() -> None:
    model = Writing()
    undo = StepUndo(model)
    undo.remember(0)
    model(torch.ones(2, 3))
    with raises(JobError, "recovery.step_not_repeatable", name="target.weight", step=1) as raised:
        undo.undo(0)
    assert raised.value.may_pass


def test_a_parameter_that_optimizer_and_forward_both_write_is_refused() -> None:
    model = nn.Linear(3, 3)
    undo = StepUndo(model)
    for step in range(3):
        undo.remember(step)
        with torch.no_grad():
            model.weight.div_(2)
    with raises(JobError, "recovery.step_not_repeatable", name="weight"):
        undo.undo(2)


def test_a_step_that_was_taken_is_not_undone() -> None:
    model = Writing()
    undo = StepUndo(model)
    undo.remember(0)
    model(torch.ones(2, 3))
    undo.undo(1)
    assert model.counted == 1
