"""Batches: counted, split into microbatches, placed, and searched for NaN, as tuples and as mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.job.batch import nonfinite_rows, place, rows, split, target_of
from refusals import raises


def tuple_of(count: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(count * 2.0).view(count, 2), torch.arange(count)


def mapping_of(count: int) -> dict[str, torch.Tensor]:
    return dict(zip(("input_ids", "labels"), tuple_of(count), strict=True))


@given(st.integers(1, 30), st.integers(1, 12), st.sampled_from([tuple_of, mapping_of]))
def test_microbatches_hold_every_sample_once_in_order_and_are_nearly_equal(count: int, parts: int, make: Any) -> None:
    pieces = list(split(make(count), parts))
    sizes = [rows(piece) for piece in pieces]
    assert torch.cat([target_of(piece) for piece in pieces]).tolist() == list(range(count))
    assert len(sizes) == min(parts, count)
    assert max(sizes) - min(sizes) <= 1


def test_an_empty_share_has_no_rows() -> None:
    assert rows(None) == 0


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (torch.zeros(4, 2), "data.batch_form"),
        ((torch.zeros(4, 2), ["a", "b"]), "data.batch_form"),
        ((torch.zeros(4, 2), {"boxes": torch.zeros(4)}), "data.batch_form"),
        ({}, "data.batch_form"),
        ("text", "data.batch_form"),
    ],
)
def test_what_is_no_batch_is_described(batch: Any, code: str) -> None:
    with raises(DataError, code):
        rows(batch)


def test_a_batch_without_a_target_says_where_it_belongs() -> None:
    with raises(DataError, "data.dict_without_labels", keys=["input_ids", "mask"]):
        target_of({"input_ids": torch.zeros(2), "mask": torch.zeros(2)})
    with raises(DataError, "data.sample_without_target"):
        target_of((torch.zeros(2),))


@pytest.mark.parametrize("make", [tuple_of, mapping_of])
def test_only_floating_point_parts_change_their_type(make: Any) -> None:
    placed = place(make(3), torch.device("cpu"), dtype=torch.float64, channels_last=False)
    inputs, labels = list(placed.values()) if isinstance(placed, Mapping) else placed
    assert (inputs.dtype, labels.dtype) == (torch.float64, torch.int64)


def test_images_become_channels_last_and_other_parts_stay() -> None:
    images, vectors, labels = torch.rand(2, 3, 4, 4), torch.rand(2, 5), torch.arange(2)
    placed = place((images, vectors, labels), torch.device("cpu"), dtype=None, channels_last=True)
    assert isinstance(placed, tuple)
    assert placed[0].is_contiguous(memory_format=torch.channels_last)
    for before, after in zip((images, vectors, labels), placed, strict=True):
        assert torch.equal(before, after)


def test_a_batch_that_is_where_it_belongs_is_not_copied() -> None:
    batch = tuple_of(3)
    assert place(batch, torch.device("cpu"), dtype=None, channels_last=False) is batch


@given(st.lists(st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]), min_size=1, max_size=8))
def test_the_rows_with_nan_or_inf_are_found_in_every_floating_point_part(values: list[float]) -> None:
    wide = torch.zeros(len(values), 2, 3)
    wide[:, 1, 2] = torch.tensor(values)
    bad = [row for row, value in enumerate(values) if value != 0.0]
    labels = torch.zeros(len(values), dtype=torch.long)
    assert nonfinite_rows((wide, labels)) == bad
    assert nonfinite_rows({"x": torch.zeros(len(values)), "y": wide.bfloat16(), "labels": labels}) == bad
    assert nonfinite_rows(None) == []
