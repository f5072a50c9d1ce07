"""Reading the batches: what is lost here is exact resuming, and errors that name the sample."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from paceline.data.loader import Loader, Position
from paceline.data.loader_processes import Workers
from paceline.data.samples import held_out_batches
from paceline.errors import DataError
from paceline.job.partition import Partition, PartitionSpec
from refusals import raises

SAMPLES, BATCH = 50, 8  # seven steps an epoch, the last of 2 samples


class Rows(Dataset[Any]):
    """Sample i is (i, 10 · epoch); whole batches are collated here."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.epoch = samples, -1

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 10 * self.epoch

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(indices), torch.full((len(indices),), 10 * self.epoch)


class Plain(Dataset[Any]):
    """No fast path: samples are read one by one. Sample 13 may be broken, sample 14 of another length."""

    def __init__(self, broken: BaseException | None = None, uneven: bool = False) -> None:
        self.broken, self.uneven = broken, uneven

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 13 and self.broken:
            raise self.broken
        return {"x": torch.zeros(2 if index == 14 and self.uneven else 1), "labels": torch.tensor(index)}


class Fast(Plain):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]


class Random(Plain):
    """Augmentation from all three random states."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        import random

        return {"x": torch.rand(1), "y": torch.tensor(np.random.rand()), "z": torch.tensor(random.random())}


class Unnamed(Plain):
    """Sample i is (i, a random number)."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([index, int(torch.randint(1000, ()))])}


class Annotated(Unnamed):
    """A data set of a user whose attributes have the names of ours, with other meanings."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.corpus, self.starts = np.arange(3), ["one", "two"], [0, 1]
        self.draws, self.tokenizer, self.window = False, str.split, 3

    def digest(self) -> str:
        return "text"

    def epoch_order(self) -> None:
        raise AssertionError


class Counting(Rows):
    """A dataset with a state of its own: how many batches it has made."""

    made = 0

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.made += 1
        return torch.tensor(indices), torch.full((len(indices),), self.made)

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


class Killed(Rows):
    """As by the kernel, when the memory is full."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def partition(replica: int = 0, replicas: int = 1, samples: int = SAMPLES) -> Partition:
    return Partition(PartitionSpec(), samples=samples, global_batch=BATCH, seed=5, replica=replica, replicas=replicas)


def load(dataset: Dataset[Any], num_workers: int = 0, replica: int = 0, replicas: int = 1, **options: Any) -> Loader:
    return Loader(dataset, partition(replica, replicas), num_workers=num_workers, **options)


def rows(batches: Any) -> list[list[int]]:
    return [[] if batch is None else batch[0].tolist() for batch in batches]


@pytest.fixture(params=[0, 2], ids=["in the rank", "in loader processes"])
def num_workers(request: pytest.FixtureRequest, loader_processes_end: None) -> int:
    found: int = request.param
    return found


def test_each_iteration_is_one_epoch_of_the_partition(num_workers: int) -> None:
    loader = load(Rows(), num_workers)
    assert len(loader) == 7
    for epoch in range(3):
        batches = list(loader)
        assert rows(batches) == list(partition().batches(epoch))
        assert {int(target) for _, targets in batches for target in targets} == {10 * epoch}


def test_position_and_indices_are_those_of_the_batch_in_hand(num_workers: int) -> None:
    loader = load(Rows(), num_workers, replica=1, replicas=3)
    assert loader.position is None
    steps = zip(loader, partition(1, 3).batches(0), strict=True)
    for step, (_, indices) in enumerate(steps):
        assert loader.indices == indices
        assert loader.position == Position(0, step, len(indices), BATCH if step < 6 else 2)


def test_a_replica_without_a_sample_in_the_tail_gets_none_for_it(num_workers: int) -> None:
    tails = [list(load(Rows(), num_workers, replica, 4))[-1] for replica in range(4)]
    assert sorted(0 if tail is None else len(tail[0]) for tail in tails) == [0, 0, 1, 1]


@pytest.mark.parametrize("stop_after", [0, 1, 3, 7, 8])
def test_a_saved_position_continues_with_the_next_batch_in_a_new_loader(num_workers: int, stop_after: int) -> None:
    whole = list(partition().batches(0)) + list(partition().batches(1))
    loader = load(Rows(), num_workers)
    seen: list[list[int]] = []
    while len(seen) < stop_after:
        for batch in loader:
            seen += rows([batch])
            if len(seen) == stop_after:
                saved = json.dumps(loader.state_dict())  # mid-iteration, while loader processes have read ahead
                break
    if not stop_after:
        saved = json.dumps(loader.state_dict())
    resumed = load(Rows(), num_workers)
    resumed.load_state_dict(json.loads(saved))
    rest = rows(resumed)
    if stop_after < 7:
        rest += rows(resumed)
    assert seen + rest == whole


