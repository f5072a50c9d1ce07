"""DiLoCo computes what the paper says, whole or in fragments, at once or delayed.

Its state is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.planning.plan import Plan
from paceline.sync import build_rule
from paceline.sync.diloco import DiLoCo
from paceline.sync.local import cut
from paceline.sync.rule import Replica
from paceline.wire.status import GenerationOver
from ranks import Ranks

STEPS, PERIOD = 14, 4


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 2)).to(dtype)


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + replica), dtype=torch.float64)


def backward(model: nn.Module, step: int, replica: int) -> None:
    model.zero_grad()
    model(batch(step, replica).to(next(model.parameters()).dtype)).square().mean().backward()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(settings: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Train on different data on each rank: the parameters after every step."""
    with joined(deadline_s=30) as group:
        rank = Rank(group, settings)
        parameters = [values(rank.model) for _ in rank.train(steps)]
        rank.rule.detach()
        return {"parameters": parameters, "messages": rank.messages, "traffic": rank.replica.traffic}


def all_trained(*settings: dict[str, Any]) -> list[dict[str, Any]]:
    """`trained` with each of the settings, one after the other."""
    return [trained(each) for each in settings]


def made(period: int, *, compress: str = "none", **settings: Any) -> DiLoCo:
    """The rule with these settings, and else the defaults of a plan."""
    sync = ",".join([f"diloco:{period}", *(f"{key}={value}" for key, value in settings.items())])
    rule = build_rule(Plan(dp=2, sync=sync, compress=compress))
    assert isinstance(rule, DiLoCo)
    return rule


class Rank:
    """A model under the rule."""

    def __init__(self, group: Group, settings: dict[str, Any]) -> None:
        self.rule, self.step = made(**({"period": PERIOD} | settings)), 0
        self.messages: list[str] = []
        self.model = network(torch.float32 if "compress" in settings else torch.float64)
        self.replica = Replica(self.model, group, inner=Group(), world=group, log=self.messages.append)
        self.rule.attach(self.replica)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, steps: int) -> Iterator[None]:
        for _ in range(steps):
            self.step += 1
            backward(self.model, self.step, self.replica.dp.rank)
            self.rule.after_backward(self.step, torch.zeros(0))
            self.optimizer.step()
            self.rule.after_step(self.step)
            yield


def as_published(
    replicas: int, *, period: int = PERIOD, fragments: int = 1, overlap: int = 0, lr: float = 0.7, momentum: float = 0.9
) -> list[list[list[Tensor]]]:
    """The same by torch's own optimizer in one process: of every step and replica the parameters."""
    models = [network() for _ in range(replicas)]
    outer = network()
    inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    numbers = dict(zip(outer.parameters(), count(), strict=False))
    runs = [[numbers[p] for p in run] for run in cut(list(outer.parameters()), fragments)]
    locals_, outers = [list(model.parameters()) for model in models], list(outer.parameters())
    optimizers = [
        torch.optim.SGD([outers[i] for i in run], lr=lr, momentum=momentum, nesterov=momentum > 0) for run in runs
    ]
    waiting: list[tuple[int, int, list[list[Tensor]]]] = []  # when, which run, its local parameters when they left
    found = []
    for step in range(1, STEPS + 1):
        for r, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            backward(model, step, r)
            optimizer.step()
        for k, run in enumerate(runs):
            if step % period == (k + 1) * period // fragments % period:
                waiting.append((step + overlap, k, [[own[i].detach().clone() for i in run] for own in locals_]))
        for due, k, left in [entry for entry in waiting if entry[0] == step]:
            for j, i in enumerate(runs[k]):
                outers[i].grad = torch.stack([outers[i].detach() - own[j] for own in left]).mean(0)
            optimizers[k].step()
            with torch.no_grad():
                for own, sent in zip(locals_, left, strict=True):
                    for j, i in enumerate(runs[k]):
                        own[i].copy_(outers[i] + (own[i] - sent[j]))
            waiting = [entry for entry in waiting if entry[0] != due or entry[1] != k]
        found.append([values(model) for model in models])
    return found


