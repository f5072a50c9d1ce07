"""Ranks that cannot talk agree on who writes what, and what together they wrote is everything, once."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.split.layout import Box
from paceline.state.manifest import Receipt, ShardEntry, TensorEntry, TensorPiece
from paceline.state.shard import MeshCoordinate, assign_writers, key_of, merge, to_write
from refusals import raises
from single_process_mesh import SHAPES, meshes, own_parts, parts_of, random_tensors

DEGREES = [
    {"dp": 3},
    {"tp": 2},
    {"fsdp": 4},
    {"dp": 2, "tp": 2},
    {"fsdp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 3, "fsdp": 2},
    {"ep": 4},
]


def receipts(degrees: dict[str, int]) -> list[Receipt]:
    """What each rank of a plan would say that it wrote of `SHAPES`."""
    said = []
    for mesh in meshes(**degrees):
        parts = parts_of(mesh)
        boxes = to_write(own_parts(random_tensors(), parts), parts, MeshCoordinate.of(mesh))
        said.append(receipt({name: (SHAPES[name], boxes.get(name, [])) for name in parts}, mesh.world.rank))
    return said


def receipt(tensors: dict[str, tuple[tuple[int, ...], list[Box]]], rank: int = 0, dtype: str = "F64") -> Receipt:
    entries = {
        name: TensorEntry(
            dtype=dtype,
            shape=list(shape),
            pieces=[
                TensorPiece(shard=rank, key=key_of(name, b, shape), offset=list(b.full), shape=list(b.shape))
                for b in boxes
            ],
        )
        for name, (shape, boxes) in tensors.items()
    }
    return Receipt(
        shard=ShardEntry(bytes=0, sha256="", data_rank=0, own={}, own_values={}), tensors=entries, aliases={}
    )


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 8))
def test_the_work_is_divided_evenly_and_alike_on_all_ranks(sizes: list[int], world: int) -> None:
    state = {f"p{i}": size for i, size in enumerate(sizes)}
    division = assign_writers(state, world)
    assert division == assign_writers(dict(reversed(state.items())), world)
    load = [sum(size for n, size in state.items() if division[n] == rank) for rank in range(world)]
    assert max(load) <= sum(sizes) / world + max(sizes, default=0)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_under_any_plan_every_element_is_written_once(degrees: dict[str, int]) -> None:
    said = receipts(degrees)
    merged = merge(said)
    assert {name: tuple(entry.shape) for name, entry in merged.items()} == SHAPES
    written = sum(
        torch.Size(piece.shape).numel() for one in said for entry in one.tensors.values() for piece in entry.pieces
    )
    assert written == sum(torch.Size(shape).numel() for shape in SHAPES.values()), "nothing is written twice"


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_piece_that_no_rank_wrote_is_found(degrees: dict[str, int]) -> None:
    whole = receipts(degrees)
    for rank, one in enumerate(whole):
        for name, entry in one.tensors.items():
            for i in range(len(entry.pieces)):
                broken = [r.model_copy(deep=True) for r in whole]
                del broken[rank].tensors[name].pieces[i]
                with raises(CheckpointError, "checkpoint.shards_incomplete", name=name):
                    merge(broken)


@settings(max_examples=200)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_overlaps_and_gaps_are_told_from_a_whole_by_every_element(data: st.DataObject, shape: list[int]) -> None:
    held = torch.zeros(shape, dtype=torch.int64)
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        begin = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        box = Box(begin, begin, tuple(data.draw(st.integers(1, n - b)) for n, b in zip(shape, begin, strict=True)))
        box.within(held).add_(1)
        boxes.append(box)
        if list(box.shape) == shape and (held > 1).any():
            return  # all of it twice is what every part of a divided parameter says of a count
    full = tuple(shape)
    if (held == 1).all():
        merge([receipt({"w": (full, boxes)})])
    else:
        wrong = re.compile("no rank" if (held == 0).any() else "two ranks")
        with raises(CheckpointError, "checkpoint.shards_incomplete", name="w", shape=shape, wrong=wrong):
            merge([receipt({"w": (full, boxes)})])


def test_what_all_parts_of_a_parameter_have_alike_counts_once() -> None:
    whole = Box((), (), ())
    merged = merge([receipt({"step": ((), [whole])}, rank) for rank in range(3)])
    assert [piece.shard for piece in merged["step"].pieces] == [0]


def test_ranks_that_train_different_models_are_told_apart() -> None:
    with raises(
        CheckpointError,
        "checkpoint.ranks_differ",
        dtype="F64",
        full_dtype="F64",
        full_shape=[2],
        name="w",
        rank=1,
        shape=[3],
    ):
        merge([receipt({"w": ((2,), [])}), receipt({"w": ((3,), [])})])
    with raises(
        CheckpointError,
        "checkpoint.ranks_differ",
        dtype="F32",
        full_dtype="F64",
        full_shape=[2],
        name="w",
        rank=1,
        shape=[2],
    ):
        merge([receipt({"w": ((2,), [])}), receipt({"w": ((2,), [])}, dtype="F32")])


def test_ranks_with_the_same_part_share_the_writing() -> None:
    """Otherwise the first replica writes everything and the others wait for it."""
    tensors = {f"layer{i}": torch.zeros(100, 4) for i in range(8)}
    for mesh in meshes(dp=4):
        written = to_write(tensors, {}, MeshCoordinate.of(mesh))
        assert sum(len(boxes) for boxes in written.values()) == 2
