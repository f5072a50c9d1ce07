"""What is drawn at random in a simulation: against the formulas, where there are some."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planning.cost.estimate import FailureCosts
from paceline.planning.explain.training_run import straggler_slowdown
from paceline_lab.simulated.measured_here import Jitter, ScaleError, drawn_goodput, held_against, interval_of

DAY_S = 86_400.0


def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("ranks", [1, 2, 8, 1024, 16384])
def test_the_slowest_of_many_ranks_is_as_slow_as_the_formula_says(ranks: int) -> None:
    drawn = Jitter(0.05).slowest(ranks, (100_000,), random())
    # Blom's formula is off by less than three hundredths of the deviation, most for two ranks
    assert drawn.mean() == pytest.approx(straggler_slowdown(ranks, 0.05), abs=0.03 * 0.05)


@given(st.lists(st.floats(0.5, 2.0), min_size=10, max_size=50), st.integers(1, 10_000), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_measured_steps_are_never_slower_than_the_slowest_measured_one(
    ratios: list[float], ranks: int, seed: int
) -> None:
    jitter = Jitter.of(ratios, "by hand")
    drawn = jitter.slowest(ranks, (200,), np.random.default_rng(seed))
    assert min(ratios) <= drawn.min() <= drawn.max() <= max(ratios)
    more = jitter.slowest(2 * ranks, (200,), np.random.default_rng(seed))
    assert (more >= drawn - 1e-12).all(), "the slowest of more ranks is slower"


def test_nothing_is_drawn_where_no_jitter_is_known() -> None:
    assert (Jitter().slowest(1000, (3, 4), random()) == 1).all()


@pytest.mark.parametrize(
    "costs",
    [
        FailureCosts(between_s=DAY_S, step_s=1.0, stall_s=2.0, write_s=60.0, restart_s=120.0),
        FailureCosts(between_s=DAY_S / 10, step_s=1.0, stall_s=2.0, write_s=60.0, restart_s=300.0),
        FailureCosts(between_s=DAY_S / 10, step_s=1.0, stall_s=2.0, write_s=60.0, restart_s=300.0, in_place=True),
        FailureCosts(between_s=DAY_S / 10, step_s=1.0, stall_s=2.0, write_s=60.0, restart_s=300.0, copied_s=500.0),
    ],
)
@pytest.mark.parametrize("interval_s", [30.0, 600.0, 3600.0])
def test_over_a_long_time_goodput_is_that_of_the_formula(costs: FailureCosts, interval_s: float) -> None:
    drawn = drawn_goodput(costs, interval_s, 2000 * costs.between_s, 60, random())
    assert drawn.mean() == pytest.approx(costs.goodput(interval_s), rel=0.01)


def test_a_short_training_may_see_no_failure_or_several() -> None:
    costs = FailureCosts(between_s=DAY_S, step_s=1.0, stall_s=1.0, write_s=10.0, restart_s=600.0)
    drawn = drawn_goodput(costs, 3600.0, DAY_S, 2000, random())
    unharmed = 3600 / 3601
    assert drawn.max() == pytest.approx(unharmed, abs=1e-6)
    assert np.mean(drawn > unharmed - 1e-6) == pytest.approx(math.exp(-1), abs=0.04), "the chance of no failure"
    assert drawn.min() < 0.9


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=100), st.floats(0.01, 100.0))
def test_an_interval_holds_its_middle_and_is_in_order(values: list[float], middle: float) -> None:
    found = interval_of(np.array(values), middle)
    assert found.low <= found.middle <= found.high
    assert found.middle == middle


def test_sources_count_alike_however_many_curves_they_have() -> None:
    held = held_against()
    error = ScaleError.of(held)
    assert sum(error.weights) == pytest.approx(1)
    mosaic = [one for one in held if one.curve.source.startswith("MosaicML")]
    assert len(mosaic) > 3
    sources = len({one.curve.source for one in held})
    weight_of = dict(zip(error.values, error.weights, strict=True))
    assert sum(weight_of[one.excess] for one in mosaic) == pytest.approx(1 / sources)


@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=30))
def test_quantiles_of_the_error_ascend_and_draws_stay_inside(values: list[float]) -> None:
    error = ScaleError(tuple(sorted(values)), (1 / len(values),) * len(values))
    levels = [error.quantile(level) for level in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert levels == sorted(levels)
    drawn = error.draw(100, random())
    assert min(values) <= drawn.min() <= drawn.max() <= max(values)
