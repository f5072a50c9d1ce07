"""Invented data: marked as such, the same for the same seed, and small in memory whatever its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.job.data import DataSpec
from paceline.job.samples import DataSets
from refusals import raises


def build(input_shape: tuple[int, ...] | None = None, seed: int = 0, **values: Any) -> DataSets:
    spec = TypeAdapter(DataSpec).validate_python({"kind": "synthetic", **values})
    sets: DataSets = spec.build(input_shape=input_shape, seed=seed)
    return sets


def length(dataset: Any) -> int:
    return len(dataset)


def test_it_is_marked_as_synthetic_so_that_no_figure_hides_it() -> None:
    assert build(shape=[4]).synthetic


def test_images_take_the_models_shape_unless_the_job_names_one() -> None:
    image, label = build(input_shape=(3, 8, 8), classes=5).train[0]
    assert image.shape == (3, 8, 8)
    assert image.dtype == torch.float32
    assert label.dtype == torch.int64
    assert build(input_shape=(3, 8, 8), shape=[7]).train[0][0].shape == (7,)


def test_the_target_of_a_token_is_the_next_one() -> None:
    inputs, target = build(vocab=50, shape=[16]).train[3]
    assert inputs.dtype == target.dtype == torch.int64
    assert torch.equal(inputs[1:], target[:-1])
    assert int(inputs.max()) < 50


def test_the_seed_alone_decides_the_samples() -> None:
    first, again, other = (build(shape=[4], seed=seed).train.__getitems__([0, 7]) for seed in (1, 1, 2))  # type: ignore[attr-defined]
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_a_billion_large_images_cost_no_more_memory_than_a_few() -> None:
    train, held_out, *_ = build(shape=[3, 224, 224], samples=10**9)
    assert length(train) + length(held_out) == 10**9
    assert train.inputs.nbytes <= 64 << 20  # type: ignore[attr-defined]
    last = length(train) - 1
    assert torch.equal(train[last][0], train.__getitems__([last])[0][0])  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        train[last + 1]


def test_labels_are_those_of_the_samples() -> None:
    train = build(shape=[1024, 1024], samples=50, held_out=0.5).train
    assert train.labels.tolist() == [int(train[i][1]) for i in range(25)]  # type: ignore[attr-defined]


def test_a_limit_bounds_both_sides_together() -> None:
    train, held_out, *_ = build(shape=[2], limit=10, held_out=0.2)
    assert (length(train), length(held_out)) == (8, 2)
    assert build(shape=[2], held_out=0.0).held_out is None


def test_a_shape_is_asked_for_where_nobody_names_one() -> None:
    with raises(DataError, "data.shape_unknown"):
        build()
    with raises(DataError, "data.shape_of_tokens"):
        build(vocab=10, input_shape=(3, 8, 8))
