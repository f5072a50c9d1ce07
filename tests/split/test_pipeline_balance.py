"""Stages are cut where the slowest one is as fast as can be, by what the pieces were measured to cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.split.cut_model import costs
from paceline.split.forward_trace import Cut
from paceline.split.record_forward import trace_forward
from pipelines import CPU


def call(model: Any, batch: Any) -> Any:
    return model(*batch[:-1])


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for width in (8, 8, 4096, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_an_expensive_block_is_measured_as_one() -> None:
    with torch.device("meta"):
        model = Uneven()
    batch = (torch.randn(64, 64), torch.zeros(64))
    trace = trace_forward(model, batch, call, CPU, whole=set())
    cuts = [cut for i in (1, 2, 3) if isinstance(cut := trace.cut(f"blocks.{i}"), Cut)]
    seconds = costs(model, trace, cuts, batch, call, CPU)
    assert seconds[0] > 0
    assert max(range(4), key=seconds.__getitem__) == 2
    assert all(p.is_meta for p in model.parameters()), "measuring must leave no memory behind"
