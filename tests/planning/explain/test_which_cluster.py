"""Which cluster: lists of offers, the fastest and cheapest of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handmade_search import job
from paceline.errors import ClusterError, PlanError
from paceline.planning.explain.training_run import Conditions, Goal
from paceline.planning.explain.which_cluster import (
    EXAMPLES,
    ClusterChoice,
    Offer,
    Offers,
    host_counts,
    read_offers,
    which_cluster,
)
from paceline.units import money

H100 = Offer(cluster="8xH100-SXM, 400gbit", price=3.0, spot=1.0, hosts=4, name="Hopper")
A100 = Offer(cluster="8xA100-SXM-80", price=1.5, hosts=2)


def choice(*offers: Offer, **limits: Any) -> ClusterChoice:
    conditions = Conditions(preemptions_per_host_day=1.0)
    return which_cluster(job(), Offers(offers=offers), Goal(tokens=1e9), conditions, **limits)


def test_host_counts_double_and_end_with_the_largest() -> None:
    assert host_counts(1) == [1]
    assert host_counts(6) == [1, 2, 4, 6]
    assert host_counts(8) == [1, 2, 4, 8]


def test_every_number_of_hosts_and_every_way_to_pay_is_an_option() -> None:
    found = choice(H100, A100)
    assert {(one.offer.title, one.hosts, one.bought.what) for one in found.options} == {
        *(("Hopper", hosts, what) for hosts in (1, 2, 4) for what in ("on demand", "spot")),
        *(("8xA100-SXM-80", hosts, "on demand") for hosts in (1, 2)),
    }


def test_no_option_beats_one_of_the_front_in_both_time_and_cost() -> None:
    found = choice(H100, A100)
    for one in found.front:
        assert not any(other.cost < one.cost and other.bought.wall_s < one.bought.wall_s for other in found.options)
    assert [one.cost for one in found.front] == sorted(one.cost for one in found.front)
    assert found.fastest == found.front[-1]
    assert found.cheapest == found.front[0]


def test_budget_and_deadline_bind_and_what_is_missing_is_said() -> None:
    every = choice(H100, A100)
    assert every.fastest is not None
    assert every.cheapest is not None
    tight = choice(H100, A100, budget=(every.fastest.cost + every.cheapest.cost) / 2)
    assert tight.fastest is not None
    assert tight.fastest.cost <= (tight.budget or 0)
    late = choice(H100, A100, deadline_s=every.fastest.bought.wall_s * 1.01)
    assert late.cheapest is not None
    assert late.cheapest.bought.wall_s <= (late.deadline_s or 0)
    none = choice(H100, A100, budget=every.cheapest.cost / 2)
    assert none.fastest is None
    assert money(every.cheapest.cost) in none.nothing


def test_spot_prices_without_a_rate_of_preemptions_are_no_option() -> None:
    found = which_cluster(job(), Offers(offers=(H100,)), Goal(tokens=1e9))
    assert {one.bought.what for one in found.options} == {"on demand"}


def test_an_offer_on_which_nothing_fits_is_named_with_its_reason_and_others_go_on() -> None:
    large = job(model={"transformer": {"layers": 32, "hidden": 8192, "heads": 64, "seq": 1024, "vocab": 32000}})
    small = Offer(cluster="V100-SXM-16", price=0.1)
    found = which_cluster(large, Offers(offers=(small, H100)), Goal(tokens=1e9))
    assert {one.offer.title for one in found.options} == {"Hopper"}
    assert any(machines == "1 host of V100-SXM-16" and "GiB" in reason for machines, reason in found.refused)
    with pytest.raises(PlanError, match="V100"):
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
    ("name", "text", "said"),
    [
        ("a.yaml", "offers: [{cluster: 8xH100-SXM, prise: 2}]", 'Did you mean "price"'),
        ("a.yaml", "offers: [{cluster: 8xH1000, price: 2}]", "catalogue"),
        ("a.yaml", "offers: [{cluster: 2x8xH100-SXM, price: 2}]", "name one"),
        ("a.yaml", "offers: []", "offers"),
        ("a.csv", "cluster,price\n8xH100-SXM,dear\n", "line 2"),
        ("a.csv", "cluster,price\n8xH100-SXM, 400gbit,2\n", "quote"),
        ("a.csv", "cluster,price\n", "no offer"),
    ],
)
def test_a_wrong_offer_is_an_error_that_says_where_and_what(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ClusterError, match=said):
        read_offers(file)
