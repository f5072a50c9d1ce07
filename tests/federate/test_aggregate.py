"""Bad updates are refused with the reason, and robust aggregation withstands a poisoner."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import JobError
from paceline_federated.client import Layout
from paceline_federated.rules import FedBuff, FederatedRule, Update
from paceline_federated.section import FederateSpec
from paceline_federated.server import Aggregator, Cohort, UpdateCodec
from refusals import raises

N = 4
LAYOUT = Layout(("w", "b"), ((3,), (1,)), 2, (), torch.float64)


def update(client: int, values: list[float], samples: int = 10, **changes: Any) -> Update:
    fields: dict[str, Any] = {"returned": {}, "samples": samples, "steps": 2, "loss": 1.0, "round": 1, "version": 0}
    return Update(client, delta=torch.tensor(values, dtype=torch.float64), **(fields | changes))


def aggregator(rule: FederatedRule | None = None, **spec: Any) -> Aggregator:
    return Aggregator(FederateSpec(**spec), LAYOUT, rule or FederatedRule())


def agreed(taking: Aggregator, *updates: Update) -> Tensor:
    for one in updates:
        taking.add(one)
    found = taking.aggregate()
    assert found is not None
    return found.delta


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update(7, [math.nan, 0, 0, 0]), "NaN or Inf"),
        (update(7, [math.inf, 0, 0, 0]), "NaN or Inf"),
        (update(7, [1, 2, 3]), "the shape (3,) instead of (4,): another model"),
        (update(7, [1, 2, 3, 4], samples=0), "0 samples"),
        (update(7, [1, 2, 3, 4], steps=0), "0 steps"),
        (update(7, [1, 2, 3, 4], returned={"control": torch.zeros(2)}), "its control has the shape"),
        (update(7, [1, 2, 3, 4], returned={"control": torch.full((N,), math.nan)}), "NaN or Inf"),
    ],
)
def test_a_bad_update_is_refused_with_the_reason_and_changes_nothing(bad: Update, reason: str) -> None:
    taking = aggregator()
    taking.add(update(1, [1, 1, 1, 1]))
    told = taking.add(bad)
    assert told is not None
    assert reason in told
    found = taking.aggregate()
    assert found is not None
    assert found.delta.tolist() == [1, 1, 1, 1]
    assert (found.clients, taking.refused) == (1, {7: told})


def test_an_update_of_another_precision_is_refused() -> None:
    single = Update(3, 1, 0, torch.zeros(N), {}, 5, 1, 0.0)
    assert "float32 instead of" in (aggregator().add(single) or "")


def test_samples_weigh_updates_unless_the_job_says_equal() -> None:
    pair = update(0, [4, 0, 0, 0], samples=30), update(1, [0, 4, 0, 0], samples=10)
    assert agreed(aggregator(), *pair).tolist() == [3, 1, 0, 0]
    assert agreed(aggregator(weigh="equal"), *pair).tolist() == [2, 2, 0, 0]


def test_a_norm_bound_scales_long_updates_down_and_tells_of_them() -> None:
    taking = aggregator(norm_bound=1.0)
    assert agreed(taking, update(0, [3, 4, 0, 0]), update(1, [0, 0, 0.5, 0])).tolist() == [0.3, 0.4, 0.25, 0]
    found = taking.aggregate()
    assert found is not None
    assert (found.clipped, found.norm) == (1, 5.0)


@pytest.mark.parametrize("aggregate", ["median", "trimmed:0.2"])
def test_a_poisoner_moves_the_mean_but_not_a_robust_aggregate(aggregate: str) -> None:
    honest = [update(client, [1 + 0.01 * client, 1, 1, 1]) for client in range(5)]
    poison = update(9, [-1000, -1000, -1000, 1000])
    assert agreed(aggregator(), *honest, poison)[0] < -100
    robust = agreed(aggregator(aggregate=aggregate), *honest, poison)
    assert torch.allclose(robust, torch.ones(N, dtype=torch.float64), atol=0.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=N, max_size=N), min_size=1, max_size=7), st.sampled_from([1, 3]))
def test_updates_together_or_one_by_one_give_the_same_aggregate(rows: list[list[float]], together: int) -> None:
    single, grouped = aggregator(norm_bound=2.0), aggregator(norm_bound=2.0)
    for client, row in enumerate(rows):
        single.add(update(client, row, samples=client + 1))
    for start in range(0, len(rows), together):
        part = list(range(start, min(start + together, len(rows))))
        deltas = torch.tensor([rows[client] for client in part], dtype=torch.float64)
        samples = [client + 1 for client in part]
        grouped.add_cohort(Cohort(part, deltas, {}, samples, [2] * len(part), [1.0] * len(part)))
    one, other = single.aggregate(), grouped.aggregate()
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one.delta, other.delta)
    assert (one.clients, one.samples, one.clipped) == (other.clients, other.samples, other.clipped)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_the_median_is_the_median(values: list[float]) -> None:
    found = agreed(aggregator(aggregate="median"), *(update(c, [v, 0, 0, 0]) for c, v in enumerate(values)))
    ordered = sorted(values)
    middle = (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
    assert float(found[0]) == pytest.approx(middle)


def test_stale_updates_count_less_by_fedbuff() -> None:
    taking = aggregator(FedBuff(2))
    taking.add(update(0, [4, 0, 0, 0]), staleness=0)
    taking.add(update(1, [0, 4, 0, 0]), staleness=3)
    found = taking.aggregate()
    assert found is not None
    assert found.delta.tolist() == [2, 1, 0, 0]


def test_no_update_at_all_is_no_agreement() -> None:
    assert aggregator().aggregate() is None


@pytest.mark.parametrize("text", ["int8", "bf16", "topk:0.3", "int4"])
def test_a_coded_update_is_near_what_was_sent_and_the_same_for_the_same_round(text: str) -> None:
    codec = UpdateCodec(text, 5000, seed=3, dtype=torch.float32)
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    coded = codec.encode(flat, 1, 7)
    assert len(coded) == codec.nbytes < flat.nbytes
    assert torch.equal(coded, codec.encode(flat, 1, 7))
    assert float((codec.decode(coded) - flat).norm() / flat.norm()) < 0.5


def test_codecs_of_sums_and_of_some_numbers_are_refused_where_they_cannot_be() -> None:
    with raises(JobError, "federate.compress_invalid", key="federate.compress"):
        UpdateCodec("powersgd:4", 100, seed=0, dtype=torch.float32)
    with raises(JobError, "federate.compress_partial", key="federate.compress_down", text="topk:0.1"):
        UpdateCodec("topk:0.1", 100, seed=0, weights=True, dtype=torch.float32)
    with raises(JobError, "federate.compress_larger", coded=256, plain=40, text="topk:0.01"):
        UpdateCodec("topk:0.01", 10, seed=0, dtype=torch.float32)
    with raises(JobError, "federate.compress_invalid"):
        UpdateCodec("int9", 100, seed=0, dtype=torch.float32)
