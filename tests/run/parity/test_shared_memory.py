"""PyTorch's `DistributedDataParallel` runs over shared memory unchanged.

Its FSDP2, tensor-parallel layers and pipelines are those of plans, in `test_splits.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import Ranks

FEATURES, HIDDEN, CLASSES, BATCH, STEPS = 24, 96, 8, 24, 5
Weights = dict[str, Tensor]


class Layers(nn.Module):
    """A network whose large layer is 0.3 MB, and which leaves out a layer in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, *, all_layers: bool = True) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.up(x))))
        if all_layers:
            x = torch.tanh(self.sometimes(x))
        y: Tensor = self.down(x)
        return y


def built() -> Layers:
    torch.manual_seed(0)
    return Layers().double()


def batch(step: int, place: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
    """A share of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    return x.chunk(of)[place], y.chunk(of)[place]


def trained(model: nn.Module, backward: Callable[[int], Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step)
        optimizer.step()


def weights(model: nn.Module) -> Weights:
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}


def alone(skips: bool = False, accumulates: bool = False) -> Weights:
    model = built()

    def backward(step: int) -> None:
        for part in range(2 if accumulates else 1):
            x, y = batch(10 * step + part)
            F.cross_entropy(model(x, all_layers=not skips or step % 2 == 0), y).backward()

    trained(model, backward)
    return weights(model)


def with_ddp(skips: bool, accumulates: bool, settings: dict[str, Any]) -> Weights:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(built(), bucket_cap_mb=0.05, **settings)

    def backward(step: int) -> None:
        for part in range(2 if accumulates else 1):
            x, y = batch(10 * step + part, rank, size)
            model.require_backward_grad_sync = not accumulates or part == 1  # what `no_sync` sets
            F.cross_entropy(model(x, all_layers=not skips or step % 2 == 0), y).backward()

    trained(model, backward)
    return weights(model)


@pytest.mark.parametrize(
    ("size", "settings", "skips", "accumulates"),
    [
        pytest.param(3, {}, False, False, id="plain"),
        pytest.param(3, {"static_graph": True}, False, False, id="a static graph"),
        pytest.param(2, {"find_unused_parameters": True}, True, False, id="unused parameters"),
        pytest.param(2, {"gradient_as_bucket_view": True}, False, True, id="accumulation"),
    ],
)
def test_every_rank_has_the_weights_of_one_process(
    ranks: Ranks, size: int, settings: dict[str, Any], skips: bool, accumulates: bool
) -> None:
    expected = alone(skips, accumulates)
    for found in ranks(size, with_ddp, skips, accumulates, settings, backend="shm"):
        for name, weight in found.items():
            assert torch.allclose(weight, expected[name], rtol=1e-8, atol=1e-10), name
