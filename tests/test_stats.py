"""Intervals, and that a difference is claimed only where there is one."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.stats import LEAST_REPEATS, Interval, differ, median_interval

TIMES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


@given(values=TIMES)
def test_the_interval_holds_the_median_and_lies_within_what_was_measured(values: list[float]) -> None:
    interval = median_interval(values, resamples=200)
    assert min(values) <= interval.low <= interval.middle <= interval.high <= max(values)
    assert interval.middle == statistics.median(values)


@given(values=TIMES, factor=st.floats(1e-3, 1e3))
def test_an_interval_in_other_units_is_the_same_interval(values: list[float], factor: float) -> None:
    scaled, other = median_interval(values, resamples=200).times(factor), median_interval([v * factor for v in values], resamples=200)
    assert (scaled.low, scaled.middle, scaled.high) == pytest.approx((other.low, other.middle, other.high))


@given(values=TIMES)
def test_nothing_differs_from_itself(values: list[float]) -> None:
    interval = median_interval(values, resamples=200)
    assert not differ(interval, interval, repeats=len(values))


def test_about_95_of_100_intervals_hold_the_true_median() -> None:
    draw = random.Random(1)
    intervals = [median_interval([draw.gauss(10, 1) for _ in range(15)], resamples=400) for _ in range(200)]
    assert sum(i.low <= 10 <= i.high for i in intervals) >= 180


def test_too_few_repeats_claim_no_difference_however_far_apart_they_are() -> None:
    assert not differ(Interval(1, 1, 1), Interval(2, 2, 2), repeats=LEAST_REPEATS - 1)
    assert differ(Interval(1, 1, 1), Interval(2, 2, 2), repeats=LEAST_REPEATS)
    assert not differ(Interval(1, 1.4, 1.6), Interval(1.5, 2, 2.5), repeats=5)
