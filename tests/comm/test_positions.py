"""A rank finds its position in its collectives: in flight recorders, and in its stack or its error."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.comm.positions import name_layers_of, own_position
from paceline.device import FLIGHT_RECORDERS
from paceline.wire.position import Position

GATE, GRADIENTS, CHECK = [32], [1000], [2]  # shapes of three collectives


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    """The name of a group of two ranks."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        [name] = own_position().entered
        yield name
    finally:
        dist.destroy_process_group()


def position_after(group: str, *calls: tuple[int, list[int], str], monkeypatch: pytest.MonkeyPatch) -> Position:
    """The position of a rank whose flight recorder has all-reduces: number, shape, and state of each."""
    entries: list[dict[str, Any]] = [
        {
            "process_group": (group, ""),
            "collective_seq_id": number,
            "is_p2p": False,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [shape],
            "input_dtypes": ["Float"],
            "time_created_ns": at,
            "retired": False,
            "state": state,
            "frames": [],
        }
        for at, (number, shape, state) in enumerate(calls)
    ]
    for name in FLIGHT_RECORDERS:
        monkeypatch.setattr(c10d, name, lambda *_: pickle.dumps({"entries": []}), raising=False)
    monkeypatch.setattr(c10d, FLIGHT_RECORDERS[0], lambda *_: pickle.dumps({"entries": entries}))
    return own_position()


DONE, OPEN = "completed", "scheduled"
STEP = [(1, CHECK, DONE), (2, GATE, DONE), (3, GRADIENTS, DONE)]


def test_a_call_that_always_came_before_is_told_by_the_rank_that_left_it_out(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    position = position_after(group, *STEP, (4, GRADIENTS, OPEN), (5, GATE, OPEN), monkeypatch=monkeypatch)
    assert [(wait.number, wait.after) for wait in position.waits] == [(4, ("all_reduce", "float32 [32]"))]


@pytest.mark.parametrize(
    "calls",
    [
        [*STEP, (4, GATE, DONE), (5, GRADIENTS, OPEN)],
        [*STEP, (4, GATE, DONE), (5, GATE, DONE), (6, GATE, OPEN)],
        [*STEP, (4, [7], OPEN)],
        [(1, GATE, OPEN)],
    ],
    ids=["in the usual order", "in an order that came before", "a new call", "the first call"],
)
def test_calls_in_order_leave_out_nothing(
    calls: list[tuple[int, list[int], str]], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [wait] = position_after(group, *calls, monkeypatch=monkeypatch).waits
    assert wait.after is None


def test_calls_of_a_group_of_an_earlier_generation_are_no_waits(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = [(number, GATE, DONE) for number in range(1, 9)]
    position = position_after(
        group, *earlier, (9, GRADIENTS, OPEN), (1, CHECK, DONE), (2, GATE, OPEN), monkeypatch=monkeypatch
    )
    assert position.entered == {group: 2}
    assert [(wait.number, wait.tensors) for wait in position.waits] == [(2, "float32 [32]")]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the connection failed")


def test_a_rank_that_handles_an_error_of_a_layer_is_still_in_this_layer() -> None:
    model = nn.Sequential(nn.Identity(), Fails())
    name_layers_of(model)
    assert own_position().layer == ""
    try:
        model(torch.zeros(1))
    except RuntimeError:
        asked = own_position()
    assert asked.layer == "1"
    assert own_position().layer == ""
