"""A whole training: amounts of work, scaling laws, goodput, stragglers, spot prices, energy and carbon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handmade_search import TRACE, candidate, cluster, job
from paceline.cluster.cluster import cluster_from
from paceline.errors import ClusterError, PlanError
from paceline.planning.explain.advice import Case
from paceline.planning.explain.explain import Explanation, explain
from paceline.planning.explain.questions import Answer, answers, read_question
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
from paceline.planning.explain.which_cluster import (
    EXAMPLES,
    ClusterChoice,
    Offer,
    Offers,
    host_counts,
    read_offers,
    which_cluster,
)
from paceline.planning.search.result import Candidate
from paceline.planning.search.search import search
from paceline.units import kilograms, kilowatt_hours, money, span
from refusals import raises

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
    with raises(PlanError, "cost.amount_invalid"):
        read_amount(text)


def test_durations_are_read_and_a_number_alone_is_none() -> None:
    assert read_duration("30d") == 30 * 86_400
    assert read_duration("90min") == 5400
    assert read_duration("2 weeks") == 14 * 86_400
    with raises(PlanError, "cost.duration_invalid"):
        read_duration("30")


def test_steps_follow_from_tokens_samples_or_the_jobs_own_stop_rule() -> None:
    assert amount_of(job(), TRACE, Goal(tokens=64 * 1024 * 10)).steps == 10
    assert amount_of(job(), TRACE, Goal(samples=65)).steps == 2
    assert amount_of(job(), TRACE, Goal()).steps == 1000
    with raises(PlanError, "cost.amount_missing"):
        amount_of(job(stop={"epochs": 3}), TRACE, Goal())
    with raises(PlanError, "cost.amounts_conflict"):
        amount_of(job(), TRACE, Goal(tokens=1, loss=2.0))


def test_tokens_of_a_model_that_has_none_are_refused() -> None:
    with raises(PlanError, "cost.not_tokens"):
        amount_of(job(), replace(TRACE, tokens=1), Goal(tokens=1e9))


def test_the_corrected_law_puts_chinchilla_near_its_reported_loss_and_both_laws_invert() -> None:
    for law in (BESIROGLU, HOFFMANN):
        assert law.loss(70e9, 1.4e12) == pytest.approx(1.96, abs=0.03)
        assert law.tokens(7e9, law.loss(7e9, 1e12)) == pytest.approx(1e12)


def test_a_loss_below_the_floor_is_an_error_that_names_it_and_the_law() -> None:
    with raises(PlanError, "cost.loss_below_floor", floor=1.8172):
        BESIROGLU.tokens(7e9, 1.8)
    with raises(PlanError, "cost.loss_below_models_floor", least=BESIROGLU.floor_of(1e8)):
        BESIROGLU.tokens(1e8, 2.0)


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
    with raises(PlanError, "cost.no_law_for_experts"):
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
    with raises(PlanError, "cost.no_time_left"):
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


H100 = Offer(cluster="8xH100-SXM, 400gbit", price=3.0, spot=1.0, hosts=4, name="Hopper")
A100 = Offer(cluster="8xA100-SXM-80", price=1.5, hosts=2)


def choice(*offers: Offer, **limits: Any) -> ClusterChoice:
    conditions = Conditions(preemptions_per_host_day=1.0)
    return which_cluster(job(), Offers(offers=offers), Goal(tokens=1e9), conditions, **limits)


@pytest.fixture(scope="module")
def every() -> ClusterChoice:
    return choice(H100, A100)


def test_host_counts_double_and_end_with_the_largest() -> None:
    assert host_counts(1) == [1]
    assert host_counts(6) == [1, 2, 4, 6]
    assert host_counts(8) == [1, 2, 4, 8]


def test_every_number_of_hosts_and_every_way_to_pay_is_an_option(every: ClusterChoice) -> None:
    assert {(one.offer.title, one.hosts, one.bought.what) for one in every.options} == {
        *(("Hopper", hosts, what) for hosts in (1, 2, 4) for what in ("on demand", "spot")),
        *(("8xA100-SXM-80", hosts, "on demand") for hosts in (1, 2)),
    }


def test_no_option_beats_one_of_the_front_in_both_time_and_cost(every: ClusterChoice) -> None:
    for one in every.front:
        assert not any(other.cost < one.cost and other.bought.wall_s < one.bought.wall_s for other in every.options)
    assert [one.cost for one in every.front] == sorted(one.cost for one in every.front)
    assert every.fastest == every.front[-1]
    assert every.cheapest == every.front[0]


def test_budget_and_deadline_bind_and_what_is_missing_is_said(every: ClusterChoice) -> None:
    assert every.fastest is not None
    assert every.cheapest is not None
    tight = replace(every, budget=(every.fastest.cost + every.cheapest.cost) / 2)
    assert tight.fastest is not None
    assert tight.fastest.cost <= (tight.budget or 0)
    late = replace(every, deadline_s=every.fastest.bought.wall_s * 1.01)
    assert late.cheapest is not None
    assert late.cheapest.bought.wall_s <= (late.deadline_s or 0)
    none = choice(A100, budget=1e-6, deadline_s=1.0)
    assert none.fastest is None
    assert money(min(one.cost for one in none.options)) in none.nothing


def test_spot_prices_without_a_rate_of_preemptions_are_no_option() -> None:
    found = which_cluster(job(), Offers(offers=(H100,)), Goal(tokens=1e9))
    assert {one.bought.what for one in found.options} == {"on demand"}


def test_an_offer_on_which_nothing_fits_is_named_with_its_reason_and_others_go_on() -> None:
    large = job(model={"transformer": {"layers": 32, "hidden": 8192, "heads": 64, "seq": 1024, "vocab": 32000}})
    small = Offer(cluster="V100-SXM-16", price=0.1)
    found = which_cluster(large, Offers(offers=(small, H100)), Goal(tokens=1e9))
    assert {one.offer.title for one in found.options} == {"Hopper"}
    assert any(machines == "1 host of V100-SXM-16" and "GiB" in reason for machines, reason in found.refused)
    with raises(PlanError, "offers.none_can_run"):
        which_cluster(large, Offers(offers=(small,)), Goal(tokens=1e9))


def test_the_bundled_offers_can_be_planned_for_and_are_dated() -> None:
    offers = read_offers(EXAMPLES)
    assert offers.as_of
    for offer in offers.offers:
        assert offer.of_hosts(offer.hosts).price_per_hour == offer.price


def test_offers_are_read_from_csv_too(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text('cluster,price,hosts,spot\n"8xH100-SXM, 400gbit",2.5,16,\n8xA100-SXM-80,1.2,4,0.6\n')
    first, second = read_offers(file).offers
    assert (first.price, first.hosts, first.spot) == (2.5, 16, None)
    assert second.spot == 0.6


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.yaml", "offers: [{cluster: 8xH100-SXM, prise: 2}]", "file.unknown_key"),
        ("a.yaml", "offers: [{cluster: 8xH1000, price: 2}]", "cluster.name_wrong"),
        ("a.yaml", "offers: [{cluster: 2x8xH100-SXM, price: 2}]", "offers.several_hosts"),
        ("a.yaml", "offers: []", "file.wrong_type"),
        ("a.csv", "cluster,price\n8xH100-SXM,dear\n", "file.wrong_type"),
        ("a.csv", "cluster,price\n8xH100-SXM, 400gbit,2\n", "offers.too_many_values"),
        ("a.csv", "cluster,price\n", "offers.empty"),
    ],
)
def test_a_wrong_offer_is_an_error_that_says_where_and_what(tmp_path: Path, name: str, text: str, code: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with raises(ClusterError, code):
        read_offers(file)


CLUSTER = cluster_from("2x4xA100-SXM-80, 200gbit, 2/h")


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(job(), CLUSTER, search(job(), CLUSTER), what_would_help=False)


def ask(explanation: Explanation, question: str) -> Answer:
    return answers(explanation, Case(job(), CLUSTER), [question])[0]


@pytest.mark.parametrize(
    ("question", "ranks"),
    [("one more host", 12), ("1 host fewer", 4), ("twice the hosts", 16), ("half the devices", 4)],
)
def test_other_numbers_of_hosts_are_searched_anew(explanation: Explanation, question: str, ranks: int) -> None:
    found = ask(explanation, question).candidate
    assert found is not None
    assert found.layout.machines.devices == ranks


def test_the_same_amount_of_training_is_priced_whatever_the_batch_is(explanation: Explanation) -> None:
    doubled = ask(explanation, "twice the batch")
    assert doubled.cost is not None
    assert doubled.now_cost is not None
    assert doubled.cost == pytest.approx(doubled.now_cost, rel=0.3)  # not twice as much
    assert doubled.cost_of == "as many samples"


def test_keys_change_the_known_plans_and_degrees_name_a_whole_one(explanation: Explanation) -> None:
    recomputed = ask(explanation, "remat=block").candidate
    assert recomputed is not None
    assert recomputed.plan.remat == "block"
    whole = ask(explanation, "dp=2 tp=4 sequence=on microbatches=2").candidate
    assert whole is not None
    assert str(whole.plan) == "dp=2 tp=4 sequence=on microbatches=2"


def test_a_plan_that_cannot_run_is_said_with_the_reason(explanation: Explanation) -> None:
    assert "tp=3" in ask(explanation, "tp=3").why
    assert ask(explanation, "tp=3").gain is None


def test_another_cluster_and_another_precision_can_be_asked_for(explanation: Explanation) -> None:
    faster, slower = ask(explanation, "8xH100-SXM, 3/h"), ask(explanation, "fp32")
    assert faster.gain is not None
    assert slower.gain is not None
    assert faster.gain > 0 > slower.gain
    assert "fp8" in ask(explanation, "fp8").why  # an A100 has none


def test_fp8_makes_products_faster_where_the_device_has_it() -> None:
    on = cluster_from("8xH100-SXM")
    found = explain(job(), on, search(job(), on), what_would_help=False)
    answer = answers(found, Case(job(), on), ["fp8"])[0]
    assert answer.gain is not None
    assert answer.gain > 0


def test_less_memory_costs_throughput_and_more_links_do_not(explanation: Explanation) -> None:
    assert (ask(explanation, "0.25 times the memory").gain or 0) <= 0
    assert (ask(explanation, "twice the links").gain or 0) >= 0


def test_a_question_that_nobody_understands_names_the_nearest_one() -> None:
    with raises(PlanError, "explain.question_unknown"):
        read_question("twise the memory")
    with raises(PlanError, "plan.unknown_key"):
        read_question("rematt=none")
    with raises(ClusterError, "cluster.name_wrong"):
        read_question("8xH1000")


def test_answers_are_told_in_json_with_their_plans(explanation: Explanation) -> None:
    values = ask(explanation, "one more host").to_json()
    assert values["plan"]
    assert values["question"] == "one more host"
