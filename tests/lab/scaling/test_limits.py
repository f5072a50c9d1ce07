"""The sentences about limits of scaling follow from the numbers, or are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handmade_runs import result, runs_of, setting
from paceline.engine.meter import PARTS
from paceline.planning.plan import Plan
from paceline_lab.scaling.result import MeasuredSetting
from paceline_lab.scaling.table import excess_s, limits_of

ALONE = {"data": 0.4, "compute": 8.0, "optimizer": 1.6}


def settings(
    parts_ms: dict[str, float], weak_ms: dict[str, float] | None = None, spread: float = 0.01, repeats: int = 3
) -> list[MeasuredSetting]:
    """One device as in `ALONE`, two as given, and two with the same batch per device where given."""
    found = []
    one = runs_of(setting(), *around(ALONE, spread, repeats), parts_ms=ALONE)
    for what, parts in ((setting(), ALONE), (setting(2), parts_ms), (setting(2, "weak"), weak_ms)):
        if parts is not None:
            found.append(result(what, runs_of(what, *around(parts, spread, repeats), parts_ms=parts), one))
    return found


def around(parts_ms: dict[str, float], spread: float, repeats: int) -> list[float]:
    return [sum(parts_ms.values()) * (1 + spread * (i - repeats // 2)) for i in range(repeats)]


def test_the_excess_over_the_ideal_step_is_split_over_the_parts_and_sums_to_it() -> None:
    parts = {"data": 0.2, "compute": 4.4, "comm": 1.0, "imbalance": 0.2, "optimizer": 1.6}
    one, two = settings(parts)
    lost = excess_s(one, two)
    assert lost == pytest.approx(
        {"data": 0, "compute": 4e-4, "bubble": 0, "comm": 1e-3, "imbalance": 2e-4, "optimizer": 8e-4, "checkpoint": 0},
        abs=1e-9,
    )
    assert sum(lost.values()) == pytest.approx(two.step_time_s.middle - one.step_time_s.middle / 2)
    headline, where = limits_of([one, two])
    assert headline.startswith("2 devices are 1.35× as fast as one")
    assert "68 % of the ideal 2×" in headline
    assert where == (
        "A step takes 7.4 ms instead of 5 ms, which is 1/2 of one device's step. Causes of the difference: "
        "42 % exposed communication, 33 % optimizer updates, 17 % slower compute and 8 % waiting for slower ranks."
    )


@pytest.mark.parametrize("part", PARTS)
def test_no_change_is_advised_that_was_not_measured(part: str) -> None:
    ideal = {name: ALONE.get(name, 0.0) / 2 for name in PARTS}
    assert len(limits_of(settings(ideal | {part: ideal[part] + 2.0}))) == 2, "a headline, and where the time goes"


@pytest.mark.parametrize(("weak_ms", "gains"), [(8.2, True), (12.0, False), (10.4, False)])
def test_a_larger_batch_is_advised_only_if_its_measured_gain_is_certain(weak_ms: float, gains: bool) -> None:
    parts = {"data": 0.2, "compute": 4.6, "comm": 0.1, "optimizer": 1.6}
    found = limits_of(settings(parts, weak_ms=ALONE | {"compute": weak_ms}, spread=0.03, repeats=5))
    assert any("larger global batch" in sentence for sentence in found) == gains


@pytest.mark.parametrize(
    ("chosen_ms", "verdict"), [(3.0, "faster than (1.97 ×)"), (5.92, "not measurably different"), (9.0, "slower than")]
)
def test_the_plan_of_auto_is_compared_with_the_fixed_layout(chosen_ms: float, verdict: str) -> None:
    one = runs_of(setting(), *around(ALONE, 0.01, 5), parts_ms=ALONE)
    two = {"compute": 4.32, "optimizer": 1.6}
    auto = replace(setting(2), key="auto", label="auto: threads=2", plan=Plan(threads=2))
    found = [
        result(what, runs_of(what, *around(parts, 0.01, 5), parts_ms=parts), one)
        for what, parts in ((setting(), ALONE), (setting(2), two), (auto, {"compute": chosen_ms}))
    ]
    sentences = limits_of(found, auto="threads=2")
    assert "with threads=2, the plan that auto chose" in sentences[0], "whichever is faster"
    assert verdict in sentences[-1]
    assert "with dp=2, the plan that auto chose" in limits_of(found, found[1].plan, "dp=2")[0]
    assert found[1].plan in limits_of(found)[0], "without auto the fixed layout, which is named too"


def test_devices_that_are_slower_than_one_are_called_so_and_explained() -> None:
    headline, where = limits_of(settings({"compute": 4.0, "comm": 9.0}))
    assert headline.startswith("2 devices are slower than one with dp=2 threads=1: 0.77× its speed")
    assert "exposed communication" in where


def test_nothing_is_claimed_where_the_intervals_overlap_but_what_is_certainly_lost_is_explained() -> None:
    headline, *more = limits_of(settings({"compute": 4.0, "comm": 5.9}, spread=0.02))
    assert headline.startswith("No measurable difference between one device and 2 devices with")
    assert "exposed communication" in more[0]
    one = runs_of(setting(), 5, 10, 15)
    _, wide = limits_of([result(setting(), one, one), result(setting(2), runs_of(setting(2), 12, 7, 4), one)])
    assert wide.startswith("The intervals are too wide")


def test_an_ideal_speedup_has_no_limit_to_tell_of() -> None:
    headline, rest = limits_of(settings({"data": 0.2, "compute": 4.0, "optimizer": 0.8}))
    assert "100 % of the ideal" in headline
    assert rest.startswith("Within the interval, this is the ideal speedup")


def test_too_few_repeats_or_one_device_say_nothing() -> None:
    assert limits_of(settings({"compute": 4.0}, repeats=2))[0].startswith("Fewer than 3 repeats")
    assert limits_of(settings({"compute": 4.0})[:1]) == ["To show how the job scales, measure one device and several."]
    assert len(limits_of([])) == 1
