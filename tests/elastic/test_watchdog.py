"""Ranks that hang are told apart from slow ones, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.watchdog import FACTOR, FIRST_DEADLINES, FIRST_STEPS, LEAST_S, Watchdog
from paceline.wire.status import Phase, RankStatus

DEADLINE_S, START_S, TICK_S = 100.0, 130.0, 0.2


@dataclass
class Ranks:
    """Ranks that a watchdog looks at."""

    count: int = 3
    follows_steps: bool = True
    now_s: float = 1e5
    paging: set[int] = field(default_factory=set)
    hung: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(DEADLINE_S, START_S, follows_steps=self.follows_steps)
        self.pids = {rank: 100 + rank for rank in range(self.count)}
        self.marks: dict[int, tuple[Phase, int, float]] = {}
        self.generation = 0
        self.mark(*range(self.count), phase="starting", step=0)

    def mark(self, *ranks: int, phase: Phase, step: int) -> None:
        self.marks |= dict.fromkeys(ranks, (phase, step, self.now_s))

    def look(self) -> list[int]:
        statuses = [
            RankStatus(r, self.pids[r], 0, phase, step, 0, self.generation)
            for r, (phase, step, _) in self.marks.items()
        ]
        idle_s = {rank: self.now_s - since_s for rank, (_, _, since_s) in self.marks.items()}
        hung = [s.rank for s in self.watchdog.look(statuses, idle_s, self.now_s, self.paging)]
        self.hung += hung
        return hung

    def passes(self, seconds: float) -> float:
        """Look on until a rank hangs, or time is over; returns the seconds that went by."""
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            self.now_s += TICK_S
            if self.look():
                break
        return self.now_s - began_s

    def step(self, step: int, step_s: float, *late: int, late_s: float = 0.0) -> None:
        """One step, which takes ranks `late` longer."""
        ranks = range(self.count)
        self.mark(*ranks, phase="data", step=step)
        self.look()
        self.mark(*ranks, phase="compute", step=step)
        self.passes(step_s)
        self.mark(*(rank for rank in ranks if rank not in late), phase="sync", step=step)
        self.passes(late_s)
        self.mark(*ranks, phase="optimizer", step=step)
        self.look()

    def steps(self, count: int, step_s: float) -> None:
        for step in range(1, count + 1):
            self.step(step, step_s)

    def rank_2_stays(self, phase: Phase, step: int) -> None:
        self.mark(0, 1, phase="sync", step=step)
        self.mark(2, phase=phase, step=step)

    def until_hung(self) -> float:
        taken_s = self.passes(4 * START_S)
        assert set(self.hung) == {2}
        return taken_s


def with_rank_2_in_step_31() -> Ranks:
    """Ranks after 30 short steps, of which two wait for rank 2."""
    ranks = Ranks()
    ranks.steps(30, TICK_S)
    ranks.rank_2_stays("compute", 31)
    return ranks


def about(limit_s: float) -> tuple[float, float]:
    return limit_s, limit_s + 3 * TICK_S


@pytest.mark.parametrize(
    ("steps", "step_s", "follows_steps", "limit_s"),
    [
        (30, 2.0, True, FACTOR * 2.0),
        (30, TICK_S, True, LEAST_S),
        (10, 20.0, True, DEADLINE_S),
        (30, 1.0, False, DEADLINE_S),
    ],
    ids=["a multiple of the slowest recent step", "at least ten seconds", "the deadline at most", "or always"],
)
def test_a_rank_that_others_wait_for_has_a_limit_of_its_own(
    steps: int, step_s: float, follows_steps: bool, limit_s: float
) -> None:
    ranks = Ranks(follows_steps=follows_steps)
    ranks.steps(steps, step_s)
    ranks.rank_2_stays("compute", steps + 1)
    low, high = about(limit_s)
    assert low <= ranks.until_hung() <= high + FACTOR * 2 * TICK_S


def test_one_slow_step_is_enough_for_a_longer_limit() -> None:
    ranks = Ranks()
    ranks.steps(30, 1.0)
    ranks.step(31, 2.0)
    ranks.rank_2_stays("compute", 32)
    assert ranks.until_hung() >= FACTOR * 2.0


def test_the_first_steps_of_a_process_have_the_deadline() -> None:
    ranks = Ranks()
    ranks.steps(FIRST_STEPS - 1, 1.0)
    ranks.rank_2_stays("compute", FIRST_STEPS)
    assert ranks.until_hung() > DEADLINE_S


def test_so_has_one_that_took_the_place_of_a_lost_rank() -> None:
    ranks = Ranks()
    ranks.steps(30, 1.0)
    ranks.pids[2] += 50
    ranks.mark(2, phase="starting", step=0)
    ranks.passes(1.0)
    ranks.step(31, 1.0)
    ranks.rank_2_stays("compute", 32)
    assert ranks.until_hung() > DEADLINE_S


@pytest.mark.parametrize("phase", ["data", "evaluate", "checkpoint", "optimizer"])
def test_data_from_a_slow_disk_evaluations_and_checkpoints_have_the_deadline(phase: Phase) -> None:
    ranks = Ranks()
    ranks.steps(30, 1.0)
    ranks.rank_2_stays(phase, 31)
    assert ranks.until_hung() > DEADLINE_S


def test_an_evaluation_is_no_slow_step() -> None:
    ranks = Ranks()
    ranks.steps(10, 1.0)
    ranks.mark(0, 1, 2, phase="data", step=11)
    ranks.look()
    ranks.mark(0, 1, 2, phase="evaluate", step=10)
    ranks.passes(60.0)
    ranks.step(11, 1.0)
    ranks.rank_2_stays("compute", 12)
    assert ranks.until_hung() < FACTOR * 2


def test_steps_longer_than_every_limit_are_taken_where_nobody_waits() -> None:
    ranks = Ranks()
    ranks.passes(5.0)
    ranks.step(1, FIRST_DEADLINES * DEADLINE_S - 1, 2, late_s=DEADLINE_S / 2)
    for step in range(2, 4):
        ranks.step(step, 5 * DEADLINE_S, 1, late_s=DEADLINE_S / 2)
    assert not ranks.hung


def test_ranks_that_all_stand_still_are_found_all_the_same() -> None:
    ranks = Ranks()
    ranks.mark(0, 1, 2, phase="compute", step=1)
    assert ranks.passes(1e6) <= about(FIRST_DEADLINES * DEADLINE_S)[1]
    assert ranks.hung == [0, 1, 2]


@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_a_mark_that_is_read_with_the_time_of_the_mark_before_is_no_hang(phase: Phase) -> None:
    ranks = Ranks()
    ranks.passes(START_S - 1)
    _, _, began_s = ranks.marks[2]
    ranks.mark(0, 1, phase=phase, step=1)
    ranks.marks[2] = phase, 1, began_s
    ranks.passes(2 * TICK_S)
    ranks.mark(2, phase=phase, step=1)
    ranks.passes(DEADLINE_S / 2)
    assert not ranks.hung


def test_a_machine_that_sleeps_for_an_hour_loses_no_rank() -> None:
    ranks = Ranks()
    ranks.steps(30, 1.0)
    ranks.rank_2_stays("compute", 31)
    ranks.passes(1.0)
    ranks.now_s += 3600
    ranks.passes(5.0)
    ranks.step(31, 1.0)
    assert not ranks.hung


def test_a_rank_that_waits_for_its_memory_is_only_slow() -> None:
    ranks = with_rank_2_in_step_31()
    ranks.paging = {2}
    ranks.passes(LEAST_S * 5)
    assert not ranks.hung
    ranks.paging = set()
    assert ranks.until_hung() > LEAST_S - 1


def test_a_rank_behind_a_cut_link_is_not_taken_for_hung() -> None:
    ranks = with_rank_2_in_step_31()
    phase, step, _ = ranks.marks[2]
    for _ in range(1000):
        ranks.now_s += TICK_S
        ranks.marks[2] = phase, step, ranks.now_s - 1.0
        assert not ranks.look()


def test_words_that_come_late_from_another_host_do_not_begin_the_wait_anew() -> None:
    ranks = with_rank_2_in_step_31()
    _, _, since_s = ranks.marks[2]
    taken_s = 0.0
    for look in range(1000):
        taken_s += ranks.passes(TICK_S)
        ranks.marks[2] = "compute", 31, since_s + look % 3 * TICK_S / 2
        if ranks.hung:
            break
    assert LEAST_S <= taken_s < 2 * LEAST_S


def test_what_a_survivor_did_when_its_generation_ended_is_no_computing_in_the_next() -> None:
    ranks = with_rank_2_in_step_31()
    ranks.passes(LEAST_S / 2)
    ranks.generation += 1
    ranks.passes(DEADLINE_S * 0.9)
    assert not ranks.hung, "it takes over what others have"
    ranks.step(31, TICK_S)
    ranks.rank_2_stays("compute", 32)
    assert ranks.until_hung() < 2 * LEAST_S


def test_a_rank_that_hangs_is_found_although_who_waited_for_it_is_gone() -> None:
    ranks = with_rank_2_in_step_31()
    ranks.passes(LEAST_S / 2)
    del ranks.marks[0], ranks.marks[1]
    assert ranks.until_hung() < 2 * DEADLINE_S


def test_a_step_that_cost_one_rank_its_place_is_a_slow_one_for_who_takes_over_its_samples() -> None:
    ranks = with_rank_2_in_step_31()
    ranks.until_hung()
    del ranks.marks[2]
    ranks.hung.clear()
    ranks.mark(0, 1, phase="compute", step=31)
    ranks.passes(TICK_S)
    ranks.mark(0, phase="sync", step=31)
    ranks.passes(DEADLINE_S * 0.9)
    assert not ranks.hung


def test_the_first_steps_after_a_checkpoint_is_resumed_are_first_ones() -> None:
    ranks = Ranks()
    ranks.passes(5.0)
    for step in range(501, 500 + FIRST_STEPS):
        ranks.step(step, 1.0)
    ranks.rank_2_stays("compute", 500 + FIRST_STEPS)
    assert ranks.until_hung() > DEADLINE_S


@given(
    usual_s=st.floats(TICK_S, 5.0),
    lates=st.lists(st.tuples(st.integers(0, 2), st.floats(0, FACTOR * 0.9)), min_size=1, max_size=8),
)
def test_no_rank_is_lost_that_takes_less_than_twenty_steps(usual_s: float, lates: list[tuple[int, float]]) -> None:
    ranks = Ranks()
    ranks.steps(FIRST_STEPS + 1, usual_s)
    for step, (rank, times) in enumerate(lates, FIRST_STEPS + 2):
        ranks.step(step, usual_s, rank, late_s=min(times * usual_s, DEADLINE_S * 0.9))
    assert not ranks.hung
