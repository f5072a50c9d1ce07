"""Stages are cut where the slowest one is as fast as can be, by what the pieces were measured to cost."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.planning.plan import Plan
from paceline.split.cut_model import CutModel, costs
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


measured: set[int] = set()


class Wide(nn.Module):
    """Blocks before a head whose output is far larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if not isinstance(x, FakeTensor):
            measured.add(len(x))
        y: Tensor = self.head(x)
        return y


def test_segments_are_measured_with_few_samples_if_activations_are_large() -> None:
    measured.clear()
    with torch.device("meta"):
        model = Wide()
    batch = (torch.randn(64, 1024, 8), torch.zeros(64))  # the output takes 256 MiB
    CutModel(model, Plan.parse("pp=2 cut=blocks.1"), 2, batch, call, CPU)
    assert measured == {16}


def test_measured_segments_are_freed_without_a_garbage_collection() -> None:
    with torch.device("meta"):
        model = Uneven()
    batch = (torch.randn(64, 64), torch.zeros(64))
    trace = trace_forward(model, batch, call, CPU, whole=set())
    cuts = [cut for i in (1, 2, 3) if isinstance(cut := trace.cut(f"blocks.{i}"), Cut)]
    gc.collect()
    gc.disable()
    try:
        before = large_parameters()
        costs(model, trace, cuts, batch, call, CPU, runs=2)
        assert large_parameters() == before
    finally:
        gc.enable()


def large_parameters() -> int:
    """Count parameters with memory and 4096 rows, of other tests, too."""
    found = [one for one in gc.get_objects() if isinstance(one, nn.Parameter)]
    return sum(not one.is_meta and one.dim() > 0 and one.shape[0] == 4096 for one in found)
