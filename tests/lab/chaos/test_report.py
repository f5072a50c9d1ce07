"""Which fault of a chaotic run an event of its record answers to."""

from __future__ import annotations

from typing import Any

from paceline_lab.chaos.faults import Injected
from paceline_lab.chaos.schedule import Fault
from paceline_lab.chaos.session import is_about, named_until


def made(time: float, kind: Any, target: Any = "rank", number: int = 0) -> Injected:
    return Injected(Fault(kind, 0.5, target, number), "", time=time)


def test_the_loss_of_a_rank_is_no_answer_to_a_short_stop_of_it_long_before() -> None:
    stop, other, kill = made(100, "stop", number=1), made(105, "kill", number=2), made(120, "kill", number=1)
    assert named_until(stop, [other, kill]) == 120
    assert named_until(other, [kill]) == 165  # of another rank, whose loss is told apart


def test_faults_that_are_named_by_other_events_do_not_take_the_answer() -> None:
    assert named_until(made(100, "kill"), [made(101, "slow"), made(102, "disk-full", "disk")]) == 160


def test_what_hits_more_than_a_rank_may_have_lost_that_rank() -> None:
    assert named_until(made(100, "stop"), [made(103, "kill", "command")]) == 103


def test_the_loss_of_a_rank_answers_to_what_hit_that_rank_and_not_to_what_spared_it() -> None:
    lost = {"event": "lost", "rank": 1}
    assert is_about(lost, Fault("kill", 0.5, "rank", 1))
    assert is_about(lost, Fault("kill", 0.5, "ranks"))
    assert not is_about(lost, Fault("kill", 0.5, "others", 1))
    assert not is_about(lost, Fault("kill", 0.5, "rank", 2))
    assert is_about(lost, Fault("kill", 0.5, "others", 2))
