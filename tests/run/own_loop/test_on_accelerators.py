"""Loops that compute their own loss, on accelerators: their batches arrive there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from simulated.environment import Simulated


class Pair(NamedTuple):
    """A batch whose parts have names."""

    inputs: Tensor
    labels: Tensor


def samples() -> list[Pair]:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(24, 8, generator=draw)
    return [Pair(row, row.argmax()) for row in inputs]


def as_dict(rows: list[Pair]) -> dict[str, Any]:
    return {
        "inputs": torch.stack([row.inputs for row in rows]),
        "more": [torch.stack([r.labels for r in rows])],
        "n": 8,
    }


def train(take: Callable[[Any], tuple[Tensor, Tensor]], loader: DataLoader[Any], *, alone: bool) -> list[float]:
    """Losses of three steps, by `setup` or in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = None if alone else paceline.setup(model, optimizer, loader=loader)
    losses = []
    for batch in loader if engine is None else engine.loader:
        inputs, labels = take(batch)
        loss = F.cross_entropy(model(inputs), labels)
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            loss = engine.backward(loss)
            engine.update()
        losses.append(loss.item())
    if engine is not None:
        engine.close()
    return losses


def of_pairs(*, alone: bool = False) -> list[float]:
    return train(lambda batch: (batch.inputs, batch.labels), DataLoader(samples(), batch_size=8), alone=alone)  # type: ignore[arg-type]


def of_dicts(*, alone: bool = False) -> list[float]:
    loader: DataLoader[Any] = DataLoader(samples(), batch_size=8, collate_fn=as_dict)  # type: ignore[arg-type]
    return train(lambda batch: (batch["inputs"], batch["more"][0]), loader, alone=alone)


@pytest.mark.parametrize("order", ["late", "random"])
def test_batches_of_any_structure_arrive_on_the_device(simulated: Simulated, order: Any) -> None:
    assert simulated.ranks(1, of_pairs, order=order) == [pytest.approx(of_pairs(alone=True), rel=1e-5)]


def test_batches_in_a_dict_arrive_on_the_device(simulated: Simulated) -> None:
    assert simulated.ranks(1, of_dicts) == [pytest.approx(of_dicts(alone=True), rel=1e-5)]


def test_two_ranks_train_as_one_process(simulated: Simulated) -> None:
    assert simulated.ranks(2, of_pairs) == [pytest.approx(of_pairs(alone=True), rel=1e-5)] * 2
