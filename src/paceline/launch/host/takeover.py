"""Takeover: when the coordinator of a run is lost, the next host continues the run.

The hosts that are left meet anew, at the one of the lowest number that can be reached. It runs the command as host 0
did, and numbers them from 0. Where the run recovers in place they have kept their ranks, which go on
(`launch/adopted.py`); else it continues the run as it was saved. At least half of the hosts have to come. Where the
lost host still lives with the other half, the lock of the run directory decides (`training/record/run_lock.py`): who
has it trains.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.channel.connection import Connection, connect
from paceline.channel.key import RunKey
from paceline.channel.listener import Listener
from paceline.cluster.cluster import Host
from paceline.errors import ChannelError, LaunchError
from paceline.launch.host.gather import refuse, take, taken_in, welcomed
from paceline.launch.host.hosts import Hosts
from paceline.launch.host.link import AbsentLink, Link
from paceline.launch.host.messages import EndAttempt, FromHost, Over, Succession, Successor, ToHost
from paceline.launch.host.serve import Coordinator
from paceline.launch.host.served import ServedAttempt
from paceline.launch.membership import Membership
from paceline.launch_engine import HostPlace
from paceline.printable import printable
from paceline.storage.url import is_url

MEET_S = 20.0  # for the other hosts to come, each of which ends its ranks first
_FIRST_EVENT_BYTES = 4096


@dataclass(frozen=True)
class Takeover:
    """A run that this host continues, since the coordinator was lost.

    Attributes:
        run: its directory, or its URL.
        lost: names the host that coordinated it.
        by: names this host.
        attempt: the ranks that this host has kept, where the run goes on with them and those that others have kept.
    """

    run: str
    lost: str
    by: str
    attempt: ServedAttempt | None

    @property
    def job_file(self) -> Path | None:
        """The job as the run has it; None where the run is at a URL."""
        return None if is_url(self.run) else Path(self.run) / "job.yaml"


def tell_successors(hosts: Hosts, run: str | Path) -> None:
    """Tell the other hosts what they need to continue a run.

    In its directory, an event was written.
    """
    own, *others = hosts.cluster.hosts
    successors = [Successor(own.name, hosts.address, 0, _as_json(own), lost=False)]
    for link, host in zip(hosts.links, others, strict=True):
        where = link.address, link.standby_port
        successors.append(Successor(host.name, *where, _as_json(host), lost=link.lost is not None))
    message = Succession(str(run), "" if is_url(run) else _first_event(Path(run)), successors)
    for link in hosts.links:
        link.send(message)


def met_again(place: HostPlace, key: RunKey, before: Coordinator) -> Hosts | Coordinator:
    """The hosts that are left, where this one coordinates them; else their new coordinator.

    Raises:
        LaunchError: too few have met, or the run cannot be continued here.
    """
    succession = before.succession
    assert succession is not None
    assert before.standby is not None
    own = before.standby.getsockname()[:2]
    numbers = [number for number, host in enumerate(succession.hosts) if (host.address, host.port) == own]
    if not numbers:
        raise LaunchError(f"{before.who} is lost, and host {place.name} was not yet one of this run's hosts")
    place = replace(place, number=numbers[0], count=len(succession.hosts))
    for number, host in enumerate(succession.hosts[: place.number]):
        if host.port and not host.lost:
            found = _at(replace(place, coordinator=host.address, port=host.port), key, before)
            if found is not None:
                _say(f"host {host.name} (number {number}) coordinates now")
                return found
            _say(f"host {host.name} (number {number}) is not reached either")
    with closing(before.standby):
        return _coordinated(place, key, before, succession)


def _at(place: HostPlace, key: RunKey, before: Coordinator) -> Coordinator | None:
    """The host that may coordinate, once it does; None where it is lost, too."""
    try:
        connection = connect((place.coordinator, place.port), key, ToHost, deadline_s=MEET_S)
        held = before.attempt.held() if before.attempt else None
        found = taken_in(place, connection, 2 * MEET_S, before.standby, held)
    except (OSError, ChannelError):
        return None
    found.attempt = before.attempt
    if found.attempt is not None:
        found.attempt.coordinator = found
    return found


def _coordinated(place: HostPlace, key: RunKey, before: Coordinator, succession: Succession) -> Hosts:
    """The hosts that come to this one."""
    there = succession.hosts[place.number]
    came: queue.Queue[Connection] = queue.Queue()
    assert before.standby is not None
    before.standby.listen()
    listener, links = Listener(before.standby, key, FromHost, came.put), dict[int, Link]()
    try:
        _await_others(place, came, links, succession)
        _must_be_enough(place, links, before, succession)
        _must_have(succession, before, there.name)
    except BaseException as error:
        refuse(links.values(), error)
        raise
    finally:
        listener.close()
    met = [links[number] for number in sorted(links)]
    for number, link in enumerate(met, 1):
        link.number, link.name = number, succession.hosts[link.number].name
    by = f"host {there.name} (number {place.number})"
    _say(f"{by} coordinates now{_with(link.name for link in met)}, and continues the run in {succession.run}")
    hosts = welcomed(_host_of(there), there.address, met, key, measures=before.attempt is None)
    attempt = _kept(before.attempt, met)
    hosts.least = place.least
    hosts.takeover = Takeover(succession.run, before.who, by, attempt)
    if attempt is not None:
        _add_lost(hosts, succession, before)
    tell_successors(hosts, succession.run)
    return hosts


def _add_lost(hosts: Hosts, succession: Succession, before: Coordinator) -> None:
    """Add the hosts that have not met, which may come back."""
    met = {host.name for host in hosts.cluster.hosts}
    for number, host in enumerate(succession.hosts):
        if host.name not in met:
            own_number, has = len(hosts.cluster.hosts), _host_of(host)
            if not host.address:
                hosts.add(AbsentLink(own_number, host.name, has))
                continue
            link = Link(before.connection, own_number, host.name, host.address, has)
            link.standby_port = host.port
            link.lose("it was lost before" if host.lost else before.lost or "" if not number else "it has not come")
            hosts.add(link)


def _await_others(
    place: HostPlace, came: queue.Queue[Connection], links: dict[int, Link], succession: Succession
) -> None:
    """Take hosts in until all of higher numbers are there, or for a while.

    Those that were lost before are not waited for.
    """
    until = time.monotonic() + MEET_S
    awaited = {number for number, host in enumerate(succession.hosts) if number > place.number and not host.lost}
    while awaited - links.keys() and time.monotonic() < until:
        try:
            take(place, came.get(timeout=0.1), links)
        except queue.Empty:
            continue


def _kept(attempt: ServedAttempt | None, links: list[Link]) -> ServedAttempt | None:
    """The attempt here, if a whole replica of it lives; ranks of others are ended."""
    same = [link for link in links if link.held and attempt and link.held.attempt == attempt.begin.attempt]
    if attempt is not None and not _has_a_replica(attempt, same):
        attempt.end()
        attempt, same = None, []
    for link in links:
        if link.held is not None and link not in same:
            link.held = None
            link.send(EndAttempt())
            link.answer(Over, MEET_S)
    return attempt


def _has_a_replica(attempt: ServedAttempt, links: list[Link]) -> bool:
    """True if one lives on this host and those."""
    ranks = {rank for held in (attempt.held(), *(link.held for link in links)) if held for rank in held.entered}
    return bool(Membership(len(attempt.begin.places), replica_size=attempt.begin.replica_ranks).whole(ranks))


def _must_be_enough(place: HostPlace, links: dict[int, Link], before: Coordinator, succession: Succession) -> None:
    """Raise LaunchError without at least half of the hosts."""
    there, count = sorted({place.number, *links}), sum(not host.lost for host in succession.hosts)
    if 2 * len(there) < count:
        found = ", ".join(f"{succession.hosts[number].name} (number {number})" for number in there)
        raise LaunchError(
            f"{before.who} is lost, and {len(there)} of {count} hosts have met: {found}. At least half of them "
            "have to, or two parts of a network that was cut would train one run. It stops here. What was saved stays: "
            "continue with --resume."
        )


def _must_have(succession: Succession, before: Coordinator, name: str) -> None:
    """Raise LaunchError where this host does not see the run's directory."""
    if is_url(succession.run) or (
        succession.first_event and _first_event(Path(succession.run)) == succession.first_event
    ):
        return
    raise LaunchError(
        f"{before.who} is lost, and the run's directory {succession.run} with it: host {name} does not see it. When "
        "that host is back, continue there with --resume. A run whose directory all hosts share, or which is kept at a "
        "URL (--run s3://…), goes on without that host."
    )


def _as_json(host: Host) -> str:
    return host.model_dump_json(exclude_defaults=True)


def _host_of(successor: Successor) -> Host:
    return Host.model_validate_json(successor.host).model_copy(update={"name": successor.name})


def _first_event(run: Path) -> str:
    """First line of a run's events; empty where there is none."""
    try:
        with (run / "events.jsonl").open("rb") as file:
            return file.readline(_FIRST_EVENT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _with(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return f" with {text}" if text else ", alone"


def _say(text: str) -> None:
    print(printable(f"paceline: {text}"), file=sys.stderr, flush=True)
