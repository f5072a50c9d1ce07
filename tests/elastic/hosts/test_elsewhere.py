"""Hosts that were lost find the coordinator that took over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import msgspec
import pytest

from host_processes import own_address
from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts.gather import GoesOnElsewhere, gathered
from paceline.elastic.hosts.hosts import WAIT
from paceline.elastic.hosts.messages import Begin, Elsewhere, ToHost
from paceline.errors import ChannelError, LaunchError
from paceline.wire.connection import connect
from paceline.wire.key import RunKey
from refusals import raises

MOVED = Elsewhere("job 7", "10.0.0.2", 41873, ["b", "vm-2", "a"])


def place_of(number: int, name: str, coordinator: str = "10.0.0.1") -> HostPlace:
    return HostPlace(number, 3, coordinator, 29633, name, "hosts", "job 7")


def test_a_host_has_a_new_number_at_the_new_coordinator() -> None:
    assert GoesOnElsewhere(MOVED).place_of(place_of(0, "a")) == HostPlace(
        2, 3, "10.0.0.2", 41873, "a", "hosts", "job 7"
    )
    assert GoesOnElsewhere(MOVED).place_of(place_of(2, "vm")).number == 1  # hosts of one name have their number behind


@pytest.mark.parametrize("intruder", [place_of(1, "c"), place_of(1, "vm"), place_of(1, "b")])
def test_a_host_that_the_run_does_not_have_is_told_so(intruder: HostPlace) -> None:
    with raises(LaunchError, "hosts.not_a_host", host=intruder.name):
        GoesOnElsewhere(MOVED).place_of(intruder)


def test_host_0_that_was_started_again_hears_of_the_coordinator_of_its_run_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WAIT, "60")
    key, place = RunKey.make(), place_of(0, "a", own_address())
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(gathered, place, key)
        for message in (msgspec.structs.replace(MOVED, run_name="job 6"), MOVED):
            assert not host.done()
            with closing(connect((place.coordinator, place.port), key, ToHost, deadline_s=60)) as connection:
                connection.send(message)
                with suppress(ChannelError):  # it hangs up
                    connection.receive(60)
        with raises(GoesOnElsewhere, "hosts.continues_elsewhere", address="10.0.0.2", host="b", port=41873):
            host.result(60)


@pytest.mark.parametrize(
    ("places", "replica_ranks", "spared"),
    [("ab", 1, True), ("aa", 1, False), ("aabb", 2, True), ("abab", 2, False), ("abbccc", 3, True)],
)
def test_a_run_goes_on_without_the_host_that_has_no_rank_of_some_replica(
    places: str, replica_ranks: int, spared: bool
) -> None:
    begin = Begin(0, [], {}, 1.0, True, spares_hosts=True, replica_ranks=replica_ranks, places=list(places))
    assert begin.spares("a") is spared
    assert not msgspec.structs.replace(begin, recovers=False).spares("a")
