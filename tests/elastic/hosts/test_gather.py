"""Hosts that cannot work together are told so before anything starts, on both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from host_processes import PORT, joining_host, own_address
from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts import gather
from paceline.elastic.hosts.gather import gathered, joined
from paceline.elastic.hosts.hosts import WAIT, Hosts
from paceline.elastic.hosts.messages import Dismiss, Echo, Interrupted, Probe, ToHost
from paceline.errors import LaunchError
from paceline.wire.connection import connect
from paceline.wire.key import RunKey
from refusals import raises

KEY = RunKey.make()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT, "20")


@pytest.fixture
def place() -> HostPlace:
    """Place of host 0 of two."""
    return HostPlace(0, 2, own_address(), PORT, "a", "hosts", "run 7")


def other(place: HostPlace, **changes: Any) -> HostPlace:
    """Place of host 1, as started beside host 0."""
    return replace(place, **{"number": 1, "name": "b", **changes})


@contextmanager
def coordinator(place: HostPlace) -> Iterator[Callable[[], str]]:
    """Host 0 in a thread; the function gives the error that it ended with."""
    errors: list[str] = []

    def gather_them() -> None:
        try:
            gathered(place, KEY).dismiss(0)
        except LaunchError as error:
            errors.append(str(error))

    thread = threading.Thread(target=gather_them)
    thread.start()

    def error() -> str:
        thread.join(30)
        assert errors, "host 0 found nothing wrong"
        return errors[0]

    try:
        yield error
    finally:
        thread.join(30)


def refused(place: HostPlace, **changes: Any) -> str:
    """What a host is told that joins with other values than its own."""
    with closing(joining_host(other(place), KEY, **changes)) as connection:
        return str(connection.receive(20).reason)


def test_hosts_that_fit_meet(place: HostPlace) -> None:
    found: list[Hosts] = []
    thread = threading.Thread(target=lambda: found.append(gathered(place, KEY)))
    thread.start()
    reached = joined(other(place), KEY)
    while thread.is_alive():  # it measures the link
        if (message := reached.take()) is not None:
            assert isinstance(message, Probe)
            reached.send(Echo())
        thread.join(0.001)
    assert reached.who == "host a (number 0)"
    assert [host.name for host in found[0].cluster.hosts] == ["a", "b"]
    assert found[0].address_of(0) == place.coordinator
    measured = [link for link in found[0].cluster.hosts[1].links if link.kind == "measured"]
    assert measured[0].bandwidth_gbps
    assert measured[0].latency_ms
    found[0].dismiss(0)
    reached.close()


def test_a_signal_at_one_host_while_links_are_measured_ends_all_with_its_code(place: HostPlace) -> None:
    ended: list[int] = []

    def gather_them() -> None:
        with pytest.raises(SystemExit) as caught:
            gathered(place, KEY)
        ended.append(int(str(caught.value.code)))

    thread = threading.Thread(target=gather_them)
    thread.start()
    reached = joined(other(place), KEY)
    reached.send(Interrupted("SIGTERM"))
    while not isinstance(message := reached.connection.receive(20), Dismiss):
        assert isinstance(message, Probe)
    thread.join(30)
    assert (ended, message.code) == ([143], 143)
    reached.close()


@pytest.mark.parametrize("package", ["paceline", "torch", "Python"])
def test_different_versions_are_refused_and_both_named(place: HostPlace, package: str) -> None:
    with coordinator(place) as error:
        told = refused(place, versions={**gather.versions(), package: "0.0.7"})
        assert f"host b (number 1) has {package} 0.0.7" in told
        assert f"host 0 (a) has {gather.versions()[package]}" in told
        assert error() == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clock_s": 0.0}, "s behind the clock of host 0 (a)"),
        ({"count": 3}, "as one of 3 hosts, but host 0 (a) was started as one of 2"),
        ({"number": 2}, "host b (number 2) has an invalid number"),
        ({"identity": "another machine"}, "where no other host can reach it"),  # its address is a loopback one
    ],
)
def test_a_host_that_cannot_take_part_is_refused_on_both_sides(
    place: HostPlace, changes: dict[str, Any], told: str
) -> None:
    with coordinator(place) as error:
        assert told in refused(place, **changes)
        assert told in error()


def test_two_hosts_with_one_number_are_refused(place: HostPlace) -> None:
    three = replace(place, count=3)
    with coordinator(three) as error:
        first = joining_host(other(three, name="first"), KEY)
        second = joining_host(other(three, name="second"), KEY)
        told = [connection.receive(20).reason for connection in (first, second)]
        assert told[0] == told[1] == error()
        assert "two hosts have the number 1" in told[0]
        first.close()
        second.close()


def test_a_host_of_another_run_is_sent_away_and_its_own_run_goes_on(
    place: HostPlace, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT, "1")
    with coordinator(place) as error:
        assert "two runs use port" in refused(place, run_name="run 8")
        assert "host 1 of 2 has not come" in error()
    assert "sent away" in capfd.readouterr().err


def test_a_host_that_never_comes_is_named_with_the_time(place: HostPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT, "0.3")
    with raises(LaunchError, "hosts.missing"):
        gathered(place, KEY)


def test_a_coordinator_that_never_comes_is_named_with_its_address(
    place: HostPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT, "0.3")
    with raises(LaunchError, "hosts.not_reached") as caught:
        joined(other(place), KEY)
    assert f"{place.coordinator}:{PORT}" in str(caught.value)
    assert "reached on its own machine only" in str(caught.value)


def test_another_key_is_told_on_both_sides(place: HostPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT, "2")
    key = RunKey.make()
    with coordinator(place) as error:
        with raises(LaunchError, "hosts.rejected"):
            joined(other(place), key)
        assert "did not prove the run's key" in error()
        assert KEY.fingerprint in error()


def test_a_port_that_is_taken_is_told(place: HostPlace) -> None:
    with coordinator(place) as error:
        connection = connect((place.coordinator, place.port), KEY, ToHost, deadline_s=20)
        with raises(LaunchError, "hosts.cannot_listen"):
            gathered(place, KEY)
        connection.close()
        assert refused(place, number=9) == error()
