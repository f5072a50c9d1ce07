"""What every data set relies on: the split, the selection of samples, and batches by a list of indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from paceline.errors import DataError
from paceline.job.data import Synthetic
from paceline.job.samples import Selection, TensorSamples, split
from refusals import raises


class Squares(Dataset[tuple[int, int]]):
    """A user's own data set: no fast path, labels as a list, and a note of the epoch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.labels: list[Any] = [i % 3 for i in range(samples)]
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def spec(held_out: float, limit: int | None = None) -> Synthetic:
    return Synthetic(kind="synthetic", held_out=held_out, limit=limit)


@given(
    samples=st.integers(2, 300),
    share=st.floats(0.01, 0.6),
    limit=st.none() | st.integers(2, 400),
    seed=st.integers(0, 2**31 - 1),
)
def test_each_sample_is_trained_on_or_held_out_but_never_both(
    samples: int, share: float, limit: int | None, seed: int
) -> None:
    train, held_out, synthetic, _ = split(Squares(samples), spec(share, limit), seed)
    used = min(samples, limit or samples)
    assert isinstance(train, Selection)
    assert isinstance(held_out, Selection)
    assert sorted([*train.rows, *held_out.rows]) == list(range(used))
    assert len(held_out) == max(1, round(used * share))
    assert not synthetic


def test_the_split_is_the_same_in_every_run_of_a_job_and_another_with_another_seed() -> None:
    first, again, other = (split(Squares(100), spec(0.2), seed).held_out for seed in (5, 5, 6))
    assert isinstance(first, Selection)
    assert isinstance(again, Selection)
    assert isinstance(other, Selection)
    assert (first.rows == again.rows).all()
    assert set(first.rows) != set(other.rows)


def test_nothing_is_held_out_where_the_share_is_zero() -> None:
    train, held_out, *_ = split(Squares(10), spec(0.0, 4), 0)
    assert held_out is None
    assert [train[i] for i in range(4)] == [(0, 0), (1, 1), (2, 4), (3, 9)]


@pytest.mark.parametrize(("samples", "share"), [(1, 0.1), (2, 0.9)])
def test_a_split_that_leaves_nothing_to_train_on_is_refused(samples: int, share: float) -> None:
    with raises(DataError, "data.nothing_left_to_train"):
        split(Squares(samples), spec(share), 0)


def test_a_selection_passes_on_samples_labels_and_epochs() -> None:
    squares = Squares(10)
    selection = Selection(squares, np.array([7, 2, 9]))
    assert selection[1] == (2, 4)
    assert selection.__getitems__([2, 0]) == [(9, 81), (7, 49)]
    assert selection.labels is not None
    assert selection.labels.tolist() == [1, 2, 0]
    selection.set_epoch(3)
    assert squares.epoch == 3


@pytest.mark.parametrize("labels", [["a"] * 4, [0.5] * 4, [1, 2], [[1], [2], [3], [4]]])
def test_labels_that_are_no_class_for_each_sample_are_not_taken_for_such(labels: list[Any]) -> None:
    squares = Squares(4)
    squares.labels = labels
    assert Selection.first(squares, None).labels is None


def test_a_data_set_whose_length_changes_is_noticed() -> None:
    squares = Squares(10)
    train = split(squares, spec(0.2), 0).train
    squares.samples = 9
    with raises(DataError, "data.dataset_length_changed", before=10, class_name="Squares", now=9):
        len(train)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__


def test_a_batch_holds_what_its_samples_hold() -> None:
    samples: Any = TensorSamples(
        torch.arange(24, dtype=torch.uint8).reshape(6, 4), torch.arange(6), prepare=lambda x: x.float() / 2
    )
    inputs, target = samples.__getitems__([5, 0, 3])
    for row, index in enumerate([5, 0, 3]):
        assert torch.equal(inputs[row], samples[index][0])
        assert torch.equal(target[row], samples[index][1])
    assert inputs.dtype == torch.float32
    assert [int(y) for _, y in samples] == list(range(6))  # iterating ends, by IndexError


def test_torchs_own_loader_gets_whole_batches() -> None:
    train = split(TensorSamples(torch.randn(10, 3), torch.arange(10)), spec(0.2), 0).train
    batches = list(DataLoader(train, batch_size=4, collate_fn=lambda batch: batch))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 3), (4, 3)]


def test_a_target_that_is_no_class_has_no_labels() -> None:
    assert TensorSamples(torch.zeros(3, 1), torch.zeros(3)).labels is None
    assert TensorSamples(torch.zeros(3, 1), torch.zeros(3, 2, dtype=torch.int64)).labels is None