def test_shares_change_behind_what_was_read_ahead_and_a_saved_position_knows_them(num_workers: int) -> None:
    whole = [list(partition().batches(epoch)) for epoch in range(3)]
    loaders = [load(Rows(), num_workers, replica, 2) for replica in range(2)]
    seen: list[list[list[int]]] = [[] for _ in whole]
    saved: list[str] = []
    places = []
    for epoch in range(2):
        for step, batches in enumerate(zip(*loaders, strict=True)):
            seen[epoch].append([i for own in rows(batches) for i in own])
            shares = loaders[0].partition.shares(step, epoch)
            assert [loader.position for loader in loaders] == [Position(epoch, step, n, sum(shares)) for n in shares]
            if (epoch, step) in ((0, 1), (0, 4), (1, 0)):
                places.append([loader.reshare((BATCH - 1 - step, 1 + step)) for loader in loaders])
            if (epoch, step) == (1, 2):
                saved = [json.dumps(loader.state_dict()) for loader in loaders]
    assert seen[:2] == whole[:2]
    ahead = 2 * num_workers
    assert places == [[(0, 2 + ahead)] * 2, [(1, 0) if ahead else (0, 5)] * 2, [(1, 1 + ahead)] * 2]
    resumed = [load(Rows(), 0, replica, 2) for replica in range(2)]
    for loader, state in zip(resumed, saved, strict=True):
        loader.load_state_dict(json.loads(state))
    rest = list(zip(*(rows(loader) for loader in resumed), strict=True))
    assert [a + b for a, b in rest] == whole[1][3:]
    assert [(len(a), len(b)) for a, b in rest] == [loaders[0].partition.shares(step, 1) for step in range(3, 7)]


def test_a_position_saved_between_epochs_begins_the_next_one(num_workers: int) -> None:
    loader = load(Rows(), num_workers)
    list(loader)
    resumed = load(Rows(), num_workers)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert rows(resumed) == list(partition().batches(1))
    assert rows(resumed) == list(partition().batches(2))


def test_an_iteration_that_is_broken_off_continues_in_the_next_one_and_leaves_no_process(num_workers: int) -> None:
    loader = load(Rows(), num_workers)
    seen = []
    for batch in loader:
        seen += rows([batch])
        if len(seen) == 3:
            break
    assert not multiprocessing.active_children()
    assert seen + rows(loader) == list(partition().batches(0))
    assert rows(loader) == list(partition().batches(1))


def test_a_second_iteration_takes_over_from_one_that_is_still_referred_to(num_workers: int) -> None:
    loader = load(Rows(), num_workers)
    left = iter(loader)
    seen = rows([next(left)])
    taken_over = iter(loader)
    seen += rows([next(taken_over)])
    del left
    assert seen + rows(taken_over) == list(partition().batches(0))


def test_loading_a_state_ends_the_running_iteration_and_the_next_one_begins_there(num_workers: int) -> None:
    """A rewind in the middle of the loop.

    Going on with batches that were read ahead would skip what is to be done again.
    """
    loader = load(Rows(), num_workers)
    start, seen = loader.state_dict(), []
    for batch in loader:
        seen += rows([batch])
        if len(seen) == 2:
            loader.load_state_dict(start)
    assert seen == list(partition().batches(0))[:2]
    assert rows(loader) == list(partition().batches(0))


def test_closing_ends_the_loader_processes_and_loses_no_batch(num_workers: int) -> None:
    loader = load(Rows(), num_workers)
    list(loader)
    assert len(multiprocessing.active_children()) == num_workers
    loader.close()
    assert not multiprocessing.active_children()
    assert rows(loader) == list(partition().batches(1))


def test_a_run_resumes_with_other_numbers_of_replicas_and_loader_processes() -> None:
    loader = load(Rows(), num_workers=2)
    batches = iter(loader)
    seen = rows([next(batches), next(batches)])
    saved = json.loads(json.dumps(loader.state_dict()))
    parts = []
    for replica in range(2):
        resumed = load(Rows(), 0, replica, replicas=2)
        resumed.load_state_dict(saved)
        parts.append(rows(resumed))
    assert seen + [a + b for a, b in zip(*parts, strict=True)] == list(partition().batches(0))


def test_the_state_of_a_stateful_dataset_is_restored(num_workers: int) -> None:
    loader = load(Counting(), num_workers)
    counts = [int(targets[0]) for _, targets in loader]
    stopped = load(Counting(), num_workers)
    batches = iter(stopped)
    first = [int(next(batches)[1][0]) for _ in range(3)]
    resumed = load(Counting(), num_workers)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert first + [int(targets[0]) for _, targets in resumed] == counts


