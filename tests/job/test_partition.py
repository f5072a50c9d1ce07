"""Dealing the samples.

What is lost or doubled here, the training never sees or sees twice, and no loss curve would tell.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.errors import DataError, PacelineError, PlanError
from paceline.job.partition import Partition, PartitionSpec
from refusals import raises


@st.composite
def deals(draw: st.DrawFn, kinds: tuple[str, ...] = ("uniform", "stratified", "hierarchical")) -> dict[str, Any]:
    """Arguments of a `Partition`, but for the replica."""
    replicas = draw(st.integers(1, 8))
    batch = draw(st.integers(replicas, 40))
    samples = draw(st.integers(batch, 400))
    weights = draw(st.none() | st.lists(st.floats(0.05, 20), min_size=replicas, max_size=replicas).map(tuple))
    kind = draw(st.sampled_from(kinds))
    arguments: dict[str, Any] = {
        "samples": samples,
        "global_batch": batch,
        "replicas": replicas,
        "seed": draw(st.integers(0, 2**31 - 1)),
    }
    if kind == "stratified":
        classes = draw(st.lists(st.integers(0, 6), min_size=samples, max_size=samples))
        arguments["labels"] = np.array(classes) * 7 - 3
    host_files = False
    if kind == "hierarchical":
        hosts = draw(st.integers(1, replicas))
        arguments["hosts"] = draw(
            st.permutations(
                [*range(hosts), *draw(st.lists(st.integers(0, hosts - 1), min_size=replicas, max_size=replicas))][
                    :replicas
                ]
            )
        )
        host_files = draw(st.booleans())
        if host_files:
            cuts = sorted(
                draw(st.lists(st.integers(1, max(samples - 1, 1)), min_size=hosts - 1, max_size=hosts - 1, unique=True))
            )
            arguments["host_samples"] = [b - a for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
    arguments["spec"] = PartitionSpec.model_validate({"kind": kind, "weights": weights, "host_files": host_files})
    return arguments


def partitions(deal: dict[str, Any], **changes: Any) -> list[Partition]:
    """The view of each replica."""
    deal = deal | changes
    return [Partition(replica=replica, **deal) for replica in range(deal["replicas"])]


def epochs(parts: list[Partition], epoch: int = 0) -> list[list[list[int]]]:
    """The batches of an epoch: [step][replica], indices counted over all hosts."""
    return [list(step) for step in zip(*(list(part.batches(epoch)) for part in parts), strict=True)]


def global_indices(deal: dict[str, Any], steps: list[list[list[int]]]) -> list[list[list[int]]]:
    """With `host_files`, indices count within a host: shift them apart."""
    if "host_samples" not in deal:
        return steps
    first = [0, *accumulate(deal["host_samples"])]
    return [[[first[deal["hosts"][r]] + i for i in batch] for r, batch in enumerate(step)] for step in steps]


@given(deals())
def test_every_sample_is_dealt_exactly_once_in_an_epoch(deal: dict[str, Any]) -> None:
    steps = global_indices(deal, epochs(partitions(deal), epoch=3))
    assert sorted(i for step in steps for batch in step for i in batch) == list(range(deal["samples"]))


@given(deals())
def test_shares_are_what_is_dealt_and_sum_to_the_batch(deal: dict[str, Any]) -> None:
    parts = partitions(deal)
    steps = epochs(parts)
    assert len(steps) == parts[0].steps_per_epoch == -(-deal["samples"] // deal["global_batch"])
    for number, step in enumerate(steps):
        assert all(part.shares(number) == tuple(len(batch) for batch in step) for part in parts)
        assert sum(parts[0].shares(number)) == parts[0].size(number)
    assert {parts[0].size(step) for step in range(len(steps) - 1)} <= {deal["global_batch"]}


@given(deals(), st.integers(0, 50))
def test_an_epoch_resumes_at_any_step(deal: dict[str, Any], start: int) -> None:
    part = Partition(replica=deal["replicas"] - 1, **deal)
    assert list(part.batches(2, start)) == list(part.batches(2))[start:]


@given(deals())
def test_without_the_uneven_last_batch_all_others_stay_as_they_are(deal: dict[str, Any]) -> None:
    dropped = epochs(partitions(deal, drop_last=True))
    assert len(dropped) == deal["samples"] // deal["global_batch"]
    assert dropped == epochs(partitions(deal))[: len(dropped)]


@given(deals(kinds=("uniform", "stratified")), st.data())
def test_global_batches_are_the_same_for_any_number_of_replicas_and_any_weights(
    deal: dict[str, Any], data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(1, min(8, deal["global_batch"])))
    others = partitions(deal, replicas=replicas, spec=PartitionSpec(kind=deal["spec"].kind))
    for ours, theirs in zip(epochs(partitions(deal)), epochs(others), strict=True):
        assert sorted(chain(*ours)) == sorted(chain(*theirs))


@pytest.mark.parametrize("kind", ["uniform", "stratified", "hierarchical"])
def test_each_epoch_and_each_seed_has_an_order_of_its_own(kind: Any) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        part = Partition(
            PartitionSpec(kind=kind),
            samples=100,
            global_batch=10,
            seed=seed,
            replica=0,
            replicas=1,
            labels=np.arange(100) % 3,
        )
        return list(part.batches(epoch))

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_without_shuffle_the_samples_come_in_the_datasets_order() -> None:
    parts = partitions(
        {"spec": PartitionSpec(shuffle=False), "samples": 10, "global_batch": 4, "seed": 0, "replicas": 2}
    )
    assert epochs(parts, 5) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    with raises(ValidationError, "partition.stratified_shuffles"):
        PartitionSpec(kind="stratified", shuffle=False)


@settings(max_examples=40)
@given(deals(kinds=("uniform", "stratified")), st.data())
def test_shares_that_change_within_an_epoch_leave_every_batch_as_it_is_and_resume_at_any_step(
    deal: dict[str, Any], data: st.DataObject
) -> None:
    parts, replicas, batch = partitions(deal), deal["replicas"], deal["global_batch"]
    steps = parts[0].steps_per_epoch
    changes = data.draw(st.lists(st.tuples(st.integers(1, 2), st.integers(0, steps - 1)), max_size=4).map(sorted))
    shares = {}
    for place in changes:
        inner = st.sets(st.integers(1, max(batch - 1, 1)), min_size=replicas - 1, max_size=replicas - 1)
        cuts = sorted(data.draw(inner))
        shares[place] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, batch], strict=True))
        for part in parts:
            part.changes.add(place, shares[place])
    for epoch in (2, 3):
        dealt = epochs(parts, epoch)
        for step, (ours, theirs) in enumerate(zip(dealt, epochs(partitions(deal), epoch), strict=True)):
            assert sorted(chain(*ours)) == sorted(chain(*theirs))
            assert all(part.shares(step, epoch) == tuple(len(own) for own in ours) for part in parts)
            in_force = [shares[place] for place in shares if place <= (epoch, step)]
            if in_force and parts[0].size(step) == batch:
                assert parts[0].shares(step, epoch) == in_force[-1]
            elif in_force:
                assert 0 not in map(len, ours) or 0 in map(len, theirs), "a small last batch is left to all it can be"
        resumed = Partition(replica=replicas - 1, **deal)
        resumed.changes.load(parts[-1].changes.state())
        start = data.draw(st.integers(0, steps))
        assert list(resumed.batches(epoch, start)) == list(parts[-1].batches(epoch, start))


def test_saved_changes_of_shares_are_checked_and_left_out_for_other_replicas() -> None:
    deal: dict[str, Any] = {"spec": PartitionSpec(), "samples": 100, "global_batch": 10, "replicas": 2, "seed": 0}
    part = partitions(deal)[0]
    part.changes.add((0, 3), (9, 1))
    for wrong in ([[0, 1]], [[0, 0, [True, 9]]], [["0", 0, [5, 5]]], [[0, -1, [5, 5]]], [[0, 0, [10, 0]]], [3]):
        with pytest.raises((TypeError, ValueError)):
            part.changes.load(wrong)
    other = Partition(replica=0, **deal | {"replicas": 4})
    other.changes.load([[0, 3, [9, 1]]])
    assert other.shares(5) == (3, 2, 3, 2)
    assert not other.changes.state()
    assert not Partition(replica=0, **deal | {"spec": PartitionSpec(kind="hierarchical")}).moves


def test_weights_decide_the_shares() -> None:
    part = Partition(PartitionSpec(weights=(1, 0.5)), samples=100, global_batch=12, seed=0, replica=0, replicas=2)
    assert part.shares(0) == (8, 4)
    assert part.shares(8) == (3, 1)


@given(deals(kinds=("stratified",)))
def test_a_stratified_part_keeps_to_its_due_of_each_class_at_every_step(deal: dict[str, Any]) -> None:
    _, classes = np.unique(deal["labels"], return_inverse=True)
    parts = partitions(deal)
    behind = np.zeros((deal["replicas"], classes.max() + 1))
    for number, step in enumerate(epochs(parts)):
        counts = np.array(
            [np.bincount(classes[batch], minlength=classes.max() + 1) for batch in map(np.array, map(_ints, step))]
        )
        share = np.array(parts[0].shares(number)) / parts[0].size(number)
        behind += np.outer(share, counts.sum(axis=0)) - counts
        assert np.abs(behind).max() < 3


@pytest.mark.parametrize("proportions", [(0.5, 0.5), (0.7, 0.2, 0.1), (0.1,) * 10, (0.01,) * 100])
def test_a_stratified_batch_keeps_the_proportions_of_the_classes(proportions: tuple[float, ...]) -> None:
    labels = np.repeat(np.arange(len(proportions)), [round(5000 * p) for p in proportions])
    part = Partition(
        PartitionSpec(kind="stratified"), samples=5000, global_batch=64, seed=1, replica=0, replicas=1, labels=labels
    )
    for batch in list(part.batches(0))[:-1]:
        assert np.abs(np.bincount(labels[batch], minlength=len(proportions)) - 64 * np.array(proportions)).max() < 2


def test_the_first_replica_does_not_get_the_first_classes_more_often() -> None:
    """Ties between classes are drawn anew in each epoch; a fixed rule would skew every epoch the same way."""
    labels = np.arange(20) % 4
    part = Partition(
        PartitionSpec(kind="stratified"), samples=20, global_batch=2, seed=0, replica=0, replicas=2, labels=labels
    )
    firsts = [labels[next(part.batches(epoch))[0]] for epoch in range(40)]
    assert set(firsts) == {0, 1, 2, 3}


@given(deals(kinds=("hierarchical",)))
def test_a_host_sees_only_its_own_part_in_every_epoch(deal: dict[str, Any]) -> None:
    parts = partitions(deal)
    seen: dict[int, set[int]] = {}
    for epoch in range(3):
        for step in global_indices(deal, epochs(parts, epoch)):
            for replica, batch in enumerate(step):
                seen.setdefault(deal["hosts"][replica], set()).update(batch)
    owned = [indices for indices in seen.values() if indices]
    assert sum(map(len, owned)) == deal["samples"]
    assert all(max(indices) - min(indices) + 1 == len(indices) for indices in owned)
    if "host_samples" in deal:
        assert [part.held_samples for part in parts] == [deal["host_samples"][host] for host in deal["hosts"]]


@given(deals(kinds=("hierarchical",)))
def test_all_hosts_work_in_every_step_in_which_they_can_and_finish_together(deal: dict[str, Any]) -> None:
    parts = partitions(deal)
    steps = np.array(
        [
            [
                sum(s for s, h in zip(parts[0].shares(n), deal["hosts"], strict=True) if h == host)
                for host in set(deal["hosts"])
            ]
            for n in range(parts[0].steps_per_epoch)
        ]
    )
    totals = steps.sum(axis=0)
    enough = totals * deal["global_batch"] >= deal["samples"]  # at least one sample for each step, by proportion
    full = deal["samples"] // deal["global_batch"]
    assert (steps[:full, enough] >= 1).all()
    due = (
        np.minimum(np.arange(1, len(steps) + 1) * deal["global_batch"], deal["samples"])[:, None]
        * totals
        / deal["samples"]
    )
    assert np.abs(steps.cumsum(axis=0) - due).max() < len(totals) + 1


def test_two_equal_hosts_both_work_in_every_step_of_an_odd_epoch() -> None:
    deal = {
        "spec": PartitionSpec(kind="hierarchical"),
        "samples": 1001,
        "global_batch": 2,
        "seed": 0,
        "replicas": 2,
        "hosts": [0, 1],
    }
    shares = [partitions(deal)[0].shares(step) for step in range(501)]
    assert shares == [(1, 1)] * 500 + [(1, 0)]


def refused(kind: type[PacelineError], code: str, changes: dict[str, Any], **fields: Any) -> None:
    deal: dict[str, Any] = {
        "spec": PartitionSpec(),
        "samples": 100,
        "global_batch": 10,
        "seed": 0,
        "replica": 0,
        "replicas": 2,
    }
    with raises(kind, code, **fields):
        Partition(**deal | changes)


def test_sizes_that_cannot_work_are_refused_with_those_that_can() -> None:
    refused(DataError, "data.empty", {"samples": 0})
    refused(DataError, "data.smaller_than_batch", {"samples": 50, "global_batch": 64}, samples=50, global_batch=64)
    refused(PlanError, "plan.batch_smaller_than_replicas", {"global_batch": 1}, global_batch=1, replicas=2)
    weights = {"spec": PartitionSpec(weights=(1, 2, 3))}
    refused(PlanError, "plan.weights_not_per_replica", weights, weights=3, replicas=2)
    with pytest.raises(ValidationError, match="weights"):
        PartitionSpec(weights=(1, 0))


def test_labels_that_do_not_fit_a_stratified_deal_are_refused() -> None:
    spec = {"spec": PartitionSpec(kind="stratified")}
    refused(DataError, "data.no_labels", spec)
    refused(DataError, "data.labels_invalid", spec | {"labels": np.zeros(99, np.int64)}, samples=100, shape=[99])
    refused(DataError, "data.labels_invalid", spec | {"labels": np.zeros(100)}, dtype="float64")


def test_hosts_that_do_not_hold_the_set_are_refused() -> None:
    spec = {"spec": PartitionSpec(kind="hierarchical", host_files=True), "hosts": [0, 1]}
    refused(DataError, "data.host_files_counts", spec, hosts=2, samples=100, counts=[])
    refused(DataError, "data.host_files_counts", spec | {"host_samples": [50, 40]}, counts=[50, 40])
    refused(DataError, "data.host_without_files", spec | {"host_samples": [100, 0]}, host=1)
    elsewhere = {"hosts": [0, 2], "host_samples": [50, 50]}
    refused(PlanError, "plan.hosts_of_replicas", spec | elsewhere, owners=[0, 2], replicas=2)
    with raises(ValidationError, "partition.host_files", kind="uniform"):
        PartitionSpec(host_files=True)


def _ints(batch: list[int]) -> Any:
    return np.array(batch, np.int64)
