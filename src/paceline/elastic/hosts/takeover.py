"""Takeover after the loss of a run's coordinator, and readmission of lost hosts.

The remaining hosts connect to the reachable host with the lowest number. This host numbers the hosts from 0, and runs
the command in place of host 0. If the run recovers in place, hosts have kept their ranks, which first begin the next
generation (`NextGeneration`). Otherwise the run continues from its newest checkpoint. At least half of the hosts must
be present. If the lost host still runs with the other half, the lock of the run directory decides which half trains
(`elastic/leadership.py`).
"""

from __future__ import annotations

import errno
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from paceline.cluster.host import Host
from paceline.cluster.launch_engines import HostPlace
from paceline.cluster.machine import interface_of
from paceline.elastic.failure import exit_code_of
from paceline.elastic.hosts.agent import AgentAttempt, Coordinator
from paceline.elastic.hosts.files import differences
from paceline.elastic.hosts.gather import refuse, take, taken_in, welcomed
from paceline.elastic.hosts.hosts import Hosts, NextGeneration, Returns, Takeover
from paceline.elastic.hosts.link import AbsentLink, Link, Meeting, silence_limit_s
from paceline.elastic.hosts.messages import (
    Announce,
    Elsewhere,
    EndAttempt,
    Looked,
    Over,
    Past,
    Refused,
    Succession,
    Successor,
    ToHost,
    Welcome,
)
from paceline.elastic.leadership import RunLock, is_quorum
from paceline.elastic.membership import Membership
from paceline.elastic.place import RankPlace, rendezvous
from paceline.errors import ChannelError, DeadlineError, LaunchError, PacelineError
from paceline.files import whole_lines
from paceline.storage.url import is_url
from paceline.text import printable
from paceline.wire.connection import HANDSHAKE_S, Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.status import Generation

MEET_S = 20.0  # longest time for the other hosts to connect; a host whose ranks cannot continue first ends these ranks
_ASK_S, _ASK_AGAIN_S = 0.25, 1.0  # seconds until missing hosts are probed, and between two probes
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_FIRST_EVENT_BYTES = 4096


def tell_successors(hosts: Hosts, run: str | Path) -> None:
    """Send the other hosts the data that they need to continue a run.

    If the run has a local directory, the first line of its event file must already exist.
    """
    own, *others = hosts.cluster.hosts
    port = hosts.meeting.address[1] if hosts.meeting else 0
    successors = [Successor(own.name, hosts.address, port, _as_json(own), lost=False)]
    for link, host in zip(hosts.links, others, strict=True):
        where = link.address, link.standby_port
        successors.append(Successor(host.name, *where, _as_json(host), lost=link.lost is not None))
    hosts.run = str(run)
    message = Succession(str(run), "" if is_url(run) else _first_event(Path(run)), successors, hosts.past)
    for link in hosts.links:
        link.send(message)


def met_again(place: HostPlace, key: RunKey, before: Coordinator) -> Hosts | Coordinator:
    """Gather the remaining hosts; return the hosts if this host coordinates, otherwise the new coordinator.

    Raises:
        LaunchError: too few hosts are present, or the run cannot continue on this host.
    """
    succession = before.succession
    assert succession is not None
    assert before.standby is not None
    own = before.standby.address
    numbers = [number for number, host in enumerate(succession.hosts) if (host.address, host.port) == own]
    if not numbers:
        raise LaunchError(
            "hosts.lost_before_joining",
            "{lost} was lost before host {host} had joined this run",
            lost=before.who,
            host=place.name,
        )
    place = replace(place, number=numbers[0], count=len(succession.hosts))
    for number, host in enumerate(succession.hosts[1 : place.number], 1):
        if host.port and not host.lost:
            found = coordinator_at(replace(place, coordinator=host.address, port=host.port), key, before)
            if found is not None:
                _say(f"host {host.name} (number {number}) coordinates now")
                return found
            _say(f"host {host.name} (number {number}) is not reached either")
    return _coordinated(place, key, before, succession, before.standby)


