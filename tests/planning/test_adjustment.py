"""Factors of measured runs: what they find, how far an odd run moves them, and the intervals that hold what is left."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade_search import candidate, cluster, job
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.layout import Layout
from paceline.planning.explain.advice import Case
from paceline.planning.explain.explain import explain
from paceline.planning.explain.questions import answers
from paceline.planning.machines import (
    COLD_SPREAD,
    SPREAD,
    Adjustment,
    adjustment,
    equal_ratio,
    own_adjustment,
    student_quantile,
)
from paceline.planning.prediction import estimate
from paceline.planning.search.result import SearchResult
from paceline.planning.search.search import plan, search
from paceline.planning.shortlist import COMMON, OWN, alike
from paceline.planning.tables.layouts import Row

LAYOUT = candidate("dp=8", compute=1.0).layout
RATIOS = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8)


def of_size(samples: float) -> Layout:
    return replace(LAYOUT, samples=samples)


def rows(ratios: Sequence[tuple[Layout, float]]) -> list[Row]:
    """Runs that took so many times what is predicted, which is one second."""
    return [Row("mine", at, {}, layout, ratio, None, False) for at, (layout, ratio) in enumerate(ratios, 2)]


def runs(ratios: Sequence[float], layout: Layout = LAYOUT) -> list[Row]:
    return rows([(layout, ratio) for ratio in ratios])


def measured(ratios: Sequence[tuple[Layout, float]]) -> Adjustment:
    return adjustment(rows(ratios), lambda _: 1.0)


def found(ratios: Sequence[float], layout: Layout = LAYOUT) -> Adjustment:
    return adjustment(runs(ratios, layout), lambda _: 1.0)


def of_framework(name: str) -> Layout:
    return replace(LAYOUT, framework=replace(LAYOUT.framework, name=name))


def test_without_runs_predictions_stay_and_their_interval_is_wide() -> None:
    nothing = adjustment([], lambda _: 1.0)
    assert nothing.factor(LAYOUT) == 1.0
    interval = nothing.interval(LAYOUT, 2.0)
    assert interval.rests_on == "the cost model alone"
    assert interval.relative > found([1.0] * 5).interval(LAYOUT, 2.0).relative


def test_runs_that_took_1_3_times_as_long_give_1_3() -> None:
    ratios = [1.29, 1.31, 1.3, 1.28, 1.32]
    assert found(ratios * 10).factor(LAYOUT) == pytest.approx(1.3, rel=0.02)
    few = found(ratios)
    assert 1.1 < few.factor(LAYOUT) < 1.3  # five runs do not move it all the way
    assert 1.3 in few.interval(LAYOUT, few.factor(LAYOUT))


def test_runs_of_the_job_itself_give_their_whole_factor_however_far_off_they_are() -> None:
    own = own_adjustment(runs([0.3, 0.31, 0.29]), lambda _: 1.0)
    assert own.factor(LAYOUT) == pytest.approx(0.3)
    assert found([0.3, 0.31, 0.29]).factor(LAYOUT) > 0.5, "where others' runs are drawn towards what is usual"
    interval = own.interval(LAYOUT, 0.3)
    assert all(ratio in interval for ratio in (0.3, 0.31, 0.29))
    assert interval.rests_on == "3 measured runs of this software and hardware"
    assert own_adjustment([], lambda _: 1.0) == Adjustment()


@given(RATIOS)
def test_the_jobs_own_factor_is_the_median_of_its_runs(ratios: list[float]) -> None:
    own = own_adjustment(runs(ratios), lambda _: 1.0)
    assert min(ratios) * 0.999 <= own.factor(LAYOUT) <= max(ratios) * 1.001


def test_one_odd_run_of_five_hardly_moves_the_factor() -> None:
    usual, odd = found([1.1, 1.12, 1.11, 1.1, 1.12]), found([1.1, 1.12, 1.11, 1.1, 3.0])
    assert odd.factor(LAYOUT) == pytest.approx(usual.factor(LAYOUT), rel=0.03)
    assert odd.interval(LAYOUT, 1.0).relative > usual.interval(LAYOUT, 1.0).relative


def test_a_software_without_runs_takes_the_factor_of_all_and_a_wider_interval() -> None:
    factors, other = found([1.3] * 10), of_framework("Another")
    assert factors.factor(other) == factors.factor(LAYOUT)
    mine, its = factors.interval(LAYOUT, 1.0), factors.interval(other, 1.0)
    assert its.relative > mine.relative
    assert "of this software and hardware" in mine.rests_on
    assert "of other software" in its.rests_on


def test_each_software_has_a_factor_of_its_own() -> None:
    other = of_framework("Another")
    factors = adjustment([*runs([1.0] * 50), *runs([1.4] * 50, other)], lambda _: 1.0)
    assert factors.factor(LAYOUT) == pytest.approx(1.0, rel=0.03)
    assert factors.factor(other) == pytest.approx(1.4, rel=0.03)


@given(RATIOS, st.randoms())
def test_the_order_of_runs_does_not_matter(ratios: list[float], random: object) -> None:
    shuffled = list(ratios)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert found(shuffled).factor(LAYOUT) == pytest.approx(found(ratios).factor(LAYOUT), rel=1e-3)


@given(st.floats(0.8, 1.25), st.floats(0.8, 1.25))
def test_the_factor_grows_with_the_runs(one: float, other: float) -> None:
    """It stays between 1 and theirs: few runs do not move it all the way."""
    slower, faster = max(one, other), min(one, other)
    assert found([slower] * 5).factor(LAYOUT) >= found([faster] * 5).factor(LAYOUT) - 1e-3
    assert min(1.0, one) - 1e-3 <= found([one] * 5).factor(LAYOUT) <= max(1.0, one) + 1e-3


@given(RATIOS, st.floats(1e-3, 1e4))
def test_an_interval_holds_the_prediction_that_it_is_of(ratios: list[float], seconds: float) -> None:
    interval = found(ratios).interval(LAYOUT, seconds)
    assert seconds in interval
    assert interval.low_s * interval.high_s == pytest.approx(seconds**2)


@pytest.mark.parametrize(("degrees", "quantile"), [(3.0, 1.6377), (4.0, 1.5332), (8.0, 1.3968), (40.0, 1.3031)])
def test_the_quantile_is_that_of_tables_of_students_t(degrees: float, quantile: float) -> None:
    assert student_quantile(0.9, degrees) == pytest.approx(quantile, rel=1e-3)


def test_errors_of_plans_of_one_job_are_smaller_against_each_other_than_by_themselves() -> None:
    assert 1 < equal_ratio() < math.exp(SPREAD) < math.exp(COLD_SPREAD)


@pytest.fixture(scope="module")
def plain() -> SearchResult:
    return search(job(), cluster(), top=10)


def test_predictions_are_multiplied_and_the_ranking_stays(plain: SearchResult) -> None:
    where, factors = cluster(), found([1.3] * 20)
    slowed = search(job(), where, top=10, calibration=factors)
    factor = factors.factor(plain.best[0].layout)
    assert [one.plan for one in slowed.best] == [one.plan for one in plain.best]
    for one, then in zip(plain.best, slowed.best, strict=True):
        assert then.prediction.step_time_s == pytest.approx(factor * one.prediction.step_time_s)
        assert sum(then.prediction.breakdown.values()) == pytest.approx(then.prediction.step_time_s)
        assert then.prediction.throughput == pytest.approx(one.prediction.throughput / factor)
        assert then.prediction.memory_bytes == one.prediction.memory_bytes
        assert then.why == one.why
    single = estimate(job(), plain.best[0].plan, cluster=where, calibration=factors)
    assert single.step_time_s == pytest.approx(slowed.best[0].prediction.step_time_s)
    assert single.interval is not None
    assert single.step_time_s in single.interval
    assert any("corrected by 20 measured runs" in note for note in single.notes)


def test_the_plan_that_is_returned_is_one_of_the_equal_ones(plain: SearchResult) -> None:
    times = {one.plan: one.prediction.step_time_s for one in plain.best}
    assert times[plan(job(), cluster=cluster())] <= equal_ratio() * plain.best[0].prediction.step_time_s


@pytest.mark.slow
def test_gains_of_changes_are_the_same_with_a_factor() -> None:
    """Both sides of a comparison are multiplied, other devices included."""
    factors = found([1.3] * 20)
    gains = []
    for basis in (None, factors):
        told = explain(job(), cluster(), search(job(), cluster(), calibration=basis), basis)
        questions = answers(told, Case(job(), cluster(), basis), ["one more host", "2x8xB200"])
        assert all(one.gain is not None for one in questions)
        gains.append([*(one.gain for one in told.changes), *(one.gain for one in questions)])
    assert gains[1] == pytest.approx(gains[0])


SIZES = (1.0, 4.0, 16.0)


def test_a_size_of_microbatches_that_is_slower_than_predicted_is_corrected_by_itself() -> None:
    factors = measured([(of_size(size), 1.25 if size == 4.0 else 1.0) for size in SIZES for _ in range(4)])
    slow, *usual = (factors.factor(of_size(size)) for size in (4.0, 1.0, 16.0))
    assert slow == pytest.approx(1.25, rel=0.04)
    assert usual == pytest.approx([1.0, 1.0], rel=0.04)
    assert factors.factor_of_kind(of_size(4.0)) == factors.factor_of_kind(of_size(1.0))


def test_what_is_far_from_all_runs_has_the_factor_of_its_kind() -> None:
    factors = measured([(of_size(size), ratio) for size, ratio in zip(SIZES, (1.0, 1.2, 1.0), strict=True)])
    far = of_size(2.0**20)
    assert factors.factor(far) == pytest.approx(factors.factor_of_kind(far), rel=1e-6)


def test_runs_of_another_software_say_nothing_beside_its_factor() -> None:
    other = replace(of_size(4.0), framework=replace(LAYOUT.framework, name="Another"))
    factors = measured([(of_size(size), ratio) for size, ratio in zip(SIZES, (1.0, 1.2, 1.0), strict=True)])
    assert factors.factor(other) == factors.factor_of_kind(other)


@given(st.floats(0.5, 2.0), st.integers(1, 6))
def test_runs_that_are_all_as_much_off_have_nothing_in_common_beside_it(ratio: float, runs: int) -> None:
    factors = measured([(of_size(float(2**at)), ratio) for at in range(runs)])
    for size in SIZES:
        assert factors.factor(of_size(size)) == pytest.approx(factors.factor_of_kind(of_size(size)))


def test_the_error_that_is_left_of_a_run_is_that_of_its_prediction_by_the_others() -> None:
    logs = [0.05, -0.02, 0.01, 0.0, -0.04, 0.02, 0.0]
    layouts = [of_size(1.5**at) for at in range(len(logs))]
    left = alike(layouts, logs).left
    for at in range(1, len(logs) - 1):
        others = alike([*layouts[:at], *layouts[at + 1 :]], [*logs[:at], *logs[at + 1 :]])
        assert left[at] == pytest.approx(logs[at] - others.log(layouts[at]), abs=0.01)


def test_one_odd_run_is_not_believed() -> None:
    layouts = [of_size(4.0)] * 9
    odd = alike(layouts, [0.0] * 8 + [1.0])
    assert abs(odd.log(of_size(4.0))) < OWN / 2
    believed = alike([*layouts, *[of_size(64.0)] * 9], [0.0] * 9 + [COMMON] * 9)
    assert believed.log(of_size(64.0)) - believed.log(of_size(4.0)) > COMMON / 2


def test_measured_runs_put_the_plans_found_in_their_order(plain: SearchResult) -> None:
    small = [one for one in plain.best if one.layout.samples < 8]
    assert small
    assert plain.best[0] not in small
    # large microbatches are slower than predicted, four runs of each plan
    runs = [one for one in plain.best for _ in range(4)]
    ratios = [1.0 if one in small else 1.4 for one in runs]
    measured = rows([(one.layout, ratio * one.prediction.step_time_s) for one, ratio in zip(runs, ratios, strict=True)])
    factors = adjustment(measured, lambda layout: predict_layout(layout).step_time_s)
    told = search(job(), cluster(), top=10, calibration=factors).best
    assert told[0].plan in [one.plan for one in small]
    others = [one.prediction.step_time_s for one in told[1:]]
    assert others == sorted(others), "the first is the recommended one"
    assert all(one.prediction.step_time_s in one.interval for one in told)
    slower = next(one for one in told if one.plan == plain.best[0].plan)
    assert re.match(r"\+\d+ % according to measured runs of similar plans", slower.why)
