"""Members of a run that is followed, by its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handmade_live import NOW, begun_run
from paceline.report.live_run import MOST_RANKS, Members
from paceline.run.record.run import Run

LOST = {"rank": 2, "again": True, "generation": 1}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begun_run(tmp_path / "mine", "dp=16")


def after(run: Run, *events: tuple[str, dict[str, Any]]) -> Members:
    """Members after these events, a second apart, since their launch and start."""
    members = Members(run)
    for at, (name, details) in enumerate([("launch", {"ranks": 16}), ("start", {}), *events]):
        members.told({"event": name, "time": NOW + at, **details})
    return members


def states(members: Members) -> dict[int, str]:
    """The states of ranks that do not just take part."""
    return {rank: member.state for rank, member in members.ranks.items() if member.state != "in"}


def test_ranks_start_on_their_hosts_and_take_part_once_the_run_has_begun(run: Run) -> None:
    assert {member.state for member in Members(run).ranks.values()} == {"starts"}
    members = after(run)
    assert states(members) == {}
    assert [members.ranks[rank].host for rank in (0, 7, 8, 15)] == ["a", "a", "b", "b"]


def test_a_lost_rank_is_back_once_it_is_healed_or_has_made_a_step(run: Run) -> None:
    members = after(run, ("lost", LOST))
    assert (states(members), members.generation) == ({2: "back"}, 1)
    members.stepped(2, NOW + 1)  # a line from before
    assert states(members) == {2: "back"}
    members.stepped(2, NOW + 3)
    assert states(members) == {}
    assert states(after(run, ("lost", LOST), ("healed", {"rank": 2}))) == {}
    assert states(after(run, ("lost", LOST | {"again": False}))) == {2: "out"}


def test_a_lost_host_takes_its_ranks_along_and_brings_them_back(run: Run) -> None:
    lost = ("host_lost", {"ranks": list(range(8, 16)), "again": True, "generation": 3})
    assert states(after(run, lost)) == dict.fromkeys(range(8, 16), "lost")
    back = ("host_back", {"ranks": list(range(8, 16))})
    assert states(after(run, lost, back)) == dict.fromkeys(range(8, 16), "back")
    assert after(run, lost).generation == 3


def test_ranks_that_leave_as_asked_are_not_missed_and_may_come_again(run: Run) -> None:
    left = ("scaled", {"by": -1, "ranks": [15]})
    assert states(after(run, left)) == {15: "left"}
    assert states(after(run, left, ("scaled", {"by": 1, "ranks": [15]}))) == {15: "back"}


def test_after_a_restart_all_start_again(run: Run) -> None:
    restart = ("restart", {"attempt": 1})
    members = after(run, ("lost", LOST), restart)
    assert set(states(members).values()) == {"starts"}
    assert states(after(run, ("lost", LOST), restart, ("resume", {}))) == {}


def test_a_slow_rank_is_marked_until_it_is_as_fast_as_the_others(run: Run) -> None:
    slow = ("slow_rank", {"rank": 5})
    assert after(run, slow).ranks[5].slow
    assert not after(run, slow, ("slow_rank_over", {"rank": 5})).ranks[5].slow


def test_a_plan_of_a_hundred_million_ranks_costs_nothing(run: Run) -> None:
    (run.path / "plan.txt").write_text("dp=100000000")
    members = Members(Run(run.path))
    assert len(members.ranks) == MOST_RANKS
    members.stepped(99_999_999, NOW)
    assert len(members.ranks) == MOST_RANKS
