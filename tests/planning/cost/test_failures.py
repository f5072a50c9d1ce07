"""Predicted goodput under failures, held to a simulation of events, and the best interval between checkpoints."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade_search import candidate
from paceline.planning.cost import constants
from paceline.planning.cost.failures import FailureCosts, failure_costs

USUAL = FailureCosts(between_s=3600.0, step_s=1.0, stall_s=2.0, write_s=20.0, restart_s=60.0)


def costs(**changes: float) -> FailureCosts:
    return replace(USUAL, **changes)  # type: ignore[arg-type]


def simulated(of: FailureCosts, interval_s: float, failures: int, seed: int) -> float:
    """Goodput of a run whose failures come at random, by events one after the other."""
    draw = random.Random(seed)
    wall_s = useful_s = 0.0
    next_failure = draw.expovariate(1 / of.between_s)
    failed = 0
    while failed < failures:
        # a restart, which a failure begins anew
        if next_failure < wall_s + of.restart_s:
            wall_s, next_failure = next_failure, next_failure + draw.expovariate(1 / of.between_s)
            failed += 1
            continue
        wall_s += of.restart_s
        # steps and checkpoints until the next failure; what is not yet written then is lost
        written_at = []
        while wall_s < next_failure:
            wall_s += interval_s + of.stall_s
            written_at.append(wall_s + of.write_s)
            wall_s += max(0.0, of.write_s - interval_s)
        useful_s += interval_s * sum(moment < next_failure for moment in written_at)
        wall_s, next_failure = next_failure, next_failure + draw.expovariate(1 / of.between_s)
        failed += 1
    return useful_s / wall_s


@pytest.mark.parametrize(
    ("of", "interval_s"),
    [
        (costs(), 120.0),
        (costs(), 1500.0),
        (costs(between_s=300.0, restart_s=100.0), 60.0),
        (costs(between_s=100.0, stall_s=30.0, write_s=0.0, restart_s=5.0), 70.0),
        (costs(write_s=100.0), 50.0),
    ],
    ids=["often", "rarely", "many failures", "blocking checkpoints", "written too slowly"],
)
def test_the_goodput_of_restarts_is_that_of_a_simulation(of: FailureCosts, interval_s: float) -> None:
    assert of.restarting(interval_s) == pytest.approx(simulated(of, interval_s, failures=8000, seed=1), rel=0.03)


def test_recovery_in_place_is_that_of_a_simulation() -> None:
    of = replace(costs(between_s=120.0, stall_s=0.0, write_s=0.0), in_place=True)
    draw, wall_s, useful_s = random.Random(2), 0.0, 0.0
    for _ in range(5000):
        lifetime_s = draw.expovariate(1 / of.between_s)
        useful_s += lifetime_s
        wall_s += lifetime_s + of.step_s + constants.RECOVERY_S
    assert of.goodput(600.0) == pytest.approx(useful_s / wall_s, rel=0.01)
    assert of.goodput(600.0) > of.restarting(of.best_interval_s)


COSTS = st.builds(
    costs,
    between_s=st.floats(30, 1e7),
    step_s=st.floats(1e-3, 100),
    stall_s=st.floats(0, 300),
    write_s=st.floats(0, 3000),
    restart_s=st.floats(0, 3000),
)


@given(of=COSTS, more=st.floats(1.01, 100))
def test_more_failures_mean_less_goodput_and_no_longer_interval(of: FailureCosts, more: float) -> None:
    worse = replace(of, between_s=of.between_s / more)
    assert worse.best_interval_s <= of.best_interval_s * (1 + 1e-9)
    best, then = of.goodput(of.best_interval_s), worse.goodput(worse.best_interval_s)
    assert 0 <= then <= best <= 1
    assert then < best or best == 0


@given(of=COSTS, other=st.floats(0.1, 10))
def test_no_other_interval_is_better_than_the_best(of: FailureCosts, other: float) -> None:
    best_s = of.best_interval_s
    assert of.restarting(max(best_s * other, of.write_s, of.step_s)) <= of.restarting(best_s) * (1 + 1e-9)


@pytest.mark.parametrize("stall_s", [0.1, 2.0, 30.0, 300.0])
def test_the_best_interval_is_that_of_the_literature(stall_s: float) -> None:
    """Young's first order for short checkpoints, Daly's higher order for all."""
    of = costs(stall_s=stall_s, write_s=0.0, step_s=0.01)
    ratio = stall_s / (2 * of.between_s)
    young = math.sqrt(2 * stall_s * of.between_s)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
    assert of.best_interval_s == pytest.approx(daly, rel=1e-3)
    assert stall_s > 1 or of.best_interval_s == pytest.approx(young, rel=0.01)
    assert abs(of.best_every_steps * of.step_s - of.best_interval_s) <= of.step_s


@given(of=COSTS)
def test_the_best_number_of_steps_is_better_than_its_neighbours(of: FailureCosts) -> None:
    steps = of.best_every_steps
    best = of.restarting(steps * of.step_s)
    for other in {max(1, steps - 1), steps + 1, 2 * steps}:
        assert of.restarting(other * of.step_s) <= best * (1 + 1e-9)


def test_failures_that_come_faster_than_a_restart_leave_nothing() -> None:
    assert costs(between_s=0.01).restarting(600.0) == 0.0


@pytest.mark.parametrize(
    ("plan", "ranks_per_host", "in_place"),
    [
        ("dp=2 tp=8", [8, 8], True),
        ("dp=2 tp=4", [8, 0], False),
        ("dp=2 tp=6", [8, 4], False),
        ("dp=3 tp=4", [8, 4], True),
        ("fsdp=16", [8, 8], False),
        ("tp=8", [8, 0], False),
    ],
)
def test_a_plan_recovers_in_place_where_no_host_has_the_only_copy(
    plan: str, ranks_per_host: list[int], in_place: bool
) -> None:
    layout = candidate(plan, compute=1.0).layout
    assert failure_costs(layout, 1.0, 0.01, ranks_per_host).in_place is in_place


def test_costs_follow_the_state_the_hosts_and_the_rate() -> None:
    layout = candidate("fsdp=16", compute=1.0).layout
    one = failure_costs(layout, 1.0, 0.01, [8, 8])
    assert one.between_s == pytest.approx(86_400 / 0.02)
    assert one.write_s > one.stall_s > 0
    rarer = failure_costs(layout, 1.0, 0.005, [8, 8])
    assert rarer == replace(one, between_s=2 * one.between_s)
    larger = replace(layout, optimizer_bytes=2 * layout.optimizer_bytes + layout.parameter_bytes)
    twice_s = failure_costs(larger, 1.0, 0.01, [8, 8]).write_s - constants.CHECKPOINT_WRITE_S
    assert twice_s == pytest.approx(2 * (one.write_s - constants.CHECKPOINT_WRITE_S))
