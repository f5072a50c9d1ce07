"""PyTorch's own parallel training runs over shared memory unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


def trained(model: nn.Module, backward: Callable[[int], Any], parameters: Any = None) -> None:
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step)
        optimizer.step()


def weights(model: nn.Module) -> Weights:
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n.removeprefix("module."): p.detach().clone() for n, p in whole.items()}


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


def with_fsdp() -> Weights:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = built()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model.up, model.middle, model.sometimes, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(
        model,
        lambda step: F.cross_entropy(
            model(batch(10 * step, rank, size)[0]), batch(10 * step, rank, size)[1]
        ).backward(),
    )
    return weights(model)


def with_tensor_parallel() -> Weights:
    model = built()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "up": ColwiseParallel(),
        "middle": RowwiseParallel(),
        "sometimes": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    trained(model, lambda step: F.cross_entropy(model(batch(10 * step)[0]), batch(10 * step)[1]).backward())
    matrix = torch.arange(64.0, dtype=torch.float64).view(8, 8)
    product = distribute_tensor(matrix, mesh, [Shard(0)]) @ distribute_tensor(matrix, mesh, [Shard(1)])
    assert isinstance(product, DTensor)
    assert torch.equal(product.redistribute(placements=[Replicate()]).to_local(), matrix @ matrix)
    return weights(model)


def with_pipeline() -> Weights:
    """Rank 0 has the first half of the layers, rank 1 the second."""
    rank, whole = dist.get_rank(), built()
    first = nn.Sequential(whole.up, nn.Tanh(), whole.middle, nn.Tanh())
    last = nn.Sequential(whole.sometimes, nn.Tanh(), whole.down)
    stage = PipelineStage((first, last)[rank], rank, 2, torch.device("cpu"))
    pipeline = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.cross_entropy)

    def backward(step: int) -> None:
        x, y = batch(10 * step)
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y)

    trained(stage.submod, backward)
    own = {id(p) for p in stage.submod.parameters()}
    return {n: p.detach().clone() for n, p in whole.named_parameters() if id(p) in own}


def assert_equal(found: Weights, expected: Weights) -> None:
    for name, weight in found.items():
        difference = (weight - expected[name]).abs().max().item()
        assert torch.allclose(weight, expected[name], rtol=1e-8, atol=1e-10), f"{name} differs by up to {difference:g}"


@pytest.mark.parametrize(
    ("size", "train", "arguments", "skips", "accumulates"),
    [
        pytest.param(3, with_ddp, [False, False, {}], False, False, id="ddp"),
        pytest.param(3, with_ddp, [False, False, {"static_graph": True}], False, False, id="ddp, a static graph"),
        pytest.param(2, with_ddp, [True, False, {"find_unused_parameters": True}], True, False, id="ddp, unused"),
        pytest.param(
            2, with_ddp, [False, True, {"gradient_as_bucket_view": True}], False, True, id="ddp, accumulating"
        ),
        # three ranks do not divide the last layer's 8 rows
        pytest.param(3, with_fsdp, [], False, False, id="fully sharded"),
        pytest.param(2, with_tensor_parallel, [], False, False, id="tensor parallel"),
    ],
)
def test_every_rank_has_the_weights_of_one_process(
    ranks: Ranks, size: int, train: Callable[..., Weights], arguments: list[Any], skips: bool, accumulates: bool
) -> None:
    expected = alone(skips, accumulates)
    for found in ranks(size, train, *arguments, backend="shm"):
        assert_equal(found, expected)


def test_pipeline(ranks: Ranks) -> None:
    expected, found = alone(), Weights()
    for part in ranks(2, with_pipeline, backend="shm"):
        found |= part
    assert found.keys() == expected.keys()
    assert_equal(found, expected)
