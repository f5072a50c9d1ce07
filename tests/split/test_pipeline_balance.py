"""Stages are cut where the slowest one is as fast as can be, by what the pieces were measured to cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.split.pipeline.balance import balanced, costs
from paceline.split.pipeline.forward_trace import Cut, Trace
from pipelines import CPU

_COSTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=8)


@given(_COSTS, st.integers(1, 8))
def test_no_other_cuts_have_a_cheaper_slowest_stage(seconds: list[float], stages: int) -> None:
    stages = min(stages, len(seconds))

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, len(seconds))))

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(seconds)), stages - 1))
    assert slowest(tuple(balanced(seconds, stages))) == pytest.approx(best)


def test_costs_count_not_numbers() -> None:
    assert balanced([1, 1, 1, 1, 1, 5], 2) == [5]
    assert balanced([4, 1, 1, 1, 1, 1], 3) == [1, 3] or balanced([4, 1, 1, 1, 1, 1], 3) == [1, 4]


def test_more_stages_than_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 segments cannot be cut into 3 stages"):
        balanced([1, 1], 3)


def call(model: Any, batch: Any) -> Any:
    return model(*batch[:-1])


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for width in (8, 8, 4096, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_an_expensive_block_is_measured_as_one() -> None:
    with torch.device("meta"):
        model = Uneven()
    batch = (torch.randn(64, 64), torch.zeros(64))
    trace = Trace(model, batch, call, CPU, whole=set())
    cuts = [cut for i in (1, 2, 3) if isinstance(cut := trace.cut(f"blocks.{i}"), Cut)]
    seconds = costs(model, trace, cuts, batch, call, CPU)
    assert seconds[0] > 0
    assert max(range(4), key=seconds.__getitem__) == 2
    assert all(p.is_meta for p in model.parameters()), "measuring must leave no memory behind"
