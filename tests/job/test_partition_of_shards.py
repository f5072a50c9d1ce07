"""Partitions of a data set that reads shards: each sample once, from any step, for any ranks."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.corpus.order import Mixture, Order
from paceline.job.partition import Partition, PartitionSpec


class Shards:
    """Samples in shards, by default of 7, 50 and 3 000."""

    def __init__(self, sizes: tuple[int, ...] = (7, 50, 3000), window: int = 32) -> None:
        self.starts, self.window = np.cumsum([0, *sizes]), window

    def epoch_order(
        self, seed: int, epoch: int, batch: int, *, steps: int, shuffle: bool, part: tuple[int, int] | None = None
    ) -> Order:
        starts = self.starts if part is None else np.clip(self.starts, *part) - part[0]
        return Order(starts, seed=seed, epoch=epoch, batch=batch, window=self.window, shuffle=shuffle)


def partition(spec: PartitionSpec, replica: int, replicas: int, **keys: Any) -> Partition:
    values: dict[str, Any] = {"samples": 3057, "global_batch": 48, "seed": 5, "shards": Shards()}
    return Partition(spec, replica=replica, replicas=replicas, **(values | keys))


SPECS = {
    "uniform": (PartitionSpec(), 3, None),
    "in order": (PartitionSpec(shuffle=False), 3, None),
    "weighted": (PartitionSpec(weights=(1.0, 2.5, 0.5)), 3, None),
    "hierarchical": (PartitionSpec(kind="hierarchical"), 4, [0, 0, 1, 1]),
    "uneven hosts": (PartitionSpec(kind="hierarchical", weights=(1.0, 1.0, 3.0)), 3, [0, 1, 1]),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_sample_is_in_one_batch_of_one_replica(name: str) -> None:
    spec, replicas, hosts = SPECS[name]
    parts = [partition(spec, r, replicas, hosts=hosts) for r in range(replicas)]
    batches = [list(part.batches(1)) for part in parts]
    assert sorted(i for of in batches for batch in of for i in batch) == list(range(3057))
    for step, shares in enumerate(zip(*[map(len, of) for of in batches], strict=True)):
        assert shares == parts[0].shares(step, 1)
    for part, whole in zip(parts, batches, strict=True):
        assert list(part.batches(1, 40)) == whole[40:]


@given(
    changes=st.lists(st.tuples(st.integers(0, 60), st.permutations([8, 16, 24])), max_size=4),
    shuffle=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_changed_shares_move_samples_and_lose_none(changes: list[tuple[int, list[int]]], shuffle: bool) -> None:
    parts = [partition(PartitionSpec(shuffle=shuffle), r, 3) for r in range(3)]
    for part in parts:
        for step, shares in sorted(changes):
            part.changes.add((0, step), shares)
    assert sorted(i for part in parts for batch in part.batches(0) for i in batch) == list(range(3057))


def test_global_batches_do_not_depend_on_the_ranks() -> None:
    whole = list(partition(PartitionSpec(), 0, 1).batches(2))
    for replicas in (2, 3, 4, 8):
        parts = [partition(PartitionSpec(), r, replicas).batches(2) for r in range(replicas)]
        assert [sum(of, []) for of in zip(*parts, strict=True)] == whole  # noqa: RUF017


def test_a_replica_knows_the_shards_of_its_next_batches() -> None:
    part = partition(PartitionSpec(), 1, 3)
    wanted = part.shards_from(0, 10)
    assert set(wanted) <= {0, 1, 2}
    assert 2 in wanted
    assert part.shards_from(0, part.steps_per_epoch) == []


class Sources:
    """Sources with shards and weights."""

    def __init__(self, sizes: list[list[int]], schedule: list[tuple[int, list[float]]], windows: list[int]) -> None:
        self.sources, self.schedule, self.windows = [np.cumsum([0, *own]) for own in sizes], schedule, windows
        self.starts, self.window = np.cumsum([0, *(size for own in sizes for size in own)]), max(windows)

    def epoch_order(self, seed: int, epoch: int, batch: int, *, steps: int, shuffle: bool) -> Mixture:
        return Mixture(
            self.sources,
            [0, *np.cumsum([own[-1] for own in self.sources]).tolist()][:-1],
            self.schedule,
            seed=seed,
            epoch=epoch,
            batch=batch,
            samples=min(SAMPLES, steps * batch),
            steps=steps,
            windows=self.windows,
            shuffle=shuffle,
        )


SAMPLES = 2000  # of an epoch of a mixture


def assert_wanted_before_read(part: Partition, shards: Any, epoch: int, step: int) -> None:
    """Assert that all shards are wanted that the replica reads within the look-ahead."""
    # a large batch takes several samples of each of 120 lanes; without shuffling, the window counts positions
    ahead = shards.window // (-(-part.global_batch // 120) if part.shuffle else part.global_batch)
    wanted = set(part.shards_from(epoch, step))
    for later, rows in enumerate(islice(part.batches(epoch, step), 1 + ahead), step):
        read = set((np.searchsorted(shards.starts, rows, side="right") - 1).tolist())
        assert read <= wanted, f"step {later}"


replicas = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=30),
    replica=replicas,
    batch=st.integers(8, 400),
    window=st.integers(1, 300),
    shuffle=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_shards_are_wanted_before_they_are_read(
    sizes: list[int], replica: tuple[int, int], batch: int, window: int, shuffle: bool, data: st.DataObject
) -> None:
    shards, samples = Shards((*sizes, 8), window), sum(sizes) + 8
    spec = PartitionSpec(shuffle=shuffle)
    part = partition(spec, *replica, samples=samples, global_batch=min(batch, samples), shards=shards)
    step = data.draw(st.integers(0, part.steps_per_epoch - 1) | st.just(max(0, part.steps_per_epoch - 3)))
    assert_wanted_before_read(part, shards, 0, step)


weight = st.sampled_from([0.0, 0.1, 0.3, 1.0, 5.0])


@given(
    sizes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=12), min_size=1, max_size=4),
    replica=replicas,
    batch=st.integers(8, 300),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_shards_of_sources_are_wanted_before_they_are_read(
    sizes: list[list[int]],
    replica: tuple[int, int],
    batch: int,
    drop_last: bool,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    weights = st.lists(weight, min_size=len(sizes), max_size=len(sizes)).filter(any)
    steps = data.draw(st.lists(st.integers(1, 300), max_size=3, unique=True))
    schedule = [(step, data.draw(weights)) for step in (0, *sorted(steps))]
    windows = data.draw(st.lists(st.integers(1, 100), min_size=len(sizes), max_size=len(sizes)))
    shards = Sources(sizes, schedule, windows)
    spec = PartitionSpec(shuffle=shuffle)
    part = partition(spec, *replica, samples=SAMPLES, global_batch=batch, shards=shards, drop_last=drop_last)
    for _ in range(3):
        epoch, step = data.draw(st.integers(0, 3)), data.draw(st.integers(0, part.steps_per_epoch - 1))
        assert_wanted_before_read(part, shards, epoch, step)
