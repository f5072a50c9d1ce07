"""Corrections by measured runs: what they find, how far an odd run moves them, and the intervals that remain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade_search import candidate, cluster, job
from paceline.cluster.catalogue import CATALOGUE
from paceline.planning.cost import constants
from paceline.planning.cost.estimate import predict_layout, step_time_s, timeline
from paceline.planning.cost.layout import Interval, Layout, Machines, Prediction
from paceline.planning.explain.advice import Case
from paceline.planning.explain.explain import explain
from paceline.planning.explain.questions import answers
from paceline.planning.machines import (
    COLD_SPREAD,
    SPREAD,
    Adjustment,
    adjusted,
    adjustment,
    equal_ratio,
    own_adjustment,
    regression,
    student_quantile,
)
from paceline.planning.prediction import estimate
from paceline.planning.search.result import SearchResult
from paceline.planning.search.search import plan, search
from paceline.planning.tables.layouts import Row

LAYOUT = candidate("dp=8", compute=1.0).layout
CORES = replace(LAYOUT, machines=Machines(CATALOGUE["CPU"], 1, 8, CATALOGUE["CPU"].network), precision="fp32")
RATIOS = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def fitted_constants() -> Iterator[None]:
    yield
    constants.use()


@cache
def plain_s(layout: Layout) -> float:
    return step_time_s(layout, {})


def rows(ratios: Sequence[tuple[Layout, float]]) -> list[Row]:
    """Runs whose steps took these multiples of the time that is predicted."""
    return [
        Row("mine", at, {}, layout, ratio * plain_s(layout), None, False)
        for at, (layout, ratio) in enumerate(ratios, 2)
    ]


def runs(ratios: Sequence[float], layout: Layout = LAYOUT) -> list[Row]:
    return rows([(layout, ratio) for ratio in ratios])


def found(ratios: Sequence[float], layout: Layout = LAYOUT) -> Adjustment:
    return adjustment(runs(ratios, layout))


def of_factors(ratios: Sequence[float], layout: Layout = LAYOUT) -> Adjustment:
    """The same without constants that may move, which takes no derivatives."""
    return regression(runs(ratios, layout), {}, {}, step_time_s)


def corrected(factors: Adjustment, layout: Layout = LAYOUT) -> Prediction:
    there = replace(layout, machines=replace(layout.machines, adjustment=factors))
    return adjusted(predict_layout(there), there)


def times(factors: Adjustment, layout: Layout = LAYOUT) -> float:
    """Return corrected / uncorrected time."""
    return corrected(factors, layout).step_time_s / plain_s(layout)


def interval(factors: Adjustment, layout: Layout = LAYOUT) -> Interval:
    """Return the interval of a corrected time, in multiples of the uncorrected one."""
    told = corrected(factors, layout).interval
    assert told is not None
    return replace(told, low_s=told.low_s / plain_s(layout), high_s=told.high_s / plain_s(layout))


def of_framework(name: str) -> Layout:
    return replace(LAYOUT, framework=replace(LAYOUT.framework, name=name))


def of_size(samples: float) -> Layout:
    return replace(LAYOUT, samples=samples)


def test_without_runs_predictions_stay_and_their_interval_is_wide() -> None:
    nothing = adjustment([])
    assert nothing == Adjustment()
    assert corrected(nothing).step_time_s == predict_layout(LAYOUT).step_time_s
    assert interval(nothing).rests_on == "the cost model alone"
    assert interval(nothing).relative > interval(found([1.0] * 5)).relative


def test_runs_that_took_1_3_times_as_long_give_1_3() -> None:
    ratios = [1.29, 1.31, 1.3, 1.28, 1.32]
    assert times(found(ratios * 10)) == pytest.approx(1.3, rel=0.02)
    few = found(ratios)
    assert 1.1 < times(few) < 1.3  # five runs do not move it all the way
    assert 1.3 in interval(few)


def test_runs_as_predicted_move_no_constant() -> None:
    factors = found([1.0] * 20)
    assert factors.constants == pytest.approx({name: constants.FITTED[name] for name in constants.ASSUMED})
    assert times(factors) == pytest.approx(1.0)


def test_a_constant_moves_with_the_runs_that_depend_on_it_and_no_further_than_is_likely() -> None:
    """Runs over slow links that were slower correct the links, not other runs of the same software."""
    slow = replace(LAYOUT, machines=replace(LAYOUT.machines, between=replace(LAYOUT.machines.between, bandwidth=1e9)))
    far, near = replace(slow, tp=1, dp=16), replace(slow, dp=1)
    factors = adjustment(rows([(far, 1.25), (near, 1.0)] * 10))
    assert factors.constants["LINK_TOP_BETWEEN"] < constants.FITTED["LINK_TOP_BETWEEN"]
    assert times(factors, far) > 1.1
    assert times(factors, near) == pytest.approx(1.0, abs=0.05)
    for name, value in found([4.0] * 50).constants.items():
        assert abs(math.log(value / constants.FITTED[name])) < 3 * constants.ASSUMED[name].spread


def test_runs_of_the_job_itself_give_their_whole_factor_however_far_off_they_are() -> None:
    own = own_adjustment(runs([0.3, 0.31, 0.29]))
    assert times(own) == pytest.approx(0.3)
    assert times(found([0.3, 0.31, 0.29])) > 0.31, "others' runs are drawn towards what is usual"
    assert all(ratio in interval(own) for ratio in (0.3, 0.31, 0.29))
    assert interval(own).rests_on == "3 measured runs of this software and hardware"
    assert own_adjustment([]) == Adjustment()


@given(RATIOS)
def test_the_jobs_own_factor_is_the_median_of_its_runs(ratios: list[float]) -> None:
    own = own_adjustment(runs(ratios))
    assert min(ratios) * 0.999 <= own.factor(LAYOUT) <= max(ratios) * 1.001


def test_one_odd_run_of_five_hardly_moves_the_result() -> None:
    usual, odd = found([1.1, 1.12, 1.11, 1.1, 1.12]), found([1.1, 1.12, 1.11, 1.1, 3.0])
    assert times(odd) == pytest.approx(times(usual), rel=0.03)
    assert interval(odd).relative > interval(usual).relative


def test_how_far_off_an_outlier_is_does_not_change_the_interval_of_the_other_runs() -> None:
    far, farther = (found([1.0] * 20 + [times]) for times in (5.0, 50.0))
    assert interval(far).relative == pytest.approx(interval(farther).relative, rel=0.05)
    assert interval(far).relative > interval(found([1.0] * 21)).relative


def test_software_without_runs_gets_a_wider_interval() -> None:
    factors, other = found([1.3] * 10), of_framework("Another")
    assert 1.0 < times(factors, other) <= times(factors)
    mine, its = interval(factors), interval(factors, other)
    assert its.relative > mine.relative
    # runs of other software hardly help on published runs, so they do not narrow what is without runs
    assert its.relative == pytest.approx(interval(Adjustment(), other).relative)
    assert "of this software and hardware" in mine.rests_on
    assert "of other software" in its.rests_on


def test_each_software_has_a_factor_of_its_own() -> None:
    other = of_framework("Another")
    factors = adjustment([*runs([1.0] * 50), *runs([1.4] * 50, other)])
    assert times(factors) == pytest.approx(1.0, rel=0.03)
    assert times(factors, other) == pytest.approx(1.4, rel=0.03)


def test_runs_on_cores_and_on_gpus_do_not_correct_each_other() -> None:
    on_cores, on_gpus = found([1.5] * 20, CORES), found([1.5] * 20)
    assert times(on_cores, CORES) > 1.3
    assert times(on_gpus) > 1.3
    for factors, other in ((on_cores, LAYOUT), (on_gpus, CORES)):
        assert times(factors, other) == pytest.approx(1.0)
        assert interval(factors, other) == interval(Adjustment(), other)
    both = adjustment([*runs([1.5] * 20, CORES), *runs([0.8] * 20)])
    assert times(both, CORES) == pytest.approx(times(on_cores, CORES))
    assert times(both) == pytest.approx(times(found([0.8] * 20)))


@settings(deadline=None)
@given(RATIOS, st.randoms())
def test_the_order_of_runs_does_not_matter(ratios: list[float], random: object) -> None:
    shuffled = list(ratios)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert of_factors(shuffled).factor(LAYOUT) == pytest.approx(of_factors(ratios).factor(LAYOUT), rel=1e-3)


def test_the_order_of_runs_does_not_matter_to_the_constants() -> None:
    some = [(of_size(float(2**at)), 0.9 + 0.1 * at) for at in range(5)]
    forward, backward = adjustment(rows(some)), adjustment(rows(some[::-1]))
    assert backward.constants == pytest.approx(forward.constants)
    assert backward.logs == pytest.approx(forward.logs)
    assert sorted(backward.errors) == pytest.approx(sorted(forward.errors))


@settings(deadline=None)
@given(st.floats(0.8, 1.25), st.floats(0.8, 1.25))
def test_the_factor_grows_with_the_runs(one: float, other: float) -> None:
    """It stays between 1 and theirs: few runs do not move it all the way."""
    slower, faster = max(one, other), min(one, other)
    assert of_factors([slower] * 5).factor(LAYOUT) >= of_factors([faster] * 5).factor(LAYOUT) - 1e-3
    assert min(1.0, one) - 1e-3 <= of_factors([one] * 5).factor(LAYOUT) <= max(1.0, one) + 1e-3


@pytest.mark.parametrize("ratio", [0.7, 0.9, 1.1, 1.4])
def test_the_corrected_time_is_between_the_predicted_and_the_measured_one(ratio: float) -> None:
    before, low, high = 1.0, min(ratio, 1.0), max(ratio, 1.0)
    for number in (1, 5, 50):  # and nearer with each further run
        now = times(found([ratio] * number))
        assert low - 0.01 <= now <= high + 0.01
        assert abs(now - ratio) < abs(before - ratio)
        before = now


@settings(deadline=None)
@given(RATIOS, st.floats(1e-3, 1e4))
def test_an_interval_holds_the_prediction_that_it_is_of(ratios: list[float], seconds: float) -> None:
    around = of_factors(ratios).interval(LAYOUT, seconds)
    assert seconds in around
    assert around.low_s * around.high_s == pytest.approx(seconds**2)


@pytest.mark.parametrize(("degrees", "quantile"), [(3.0, 1.6377), (4.0, 1.5332), (8.0, 1.3968), (40.0, 1.3031)])
def test_the_quantile_is_that_of_tables_of_students_t(degrees: float, quantile: float) -> None:
    assert student_quantile(0.9, degrees) == pytest.approx(quantile, rel=1e-3)


def test_errors_of_plans_of_one_job_are_smaller_against_each_other_than_by_themselves() -> None:
    assert 1 < equal_ratio() < math.exp(SPREAD) < math.exp(COLD_SPREAD)


def test_predictions_without_runs_are_the_same_after_predictions_with_runs() -> None:
    before, drawn = predict_layout(LAYOUT), timeline(replace(LAYOUT, pp=2, dp=4))
    factors = found([1.6] * 20)
    moved = replace(LAYOUT, machines=replace(LAYOUT.machines, adjustment=factors))
    assert predict_layout(moved).step_time_s != before.step_time_s
    assert predict_layout(LAYOUT) == before
    predict_layout(moved)
    assert timeline(replace(LAYOUT, pp=2, dp=4)) == drawn
    predict_layout(moved)
    assert found([1.6] * 20) == factors, "a correction of corrected constants would move them twice"


def test_constants_in_use_change_results_that_are_cached() -> None:
    before = predict_layout(LAYOUT).step_time_s
    slower = {name: 0.5 * value for name, value in constants.FITTED.items() if name.startswith("SUSTAINED")}
    assert step_time_s(LAYOUT, slower) > before
    assert constants.fitted("SUSTAINED_HOPPER") == slower["SUSTAINED_HOPPER"]
    constants.use()
    assert constants.fitted("SUSTAINED_HOPPER") == constants.FITTED["SUSTAINED_HOPPER"]
    assert step_time_s(LAYOUT) == before
    constants.fix(dict(constants.FITTED) | slower)
    try:
        assert step_time_s(LAYOUT) > before, "predictions use the constants of this fit"
    finally:
        constants.fix()
    assert step_time_s(LAYOUT) == before


def test_each_fitted_constant_is_assumed_before_it_is_fitted_and_not_far_from_what_was_assumed() -> None:
    assert constants.FITTED.keys() == constants.ASSUMED.keys()
    for name, assumed in constants.ASSUMED.items():
        assert abs(math.log(constants.FITTED[name] / assumed.value)) < 4 * assumed.spread


@pytest.fixture(scope="module")
def plain() -> SearchResult:
    return search(job(), cluster(), top=10)


def test_a_corrected_search_ranks_by_corrected_times(plain: SearchResult) -> None:
    where, factors = cluster(), adjustment(runs([1.3] * 20, plain.best[0].layout))
    slowed = search(job(), where, top=10, calibration=factors)
    best = slowed.best[0]
    assert times(factors, plain.best[0].layout) == pytest.approx(1.3, rel=0.05)
    later = [one.prediction.step_time_s for one in slowed.best[1:]]
    assert later == sorted(later), "the first is the recommended one"
    for one in slowed.best:
        single = estimate(job(), one.plan, cluster=where, calibration=factors)
        assert one.prediction.step_time_s == pytest.approx(single.step_time_s)
        assert sum(one.prediction.breakdown.values()) == pytest.approx(one.prediction.step_time_s)
        assert one.prediction.throughput == pytest.approx(64 / one.prediction.step_time_s)
        assert single.interval is not None
        assert single.step_time_s in single.interval
        assert any("corrected by 20 measured runs" in note for note in single.notes)
    for one in plain.best:  # no plan that the search without runs found is faster
        single = estimate(job(), one.plan, cluster=where, calibration=factors)
        assert single.memory_bytes == one.prediction.memory_bytes
        assert single.step_time_s >= min(one.prediction.step_time_s for one in slowed.best) * (1 - 1e-9)
    assert best.prediction.step_time_s <= equal_ratio() * min(later)
    again = search(job(), where, top=10)
    assert [(one.plan, one.prediction.step_time_s) for one in again.best] == [
        (one.plan, one.prediction.step_time_s) for one in plain.best
    ], "a search without runs finds the same after one with runs"


def test_the_plan_that_is_returned_is_one_of_the_equal_ones(plain: SearchResult) -> None:
    found = {one.plan: one.prediction.step_time_s for one in plain.best}
    assert found[plan(job(), cluster=cluster())] <= equal_ratio() * plain.best[0].prediction.step_time_s


@pytest.mark.slow
def test_gains_of_changes_are_the_same_with_a_factor() -> None:
    """Both sides of a comparison are multiplied, other devices included."""
    factors = own_adjustment(runs([1.3] * 20))
    gains = []
    for basis in (None, factors):
        told = explain(job(), cluster(), search(job(), cluster(), calibration=basis), basis)
        questions = answers(told, Case(job(), cluster(), basis), ["one more host", "2x8xB200"])
        assert all(one.gain is not None for one in questions)
        gains.append([*(one.gain for one in told.changes), *(one.gain for one in questions)])
    assert gains[1] == pytest.approx(gains[0])
