"""The order of an epoch: every sample once, few shards for a rank, any position without the ones before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.corpus.order import Mixture, Order
from paceline.job.partition import even_shares


def starts_of(counts: list[int]) -> Any:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def order_of(counts: list[int], batch: int, **keys: Any) -> Order:
    return Order(starts_of(counts), **{"seed": 3, "epoch": 0, "batch": batch, "window": 64, **keys})


def batches(order: Order | Mixture, samples: int, batch: int) -> list[list[int]]:
    return [order.rows(first, min(first + batch, samples)).tolist() for first in range(0, samples, batch)]


shards = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@given(counts=shards, batch=st.integers(1, 300), window=st.integers(1, 500), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_sample_once(counts: list[int], batch: int, window: int, epoch: int) -> None:
    samples = sum(counts)
    batch = min(batch, samples)
    found = batches(order_of(counts, batch, window=window, epoch=epoch), samples, batch)
    assert sorted(row for batch_rows in found for row in batch_rows) == list(range(samples))


@given(counts=shards, batch=st.integers(1, 300), replicas=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_parts_of_ranks_are_the_whole_batch_wherever_they_begin(
    counts: list[int], batch: int, replicas: int, data: st.DataObject
) -> None:
    samples = sum(counts)
    batch = min(batch, samples)
    step = data.draw(st.integers(0, -(-samples // batch) - 1))
    first, end = step * batch, min((step + 1) * batch, samples)
    whole = order_of(counts, batch).rows(first, end).tolist()
    parts: list[int] = []
    for share in even_shares(end - first, replicas):
        parts += order_of(counts, batch).rows(first + len(parts), first + len(parts) + share).tolist()
    assert parts == whole


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    found = {tuple(order_of([500, 700], 8, seed=s, epoch=e).rows(0, 8)) for s in range(4) for e in range(4)}
    assert len(found) == 16
    assert order_of([500, 700], 8, shuffle=False).rows(16, 24).tolist() == list(range(16, 24))


def test_a_batch_has_samples_of_many_places() -> None:
    order = order_of([10_000] * 4, 120, window=1000)
    first = order.rows(0, 120)
    assert len(set((first // 10_000).tolist())) == 4
    assert len(set((first // 1024).tolist())) >= 25


@pytest.mark.parametrize("batch", [32, 96, 256, 1000])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 6, 8, 12])
def test_a_rank_reads_at_most_a_tenth_more_than_its_share(batch: int, replicas: int) -> None:
    counts, samples = [200] * 4000, 800_000
    order = order_of(counts, batch, window=2000)
    shares = even_shares(batch, replicas)
    firsts = np.concatenate(([0], np.cumsum(shares)))
    for replica in range(replicas):
        lanes = order.shards_from(int(firsts[replica]), int(firsts[replica + 1]), samples)
        assert len(lanes) * 200 <= 1.1 * samples * shares[replica] / batch + 2 * 200


def test_shards_are_wanted_before_they_are_read() -> None:
    counts = [50] * 400
    order, starts = order_of(counts, 16, window=100), starts_of(counts)
    for step in range(0, 1000, 97):
        wanted = order.shards_from(step * 16 + 4, step * 16 + 12, 200)
        for later in range(step, min(step + 50, 1250)):
            read = np.searchsorted(starts, order.rows(later * 16 + 4, later * 16 + 12), side="right") - 1
            assert set(read.tolist()) <= set(wanted)


def mixture(sizes: list[list[int]], weights: Any, **keys: Any) -> Mixture:
    sources = [starts_of(size) for size in sizes]
    offsets = np.concatenate(([0], np.cumsum([sum(size) for size in sizes]))).tolist()[:-1]
    schedule = weights if isinstance(weights[0], tuple) else [(0, weights)]
    return Mixture(
        sources,
        offsets,
        schedule,
        **{"seed": 1, "epoch": 0, "batch": 8, "samples": 10**6, "steps": 50, "windows": [64] * 9, **keys},
    )


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    batch=st.integers(1, 40),
    step=st.integers(0, 10_000),
)
@settings(max_examples=100, deadline=None)
def test_sources_are_drawn_by_weight_at_any_step(weights: list[float], batch: int, step: int) -> None:
    order = mixture([[1000]] * len(weights), weights, batch=batch)
    before, after = order.counts(step), order.counts(step + 1)
    assert sum(before) == step * batch
    assert sum(after) - sum(before) == batch
    assert all(b <= a for b, a in zip(before, after, strict=True))
    for count, weight in zip(before, weights, strict=True):
        assert abs(count - step * batch * weight / sum(weights)) <= 1 + len(weights)


def test_a_source_of_a_mixture_gives_each_sample_once_before_it_repeats() -> None:
    order = mixture([[30, 40], [100]], [0.5, 0.5], batch=8, steps=50)
    drawn = [row for step in range(50) for row in order.rows(step * 8, step * 8 + 8).tolist()]
    first = [row for row in drawn if row < 70]
    second = [row - 70 for row in drawn if row >= 70]
    assert len(first) == len(second) == 200
    for rows, size in ((first, 70), (second, 100)):
        counts = np.bincount(rows[: len(rows) // size * size], minlength=size)
        # a batch that spans two epochs of a source may mix them
        assert np.abs(counts - len(rows) // size).sum() <= 16


def test_weights_follow_their_schedule() -> None:
    order = mixture([[1000], [1000]], [(0, [1, 0]), (10, [0.5, 0.5]), (20, [0, 1])], batch=8)
    assert order.counts(10) == [80, 0]
    assert order.counts(20) == [120, 40]
    assert order.counts(30) == [120, 120]
    later = mixture([[1000], [1000]], [(0, [1, 0]), (60, [0, 1])], batch=8, epoch=1, samples=396)
    assert later.counts(0) == [396, 0]
    assert later.counts(10) == [476, 0]
    assert later.counts(20) == [476, 80]


def test_ranks_of_a_mixture_get_every_source_in_proportion() -> None:
    order = mixture([[1000], [1000]], [0.75, 0.25], batch=16)
    for step in range(20):
        for half in (0, 8):
            rows = order.rows(step * 16 + half, step * 16 + half + 8)
            assert (rows >= 1000).sum() == 2


def test_a_source_that_begins_later_is_drawn_from_many_places() -> None:
    order = mixture([[100] * 40, [100] * 40], [(0, [1, 0]), (10, [0.5, 0.5])], batch=64)
    rows = order.rows(10 * 64, 11 * 64)
    later = rows[rows >= 4000]
    assert len(later) == 32
    assert len(set((later // 100).tolist())) >= 16
    assert max(order.shards_from(0, 64, 8)) < 40, "no shard is fetched before its source begins"
    assert max(order.shards_from(0, 64, 12)) >= 40


def test_every_source_is_among_the_first_shards_that_are_fetched() -> None:
    order = mixture([[50] * 400, [50] * 400, [50] * 400], [0.6, 0.2, 0.2], batch=120, samples=60_000, steps=500)
    wanted = order.shards_from(0, 60, 200)
    assert {shard // 400 for shard in wanted[: len(wanted) // 4]} == {0, 1, 2}


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.8, 0.2]])
def test_a_rank_of_a_mixture_fetches_few_shards_that_it_does_not_read(weights: list[float]) -> None:
    order = mixture([[20] * 2000, [20] * 2000], weights, batch=240, samples=72_000, steps=300, windows=[100, 100])
    first, end = 60, 120
    read: set[int] = set()
    for step in range(100, 201):
        read.update((order.rows(step * 240 + first, step * 240 + end) // 20).tolist())
    wanted = order.shards_from(100 * 240 + first, 100 * 240 + end, 200)
    assert read <= set(wanted)
    # beyond the samples that are read: the rest of the windows, and the slots that rounding may add
    assert len(wanted) <= 2 * len(read)
