"""Intervals, and that a difference is claimed only where there is one."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.stats import LEAST_REPEATS, Interval, differ, median_interval

TIMES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


@given(values=TIMES)
def test_the_interval_holds_the_median(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval.low <= interval.middle <= interval.high
    assert interval.middle == statistics.median(values)


@given(values=TIMES, factor=st.floats(1e-3, 1e3))
def test_an_interval_in_other_units_is_the_same_interval(values: list[float], factor: float) -> None:
    scaled, other = median_interval(values).times(factor), median_interval([v * factor for v in values])
    assert (scaled.low, scaled.middle, scaled.high) == pytest.approx((other.low, other.middle, other.high), rel=1e-5)


@given(values=TIMES)
def test_nothing_differs_from_itself(values: list[float]) -> None:
    interval = median_interval(values)
    assert not differ(interval, interval, repeats=len(values))


@pytest.mark.parametrize("repeats", [3, 5, 6, 8, 15])
def test_95_of_100_intervals_hold_the_true_median_at_any_number_of_repeats(repeats: int) -> None:
    """Times whose logarithms are distributed normally; a bootstrap of 3 of them covers 75 of 100."""
    draw = random.Random(1)
    intervals = [median_interval([draw.lognormvariate(0, 0.1) for _ in range(repeats)]) for _ in range(2000)]
    assert sum(i.low <= 1 <= i.high for i in intervals) / 2000 >= 0.94


@pytest.mark.parametrize("repeats", [6, 8, 15])
def test_from_six_repeats_on_the_distribution_does_not_matter(repeats: int) -> None:
    draw = random.Random(2)
    intervals = [median_interval([draw.expovariate(math.log(2)) for _ in range(repeats)]) for _ in range(2000)]
    assert sum(i.low <= 1 <= i.high for i in intervals) / 2000 >= 0.94


def test_too_few_repeats_claim_no_difference_however_far_apart_they_are() -> None:
    assert not differ(Interval(1, 1, 1), Interval(2, 2, 2), repeats=LEAST_REPEATS - 1)
    assert differ(Interval(1, 1, 1), Interval(2, 2, 2), repeats=LEAST_REPEATS)
    assert not differ(Interval(1, 1.4, 1.6), Interval(1.5, 2, 2.5), repeats=5)