def test_it_computes_what_is_published(ranks: Ranks) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"momentum": 0.0, "lr": 1.0},
        {"fragments": 3, "overlap": 2},
        {"overlap": 3},
        {"period": 9, "fragments": 8},
    ]
    of_rank = ranks(2, all_trained, *cases, backend="shm")
    for number, settings in enumerate(cases):
        expected = as_published(2, **settings)
        for rank, found in enumerate(of_rank):
            for now, then in zip(found[number]["parameters"], expected, strict=True):
                for one, other in zip(now, then[rank], strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=str(settings))


def test_replicas_are_one_after_every_period_and_each_fragment_in_its_own_steps(ranks: Ranks) -> None:
    (one, of_one), (two, of_two) = ranks(2, all_trained, {}, {"fragments": 2})
    equal = [same(a, b) for a, b in zip(one["parameters"], two["parameters"], strict=True)]
    assert equal == [step % PERIOD == 0 for step in range(1, STEPS + 1)]
    runs = cut(list(network().parameters()), 2)
    first = len(runs[0])
    for step, (a, b) in enumerate(zip(of_one["parameters"], of_two["parameters"], strict=True), start=1):
        assert same(a[:first], b[:first]) == (step % PERIOD == 2)
        assert same(a[first:], b[first:]) == (step % PERIOD == 0)