def coordinator_at(place: HostPlace, key: RunKey, before: Coordinator) -> Coordinator | None:
    """Connect to the host that may coordinate. Return None if that host is lost as well."""
    try:
        connection = _reached((place.coordinator, place.port), key)
        held = before.attempt.held() if before.attempt else None
        found = taken_in(place, key, connection, 2 * MEET_S, before.standby, again=True, held=held)
    except (OSError, ChannelError):
        return None
    found.attempt = before.attempt
    if found.attempt is not None:
        found.attempt.coordinator = found
    return found


def is_known_to_have_ended(before: Coordinator, key: RunKey) -> bool:
    """Return True if the coordinator's process is known to have ended. A cut network is no proof."""
    assert before.succession is not None
    first = before.succession.hosts[0]
    return not before.silent and first.port != 0 and _absence(first, key) == "ended"


def _reached(where: tuple[str, int], key: RunKey) -> Connection:
    """Connect to a host whose process may be busy.

    Raises:
        ChannelError: the process has ended, does not answer, or belongs to another run.
    """
    until = time.monotonic() + MEET_S
    while True:
        try:
            return connect(where, key, ToHost, deadline_s=MEET_S, stopped=lambda: True)
        except DeadlineError as error:
            if _why_absent(error) or time.monotonic() > until:
                raise


def _coordinated(place: HostPlace, key: RunKey, before: Coordinator, succession: Succession, meeting: Meeting) -> Hosts:
    """Gather the hosts that connect to this host, which coordinates."""
    there = succession.hosts[place.number]
    links: dict[int, Link] = {}
    try:
        await_others(place, key, meeting, links, before, succession.hosts)
        _must_be_enough(place, links, before, succession)
        _must_have(succession, before, there.name)
    except BaseException as error:
        refuse(links.values(), error)
        raise
    met = [links[number] for number in sorted(links)]
    for number, link in enumerate(met, 1):
        link.number, link.name = number, succession.hosts[link.number].name
    by = f"host {there.name} (number {place.number})"
    _say(f"{by} coordinates now{_with(link.name for link in met)}, and continues the run in {succession.run}")
    hosts = welcomed(_host_of(there), meeting, met, key, measures=before.attempt is None)
    attempt, next_generation = _kept(before.attempt, met), None
    hosts.least = place.least
    if attempt is not None:
        hosts.past = _older(succession.past, time.monotonic() - before.told_at)
        _add_lost(hosts, succession, before)
        has_ended = partial(is_known_to_have_ended, before, key)
        try:
            next_generation = begin_next_generation(hosts, Path(succession.run), attempt, has_ended)
        except BaseException as error:  # another process trains in the run directory
            hosts.dismiss(exit_code_of(error))
            raise
    hosts.takeover = Takeover(succession.run, before.who, by, next_generation)
    tell_successors(hosts, succession.run)
    return hosts


def _add_lost(hosts: Hosts, succession: Succession, before: Coordinator) -> None:
    met, noted = {host.name for host in hosts.cluster.hosts}, noted_lost(succession.run)
    for number, host in enumerate(succession.hosts):
        if host.name not in met:
            own_number, has = len(hosts.cluster.hosts), _host_of(host)
            if not host.address:
                hosts.add(AbsentLink(own_number, host.name, has))
                continue
            link = Link(before.connection, own_number, host.name, host.address, has)
            link.standby_port, link.is_known_lost = host.port, host.lost or host.name in noted
            link.lose("it was lost before" if host.lost else before.lost or "" if not number else "it has not come")
            hosts.add(link)


def noted_lost(run: str) -> set[str]:
    """Return the names of the hosts that a run's record lists as lost or left.

    The coordinator may have been lost after it recorded a loss, but before it notified the other hosts.
    """
    lost: set[str] = set()
    with suppress(OSError):
        for line in () if is_url(run) else whole_lines(Path(run) / "events.jsonl"):
            with suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["event"] in ("host_lost", "host_left"):
                    lost.add(event["host"])
                elif event["event"] == "host_back":
                    lost.discard(event["host"])
    return lost


def _older(past: Past, by_s: float) -> Past:
    losses = {rank: [ago_s + by_s for ago_s in times] for rank, times in past.losses.items()}
    return Past(losses, past.left_out, past.released)


