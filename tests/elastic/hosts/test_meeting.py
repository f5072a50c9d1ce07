"""Hosts that have lost their coordinator wait for nobody who is gone; who comes late is told where the run is."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from host_processes import joining_host, own_address
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts import gather, takeover
from paceline.elastic.hosts import link as pulse
from paceline.elastic.hosts.agent import Coordinator
from paceline.elastic.hosts.hosts import Hosts
from paceline.elastic.hosts.link import Link, Meeting
from paceline.elastic.hosts.messages import Elsewhere, Succession, Successor, ToHost
from paceline.elastic.hosts.takeover import Readmission
from paceline.wire.connection import Connection
from paceline.wire.key import RunKey

KEY, DEADLINE_S = RunKey.make(), 30.0
NAMES = ["a", "b", "c", "d"]
OWN = Host(name="b", cores=2, memory_bytes=2**30)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """Where the others come to host 1."""
    with closing(Meeting(own_address(), 0, KEY)) as made:
        yield made


@pytest.fixture
def before() -> Iterator[Coordinator]:
    """Host 0, which is lost."""
    here, there = socket.socketpair()
    with here, there:
        yield Coordinator(Connection(here, ToHost, "a"), "a", "run 7")


def place_of(meeting: Meeting, number: int) -> HostPlace:
    return HostPlace(number, len(NAMES), *meeting.address, NAMES[number], "hosts", "run 7")


def successors(ports: list[int], address: str) -> list[Successor]:
    host = OWN.model_dump_json()
    return [Successor(name, address, port, host, lost=False) for name, port in zip(NAMES, ports, strict=True)]


def coming(meeting: Meeting, number: int, *, again: bool) -> Connection:
    """A connection on which a host has said who it is."""
    return joining_host(place_of(meeting, number), KEY, host=OWN.model_dump_json(), again=again)


def closed_port(address: str) -> int:
    """A port where a process has listened that has ended."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_hosts_that_have_ended_with_the_coordinator_are_not_waited_for(
    meeting: Meeting, before: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "MEET_S", 1e6)
    monkeypatch.setenv(pulse.SILENCE, "3600")
    address, links = meeting.address[0], dict[int, Link]()
    hosts = successors([0, meeting.address[1], closed_port(address), closed_port(address)], address)
    with closing(coming(meeting, 3, again=True)):  # it came before it ended
        takeover.await_others(place_of(meeting, 1), KEY, meeting, links, before, hosts)
    assert sorted(links) == [3]
    links[3].lose("the test is over")


def test_a_coordinator_that_may_be_coordinated_by_another_is_not_waited_for_once_it_has_ended(
    before: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "MEET_S", 1e6)
    address = own_address()
    place = HostPlace(2, len(NAMES), address, closed_port(address), "c", "hosts", "run 7")
    assert takeover.coordinator_at(place, KEY, before) is None


def test_the_coordinator_is_known_to_have_ended_where_its_kernel_says_so(meeting: Meeting, before: Coordinator) -> None:
    address, port = meeting.address
    for ports, ended in (([closed_port(address), 0, 0, 0], True), ([port, 0, 0, 0], False), ([0, 0, 0, 0], False)):
        before.succession = Succession("run", "", successors(ports, address))
        assert takeover.is_known_to_have_ended(before, KEY) is ended
    before.succession = Succession("run", "", successors([closed_port(address), 0, 0, 0], address))
    before.fall_silent(1.0)
    assert not takeover.is_known_to_have_ended(before, KEY), "it may be behind a network that is cut"


def test_a_host_that_was_started_again_and_takes_another_for_its_coordinator_is_told_where_that_is(
    meeting: Meeting, before: Coordinator
) -> None:
    before.standby = meeting
    before.succession = Succession("run", "", successors([4711, 1, 1, 1], "10.0.0.9"))
    met, fresh = coming(meeting, 2, again=True), coming(meeting, 3, again=False)
    meeting.came.put(meeting.came.get(timeout=DEADLINE_S))
    with closing(met), closing(fresh):
        answer = None
        while answer is None:
            before.direct_others()
            answer = fresh.take()
        assert answer == Elsewhere("run 7", "10.0.0.9", 4711, NAMES)
        links: dict[int, Link] = {}
        waiting = meeting.came.get(timeout=DEADLINE_S)
        assert waiting is not None
        gather.take(place_of(meeting, 1), waiting, links)
        assert links[2].meets_again, "who has lost the coordinator is not sent back to it"
        links[2].lose("the test is over")


def test_a_host_that_comes_too_late_to_meet_comes_again_under_its_new_number(meeting: Meeting) -> None:
    cluster = Cluster(hosts=tuple(OWN.model_copy(update={"name": name}) for name in "bca"))
    hosts = Hosts(cluster, meeting.address[0], [], KEY)
    place = HostPlace(0, len(NAMES), *meeting.address, "b", "hosts", "run 7")
    with Readmission(hosts, place, meeting, calls=True), closing(coming(meeting, 2, again=True)) as late:
        assert late.receive(DEADLINE_S) == Elsewhere("run 7", *meeting.address, ["b", "c", "a"])


def test_a_message_that_was_given_back_is_taken_once_more(meeting: Meeting) -> None:
    with closing(coming(meeting, 2, again=False)):
        connection = meeting.came.get(timeout=DEADLINE_S)
        assert connection is not None
        message = connection.receive(DEADLINE_S)
        connection.give_back(message)
        assert connection.receive(DEADLINE_S) == message
        assert connection.take() is None
        connection.close()


def test_a_loss_that_was_written_and_not_yet_told_is_known_from_the_record(tmp_path: Path) -> None:
    assert takeover.noted_lost(str(tmp_path)) == set()
    told = [("host_lost", "b"), ("host_lost", "c"), ("host_back", "b"), ("generation", "d"), ("host_lost", "b")]
    lines = [json.dumps({"event": event, "host": host}) for event, host in told]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, "no event", '{"event": "host_back", "host": "c"}', "{"]))
    assert takeover.noted_lost(str(tmp_path)) == {"b"}
    assert takeover.noted_lost("s3://bucket/run") == set()
