"""Runs that are like a plan: their errors count for it, and the less the more they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade_search import candidate, cluster, job
from paceline.planning.cost.estimate import estimate
from paceline.planning.cost.layout import Layout
from paceline.planning.machines import Adjustment, adjustment
from paceline.planning.search.search import search
from paceline.planning.shortlist import COMMON, OWN, alike
from paceline.planning.tables.layouts import Row

LAYOUT = candidate("dp=8", compute=1.0).layout
SIZES = (1.0, 4.0, 16.0)


def of_size(samples: float) -> Layout:
    return replace(LAYOUT, samples=samples)


def measured(ratios: Sequence[tuple[Layout, float]]) -> Adjustment:
    """Factors of runs that took so many times what is predicted, which is one second."""
    rows = [Row("mine", at, {}, layout, ratio, None, False) for at, (layout, ratio) in enumerate(ratios, 2)]
    return adjustment(rows, lambda _: 1.0)


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


def test_measured_runs_put_the_plans_found_in_their_order() -> None:
    where = cluster()
    plain = search(job(), where, top=10).best
    small = [one for one in plain if one.layout.samples < 8]
    assert small
    assert plain[0] not in small
    # large microbatches are slower than predicted, four runs of each plan
    runs = [one for one in plain for _ in range(4)]
    ratios = [1.0 if one in small else 1.4 for one in runs]
    rows = [
        Row("mine", at, {}, one.layout, ratio * one.prediction.step_time_s, None, False)
        for at, (one, ratio) in enumerate(zip(runs, ratios, strict=True), 2)
    ]
    told = search(job(), where, top=10, calibration=adjustment(rows, lambda layout: estimate(layout).step_time_s)).best
    assert told[0].plan in [one.plan for one in small]
    others = [one.prediction.step_time_s for one in told[1:]]
    assert others == sorted(others), "the first is the recommended one"
    assert all(one.prediction.step_time_s in one.interval for one in told)
    slower = next(one for one in told if one.plan == plain[0].plan)
    assert re.match(r"\+\d+ % by measured runs that are like it", slower.why)
