"""Hosts of a run measure the network to one another."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from host_processes import own_address
from paceline.elastic.hosts import link as measure
from paceline.elastic.hosts.link import answer_probes, is_measured, speeds_to
from paceline.elastic.hosts.messages import Echo, Measured
from paceline.errors import ChannelError
from paceline.wire.connection import connect
from paceline.wire.key import RunKey

KEY = RunKey.make()


def test_a_host_answers_probes_of_the_run_until_it_stops() -> None:
    address = own_address()
    probes = answer_probes(address, KEY)
    assert probes is not None
    with closing(probes):
        found = speeds_to([(2, address, probes.port)], KEY)
        with pytest.raises(ChannelError):
            connect((address, probes.port), RunKey.make(), Echo, deadline_s=20).receive(20)
    assert [speed.number for speed in found.speeds] == [2]
    assert found.speeds[0].bits_per_s > found.speeds[0].round_trip_s > 0


def test_a_host_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PROBE_S", 0.3)
    assert speeds_to([(2, own_address(), 1)], KEY) == Measured([])


def test_an_address_that_is_not_this_hosts_is_not_listened_on() -> None:
    assert answer_probes("192.0.2.1", KEY) is None


@pytest.mark.parametrize(("hosts", "pairs"), [(2, 0), (3, 1), (8, 21), (9, 7)])
def test_every_pair_of_eight_hosts_is_measured_and_of_more_the_neighbours(hosts: int, pairs: int) -> None:
    links: list[Any] = [SimpleNamespace(number=number) for number in range(1, hosts)]
    assert sum(is_measured(a, b, hosts) for a in links for b in links) == pairs