def await_others(
    place: HostPlace, key: RunKey, meeting: Meeting, links: dict[int, Link], before: Coordinator, hosts: list[Successor]
) -> None:
    """Accept hosts until all hosts with higher numbers have connected, or time is up.

    This does not wait for hosts that were lost earlier or have ended. Once enough hosts have connected, the remaining
    hosts get twice the limit of silence to connect, because they may have noticed the loss later.
    """
    began, least_s, ask_s = time.monotonic(), 2 * silence_limit_s(), _ASK_S
    awaited = {number for number, host in enumerate(hosts) if number > place.number and not host.lost}
    answers: dict[int, Future[str]] = {}
    pool = ThreadPoolExecutor(thread_name_prefix="paceline-meet")
    try:
        while awaited := {number for number in awaited - links.keys() if not _told(answers.get(number))}:
            waited_s = time.monotonic() - began
            if waited_s > (least_s if _are_enough(place, links, before, hosts) else MEET_S):
                return
            if waited_s > ask_s:
                ask_s = waited_s + _ASK_AGAIN_S
                answers |= {number: pool.submit(_absence, hosts[number], key) for number in awaited}
            with suppress(queue.Empty):
                if (connection := meeting.came.get(timeout=0.05)) is not None:
                    take(place, connection, links)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _told(answer: Future[str] | None) -> str:
    return answer.result() if answer is not None and answer.done() else ""


def _are_enough(place: HostPlace, links: dict[int, Link], before: Coordinator, hosts: list[Successor]) -> bool:
    """Return True if the run can continue with these hosts and their kept ranks."""
    has_replica = before.attempt is None or bool(whole_replicas(before.attempt, [*links.values()]))
    return has_replica and is_quorum(len({place.number, *links}), sum(not host.lost for host in hosts))


def _absence(host: Successor, key: RunKey) -> str:
    """Return the reason why a host is absent, or "" if it may be present.

    The reason is "ended" if the host's kernel reports that the process has ended, or "silent".
    """
    try:
        connect((host.address, host.port), key, ToHost, deadline_s=HANDSHAKE_S, stopped=lambda: True).close()
    except DeadlineError as error:
        return _why_absent(error)
    except ChannelError:  # a process of another run has answered
        return "ended"
    return ""


def _why_absent(error: DeadlineError) -> str:
    cause = error.__cause__
    if isinstance(cause, ConnectionRefusedError):
        return "ended"
    return "silent" if isinstance(cause, OSError) and cause.errno in _UNREACHABLE else ""


def _kept(attempt: AgentAttempt | None, links: list[Link]) -> AgentAttempt | None:
    """Return this host's attempt if its ranks can continue, otherwise None.

    Ranks that cannot continue are ended on all hosts.
    """
    same = [link for link in links if link.held and attempt and link.held.attempt == attempt.begin.attempt]
    if attempt is not None and not whole_replicas(attempt, same):
        attempt.end()
        attempt, same = None, []
    for link in links:
        if link.held is not None and link not in same:
            link.held = None
            link.send(EndAttempt())
            link.answer(Over, MEET_S)
    return attempt


def _must_be_enough(place: HostPlace, links: dict[int, Link], before: Coordinator, succession: Succession) -> None:
    """Raise LaunchError if fewer than half of the hosts are present."""
    there, count = sorted({place.number, *links}), sum(not host.lost for host in succession.hosts)
    if not is_quorum(len(there), count):
        found = ", ".join(f"{succession.hosts[number].name} (number {number})" for number in there)
        raise LaunchError(
            "hosts.too_few_met",
            "{lost} is lost, and only {met} of {count} hosts are connected: {found}. At least half of the "
            "hosts must be connected, because otherwise both halves of a divided network could train the "
            "same run. This run stops. Saved checkpoints are kept: continue with --resume.",
            lost=before.who,
            met=len(there),
            count=count,
            found=found,
        )


def _must_have(succession: Succession, before: Coordinator, name: str) -> None:
    """Raise LaunchError if this host does not see the run's directory."""
    if is_url(succession.run) or (
        succession.first_event and _first_event(Path(succession.run)) == succession.first_event
    ):
        return
    raise LaunchError(
        "hosts.directory_lost",
        "{host} is lost, together with the run directory {run}, which host {next} cannot access. When {host} is "
        "back, continue there with --resume. A run can continue without a host if all hosts share the run "
        "directory, or if it is at a URL (--run s3://…).",
        host=before.who,
        run=succession.run,
        next=name,
    )


