"""A pipeline computes in the precision of its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from ranks import Ranks


def first_losses(plan: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)])
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, inputs.argmax(dim=1)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loss=nn.functional.cross_entropy, loader=loader, plan=plan)
    found = [engine.step(batch).loss for batch in engine.loader]
    engine.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_pipeline_in_bf16_computes_as_one_process_does(ranks: Ranks, schedule: str) -> None:
    wide, narrow = first_losses("dp=1"), first_losses("dp=1 precision=bf16")
    assert narrow != pytest.approx(wide, rel=1e-5)
    for found in ranks(2, first_losses, f"pp=2 microbatches=2 schedule={schedule} precision=bf16"):
        assert found[0] == pytest.approx(narrow[0], rel=1e-6)
        assert found == pytest.approx(narrow, rel=2e-4)
