"""Replicas that take local steps become equal again after layers are frozen, unfrozen or added."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from ranks import Ranks

PERIOD, CHANGED_AFTER, STEPS = 6, 8, 18


def data() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * 4, 6, generator=drawn)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 3, (len(inputs),), generator=drawn)), batch_size=4)


def train(rule: str, change: str, by_step: bool) -> list[Tensor]:
    """Parameters after the exchange of the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    first, added = model[0], nn.Linear(3, 3)
    first.requires_grad_(change != "unfrozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss = F.cross_entropy if by_step else None
    engine = paceline.setup(model, optimizer, loss=loss, loader=data(), plan=f"dp=2 sync={rule}")
    for i, batch in enumerate(engine.loader):
        if i == CHANGED_AFTER:
            first.requires_grad_(change != "frozen")
            if change == "added":
                optimizer.add_param_group({"params": added.parameters()})
                engine.broadcast_new_parameters()
                model.append(added)
        if by_step:
            engine.step(batch)
        else:
            engine.backward(F.cross_entropy(model(batch[0]), batch[1]))
            engine.update()
    found = [p.detach().clone() for p in model.parameters()]
    engine.close()
    return found


def train_by_each(rule: str) -> dict[tuple[str, bool], list[Tensor]]:
    """Parameters after each change, by `engine.step` or an own loss, one after the other in the same processes."""
    cases = product(["unfrozen", "frozen", "added"], [True, False])
    return {(change, by_step): train(rule, change, by_step) for change, by_step in cases}


@pytest.mark.parametrize("rule", [f"local:{PERIOD}", f"diloco:{PERIOD}"])
def test_replicas_meet_again_after_a_change_of_what_is_trained(ranks: Ranks, rule: str) -> None:
    first, second = ranks(2, train_by_each, rule)
    assert len(first) == 6
    for case, parameters in first.items():
        assert all(torch.equal(one, other) for one, other in zip(parameters, second[case], strict=True)), case


def test_layers_frozen_while_a_fragment_is_in_flight_are_the_same_on_all_replicas(ranks: Ranks) -> None:
    first, second = ranks(2, train, f"diloco:{PERIOD},fragments=3,overlap=2", "frozen", True)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