def _as_json(host: Host) -> str:
    return host.model_dump_json(exclude_defaults=True)


def _host_of(successor: Successor) -> Host:
    return Host.model_validate_json(successor.host).model_copy(update={"name": successor.name})


def _first_event(run: Path) -> str:
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


def begin_next_generation(hosts: Hosts, run: Path, kept: AgentAttempt, has_ended: Callable[[], bool]) -> NextGeneration:
    """Begin the next generation of a run with the ranks that hosts have kept.

    The members of the generation are the remaining whole replicas. If there are too few hosts, the generation has no
    members.

    Args:
        kept: attempt on this host, which coordinates.
        has_ended: as in `RunLock`.

    Raises:
        RunError: another process trains in the run directory.
    """
    places = _places(hosts, kept)
    with ExitStack() as made:
        # the lock decides which host may continue
        lock = made.enter_context(RunLock(run, _say, succeeds=True, has_ended=has_ended))
        # the store listens at the address of this host, which lost hosts can reach when they come back
        meet_at = [_own_place(hosts), *places]
        meeting = made.enter_context(rendezvous(meet_at, kept.scratch, kept.begin.port or None, hosts.key))
        held = [kept.held(), *(link.held for link in hosts.links if link.held)]
        members = set() if hosts.too_few else whole_replicas(kept, hosts.links)
        generation = Generation(max(host.newest for host in held) + 1, tuple(sorted(members)))
        ranks = list(generation.members)
        message = Announce(generation.number, ranks, generation.number, ranks, meeting.store)
        for link in hosts.links:
            if link.held:
                link.send(message)
        kept.announce(message)
        return NextGeneration(kept, lock, generation, places, meeting, made.pop_all())


def whole_replicas(kept: AgentAttempt, links: Sequence[Link]) -> set[int]:
    """Return the running ranks on all hosts that belong to a whole replica."""
    ranks = {rank for held in (kept.held(), *(link.held for link in links)) if held for rank in held.entered}
    return Membership(len(kept.begin.places), replica_size=kept.begin.replica_ranks).whole(ranks)


def _places(hosts: Hosts, kept: AgentAttempt) -> list[RankPlace]:
    names, own = kept.begin.places, _own_place(hosts)
    numbers = {host.name: number for number, host in enumerate(hosts.cluster.hosts)}
    return [
        replace(
            own,
            local_rank=names[:rank].count(name),
            local_size=names.count(name),
            address=hosts.address_of(numbers[name]),
            number=numbers[name],
            host_name=name,
        )
        for rank, name in enumerate(names)
    ]


def _own_place(hosts: Hosts) -> RankPlace:
    return RankPlace(0, 1, hosts.address, interface_of(hosts.address) or "lo")


_NOTED_S = 10.0  # longest time for this process to notice the loss of a host that has already come back
_LOOKED_S = 120.0
_MAY_REPLACE = ("ssh",)  # launch engines that may start a spare host with the number of a lost host
_CALL_S = 1.0  # seconds between two calls to lost hosts, and timeout of a call