def test_one_replica_with_a_plain_outer_step_loses_nothing_on_the_way() -> None:
    alone = Rank(Group(), {"fragments": 3, "overlap": 2, "lr": 1.0, "momentum": 0.0})
    for _ in alone.train(STEPS):
        pass
    alone.rule.detach()
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        backward(plain, step, 0)
        optimizer.step()
    for one, other in zip(values(alone.model), values(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def interrupted(settings: dict[str, Any], at: int) -> tuple[bool, bool]:
    """Whether a rank that starts anew from the state of one in step `at` goes on with the same bits.

    And whether saving changed that.
    """
    with joined(deadline_s=30) as group:
        disturbed, undisturbed, resumed = (Rank(group, settings) for _ in range(3))
        for _ in disturbed.train(at):
            pass
        with disturbed.rule.shared_parameters():
            pass
        parameters = values(disturbed.model)
        state = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in disturbed.rule.state_dict().items()
        }
        for rank, steps in ((disturbed, STEPS - at), (undisturbed, STEPS)):
            for _ in rank.train(steps):
                pass
        with torch.no_grad():
            for parameter, value in zip(resumed.model.parameters(), parameters, strict=True):
                parameter.copy_(value)
        resumed.rule.load_state_dict(state)
        resumed.step = at
        for _ in resumed.train(STEPS - at):
            pass
        expected = values(undisturbed.model)
        for rank in (disturbed, undisturbed, resumed):
            rank.rule.detach()
        return same(values(resumed.model), expected), same(values(disturbed.model), expected)


INTERRUPTED: list[tuple[dict[str, Any], int]] = [
    ({}, 6),
    ({"fragments": 2, "overlap": 3}, 5),
    ({"overlap": 3}, 9),
    ({"overlap": 3}, 8),
    ({"fragments": 2, "overlap": 3, "compress": "int8"}, 9),
    ({"compress": "powersgd:2"}, 6),
]


def all_interrupted() -> list[tuple[bool, bool]]:
    return [interrupted(settings, at) for settings, at in INTERRUPTED]


def test_a_resumed_rule_goes_on_bit_for_bit_in_a_period_and_with_a_fragment_on_its_way(ranks: Ranks) -> None:
    for of_rank in ranks(2, all_interrupted):
        assert dict(zip(map(str, INTERRUPTED), of_rank, strict=True)) == {str(c): (True, True) for c in INTERRUPTED}


def started_anew(group: Group) -> list[Tensor]:
    """A rule that trained, and is then told that nothing is known of it but the parameters as they are."""
    rank = Rank(group, {"overlap": 3})
    for _ in rank.train(PERIOD + 1):
        pass
    with torch.no_grad():
        for parameter in rank.model.parameters():
            parameter.fill_(0.25)
    rank.rule.load_state_dict({})
    for _ in rank.train(2 * PERIOD):
        pass
    rank.rule.detach()
    return values(rank.model)


def test_without_a_state_it_starts_from_the_parameters_as_they_are() -> None:
    one = started_anew(Group())
    fresh = Rank(Group(), {"overlap": 3})
    with torch.no_grad():
        for parameter in fresh.model.parameters():
            parameter.fill_(0.25)
    fresh.rule.load_state_dict({})
    fresh.step = PERIOD + 1
    for _ in fresh.train(2 * PERIOD):
        pass
    fresh.rule.detach()
    assert same(one, values(fresh.model))


def test_among_other_replicas_it_keeps_what_is_outer_and_leaves_out_what_is_on_its_way() -> None:
    rank = Rank(Group(), {"overlap": 3})
    for _ in rank.train(PERIOD + 1):
        pass
    own, outer = values(rank.model), {key: value.clone() for key, value in rank.rule.outer_state().items()}
    assert any(key.endswith("due") for key in rank.rule.state_dict())
    rank.rule.detach()
    other = Rank(Group(), {"overlap": 3})
    with torch.no_grad():
        torch._foreach_copy_(list(other.model.parameters()), own)
    other.rule.go_on(outer)
    assert same(values(other.model), own), "what this replica learned stays"
    state = other.rule.state_dict()
    assert not state.pop("alike")
    assert state.keys() == outer.keys()
    assert all(torch.equal(state[key], outer[key]) for key in outer)
    other.rule.detach()


def test_an_exchange_that_was_broken_off_leaves_no_thread() -> None:
    rank = Rank(Group(), {"overlap": 3})
    rank.rule.sum = lost  # type: ignore[method-assign]
    for _ in rank.train(PERIOD):
        pass
    with pytest.raises(GenerationOver):
        rank.rule.detach()
    assert "paceline-sync" not in {thread.name for thread in threading.enumerate()}


def lost(tensor: Tensor) -> None:
    raise GenerationOver("test.planted", "a rank was lost")


def test_every_parameter_is_sent_once_a_period(ranks: Ranks) -> None:
    nbytes = sum(p.nbytes for p in network().parameters())
    for settings in ({}, {"fragments": 3, "overlap": 1}):
        for found in ranks(2, trained, settings, 3 * PERIOD):
            assert found["traffic"].sent_bytes == found["traffic"].plain_bytes == 3 * nbytes
            assert len(found["messages"]) == 1


def test_a_compressed_pseudo_gradient_costs_less_and_leaves_the_same_bits_everywhere(ranks: Ranks) -> None:
    shares = {"int8": 0.3, "int4": 0.18, "bf16": 0.51}
    first, second = ranks(2, all_trained, {}, *({"compress": codec} for codec in shares))
    exact = first[0]["parameters"][-3]
    for (codec, share), one, two in zip(shares.items(), first[1:], second[1:], strict=True):
        equal = [same(a, b) for a, b in zip(one["parameters"], two["parameters"], strict=True)]
        assert equal == [step % PERIOD == 0 for step in range(1, STEPS + 1)], codec
        assert 0 < one["traffic"].sent_bytes < share * one["traffic"].plain_bytes, codec
        assert one["traffic"].relative_error > 0, codec
        assert all((a.float() - b.float()).abs().max() < 0.1 for a, b in zip(one["parameters"][-3], exact, strict=True))


def test_half_precision_weights_have_a_wide_outer_copy() -> None:
    rule = made(2, lr=1e-4, momentum=0.0)
    model = nn.Linear(2, 1, bias=False).bfloat16()
    rule.attach(Replica(model, Group()))
    assert {flat.values.dtype for fragment in rule.fragments for flat in fragment.outer} == {torch.float32}
