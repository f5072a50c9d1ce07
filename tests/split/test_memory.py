"""Bytes of training state.

If this failed, a run would report memory that it does not hold, or a plan would not fit as predicted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.job.optimizer import OptimizerSpec
from paceline.split.layout import (
    Part,
    ShardLayout,
    StateBytes,
    held_bytes,
    predicted_bytes,
    shard_parameter,
    whole_parts,
)
from ranks import Ranks

SGD, ADAMW = OptimizerSpec(name="sgd"), OptimizerSpec(name="adamw")
OPTIMIZERS = [
    SGD,
    OptimizerSpec(name="sgd", momentum=0.9),
    ADAMW,
    *(OptimizerSpec.model_validate(n) for n in ("adam", "lars", "lamb")),
]


def layers() -> nn.Sequential:
    """24 x 16 + 24 and 8 x 24 + 8 elements, 608 in all."""
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, next(model.parameters()).shape[-1], dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("spec", OPTIMIZERS, ids=lambda spec: f"{spec.name} {spec.momentum}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prediction_is_what_a_rank_holds(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    model = layers().to(dtype)
    predicted = predicted_bytes(whole_parts(model), dict(model.named_parameters()), spec)
    optimizer = spec.build(model.parameters())
    step(model, optimizer)
    assert predicted == held_bytes(model.parameters(), optimizer)
    assert predicted.parameters == predicted.gradients == 608 * dtype.itemsize


def test_the_figures_of_adam() -> None:
    model = layers()
    predicted = predicted_bytes(whole_parts(model), dict(model.named_parameters()), ADAMW)
    assert predicted == StateBytes(608 * 4, 608 * 4, 2 * 608 * 4 + 4 * 4)
    assert predicted.total == 4 * 608 * 4 + 16


def test_what_is_frozen_or_tied_counts_as_it_is_held() -> None:
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    predicted = predicted_bytes(whole_parts(model), dict(model.named_parameters()), ADAMW)
    optimizer = ADAMW.build(model.parameters())
    step(model, optimizer)
    assert predicted == held_bytes(model.parameters(), optimizer)
    assert predicted[:2] == ((256 * 2 + 48) * 4, (256 + 48) * 4)


def test_a_rank_of_a_divided_matrix_holds_its_part() -> None:
    model = layers()
    parts = whole_parts(model)
    for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
        module, own = name.split(".")
        shard_parameter(model.get_submodule(module), own, parts[name], axis="tp", dim=dim, index=1, of=2)
    optimizer = ADAMW.build(model.parameters())
    step(model, optimizer)
    predicted = predicted_bytes(parts, dict(model.named_parameters()), ADAMW)
    assert predicted == held_bytes(model.parameters(), optimizer)
    assert predicted.parameters == (12 * 16 + 12 + 8 * 12 + 8) * 4


def test_tensors_of_one_memory_count_once() -> None:
    flat = torch.zeros(100)
    weight = nn.Parameter(torch.zeros(40))
    weight.grad = flat[:40]
    bias = nn.Parameter(torch.zeros(60))
    bias.grad = flat[40:]
    assert held_bytes([weight, bias], SGD.build([weight, bias])) == StateBytes(400, 400, 0)


def of_a_sharded_model(rows: int) -> tuple[StateBytes, StateBytes]:
    """Held and predicted, on a rank of an FSDP2 group."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, rows))
    parts = {name: sliced(part, mesh.get_local_rank(), mesh.size()) for name, part in whole_parts(model).items()}
    fully_shard(model, mesh=mesh)
    optimizer = ADAMW.build(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    return held_bytes(model.parameters(), optimizer), predicted_bytes(parts, dict(model.named_parameters()), ADAMW)


def sliced(part: Part, rank: int, ranks: int) -> Part:
    each = -(-part.layout.full[0] // ranks)
    layout: ShardLayout = part.layout.narrow(0, rank * each, min((rank + 1) * each, part.layout.full[0]))
    return Part(part.name, layout, {"fsdp"})


def test_a_rank_of_a_fully_sharded_model_holds_its_slices(ranks: Ranks) -> None:
    for held, predicted in ranks(2, of_a_sharded_model, 8):
        assert held == predicted
        assert held.parameters == (24 * 16 + 24 + 8 * 24 + 8) // 2 * 4


def test_padding_is_all_that_a_prediction_leaves_out(ranks: Ranks) -> None:
    (held, predicted), (of_second, predicted_of_second) = ranks(2, of_a_sharded_model, 7)
    assert held == predicted
    # a row of the last matrix, and its bias
    assert of_second.parameters - predicted_of_second.parameters == (24 + 1) * 4
    assert of_second.total < predicted_of_second.total * 1.1
