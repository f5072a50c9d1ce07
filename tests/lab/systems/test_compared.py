"""Figures of a comparison: times of steps, time to a target, losses that agree, lines that change."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_lab.systems.compared import TakenRun, changed_lines, ratio_of, step_time_s, time_to
from paceline_lab.systems.proof import difference

SCRIPTS = "paceline_lab.systems.scripts"


def ends(each_s: list[float]) -> list[float]:
    """Times at which steps of these lengths end."""
    return [sum(each_s[: i + 1]) for i in range(len(each_s))]


@given(st.floats(1e-4, 10), st.integers(4, 90))
def test_equal_steps_take_what_each_takes_however_many_they_are(step_s: float, steps: int) -> None:
    assert step_time_s(ends([step_s] * steps)) == pytest.approx(step_s)


def test_neither_the_warm_up_nor_one_slow_stretch_counts() -> None:
    assert step_time_s(ends([1.0] * 10 + [0.1] * 20 + [5.0] * 2 + [0.1] * 40)) == pytest.approx(0.1)


def test_a_target_is_reached_when_the_mean_of_ten_losses_is_below_it() -> None:
    losses = [1.0] * 15 + [0.0] * 15
    ended = ends([1.0] * 30)
    assert time_to(0.55, losses, ended) == pytest.approx(19 - 0), "five zeros of ten: 0.5"
    assert time_to(-1.0, losses, ended) is None
    assert time_to(None, losses, ended) is None
    assert time_to(0.5, [0.1] * 9, ends([1.0] * 9)) is None, "fewer than ten steps say nothing"


def test_losses_differ_by_the_worst_step_and_without_end_where_one_is_no_number() -> None:
    assert difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert difference([2.0, math.nan], [2.0, 1.0]) == math.inf


def run(way: str, number: int, step_s: float) -> TakenRun:
    return TakenRun(way, number, step_s, 1.0, 0, None, None, [], [])


def test_a_ratio_is_of_runs_of_the_same_round() -> None:
    ours = [run("paceline", number, 0.01 * (number + 1)) for number in range(5)]
    theirs = [run("ddp", number, 0.02 * (number + 1)) for number in range(1, 5)]
    found = ratio_of(theirs, ours)
    assert found is not None
    assert (found.low, found.middle, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio_of([], ours) is None


def test_lines_are_counted_where_a_script_is_not_the_plain_one() -> None:
    assert changed_lines(f"{SCRIPTS}:plain") == 0
    of_ddp = changed_lines(f"{SCRIPTS}:ddp")
    assert of_ddp == 6, "two imports, start, wrapping, the ranks' batches, end"
    assert (changed_lines(f"{SCRIPTS}:fsdp") or 0) > of_ddp
    assert (changed_lines(f"{SCRIPTS}:horovod") or 0) > 0
    assert changed_lines(None) is None
