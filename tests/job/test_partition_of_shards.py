"""Partitions of a data set that reads shards: each sample once, from any step, for any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.corpus.order import Order
from paceline.job.partition import Partition, PartitionSpec


class Shards:
    """Samples in shards of 7, 50 and 3 000."""

    window = 32
    starts = np.array([0, 7, 57, 3057], np.int64)

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