class Readmission:
    """Context manager that readmits lost hosts inside its block.

    A host is refused if it was not lost, or was lost too often. A host is also refused if its name, version, clock or
    data do not match the lost host, or if it has fewer devices. With `--hosts`, the name may differ, because a spare
    host may replace the lost host. The refused host receives the reason, and the run continues.

    Args:
        place: launch place of this host, which coordinates.
        meeting: listener to which lost hosts connect. The context closes it at the end.
        revive: function that restarts the host process of a host; None if paceline does not start host processes.
        calls: True if restarted hosts must be notified that this host coordinates.

    Attributes:
        at_work: connection of the host that is being checked, or None.
    """

    def __init__(
        self,
        hosts: Hosts,
        place: HostPlace,
        meeting: Meeting,
        revive: Callable[[int], None] | None = None,
        *,
        calls: bool = False,
    ) -> None:
        self.hosts, self._place, self._meeting = hosts, place, meeting
        self.returns = Returns(revive)
        self._call_s = _CALL_S if calls else None
        self._closing = threading.Event()
        self.at_work: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-returns", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.hosts.returns = self.returns
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.returns = None
        self._closing.set()
        self._meeting.came.put(None)
        if (connection := self.at_work) is not None:
            connection.end()
        self._thread.join()
        self._meeting.close()
        for link in self.returns.back():  # these hosts came too late, and are dismissed together with all other hosts
            self.hosts.replace(link)

    def _run(self) -> None:
        while (connection := self._next()) is not None:
            self.at_work = connection
            try:
                if self._closing.is_set():
                    raise ChannelError("hosts.run_ended", "the run has ended")
                self._take(connection)
            except LaunchError as error:
                _say(f"a host that came during the run was sent away: {error}")
            except (OSError, PacelineError, SystemExit) as error:  # SystemExit means that the host received a signal
                connection.close()
                if not self._closing.is_set():
                    _say(f"a host that came back is lost again: {error}")

    def _next(self) -> Connection | None:
        """Wait for the next host.

        While it waits, this method notifies lost hosts of the new coordinator, if they need it.
        """
        while True:
            try:
                return self._meeting.came.get(timeout=self._call_s)
            except queue.Empty:
                # hosts that are left out are notified as well, and are refused when they connect
                for number in sorted({*self.returns.expected.copy(), *self.returns.left_out.copy()}):
                    if (link := self.hosts.links[number - 1]).address:
                        self._call(link)

    def _call(self, link: Link) -> None:
        """Notify a lost host, which may have been restarted, of this coordinator's address."""
        with suppress(OSError, PacelineError):  # the host process does not run
            where = link.address, self._place.port
            with closing(connect(where, self.hosts.key, ToHost, deadline_s=_CALL_S)) as connection:
                connection.send(self._elsewhere())
                connection.receive(_CALL_S)  # wait until the other end closes the connection

    def _elsewhere(self) -> Elsewhere:
        names = [host.name for host in self.hosts.cluster.hosts]
        return Elsewhere(self._place.run_name, *self._meeting.address, names)

    def _take(self, connection: Connection) -> None:
        """Accept a host, or refuse it.

        Raises:
            LaunchError: the host does not match the lost host.
        """
        found: dict[int, Link] = {}
        take(self._place, connection, found)
        for link in found.values():
            # the host came too late to continue with its kept ranks, and must connect again without them
            if link.meets_again:
                link.send(self._elsewhere())
                link.connection.close()
                return
            if reason := self._unexpected(link) or self._other(link):
                _refuse(link, reason)
            link.send(Welcome([host.name for host in self.hosts.cluster.hosts]))
            for look in self.hosts.compared:
                link.send(look)
                answer = link.answer(Looked, _LOOKED_S)
                if answer is None:
                    raise LaunchError("hosts.lost", "{host} is lost: {reason}", host=link.who, reason=link.lost)
                if reason := "; ".join(differences(look, link, answer)):
                    _refuse(link, reason)
            self.at_work = None
            self.returns.take_in(link)

    def _unexpected(self, link: Link) -> str:
        """Return the reason why a host is not expected, or "" if it is."""
        until = time.monotonic() + _NOTED_S
        while link.number not in self.returns.expected:
            if why := self.returns.left_out.get(link.number):
                return f"{link.who} {why}"
            # the run may still be starting, and may expect this host soon
            absent = isinstance(self._before(link), AbsentLink)
            if (not absent and time.monotonic() > until) or self._closing.is_set():
                return f"two hosts have the number {link.number}: {self._before(link).name} is there."
            time.sleep(0.05)
        return ""

    def _other(self, link: Link) -> str:
        """Return how a host differs from the lost host, or "" if it matches."""
        before = self._before(link)
        if before.name not in (link.name, f"{link.name}-{link.number}"):
            if not isinstance(before, AbsentLink) and self._place.engine not in _MAY_REPLACE:
                return f"host {link.name} has come as number {link.number}, which is that of {before.name}."
            before = link
        known = self.hosts.cluster.hosts[link.number]
        count, had = len(link.host.devices), len(known.devices)
        if self.hosts.cluster.emulate is None and count < had:
            return f"{link.who} has come back with {count} of its {had} devices."
        link.name, link.host = before.name, known
        return ""

    def _before(self, link: Link) -> Link:
        return self.hosts.links[link.number - 1]


def _refuse(link: Link, reason: str) -> None:
    link.send(Refused(reason))
    link.connection.close()
    raise LaunchError("hosts.return_refused", "{reason}", reason=reason)
