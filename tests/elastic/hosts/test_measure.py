"""Hosts of a run measure the network to one another."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from host_processes import own_address
from paceline.elastic.hosts import link as measure
from paceline.elastic.hosts.link import Measuring, _is_measured
from paceline.elastic.hosts.messages import Answering, Echo, Listen, Measure, Measured
from paceline.errors import ChannelError
from paceline.wire.connection import connect
from paceline.wire.key import RunKey

KEY = RunKey.make()


@pytest.fixture(autouse=True)
def _one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "own_key", lambda: KEY)


@pytest.fixture
def measuring() -> Iterator[Measuring]:
    measuring = Measuring()
    yield measuring
    measuring.close()


def test_a_host_answers_probes_of_the_run_until_it_is_told_to_stop(measuring: Measuring) -> None:
    address = own_address()
    answer = measuring.answer(Listen(address))
    assert isinstance(answer, Answering)
    found = Measuring().answer(Measure([(2, address, answer.port)]))
    assert isinstance(found, Measured)
    assert [speed.number for speed in found.speeds] == [2]
    assert found.speeds[0].bits_per_s > found.speeds[0].round_trip_s > 0
    with pytest.raises(ChannelError):
        connect((address, answer.port), RunKey.make(), Echo, deadline_s=20).receive(20)
    assert measuring.answer(Listen("")) == Answering(0)


def test_a_host_that_does_not_answer_is_left_out(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PROBE_S", 0.3)
    assert measuring.answer(Measure([(2, own_address(), 1)])) == Measured([])


def test_an_address_that_is_not_this_hosts_is_not_listened_on(measuring: Measuring) -> None:
    assert measuring.answer(Listen("192.0.2.1")) == Answering(0)


@pytest.mark.parametrize(("hosts", "pairs"), [(2, 0), (3, 1), (8, 21), (9, 7)])
def test_every_pair_of_eight_hosts_is_measured_and_of_more_the_neighbours(hosts: int, pairs: int) -> None:
    links: list[Any] = [SimpleNamespace(number=number) for number in range(1, hosts)]
    assert sum(_is_measured(a, b, hosts) for a in links for b in links) == pairs
