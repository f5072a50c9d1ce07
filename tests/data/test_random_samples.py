"""Random augmentation: all plans train on the same samples."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.loader import Loader
from paceline.data.samples import held_out_batches
from paceline.errors import DataError
from paceline.job.partition import Partition, PartitionSpec
from paceline.job.samples import Collated, Selection
from refusals import raises

SAMPLES, BATCH = 12, 4


class Noisy(Dataset[Any]):
    """Sample i is i with noise of torch, NumPy and Python."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]), index


class Sometimes(Noisy):
    """Only sample 5 draws random numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(index) if index == 5 else (torch.zeros(3), index)


class Batched(Noisy):
    """A whole batch is drawn at once."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.rand(len(indices), 3), torch.tensor(indices)


def mixed(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]) * torch.rand(()), torch.tensor([i for _, i in samples])


def epochs(dataset: Dataset[Any], replicas: int, *, workers: int = 0, count: int = 2) -> list[dict[int, list[float]]]:
    """Values of each sample in each epoch, for this number of replicas."""
    found: list[dict[int, list[float]]] = [{} for _ in range(count)]
    for replica in range(replicas):
        partition = Partition(
            PartitionSpec(), samples=SAMPLES, global_batch=BATCH, seed=3, replica=replica, replicas=replicas
        )
        loader = Loader(dataset, partition, num_workers=workers)
        for epoch in found:
            for batch in loader:
                torch.rand(replica + 1)  # as dropout would
                if batch is not None:
                    epoch.update(zip(batch[1].tolist(), batch[0].tolist(), strict=True))
        loader.close()
    return found


@pytest.mark.usefixtures("loader_processes_end")
@pytest.mark.parametrize("dataset", [Noisy(), Sometimes(), Batched()], ids=["each", "one", "batched"])
def test_every_number_of_replicas_and_loader_processes_sees_the_same_samples(dataset: Dataset[Any]) -> None:
    alone = epochs(dataset, 1)
    assert epochs(dataset, 3) == alone
    assert epochs(dataset, 2, workers=1) == alone
    assert alone[0] != alone[1]


def test_samples_of_a_batch_differ_and_the_random_states_of_the_rank_are_kept() -> None:
    numpy_state: Any = np.random.get_state
    states = torch.get_rng_state(), numpy_state()[1].tolist(), random.getstate()
    (epoch,) = epochs(Noisy(), 1, count=1)
    assert len({tuple(noise) for noise in epoch.values()}) == SAMPLES
    torch.rand(1)
    torch.set_rng_state(states[0])
    assert (numpy_state()[1].tolist(), random.getstate()) == states[1:]


def test_a_collate_function_that_draws_repeats_and_leaves_the_samples_alone() -> None:
    one, again = epochs(Collated(Noisy(), mixed), 1), epochs(Collated(Noisy(), mixed), 1)
    assert one == again != epochs(Noisy(), 1)


def test_every_evaluation_measures_the_same_samples_on_any_number_of_replicas() -> None:
    def measured(replicas: int) -> dict[int, list[float]]:
        parts = [held_out_batches(Noisy(), batch=2, replica=r, replicas=replicas) for r in range(replicas)]
        return {i: x for part in parts for xs, ids in part for i, x in zip(ids.tolist(), xs.tolist(), strict=True)}

    assert measured(1) == measured(1) == measured(3)


class Broken(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7:
            raise ValueError("bad label")
        return torch.zeros(3), index


def test_an_error_names_the_sample_of_the_users_data_set() -> None:
    with raises(DataError, "data.sample_raised", index=7, which="sample 7") as caught:
        list(held_out_batches(Selection(Broken(), np.array([1, 7, 9])), batch=3, replica=0, replicas=1))
    assert "Selection" not in str(caught.value)


class Uneven(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(index), index


def test_samples_that_make_no_batch_are_named_as_in_the_users_data_set() -> None:
    with raises(DataError, "data.not_collated", samples="4, 9") as caught:
        list(held_out_batches(Selection(Uneven(), np.array([4, 9])), batch=2, replica=0, replicas=1))
    assert "Selection" not in str(caught.value)
