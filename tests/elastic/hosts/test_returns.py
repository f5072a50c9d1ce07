"""A host that was lost is taken in again during the run; whoever else comes is told why not, and the run goes on."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from host_processes import PORT, joining_host, own_address
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts import gather, takeover
from paceline.elastic.hosts.files import digests
from paceline.elastic.hosts.hosts import Hosts
from paceline.elastic.hosts.link import Link, Meeting
from paceline.elastic.hosts.messages import FromHost, Look, Looked, Refused, ToHost, Welcome
from paceline.elastic.hosts.takeover import Readmission
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey

KEY, DEADLINE_S = RunKey.make(), 30.0
OWN = Host(name="b", cores=2, memory_bytes=2**30)


@pytest.fixture
def place() -> HostPlace:
    """Place of host 0 of two."""
    return HostPlace(0, 2, own_address(), PORT, "a", "hosts", "run 7")


@pytest.fixture
def meeting(place: HostPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readmission]:
    """Where host 1, named b, was lost, after both had agreed about a file."""
    monkeypatch.setattr(takeover, "_NOTED_S", 0.05)
    (tmp_path / "data.txt").write_text("data")
    cluster = Cluster(hosts=tuple(OWN.model_copy(update={"name": name}) for name in "ab"))
    here, there = socket.socketpair()
    with here, there:
        lost = Link(Connection(here, FromHost, "b"), 1, "b", "127.0.0.9", cluster.hosts[1])
        lost.lose("it was killed")
        hosts = Hosts(cluster, place.coordinator, [lost], KEY)
        hosts.compared.append(Look([], [str(tmp_path / "data.txt")], []))
        with Readmission(hosts, place, Meeting(place.coordinator, PORT, KEY)) as meeting:
            yield meeting


def coming(place: HostPlace, **changes: Any) -> Connection:
    """A connection on which host 1 has said who it is, with other values than its own."""
    return joining_host(replace(place, number=1, name="b"), KEY, **{"host": OWN.model_dump_json(), **changes})


def refused(place: HostPlace, **changes: Any) -> str:
    """What a host is told that comes so."""
    connection = coming(place, **changes)
    answer = connection.receive(DEADLINE_S)
    connection.close()
    assert isinstance(answer, Refused)
    return answer.reason


def come(place: HostPlace, meeting: Readmission, *, data: str | None = None) -> Link | str:
    """The link to a host that comes as it should, with its data; else what it is told."""
    connection = coming(place)
    assert connection.receive(DEADLINE_S) == Welcome(["a", "b"])
    look = connection.receive(DEADLINE_S)
    found = digests(look)
    connection.send(Looked(found if data is None else dict.fromkeys(found, data)))
    if data is not None:
        reason = str(connection.receive(DEADLINE_S).reason)
        connection.close()
        return reason
    until = time.monotonic() + DEADLINE_S
    while not (links := meeting.returns.back()):
        assert time.monotonic() < until
        time.sleep(0.005)
    connection.close()
    return links[0]


def assert_taken_in(place: HostPlace, meeting: Readmission) -> None:
    link = come(place, meeting)
    assert isinstance(link, Link)
    assert (link.number, link.name) == (1, "b")
    link.lose("the test is over")


def test_a_host_that_was_lost_is_taken_in_under_its_name(place: HostPlace, meeting: Readmission) -> None:
    meeting.returns.expect(1)
    assert_taken_in(place, meeting)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"versions": {**gather.versions(), "torch": "1.0"}}, "has torch 1.0"),
        ({"name": "c"}, "host c has come as number 1, which is that of b"),
        ({"clock_s": 0.0}, "behind"),
        ({"number": 2}, "has an invalid number"),
        ({"run_name": "run 8"}, "two runs use port"),
        ({"host": '{"name": "b", "cores": 1, "memory_bytes": 1}'}, "has come back with 1 of its 2 devices"),
    ],
)
def test_another_than_the_lost_host_is_told_so_and_the_lost_one_is_still_taken_in(
    place: HostPlace, meeting: Readmission, changes: dict[str, Any], told: str
) -> None:
    meeting.returns.expect(1)
    assert told in refused(place, **changes)
    assert_taken_in(place, meeting)


def test_a_host_that_is_back_with_other_data_is_told_so_and_may_come_with_the_right_ones(
    place: HostPlace, meeting: Readmission
) -> None:
    meeting.returns.expect(1)
    assert "has another " in str(come(place, meeting, data="0"))
    assert "has no " in str(come(place, meeting, data=""))
    assert_taken_in(place, meeting)


def test_a_host_that_came_when_the_others_had_just_met_is_taken_in(place: HostPlace, meeting: Readmission) -> None:
    meeting.__exit__()
    where = Meeting(place.coordinator, PORT, KEY)
    connection = coming(place)
    where.came.put(where.came.get(timeout=DEADLINE_S))  # it is there
    with Readmission(meeting.hosts, place, where) as again:
        again.returns.expect(1)
        assert connection.receive(DEADLINE_S) == Welcome(["a", "b"])
    connection.close()


def test_a_host_with_the_number_of_one_that_is_there_is_refused(place: HostPlace, meeting: Readmission) -> None:
    assert "two hosts have the number 1: b is there" in refused(place)


def test_a_host_that_was_lost_too_often_is_refused(place: HostPlace, meeting: Readmission) -> None:
    meeting.returns.leave_out(1)
    assert "left out" in refused(place)


def test_a_silent_peer_with_the_key_keeps_nobody_waiting_at_the_end(place: HostPlace, meeting: Readmission) -> None:
    connection = connect((place.coordinator, place.port), KEY, ToHost, deadline_s=DEADLINE_S)
    until = time.monotonic() + DEADLINE_S
    while meeting.at_work is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    began = time.monotonic()
    meeting.__exit__()
    assert time.monotonic() - began < gather.MESSAGE_S
    connection.close()
