"""Blocks with torch's recurrent layers can be divided into pipeline stages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from ranks import Ranks

WIDTH, ROWS, STEPS = 6, 8, 3


class Block(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.recurrent = nn.LayerNorm(WIDTH), kind(WIDTH, WIDTH, num_layers=2, batch_first=True)  # type: ignore[arg-type, call-arg]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.recurrent(self.norm(x))[0]
        return y


def losses(kind: type[nn.RNNBase], plan: str) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(kind) for _ in range(4)), nn.Linear(WIDTH, WIDTH)).double()
    drawn = torch.Generator().manual_seed(2)
    inputs = torch.randn(ROWS * STEPS, 5, WIDTH, generator=drawn, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, inputs.tanh()), batch_size=ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = paceline.setup(model, optimizer, loss=F.mse_loss, loader=loader, plan=plan)
    found = [engine.step(batch).loss for batch in engine.loader]
    engine.close()
    return found


def each(plan: str) -> list[list[float]]:
    return [losses(kind, plan) for kind in (nn.LSTM, nn.GRU, nn.RNN)]


@pytest.mark.parametrize("plan", ["pp=2 microbatches=2", "pp=2 schedule=zero-bubble microbatches=4"])
def test_recurrent_blocks_in_stages_have_the_losses_of_one_process(ranks: Ranks, plan: str) -> None:
    for found in ranks(2, each, plan):
        for in_stages, alone in zip(found, each("dp=1"), strict=True):
            assert in_stages == pytest.approx(alone, rel=1e-9)