def test_random_augmentation_in_loader_processes_repeats_after_a_resume() -> None:
    def values(batches: Any) -> list[list[float]]:
        return [torch.cat([b["x"].flatten().double(), b["y"], b["z"].double()]).tolist() for b in batches]

    whole = values(load(Random(), num_workers=2))
    assert len({value for batch in whole for value in batch}) == 3 * SAMPLES
    loader = load(Random(), num_workers=2)
    batches = iter(loader)
    first = values([next(batches) for _ in range(3)])
    resumed = load(Random(), num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert first + values(resumed) == whole


def test_reading_leaves_the_ranks_random_state_alone(num_workers: int) -> None:
    """Dropout would differ between a run and the same run resumed in the middle of an epoch."""
    before = torch.get_rng_state()
    for _ in range(2):
        list(load(Rows(), num_workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_are_collated_by_torch_or_by_the_users_function(num_workers: int) -> None:
    for dataset in (Plain(), Fast()):
        batch = next(iter(load(dataset, num_workers)))
        assert batch["labels"].tolist() == next(partition().batches(0))
        assert batch["x"].shape == (BATCH, 1)
        assert next(iter(load(dataset, num_workers, collate_fn=len))) == BATCH


@pytest.mark.parametrize("kind", [Plain, Fast])
def test_a_sample_that_raises_is_named_with_its_dataset_and_the_cause_is_chained(
    num_workers: int, kind: type[Plain]
) -> None:
    """StopIteration, too: left alone, it would end the epoch early and in silence."""
    for error in (IndexError("row 13 of 12"), StopIteration()):
        with raises(DataError, "data.sample_raised", index=13, replica=0, which="sample 13") as caught:
            list(load(kind(error), num_workers))
        assert type(caught.value.__cause__) is type(error)
        assert ("in __getitem__" in "".join(getattr(caught.value.__cause__, "__notes__", []))) == bool(num_workers)
        assert not multiprocessing.active_children()


def test_a_sample_of_a_subset_is_named_by_the_subset(num_workers: int) -> None:
    part = Partition(PartitionSpec(), samples=20, global_batch=4, seed=0, replica=0, replicas=1)
    with raises(DataError, "data.sample_raised", error="bad", index=3, kind="ValueError", which="sample 3"):
        list(Loader(Subset(Plain(ValueError("bad")), range(10, 30)), part, num_workers=num_workers))


def test_an_error_that_cannot_be_pickled_is_told_in_words() -> None:
    with raises(
        DataError, "data.sample_raised", error="a and b", index=13, kind="Unpicklable", which="sample 13"
    ) as caught:
        list(load(Plain(Unpicklable("a", "b")), num_workers=2))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_batch_that_failed_is_asked_for_again_when_the_iteration_goes_on(num_workers: int) -> None:
    dataset = Plain(OSError("away"))
    loader = load(dataset, num_workers)
    seen: list[list[int]] = []
    with raises(DataError, "data.sample_raised", error="away"):
        seen.extend(batch["labels"].tolist() for batch in loader)
    dataset.broken = None
    assert seen + [batch["labels"].tolist() for batch in loader] == list(partition().batches(0))


def test_the_processes_of_a_loader_that_is_collected_in_a_cycle_end() -> None:
    loader = load(Rows(), num_workers=2)
    list(loader)
    cycle: list[Any] = [loader]
    cycle.append(cycle)
    del loader, cycle
    gc.collect()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_work_where_the_temporary_folder_has_a_long_path(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # where a spawned process imports this file
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    settings = vars(multiprocessing.current_process())["_config"]
    monkeypatch.setitem(settings, "tempdir", None)  # as at the start of a process
    assert rows(load(Rows(), workers=Workers(2, context=how))) == list(partition().batches(0))


def test_samples_of_different_shapes_are_named(num_workers: int) -> None:
    with raises(DataError, "data.not_collated", kind="RuntimeError"):
        list(load(Plain(uneven=True), num_workers))


def test_a_dataset_that_changed_its_length_is_refused_at_the_next_epoch(num_workers: int) -> None:
    dataset = Rows()
    loader = load(dataset, num_workers)
    list(loader)
    dataset.samples = 49
    with raises(DataError, "data.length_changed", epoch=1, expected=50, length=49):
        list(loader)


def test_a_killed_loader_process_is_an_error_that_says_so_and_not_a_hang() -> None:
    loader = load(Killed(), num_workers=2)
    with raises(DataError, "loader.worker_ended", how="was killed by signal 9 (SIGKILL)"):
        next(iter(loader))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("samples", "replicas"), [(50, 1), (50, 3), (2, 4)])
def test_held_out_batches_have_every_sample_once_over_the_replicas(samples: int, replicas: int) -> None:
    parts = [rows(held_out_batches(Rows(samples), batch=8, replica=r, replicas=replicas)) for r in range(replicas)]
    assert [i for part in parts for batch in part for i in batch] == list(range(samples))
    assert all(len(batch) == 8 for part in parts for batch in part[:-1])


def test_a_held_out_sample_that_raises_is_named() -> None:
    with raises(DataError, "data.sample_raised", error="bad", index=13, kind="ValueError", which="sample 13"):
        list(held_out_batches(Plain(ValueError("bad")), batch=8, replica=0, replicas=1))


def test_attributes_of_a_users_data_set_keep_their_meaning(num_workers: int) -> None:
    annotated, plain = load(Annotated(), num_workers), load(Unnamed(), num_workers)
    found = [list(loader) for loader in (annotated, plain)]
    assert [batch["x"].tolist() for batch in found[0]] == [batch["x"].tolist() for batch in found[1]]
    assert annotated.position is not None
    assert annotated.position.counts == {}
    assert annotated.fingerprint() == plain.fingerprint()
