"""A loss that reads parameters itself is right, or refused before the first update with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PlanError
from ranks import Ranks

WIDTH = 6


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def absolute(model: nn.Module) -> Any:
    return sum(p.abs().sum() for p in model.parameters())


def orthogonality(model: Any) -> Tensor:
    weight = model[0][0].weight
    loss: Tensor = (weight.T @ weight).square().sum()
    return loss


def gathered(model: Any) -> Tensor:
    weight: Any = model[0][0].weight
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole.square().sum()


def distance(model: nn.Module) -> Any:
    return sum((p - p.detach().clone() * 0.9).square().sum() for p in model.parameters())


PENALTIES = [squares, absolute, orthogonality, gathered, distance]


def train(plan: str, penalty: Callable[[Any], Any], by_step: bool) -> list[float]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 3)).double()
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(29, WIDTH, generator=drawn, dtype=torch.float64)  # the last batch has 5
    loader = DataLoader(TensorDataset(inputs, torch.arange(29) % 3), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        whole: Tensor = F.cross_entropy(output, target) + 0.01 * penalty(model)
        return whole

    engine = paceline.setup(model, optimizer, loss if by_step else None, loader, plan=plan)
    losses = []
    for x, y in engine.loader:
        if by_step:
            losses.append(engine.step((x, y)).loss)
        else:
            engine.backward(loss(model(x), y))
            losses.append(engine.update().loss)
    engine.close()
    return losses


def outcome(plan: str, penalty: Callable[[Any], Any], by_step: bool) -> list[float] | str:
    try:
        return train(plan, penalty, by_step)
    except PlanError as error:
        return type(error).__name__


def outcomes(penalty: Callable[[Any], Any]) -> list[list[float] | str]:
    """Outcomes of every plan and way to compute the loss, one after the other in the same processes."""
    return [outcome(plan, penalty, by_step) for plan in (*RIGHT, REFUSED) for by_step in (False, True)]


RIGHT, REFUSED = ("dp=2", "fsdp=2 zero=2"), "fsdp=2"


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_right_or_refused(ranks: Ranks, penalty: Callable[[Any], Any]) -> None:
    alone = [train("dp=1", penalty, by_step) for by_step in (False, True)]
    for *right, own_loss, by_step in ranks(2, outcomes, penalty):
        for losses, expected in zip(right, len(RIGHT) * alone, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)
        assert own_loss == by_step == "PlanError"
