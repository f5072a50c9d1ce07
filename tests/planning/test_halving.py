"""Search over combinations of plans and settings, with simulated times.

A wrong choice here slows every run that `auto` plans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from random import Random

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.planning.halving import HALVES, ROUNDS, Halving, combined
from paceline.planning.plan import Plan
from paceline.planning.shortlist import LEAST_ROUNDS, Comparison, Forecast, bases_of
from planner_jobs import job_on_digits

job = partial(job_on_digits, model="cifar_cnn", global_batch=64, stop={"epochs": 9})
CORES = Cluster(hosts=(Host(name="a", cpu="AMD EPYC", cores=2, memory_bytes=2**34),))
FIRST = Plan(dp=2)
Times = Callable[[Plan], float]


def search_for(forecasts: list[Forecast], failed: frozenset[str] = frozenset()) -> Halving:
    bases = bases_of(job(), CORES, FIRST, forecasts, settings=True)
    return Halving(FIRST, combined(job(), CORES, bases, batch_norm=False), forecasts, failed=failed)


def searched(time_of: Times, noise: float, seed: int, groups: int = 3) -> Halving:
    """Measure as a trial does, with step times that vary by the fraction `noise`."""
    random, halving = Random(seed), search_for([])

    def measured(plans: list[Plan], rounds: int) -> None:
        for _ in range(rounds):
            speed = random.uniform(0.8, 1.25)  # of the machine in this round
            first_s = time_of(FIRST) * speed * random.lognormvariate(0, noise)
            for plan in plans:
                own_s = time_of(plan) * speed * random.lognormvariate(0, noise)
                halving.compared.setdefault(str(plan), Comparison()).add(own_s, first_s)

    measured(halving.alone, ROUNDS)
    measured(halving.singles, ROUNDS)
    for _ in range(groups):
        measured(halving.promising(), ROUNDS)
    for count, rounds in HALVES:
        measured(halving.best(count), rounds)
    return halving


def settings_that_help_together(plan: Plan) -> float:
    """Two settings help only together; the others make steps slightly slower."""
    both = plan.memory_format == "channels_last" and plan.fused
    factor = 0.7 if both else 1.02 if plan.memory_format == "channels_last" or plan.fused else 1.0
    others = (1.05 if plan.onednn else 1.0) * (1.1 if plan.ranks == 1 else 1.0)
    return 0.02 * factor * others * (1.15 if plan.microbatches > 1 else 1.0)


def a_plan_that_is_best_with_a_setting_only(plan: Plan) -> float:
    return 0.02 * (0.8 if plan.ranks == 1 and plan.onednn else 1.03 if plan.ranks == 1 or plan.onednn else 1.0)


@pytest.mark.parametrize("time_of", [settings_that_help_together, a_plan_that_is_best_with_a_setting_only])
def test_what_helps_only_together_is_found_in_noise(time_of: Times) -> None:
    found = [searched(time_of, noise=0.03, seed=seed) for seed in range(20)]
    best_s = min(time_of(one.plan) for one in found[0].all)
    regrets = sorted(time_of(halving.chosen()) / best_s - 1 for halving in found)
    assert regrets[len(regrets) * 3 // 4] <= 0.02, regrets
    measured = max(len(halving.compared) for halving in found)
    assert measured < len(found[0].all) / 2, "the search should not measure every combination"


def test_what_costs_a_little_is_not_taken_because_of_noise() -> None:
    def time_of(plan: Plan) -> float:
        return 0.02 * (1.03 if plan.ranks == 1 else 1.0) * 1.03 ** len(str(plan).split())

    taken = [searched(time_of, noise=0.05, seed=seed).chosen() for seed in range(20)]
    assert sum(plan != FIRST for plan in taken) <= 2


def test_of_equally_fast_combinations_the_simplest_is_taken() -> None:
    halving = searched(lambda plan: 0.01 if plan.ranks == 1 else 0.02, noise=0.001, seed=1)
    assert len(str(halving.chosen()).split()) == 1
    assert halving.chosen().ranks == 1


def test_predictions_decide_where_single_settings_are_tried() -> None:
    """Measured times then count for more than predictions."""
    halving = search_for([Forecast("dp=2", 0.02, 0.02), Forecast("dp=1", 0.005, 0.005)])
    assert {plan.ranks for plan in halving.singles} == {1}
    for plan in halving.alone:
        halving.compared[str(plan)] = Comparison([0.03] * ROUNDS, [0.02] * ROUNDS)
    assert {plan.ranks for plan in halving.singles} == {2}


def test_what_failed_alone_is_in_no_combination() -> None:
    halving = search_for([], frozenset({"dp=2 memory_format=channels_last", "threads=1"}))
    assert all(one.plan.memory_format == "contiguous" and one.base.threads != 1 for one in halving.all)
    assert any(one.plan.fused for one in halving.all)


def test_every_combination_of_settings_is_in_the_space_and_keeps_the_precision() -> None:
    space = {one.plan: one for one in search_for([]).all}
    assert len(space) == len(set(space))
    keys = {"memory_format": "channels_last", "fused": True, "onednn": True, "microbatches": 2}
    for size in range(len(keys) + 1):
        for some in combinations(keys, size):
            for base in ({"dp": 2}, {"dp": 1}, {"threads": 1}):
                assert Plan(**base, **{key: keys[key] for key in some}) in space  # type: ignore[arg-type]
    assert {plan.precision_for(job()) for plan in space} == {"fp32"}
    assert {plan.compile for plan in space} == {"off"}


def test_batch_norm_has_no_other_microbatches() -> None:
    assert {one.plan.microbatches for one in combined(job(), CORES, [FIRST], batch_norm=True)} == {1}


def test_the_rows_end_with_the_choice() -> None:
    halving = searched(settings_that_help_together, noise=0.01, seed=3)
    rows = list(halving.rows())
    assert rows[-1].change == str(halving.chosen())
    assert [row.verdict == "kept" for row in rows] == [False] * (len(rows) - 1) + [True]
    assert all(len(one.ratios) >= LEAST_ROUNDS for text, one in halving.compared.items() if text == rows[-1].change)
