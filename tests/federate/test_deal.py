"""Every sample goes to one client, and a client's batches follow from the seed alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from paceline.errors import DataError
from paceline.job.samples import Selection
from paceline_federated.batched import Timetable, padded
from paceline_federated.client import Work, keys, one_key, uniform
from paceline_federated.section import ClientsSpec
from paceline_federated.simulated_clients import Deal, deal
from refusals import raises


class Labelled(Dataset[Any]):
    """Samples with a class, and a user."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = np.array(labels)
        self.users = [f"user-{label // 2}" for label in labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), int(self.labels[index])


LABELS = st.lists(st.integers(0, 5), min_size=12, max_size=80)


@settings(max_examples=60, deadline=None)
@given(LABELS, st.sampled_from(["iid", "dirichlet", "shards", "user"]), st.integers(1, 6), st.integers(0, 5))
def test_every_sample_goes_to_exactly_one_client(labels: list[int], kind: Any, clients: int, seed: int) -> None:
    found = deal(Labelled(labels), ClientsSpec(kind=kind), clients, seed)
    assert sorted(found.indices.tolist()) == list(range(len(labels)))
    assert len(found) == (len({label // 2 for label in labels}) if kind == "user" else clients)
    assert int(found.samples.sum()) == len(labels)


@settings(max_examples=40, deadline=None)
@given(LABELS, st.integers(1, 6), st.floats(0.05, 0.9), st.integers(0, 5))
def test_what_clients_are_measured_on_is_not_trained_on(
    labels: list[int], clients: int, share: float, seed: int
) -> None:
    whole = deal(Labelled(labels), ClientsSpec(kind="dirichlet", alpha=0.3), clients, seed)
    train, own = whole.split(share, seed)
    for client in range(clients):
        assert sorted([*train[client].tolist(), *own[client].tolist()]) == whole[client].tolist()
        assert len(train[client]) >= min(1, len(whole[client]))


def test_a_small_alpha_makes_clients_differ_more() -> None:
    labels = [sample % 6 for sample in range(600)]

    def classes_of_a_client(alpha: float) -> float:
        found = deal(Labelled(labels), ClientsSpec(kind="dirichlet", alpha=alpha), 6, 0)
        return float(np.mean([len({labels[sample] for sample in found[client]}) for client in range(6)]))

    assert classes_of_a_client(0.05) + 1 < classes_of_a_client(100)


def test_shards_give_a_client_few_classes() -> None:
    found = deal(Labelled([sample % 6 for sample in range(120)]), ClientsSpec(kind="shards", shards=2), 3, 0)
    assert all(len({sample % 6 for sample in found[client]}) <= 2 for client in range(3))


def test_users_of_a_selection_are_those_of_its_samples() -> None:
    samples = Labelled([0, 2, 4, 1, 3, 5])
    found = deal(Selection(samples, np.array([0, 3, 5])), ClientsSpec(kind="user"), 1, 0)
    assert [found[client].tolist() for client in range(len(found))] == [[0, 1], [2]]


class WithoutClasses(Labelled):
    def __init__(self) -> None:
        self.length = 20

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("kind", "code"),
    [("dirichlet", "federate.no_labels"), ("shards", "federate.no_labels"), ("user", "federate.no_users")],
)
def test_a_set_without_classes_or_users_is_refused_with_what_to_do(kind: Any, code: str) -> None:
    with raises(DataError, code):
        deal(WithoutClasses(), ClientsSpec(kind=kind), 3, 0)


def test_more_clients_than_samples_are_refused() -> None:
    with raises(DataError, "federate.too_many_clients", clients=20, samples=12):
        deal(Labelled([0] * 12), ClientsSpec(), 20, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 23), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(0, 3),
    st.sampled_from([1, 40, 10**6]),
)
def test_clients_side_by_side_read_what_each_reads_alone(
    counts: list[int], batch: int, epochs: int, taken: int | None, seed: int, at_once: int
) -> None:
    work = Work(batch, epochs, taken, seed)
    ends = np.cumsum([0, *counts])
    dealt = Deal([np.arange(a, b) for a, b in pairwise(ends.tolist())])
    order = np.argsort([-work.step_count(count) for count in counts], kind="stable")
    together: list[list[list[int]]] = [[] for _ in counts]
    table = Timetable(work, dealt, order, at_once, torch.float64)
    for block in table.blocks:
        for step, part in zip(block.steps, np.split(table.samples(block, 3), np.cumsum(block.sizes)[:-1]), strict=True):
            rows = part.reshape(step.rows, step.width)
            counted = (step.shares > 0).numpy()
            assert torch.allclose(step.shares.sum(dim=1)[: step.clients], torch.ones(step.clients, dtype=torch.float64))
            assert not counted[step.clients :].any()
            for place in range(step.clients):
                client = order[place]
                together[client].append((rows[place][counted[place]] - ends[client]).tolist())
    for client, count in enumerate(counts):
        assert together[client] == [indices.tolist() for indices in work.batches(client, 3, count)]


def test_an_epoch_has_every_sample_once() -> None:
    read = [sample for indices in Work(4, 2, None, 0).batches(1, 1, 11) for sample in indices.tolist()]
    assert sorted(read[:11]) == sorted(read[11:]) == list(range(11))
    assert read[:11] != read[11:]


def test_keys_are_spread_and_do_not_repeat() -> None:
    found = keys(0, np.arange(200)[:, None], np.arange(200))
    assert len(np.unique(found)) == found.size
    drawn = uniform(1, np.arange(20_000))
    assert 0 <= drawn.min() < drawn.max() < 1
    assert abs(float(drawn.mean()) - 0.5) < 0.01


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4))
def test_one_key_is_that_of_many(numbers: list[int]) -> None:
    assert one_key(*numbers) == int(keys(*numbers)) >> 1


@given(st.integers(1, 10_000))
def test_padding_adds_an_eighth_at_most(number: int) -> None:
    assert number <= padded(number) <= number * 1.125
