"""fp16 training: an overflow lowers the loss scale; the policy handles other non-finite gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import NonFiniteError

STEPS = 60


class Root(nn.Module):
    """A finite output with an infinite gradient at zero, like a norm or a standard deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sqrt()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(model: nn.Module, **settings: Any) -> Any:
    data = TensorDataset(torch.ones(STEPS, 1), torch.full((STEPS, 1), 100.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = paceline.setup(model, optimizer, mean, DataLoader(data, batch_size=1), precision="fp16", **settings)
    return [engine.step(batch) for batch in engine.loader]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_gradients_that_no_scale_makes_finite_end_the_run(policy: str) -> None:
    with pytest.raises(NonFiniteError):
        train(Root(), nonfinite=policy)


def test_an_overflow_lowers_the_scale_until_gradients_are_finite() -> None:
    model = nn.Linear(1, 1)
    results = train(model)
    left_out = [result.problem is not None for result in results]
    assert left_out[0]  # 2 x 100 x 2**16 is more than fp16 has
    assert not any(left_out[20:])
    assert model(torch.ones(1)) > 1.0
