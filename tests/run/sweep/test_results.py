"""No combination of a sweep is called best unless its runs show it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.run.sweep.results import SweepRun, combinations_of, verdict


def runs(*values: Sequence[float | None]) -> list[SweepRun]:
    return [
        SweepRun(number, {"lr": number}, seed, f"runs/{number}-seed{seed}", "finished", metric=value)
        for number, each in enumerate(values, 1)
        for seed, value in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("values", "higher", "best", "is_clear"),
    [
        ([[0.9, 0.91, 0.92], [0.5, 0.51, 0.52]], True, (1,), True),
        ([[0.9, 0.91, 0.92], [0.5, 0.51, 0.52]], False, (2,), True),
        ([[0.9, 0.5, 0.7], [0.8, 0.6, 0.75], [0.1, 0.1001, 0.1002]], True, (2, 1), False),  # within the spread
        ([[0.9, 0.91], [0.5, 0.51]], True, (1,), False),  # too few seeds for a claim
        ([[0.9], [0.5]], True, (1,), False),
        ([[0.9], [0.5], [0.9]], True, (1, 3), False),  # a tie
        ([[0.9, 0.91, 0.92]], True, (1,), False),  # nothing to compare with
        ([[None], [0.5]], True, (2,), False),
        ([[None], [None]], True, (), False),
    ],
)
def test_only_a_shown_difference_makes_a_best(
    values: list[list[float | None]], higher: bool, best: tuple[int, ...], is_clear: bool
) -> None:
    found = verdict(combinations_of(runs(*values)), "accuracy", higher_is_better=higher)
    assert (found.best, found.is_clear) == (best, is_clear)


def test_runs_that_did_not_finish_are_not_compared() -> None:
    every = runs([0.9], [0.5])
    every[0].state = "stopped early"
    assert verdict(combinations_of(every), "accuracy", higher_is_better=True).best == (2,)


def test_a_combination_tells_median_and_spread_of_its_seeds() -> None:
    [combination] = combinations_of(runs([0.9, 0.5, 0.6]))
    assert combination.metric == 0.6
    assert combination.spread == (0.5, 0.9)
    combination.runs[0].state = "failed"
    assert combination.spread == (0.5, 0.6)
    assert combination.state == "1 failed, 2 finished"
