"""The rank that did not enter a collective is found from the positions of all ranks."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest

from paceline.elastic.stall import Stall, stall_of
from paceline.wire.position import Position, Wait
from paceline.wire.status import Phase, RankStatus


def wait(number: int, *members: int, group: str = "world", **more: Any) -> Wait:
    return Wait(
        group, group, number, more.pop("what", "all_reduce"), more.pop("tensors", "float32 [4]"), members, **more
    )


def at(rank: int, *waits: Wait, world: int = 0, tp: int = 0, layer: str = "") -> Position:
    return Position(rank, layer, {"world": world, "tp": tp}, waits)


def found(
    *positions: Position, phases: dict[int, Phase] | None = None, ranks: int = 3, suspended: Set[int] = frozenset()
) -> Stall | None:
    phases = phases or {}
    statuses = [RankStatus(r, 100 + r, 0, phases.get(r, "compute"), 7, 0) for r in range(ranks)]
    return stall_of({position.rank: position for position in positions}, statuses, range(ranks), suspended)


def test_the_rank_that_entered_fewer_collectives_is_named_with_the_collective_and_both_layers() -> None:
    waits = wait(5, 0, 1, 2, layer="head")
    stall = found(at(0, waits, world=5), at(1, world=4, layer="body.1"), at(2, waits, world=5))
    assert stall is not None
    assert (stall.rank, stall.waiting, stall.stuck) == (1, [0, 2], [0, 2])
    assert (stall.wait.number, stall.layer, stall.own_layer, stall.step) == (5, "head", "body.1", 7)


def test_a_rank_that_does_not_answer_is_named() -> None:
    stall = found(at(0, wait(5, 0, 1, 2), world=5), at(1, wait(5, 0, 1, 2), world=5))
    assert stall is not None
    assert stall.rank == 2


def test_the_first_of_a_chain_of_waiting_ranks_is_named() -> None:
    stall = found(
        at(0, layer="body.0"),
        at(1, wait(0, 0, 1, 2, group="pp", what="receive", awaited=[0])),
        at(2, wait(0, 0, 1, 2, group="pp", what="receive", awaited=[1])),
    )
    assert stall is not None
    assert (stall.rank, stall.waiting, stall.layer) == (0, [1], "body.0")


def test_of_ranks_that_wait_for_one_another_the_one_that_went_on_is_named() -> None:
    in_layer, after_it = wait(3, 0, 1, group="tp", layer="gate"), wait(9, 0, 1)
    stall = found(
        at(0, in_layer, world=8, tp=3), at(1, after_it, world=9, tp=2), phases={0: "compute", 1: "sync"}, ranks=2
    )
    assert stall is not None
    assert (stall.rank, stall.wait, stall.instead, stall.layer) == (1, in_layer, after_it, "gate")


@pytest.mark.parametrize("difference", [{"what": "all_gather"}, {"tensors": "float32 [5]"}])
def test_the_one_of_three_ranks_that_made_another_call_is_named(difference: dict[str, str]) -> None:
    same, other = wait(5, 0, 1, 2, layer="gate"), wait(5, 0, 1, 2, layer="gate", **difference)
    stall = found(at(0, same, world=5), at(1, other, world=5), at(2, same, world=5))
    assert stall is not None
    assert (stall.rank, stall.differs, stall.wait, stall.instead) == (1, True, same, other)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_one_of_two_ranks_that_left_out_a_call_is_named_whichever_is_ahead(ahead: int) -> None:
    left_out = wait(5, 0, 1, layer="gate", after=("all_gather", "float32 [9]"))
    next_call = wait(5, 0, 1, tensors="float32 [5]", after=left_out.call)
    phases: dict[int, Phase] = {ahead: "optimizer", 1 - ahead: "compute"}
    stall = found(at(0, left_out, world=6), at(1, next_call, world=5), phases=phases, ranks=2)
    assert stall is not None
    assert (stall.rank, stall.differs, stall.wait, stall.layer) == (1, True, left_out, "gate")


def test_a_suspended_rank_is_named_although_it_called_the_collective() -> None:
    waits = wait(5, 0, 1, 2, layer="gate")
    stall = found(at(0, waits, world=9), at(1, waits, world=5), at(2, waits, world=9), suspended={1})
    assert stall is not None
    assert (stall.rank, stall.waiting, stall.wait.number, stall.layer) == (1, [0, 2], 5, "gate")


def test_a_rank_that_is_awaited_comes_before_a_suspended_one() -> None:
    waits = wait(5, 0, 1, 2)
    stall = found(at(0, waits, world=5), at(1, waits, world=5), at(2, world=4), suspended={1})
    assert stall is not None
    assert stall.rank == 2


def test_ranks_that_all_entered_the_same_collective_are_no_stall() -> None:
    waits = wait(5, 0, 1, 2)
    assert found(*(at(rank, waits, world=5) for rank in range(3))) is None
    assert found() is None


def test_ranks_of_a_later_generation_are_told_apart_by_their_numbers() -> None:
    statuses = [RankStatus(r, 100 + r, 0, "compute", 7, 0) for r in range(3)]
    positions = {0: at(0, wait(5, 0, 1), world=5), 2: at(1, world=4)}
    stall = stall_of(positions, statuses, [0, 2])
    assert stall is not None
    assert (stall.rank, stall.waiting) == (2, [0])


def test_positions_of_an_earlier_generation_are_left_out() -> None:
    statuses = [RankStatus(r, 100 + r, 0, "compute", 7, 0) for r in range(2)]
    assert stall_of({0: at(0, wait(5, 0, 1), world=5)}, statuses, [0]) is None
    assert stall_of({1: at(1, wait(5, 0, 1), world=5)}, statuses, [1]) is None
