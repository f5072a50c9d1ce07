"""What the hardware allows. Wrong here: a share of the limit that flatters, or blames, a transport."""

from __future__ import annotations

from typing import Any

import pytest

from hosts import Hosts
from paceline.comm.backend import joined
from paceline.comm.measure.calls import BUS_FACTORS, CollectiveSpeed
from paceline.comm.measure.limit import Limit, measure_limit
from ranks import Ranks

TWO_BY_TWO = Limit((0, 0, 1, 1), stream=1e6, latency_s=1e-3)


@pytest.mark.parametrize(
    ("collective", "bytes_over_a_link"),
    [
        ("all_reduce", 1.0),
        ("all_gather", 0.5),
        ("reduce_scatter", 0.5),
        ("all_to_all", 1.0),
        ("broadcast", 1.0),
        ("send_receive", 1.0),
    ],
)
def test_between_hosts_each_link_has_to_carry_its_least_share(collective: str, bytes_over_a_link: float) -> None:
    assert TWO_BY_TWO.least_s(collective, 10**6) == pytest.approx(bytes_over_a_link)


def test_one_rank_a_host_reaches_the_links_rate_in_bus_bandwidth_at_best() -> None:
    limit = Limit((0, 1, 2, 3), stream=3e6)
    for collective, factor in BUS_FACTORS.items():
        least_s = limit.least_s(collective, 10**6)
        assert least_s is not None
        assert 10**6 / least_s * factor(4) == pytest.approx(3e6), collective


def test_within_a_host_the_memory_limits() -> None:
    limit = Limit((0, 0, 0, 0), copies={1000: (5e3, 1e4), 10**6: (1e6, 2e6)})
    assert limit.least_s("all_reduce", 10**6) == pytest.approx(1.0)
    assert limit.least_s("all_reduce", 999_996) == pytest.approx(0.999996), "at the nearest size that was measured"
    assert limit.least_s("all_gather", 10**6) == pytest.approx(0.75)
    assert limit.least_s("reduce_scatter", 10**6) == pytest.approx(0.625), "all is read, a quarter is written"
    assert limit.least_s("send_receive", 10**6) == pytest.approx(0.5), "one copy alone"


def test_the_slower_of_memory_and_link_is_the_limit() -> None:
    assert Limit((0, 1), copies={10**6: (1e5, 1e5)}, stream=1e6).least_s("all_reduce", 10**6) == pytest.approx(10.0)
    assert Limit((0, 1), copies={10**6: (1e5, 1e5)}, stream=1e6).least_s("send_receive", 10**6) == pytest.approx(1.0)


def test_nothing_measured_is_no_limit() -> None:
    assert Limit((0, 0), why_not=["no shared memory"]).share(CollectiveSpeed("gloo", 2, 1000, 1.0)) is None


def test_of_several_measurements_the_best_of_each_counts() -> None:
    one = Limit((0, 1), {8: (2.0, 3.0)}, stream=5.0, latency_s=2.0)
    other = Limit((0, 1), {8: (1.0, 4.0)}, stream=6.0, latency_s=1.0)
    assert Limit.best([one, other]) == Limit((0, 1), {8: (2.0, 4.0)}, stream=6.0, latency_s=1.0)


def measured() -> Any:
    with joined(deadline_s=30) as group:
        return measure_limit(group, [2**10, 2**20])


def test_ranks_of_one_host_measure_copies_of_each_others_memory(ranks: Ranks) -> None:
    first, second = ranks(2, measured)
    assert first == second
    assert first.stream is None
    assert first.copies.keys() == {2**10, 2**20}
    assert all(1e5 < rate < 1e12 for rates in first.copies.values() for rate in rates)


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_between_hosts_the_stream_is_as_fast_as_the_link(hosts: Hosts) -> None:
    first, second = hosts(2, rate="40mbit").run(measured)
    assert first == second
    assert 0.6 * 5e6 < first.stream < 1.02 * 5e6, (
        "headers, acknowledgements the other way, and what a busy machine takes"
    )
    assert 0 < first.latency_s < 1
