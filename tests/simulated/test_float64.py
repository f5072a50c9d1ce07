"""An accelerator without float64 trains in what it has."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PlanError
from simulated.environment import Simulated


def mean_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loader() -> DataLoader[tuple[Tensor, ...]]:
    numbers = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.rand(16, 4, generator=numbers), torch.rand(16, 2, generator=numbers)), 8)


def trained(plan: str, loss: Callable[[Tensor, Tensor], Tensor] = mean_squares) -> tuple[list[float], float]:
    """Losses of two steps of a loop of one's own, and that of an evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = paceline.setup(model, optimizer, loss=loss, loader=loader(), plan=plan)
    losses = [engine.step(batch).loss for batch in engine.loader]
    return losses, engine.evaluate(loader())["loss"]


def without_float64(plan: str) -> tuple[list[float], float]:
    with pytest.raises(TypeError, match="no float64"):
        torch.zeros(1, dtype=torch.float64, device="sim")
    return trained(plan)


def with_a_loss_that_keeps_a_tensor_there() -> list[float]:
    weights = torch.ones(2, device="sim")
    return trained("dp=1 microbatches=2", lambda output, target: ((output - target).square() * weights).mean())[0]


def refused() -> str:
    with pytest.raises(PlanError, match=r"float64.*PACELINE_DEVICE=cpu") as found:
        trained("dp=1 precision=fp64")
    return str(found.value)


@pytest.mark.parametrize(("ranks", "plan"), [(1, "dp=1 microbatches=2"), (2, "dp=2"), (2, "fsdp=2")])
def test_a_loop_of_ones_own_trains_and_evaluates(simulated: Simulated, ranks: int, plan: str) -> None:
    (losses, measured), *others = simulated.ranks(ranks, without_float64, plan, float64=False)
    assert others == [(losses, measured)] * (ranks - 1)
    wide, expected = simulated.ranks(ranks, trained, plan)[0]
    assert losses == pytest.approx(wide, rel=1e-5)
    assert measured == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_keeps_a_tensor_on_the_device_trains(simulated: Simulated) -> None:
    assert all(map(math.isfinite, simulated.ranks(1, with_a_loss_that_keeps_a_tensor_there, float64=False)[0]))


def test_a_plan_in_float64_is_refused(simulated: Simulated) -> None:
    assert "type sim" in simulated.ranks(1, refused, float64=False)[0]
