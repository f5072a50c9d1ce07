"""The recovery protocol in virtual time: any order of losses, messages and steps keeps the run exact and going.

`benchmarks/interleavings.py` plays millions of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import membership_world
from membership_world import played
from paceline.elastic.membership import MOST_LOSSES, WITHIN_S, Membership, Start, StepBoundary, newest_of
from paceline.wire.status import Generation, next_number


@given(
    st.integers(1, 4),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(0, 2**32),
    st.integers(0, 400),
    st.sampled_from([0.0, 0.01, 0.05, 0.15]),
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_lost_when_the_others_go_on_with_the_same_model(
    replicas: int, replica_size: int, seed: int, events: int, kills: float
) -> None:
    played(seed, replicas, replica_size, events, kills)


@given(st.integers(2, 4), st.sampled_from([1, 2, 3]), st.integers(0, 2**32), st.integers(0, 300))
@settings(max_examples=120, deadline=None)
def test_no_step_is_lost_while_one_replica_that_took_it_lives(
    replicas: int, replica_size: int, seed: int, events: int
) -> None:
    played(seed, replicas, replica_size, events, kills=0.05, spared=replica_size)


@given(st.integers(2, 4), st.sampled_from([1, 2, 3]), st.integers(0, 2**32), st.integers(0, 300))
@settings(max_examples=120, deadline=None)
def test_no_step_is_lost_while_hosts_get_notices(replicas: int, replica_size: int, seed: int, events: int) -> None:
    played(seed, replicas, replica_size, events, kills=0.03, spared=replica_size, notices=0.05)


def test_the_protocol_is_imported_without_torch_sockets_or_clocks() -> None:
    wanted = "paceline.elastic.membership"
    code = f"import sys, {wanted}; sys.exit(bool({{'torch', 'socket', 'asyncio'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def without_the_newest(boundaries: Sequence[StepBoundary], replica_size: int = 1) -> Start:
    """Start from a step that is not the newest."""
    newest = max(boundary.step for boundary in boundaries)
    older = [StepBoundary() if boundary.step == newest else boundary for boundary in boundaries]
    return newest_of(older if any(boundary.step >= 0 for boundary in older) else boundaries, replica_size)


def hasty_note(membership: Membership, entered: Mapping[int, int], waiting: set[int]) -> None:
    """Let processes join while others are on their way to the generation before."""
    if membership.wanted is not None or not membership.current.members:
        note(membership, entered, waiting)
    elif whole := {process for process in waiting if membership.replica_of(process) <= waiting}:
        members = tuple(sorted({*membership.current.members, *whole}))
        membership.wanted = Generation(membership.current.number + 1, members)


note = Membership.note


def play_some(seeds: int) -> None:
    for seed in range(seeds):
        played(seed, replicas=3, replica_size=2, events=200, kills=0.05, spared=2)


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "told"),
    [
        (membership_world, "newest_of", without_the_newest, "a step is lost"),
        (Membership, "note", hasty_note, "stands still"),
    ],
)
def test_a_protocol_that_breaks_a_promise_is_found_out(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object, told: str
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match=told):
        play_some(200)


def test_a_process_that_is_lost_three_times_in_an_hour_is_left_out() -> None:
    membership = Membership(3)
    assert [membership.lost(1, at_s) for at_s in (0.0, 10.0)] == [True] * (MOST_LOSSES - 1)
    assert not membership.lost(1, 20.0)
    assert membership.current.members == (0, 2)
    assert membership.lost(2, WITHIN_S * 2), "one loss of another is no reason"


def test_processes_that_are_lost_together_are_left_out_in_one_generation() -> None:
    membership = Membership(4)
    assert membership.lost_together({1, 3}, 0.0) == {1, 3}
    assert membership.current == Generation(1, (0, 2))


def test_a_run_that_begins_without_some_takes_in_their_replicas_when_they_come() -> None:
    membership = Membership(6, replica_size=2)
    membership.begin_without({3, 4, 5})
    assert membership.current == Generation(0, (0, 1))
    assert not membership.hopeless
    membership.left_out -= {3}
    membership.note({0: 0, 1: 0, 2: -1, 3: -1}, {2, 3})
    assert membership.wanted == Generation(1, (0, 1, 2, 3))


def test_a_replica_leaves_after_a_step_and_is_taken_back() -> None:
    membership = Membership(3)
    membership.release({2})
    membership.note({0: 0, 1: 0, 2: 0}, set())
    assert (membership.current.members, membership.wanted) == ((0, 1, 2), Generation(1, (0, 1)))
    membership.note({0: 1, 1: 1, 2: 0}, {2})
    membership.note({0: 1, 1: 1, 2: 0}, {2})
    assert (membership.current, membership.wanted) == (Generation(1, (0, 1)), None), "it waits, and does not join"
    membership.take_back({2})
    membership.note({0: 1, 1: 1, 2: -1}, {2})
    assert membership.wanted == Generation(2, (0, 1, 2))


def test_a_replica_that_is_leaving_stays_when_it_is_the_last_with_the_state() -> None:
    membership = Membership(2)
    membership.release({1})
    assert membership.lost(0, 0.0)
    membership.note({1: 1}, set())
    assert membership.newest == Generation(1, (1,))
    membership.note({0: -1, 1: 1}, {0})
    membership.note({0: 2, 1: 2}, set())
    membership.note({0: 2, 1: 2}, set())
    assert membership.wanted == Generation(3, (0,))


def test_a_process_that_dies_while_it_is_leaving_is_not_started_again() -> None:
    membership = Membership(2)
    membership.release({1})
    assert not membership.lost(1, 0.0)
    assert membership.current == Generation(1, (0,))


def test_losses_that_another_has_noted_count() -> None:
    noted, membership = Membership(2), Membership(2)
    for lost_at in range(MOST_LOSSES - 1):
        noted.lost(1, lost_at)
    membership.remember(noted.losses_before(at_s=10.0), at_s=5000.0)
    assert membership.lost(0, 5000.0), "the first loss"
    assert not membership.lost(1, 5000.0)
    membership.remember(noted.losses_before(at_s=WITHIN_S + 10.0), at_s=5000.0)
    assert membership.lost(1, 5000.0), "those of long ago"


def test_losses_of_long_ago_do_not_count() -> None:
    membership = Membership(2)
    assert all(membership.lost(1, day * 86_400.0) for day in range(20))


def test_the_first_that_comes_back_after_all_were_lost_goes_on_alone() -> None:
    membership = Membership(2)
    found = []
    for process in (0, 1):
        membership.lost(process, 0.0)
        found.append(membership.current.members)
    membership.note({}, {1})
    assert [*found, membership.current.members] == [(1,), (), (1,)]


def test_a_replica_that_lost_a_rank_is_left_out_and_joins_when_it_is_whole() -> None:
    membership = Membership(6, replica_size=2)
    membership.lost(3, 0.0)
    assert membership.current.members == (0, 1, 4, 5)
    entered = dict.fromkeys(range(6), 1)
    membership.note(entered, {2})
    assert membership.wanted is None
    membership.note(entered, {2, 3})
    assert membership.newest.members == (0, 1, 2, 3, 4, 5)


def test_the_only_replica_waits_for_a_host_that_may_come_back() -> None:
    membership = Membership(4, replica_size=4)
    membership.lost_together({2, 3}, 0.0)
    membership.left_out |= {2, 3}
    assert membership.hopeless
    membership.away |= {2, 3}
    assert not membership.hopeless
    membership.note({0: -1, 1: -1}, {0, 1})
    assert membership.current.members == ()
    membership.left_out, membership.away = set(), set()
    membership.note(dict.fromkeys(range(4), -1), {0, 1, 2, 3})
    assert membership.current.members == (0, 1, 2, 3)


def test_parts_of_broken_replicas_go_on_together_from_the_newest_step_that_they_have_of_every_part() -> None:
    membership = Membership(4, replica_size=2)
    membership.lost(0, 0.0)
    membership.lost(3, 0.0)
    found = []
    for waiting in ({0, 1}, {0, 1, 2, 3}):
        membership.note({}, waiting)
        found.append(membership.current.members)
    assert found == [(), (0, 1, 2, 3)], "rank 2 has the part that rank 1 has not"
    kept = StepBoundary(step=7, generation=0)
    start = newest_of([StepBoundary(), kept, kept, StepBoundary()], replica_size=2)
    assert (start.boundary, start.behind) == (kept, [0, 3])
    assert [start.holders_of_part(rank, 4) for rank in range(4)] == [[1], [0], [1], [0]]
    assert newest_of([StepBoundary(), kept, StepBoundary(), StepBoundary()], replica_size=2).boundary.step == -1, (
        "from the disk"
    )


def test_a_rank_takes_a_step_by_itself_only_if_another_one_took_it_with_the_same_gradients() -> None:
    took, broken_off = StepBoundary(step=7, generation=2), StepBoundary(step=6, generation=2, ready=2)
    assert newest_of([took, broken_off], replica_size=2).ready == [1]
    assert newest_of([took, took, replace(broken_off, ready=1), took], replica_size=2).behind == [2]


@pytest.mark.parametrize(
    ("current", "wanted", "own", "to"), [(0, 0, -1, 0), (3, 4, 3, 4), (3, 3, 3, None), (5, 5, 3, 5), (3, 4, -1, 3)]
)
def test_the_newest_generation_is_entered_next(current: int, wanted: int, own: int, to: int | None) -> None:
    assert next_number(current, wanted, own) == to


def test_nobody_goes_on_while_too_few_hosts_are_there_and_all_do_when_enough_are() -> None:
    membership = Membership(3)
    membership.held = True
    assert membership.lost_together({2}, 0.0) == {2}
    assert membership.current == Generation(1, ())
    membership.note({0: 0, 1: 0}, {0, 1})
    assert membership.current == Generation(1, ()), "they wait"
    membership.held = False
    membership.note({0: 0, 1: 0, 2: -1}, {0})
    assert membership.current == Generation(1, ()), "process 1 may have the newest step"
    membership.note({0: 0, 1: 0, 2: -1}, {0, 1})
    assert membership.current == Generation(2, (0, 1))
    membership.note({0: 2, 1: 2, 2: -1}, {2})
    assert membership.wanted == Generation(3, (0, 1, 2))


def test_a_host_that_is_lost_before_its_ranks_take_part_holds_the_others_too() -> None:
    membership = Membership(3)
    membership.lost(2, 0.0)
    assert membership.current == Generation(1, (0, 1))
    membership.held = True
    membership.lost(2, 1.0)
    assert membership.current == Generation(2, ())
