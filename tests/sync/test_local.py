"""Local SGD: replicas are equal bit for bit after every period, and on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.sync.local import LocalSGD, cut
from paceline.sync.rule import Replica
from paceline.wire.status import GenerationOver
from ranks import Ranks


class Mixed(nn.Module):
    """A model with every kind of parameter that a rule meets.

    Two dtypes, one in another order of memory, one frozen, one unused, and a buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x
        y: Tensor = (self.narrow.float() * x).sum() + (self.image * x * self.frozen.sum()).square().sum()
        return y


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def apart(steps: int, period: int) -> dict[str, Any]:
    """Train on different data on each rank.

    Parameters after each step, scalars after each backward pass, and a moment of agreement.
    """
    with joined(deadline_s=30) as group:
        torch.manual_seed(group.rank)
        model, rule = Mixed(), LocalSGD(period)
        replica = Replica(model, group, 2, inner=Group(), world=group)
        rule.attach(replica)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found: dict[str, Any] = {"parameters": [], "scalars": [], "agreed": [], "first": values(model)}
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.tensor(1.0 + group.rank + 0.1 * step)).backward()
            agreed = rule.after_backward(step, torch.ones(2, dtype=torch.float64))
            found["scalars"].append(agreed.scalars[0].item())
            found["agreed"].append(agreed.everywhere)
            optimizer.step()
            rule.after_step(step)
            found["parameters"].append(values(model))
        with rule.shared_parameters():
            found["within"] = values(model)
        found["after"] = values(model)
        found["seen"], found["traffic"] = model.seen.item(), replica.traffic.sent_bytes
        rule.detach()
        return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def two(ranks: Ranks) -> list[dict[str, Any]]:
    """Two replicas after seven steps of periods of three."""
    return ranks(2, apart, 7, 3, backend="shm")


AGREES = [False, False, True, False, False, True, False]


def test_replicas_are_one_after_every_period_and_differ_between(ranks: Ranks, two: list[dict[str, Any]]) -> None:
    for first, *others in (two, ranks(3, apart, 7, 3, backend="gloo")):
        for other in others:
            assert same(first["first"], other["first"])
            equal = [same(one, two) for one, two in zip(first["parameters"], other["parameters"], strict=True)]
            assert equal == AGREES


def test_losses_and_votes_are_told_in_the_steps_that_agree_and_in_no_other(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["agreed"] == AGREES
        assert found["scalars"] == [1 + agrees for agrees in AGREES]


def test_for_a_moment_all_have_the_mean_and_then_their_own_again(two: list[dict[str, Any]]) -> None:
    first, second = two
    assert same(first["within"], second["within"])
    for mean, one, other in zip(first["within"], first["parameters"][-1], second["parameters"][-1], strict=True):
        torch.testing.assert_close(mean, (one.double() + other.double()).div(2).to(mean.dtype))
    for found in two:
        assert same(found["after"], found["parameters"][-1])


def test_buffers_stay_each_replicas_own_and_what_is_sent_does_not_grow_with_the_steps_between(ranks: Ranks) -> None:
    trained = (3 * 2) + (2 * 3 * 16 + 2) * 4  # bytes; the frozen ones are not sent
    first, second = ranks(2, apart, 6, 3)
    assert second["seen"] - first["seen"] == pytest.approx(6.0)
    assert first["traffic"] == second["traffic"] == 2 * trained, "two periods; the last agreement is still good"


@pytest.mark.parametrize(
    ("sizes", "count", "runs"),
    [
        ([4, 4, 4, 4], 2, [8, 8]),
        ([1, 1, 8, 1, 1], 3, [2, 8, 2]),
        ([10, 1, 1], 3, [10, 1, 1]),
        ([3, 3], 5, [3, 3]),
        ([5], 1, [5]),
        ([], 2, []),
    ],
)
def test_a_model_is_cut_so_that_the_largest_fragment_is_small(sizes: list[int], count: int, runs: list[int]) -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    found = cut(parameters, count)
    assert [sum(p.numel() for p in run) for run in found] == runs
    assert [id(p) for run in found for p in run] == [id(p) for p in parameters]


def test_a_moment_of_agreement_that_is_broken_off_leaves_the_parameters_and_their_counts_of_writes() -> None:
    model, rule = Mixed(), LocalSGD(4)
    rule.attach(Replica(model, Group(), 2, inner=Group(), world=Group()))
    rule.go_on({})
    own, sums = values(model), 0
    saved = [p.detach().requires_grad_() for p in model.parameters()]
    losses = [p.square().sum() for p in saved]

    def lost_in_the_second(tensor: Tensor) -> None:
        nonlocal sums
        sums += 1
        if sums == 2:
            raise GenerationOver("test.planted", "a rank was lost")
        tensor.add_(1)

    rule.sum = lost_in_the_second  # type: ignore[method-assign]
    with pytest.raises(GenerationOver), rule.shared_parameters():
        pass
    assert sums == 2, "one for each dtype"
    assert all(torch.equal(one, other) for one, other in zip(values(model), own, strict=True))
    for loss in losses:
        loss.backward()  # it raises where a tensor that it saved counts a write
    rule.detach()
