"""A whole training: amounts of work, scaling laws, goodput, stragglers, spot prices, energy and carbon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handmade_search import TRACE, candidate, cluster, job
from paceline.errors import PlanError
from paceline.planning.explain.training_run import (
    BESIROGLU,
    HOFFMANN,
    HOST_OVERHEAD,
    Amount,
    Conditions,
    Goal,
    amount_of,
    extrapolated,
    read_amount,
    read_duration,
    straggler_slowdown,
    training_run,
)
from paceline.planning.search.result import Candidate
from paceline.units import kilograms, kilowatt_hours, span

STEPS = Amount(1000, "the job's 1,000 steps")


def of_power(watts: float | None) -> Candidate:
    one = candidate("dp=2 tp=8", compute=0.8, tp=0.2)
    machines = one.layout.machines
    device = replace(machines.device, power_w=watts)
    return replace(one, layout=replace(one.layout, machines=replace(machines, device=device)))


@pytest.mark.parametrize(
    ("text", "value"), [("15T", 15e12), ("300b", 3e11), ("1.5e12", 1.5e12), ("20,000", 2e4), ("5 M", 5e6), ("7k", 7e3)]
)
def test_amounts_are_read_as_people_write_them(text: str, value: float) -> None:
    assert read_amount(text) == value


@pytest.mark.parametrize("text", ["", "many", "-3", "0", "3X", "1e999"])
def test_what_is_no_amount_is_an_error_with_examples(text: str) -> None:
    with pytest.raises(PlanError, match="15T"):
        read_amount(text)


def test_durations_are_read_and_a_number_alone_is_none() -> None:
    assert read_duration("30d") == 30 * 86_400
    assert read_duration("90min") == 5400
    assert read_duration("2 weeks") == 14 * 86_400
    with pytest.raises(PlanError, match="30d"):
        read_duration("30")


def test_steps_follow_from_tokens_samples_or_the_jobs_own_stop_rule() -> None:
    assert amount_of(job(), TRACE, Goal(tokens=64 * 1024 * 10)).steps == 10
    assert amount_of(job(), TRACE, Goal(samples=65)).steps == 2
    assert amount_of(job(), TRACE, Goal()).steps == 1000
    with pytest.raises(PlanError, match="--tokens"):
        amount_of(job(stop={"epochs": 3}), TRACE, Goal())
    with pytest.raises(PlanError, match="one of"):
        amount_of(job(), TRACE, Goal(tokens=1, loss=2.0))


def test_tokens_of_a_model_that_has_none_are_refused() -> None:
    with pytest.raises(PlanError, match="--samples"):
        amount_of(job(), replace(TRACE, tokens=1), Goal(tokens=1e9))


def test_the_corrected_law_puts_chinchilla_near_its_reported_loss_and_both_laws_invert() -> None:
    for law in (BESIROGLU, HOFFMANN):
        assert law.loss(70e9, 1.4e12) == pytest.approx(1.96, abs=0.03)
        assert law.tokens(7e9, law.loss(7e9, 1e12)) == pytest.approx(1e12)


def test_a_loss_below_the_floor_is_an_error_that_names_it_and_the_law() -> None:
    with pytest.raises(PlanError, match=r"1\.8172.*|Besiroglu"):
        BESIROGLU.tokens(7e9, 1.8)
    with pytest.raises(PlanError, match="needs more than") as told:
        BESIROGLU.tokens(1e8, 2.0)
    assert f"{BESIROGLU.floor_of(1e8):.3f}" in str(told.value)


def test_a_loss_says_whose_law_and_whose_data_it_rests_on_and_where_it_extrapolates() -> None:
    large = replace(TRACE, blocks=tuple(replace(block, matrices=10**9) for block in TRACE.blocks))
    amount = amount_of(job(), large, Goal(loss=2.2))
    assert amount.steps * 64 * 1024 == pytest.approx(BESIROGLU.tokens(large.parameters, 2.2), rel=1e-3)
    assert "nats per token" in amount.notes[0]
    assert "1.8172" in amount.notes[0]
    assert "Hoffmann" in amount.notes[1]
    assert extrapolated(405e9, 15e12).startswith("405 billion parameters and 15.0 trillion tokens")
    assert not extrapolated(1e9, 1e11)


def test_the_laws_of_dense_models_are_not_used_on_a_mixture() -> None:
    mixture = replace(TRACE, blocks=tuple(replace(block, experts=10**9) for block in TRACE.blocks))
    with pytest.raises(PlanError, match="mixture"):
        amount_of(job(), mixture, Goal(loss=2.2))


def test_the_slowest_of_many_ranks_is_slower_than_that_of_few() -> None:
    assert straggler_slowdown(1, 0.05) == straggler_slowdown(1024, 0.0) == 1.0
    # 1.03 and 1.54 standard deviations: tables of normal order statistics for 5 and 10
    assert straggler_slowdown(5, 1.0) == pytest.approx(1 + 1.163, abs=0.02)
    assert straggler_slowdown(10, 1.0) == pytest.approx(1 + 1.539, abs=0.02)
    assert straggler_slowdown(4096, 0.05) > straggler_slowdown(64, 0.05)


def test_time_and_cost_grow_by_checkpoints_failures_and_stragglers_and_by_no_more() -> None:
    priced = cluster(price_per_hour=2.0)
    calm = training_run(job(), priced, of_power(None), STEPS)
    assert calm.steps_s == pytest.approx(1000)
    assert 1000 < calm.purchases[0].wall_s < 1100
    assert calm.purchases[0].cost == pytest.approx(calm.purchases[0].wall_s / 3600 * 16 * 2.0)
    rough = training_run(
        job(), cluster(failures_per_host_day=4.0), of_power(None), STEPS, Conditions(straggler_sigma=0.1)
    )
    assert rough.slowdown == pytest.approx(straggler_slowdown(16, 0.1))
    assert rough.purchases[0].goodput < calm.purchases[0].goodput / rough.slowdown
    assert rough.purchases[0].cost is None


def test_spot_machines_cost_less_an_hour_and_take_longer() -> None:
    conditions = Conditions(spot_price=0.5, preemptions_per_host_day=6.0)
    demand, spot = training_run(job(), cluster(price_per_hour=2.0), of_power(None), STEPS, conditions).purchases
    assert spot.wall_s > demand.wall_s
    assert spot.cost is not None
    assert demand.cost is not None
    assert spot.cost < demand.cost


def test_machines_that_are_taken_away_before_they_save_are_an_error() -> None:
    conditions = Conditions(spot_price=0.5, preemptions_per_host_day=1e9)
    with pytest.raises(PlanError, match="no time"):
        training_run(job(), cluster(), of_power(None), STEPS, conditions)


def test_energy_counts_hosts_and_the_data_centre_and_is_unknown_without_a_power() -> None:
    run = training_run(job(), cluster(), of_power(700.0), STEPS, Conditions(pue=1.2, carbon_g_per_kwh=400))
    bought = run.purchases[0]
    kwh = 16 * 0.7 * HOST_OVERHEAD * 1.2 * bought.wall_s / 3600
    assert bought.energy_kwh == pytest.approx(kwh)
    assert bought.carbon_kg == pytest.approx(0.4 * kwh)
    without = training_run(job(), cluster(), of_power(None), STEPS)
    assert without.purchases[0].energy_kwh is None
    assert any("energy is unknown" in note for note in without.notes)


def test_carbon_has_no_default_country() -> None:
    run = training_run(job(), cluster(), of_power(700.0), STEPS)
    assert run.purchases[0].carbon_kg is None
    assert any("--carbon" in note for note in run.notes)


def test_days_megawatt_hours_and_tonnes_are_shown_in_their_own_units() -> None:
    assert str(span(86_400 * 61.2)) == "61.2 days"
    assert str(span(86_400)) == "24.0 h"
    assert str(kilowatt_hours(3450)) == "3.45 MWh"
    assert str(kilograms(12)) == "12.0 kg"
