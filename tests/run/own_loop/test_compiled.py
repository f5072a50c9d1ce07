"""`compile=` in a loop that computes its own loss compiles the models that the loop calls."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PlanError
from ranks import run_joining
from refusals import raises
from simulated.environment import Simulated


class Counting(nn.Module):
    """A small network that counts its calls that are not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.eager = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.eager += 1
        y: Tensor = self.layers(x)
        return y


def made() -> tuple[Counting, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    model = Counting()
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def train(plan: str) -> tuple[list[float], Counting, Counting]:
    """Losses of three steps, the model, and a copy of the model from before the steps."""
    model, optimizer, loader = made()
    engine = paceline.setup(model, optimizer, loader=loader, plan=plan)
    before, losses = copy.deepcopy(model), []
    for inputs, labels in engine.loader:
        losses.append(float(engine.backward(F.cross_entropy(model(inputs), labels))))
        engine.update()
    engine.close()
    return losses, model, before


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(300)
def test_the_calls_of_the_loop_are_compiled_and_those_of_a_copy_are_not() -> None:
    run_joining(1, check_calls_of_the_loop_and_a_copy, deadline_s=240.0)  # the compiler's threads end with the rank


def check_calls_of_the_loop_and_a_copy() -> None:
    expected, *_ = train("dp=1")
    losses, model, before = train("compile=on")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert model.eager == 0
    inputs = torch.ones(2, 8)
    assert torch.equal(before(inputs), made()[0](inputs)), "a copy has its own weights"
    model(inputs)
    assert (before.eager, model.eager) == (1, 1), "after close, the model is no longer compiled"


def test_graphs_are_refused_where_the_device_has_none() -> None:
    model, optimizer, loader = made()
    with raises(PlanError, "plan.no_graphs"):
        paceline.setup(model, optimizer, loader=loader, plan="compile=reduce-overhead")


def test_a_device_without_compiled_code_says_so_at_the_first_call(simulated: Simulated) -> None:
    assert simulated.ranks(1, code_of_a_compiled_call) == ["plan.compile_failed"]


def code_of_a_compiled_call() -> str:
    model, optimizer, loader = made()
    engine = paceline.setup(model, optimizer, loader=loader, plan="compile=on")
    inputs, _ = next(iter(engine.loader))
    with pytest.raises(PlanError) as raised:
        model(inputs)
    engine.loader.close()
    engine.close()
    return raised.value.code
