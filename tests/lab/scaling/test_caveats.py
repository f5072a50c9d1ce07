"""What makes figures less sure is said, with its number; a benchmark without doubts has no caveats."""

from __future__ import annotations

from typing import Any

import pytest

from handmade_runs import STEPS, runs_of, setting
from paceline_lab.scaling.result import Setting
from paceline_lab.scaling.summary import FinishedRun
from paceline_lab.scaling.table import caveats
from small_jobs import small_job

ONE, TWO, TWO_WEAK = setting(), setting(2), setting(2, "weak")


def told(
    ones: list[FinishedRun],
    twos: list[FinishedRun],
    weak: list[FinishedRun] | None = None,
    two: Setting = TWO,
    **changes: Any,
) -> list[str]:
    found: dict[str, list[FinishedRun]] = {ONE.key: ones, two.key: twos}
    settings = [ONE, two]
    if weak is not None:
        settings.append(TWO_WEAK)
        found[TWO_WEAK.key] = weak
    return caveats(small_job(), settings, found, **({"repeat": 3, "cores": 2} | changes))


def test_a_quiet_and_complete_benchmark_has_none() -> None:
    assert told(runs_of(ONE, 10, 10, 10), runs_of(TWO, 6, 6, 6), runs_of(TWO_WEAK, 11, 11, 11)) == []


def test_what_was_not_measured_is_counted() -> None:
    assert told(runs_of(ONE, 10, 10, 10), runs_of(TWO, 6, 6)) == ["5 of 6 runs were measured."]
    assert (
        told(runs_of(ONE, 10), [], repeat=1)[1]
        == "With 1 repeat there is no confidence interval, so no difference is reported."
    )


def test_other_load_is_told_with_what_it_may_have_cost() -> None:
    [text] = told(runs_of(ONE, 10, 10, 10, other_cores=0.3), runs_of(TWO, 6, 6, 6, other_cores=0.4))
    assert text == (
        "Other processes kept 0.35 cores busy (median of the runs), and 0.40 at most. They may have "
        "slowed the ranks, so the "
        "intervals extend further towards shorter times: 2 devices by 40 %."
    ), "one device left a core free for them"
    [text] = told(runs_of(ONE, 10, 10, 10, other_cores=0.3), runs_of(TWO, 6, 6, 6, other_cores=0.4), cores=8)
    assert "slowed" not in text
    [text] = told(runs_of(ONE, 10, 10, 10, other_cores=None), runs_of(TWO, 6, 6, 6, other_cores=None))
    assert text.startswith("Other load on the machine is unknown")


@pytest.mark.parametrize(("off_by", "doubted"), [(0.0002, False), (0.02, True)])
def test_losses_that_do_not_agree_are_told_before_anyone_compares_the_times(off_by: float, doubted: bool) -> None:
    ones = runs_of(ONE, 10, 10, 10)
    losses = [loss and loss * (1 + off_by) for loss in ones[0].losses]
    found = told(ones, runs_of(TWO, 6, 6, 6, losses=losses))
    assert bool(found) == doubted
    if doubted:
        assert f"(2 devices by 1.96 % after {STEPS} steps)" in found[0]


def test_losses_that_are_not_finite_or_of_runs_of_differing_length_can_be_compared() -> None:
    ones = runs_of(ONE, 10, 10, 10)
    assert told(ones, runs_of(TWO, 6, 6, 6, losses=[None, *ones[0].losses[1:9]])) == []
    assert told(ones, runs_of(TWO, 6, 6, 6, losses=[None] * STEPS)) == []


def test_a_target_that_was_missed_or_took_other_numbers_of_steps_is_told() -> None:
    two = setting(2, steps=None)
    missed, steps = told(
        runs_of(ONE, 10, 10, 10),
        [*runs_of(two, 6, 6, reached=True), *runs_of(two, 6, steps=30, reason="epochs: 2 done")],
        two=two,
    )
    assert missed == "1 of 3 runs of 2 devices did not reach the target (epochs: 2 done)."
    assert "(2 devices 20 to 30)" in steps


def test_a_training_set_too_small_for_the_weak_batch_is_told() -> None:
    [text] = told(runs_of(ONE, 10, 10, 10), runs_of(TWO, 6, 6, 6), runs_of(TWO_WEAK, 9, 9, 9, samples=70.0))
    assert text.startswith("2 devices, weak: most steps had 70 samples instead of 128")
