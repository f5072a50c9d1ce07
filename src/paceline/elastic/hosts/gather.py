"""Gathering of a run's host processes: all other hosts connect to host 0.

Incompatible hosts are refused before anything starts.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import msgspec
from pydantic import ValidationError

from paceline.cluster.discover import discover
from paceline.cluster.host import Host
from paceline.cluster.launch_engines import HostPlace
from paceline.cluster.machine import host_identity
from paceline.elastic.failure import exit_code_of
from paceline.elastic.hosts.agent import Coordinator
from paceline.elastic.hosts.hosts import WAIT, Hosts, hosts_wait_s
from paceline.elastic.hosts.link import (
    KERNEL_SILENT_S,
    AbsentLink,
    Link,
    Meeting,
    answer_probes,
    measured_cluster,
)
from paceline.elastic.hosts.messages import Dismiss, Elsewhere, Held, Joining, Refused, ToHost, Welcome
from paceline.errors import ChannelError, DeadlineError, LaunchError, PacelineError
from paceline.text import printable
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener

_TELL_S, MESSAGE_S = 10.0, 20.0
_FEW_S = 10.0  # seconds that host 0 waits for more hosts than the minimum
EMULATED = "emulate"  # name of the engine for host processes of emulated hosts
_PORT = "PACELINE_COORDINATOR=ADDRESS:PORT, on every host, names another address of host 0 or another port."
_CLOCKS_S = 60.0  # largest allowed difference between the clocks of two hosts, in seconds


def gathered(place: HostPlace, key: RunKey) -> Hosts:
    """Gather all hosts of the run. This function runs on host 0.

    Raises:
        LaunchError: a host does not connect, or cannot take part.
    """
    own = discover().hosts[0].model_copy(update={"name": place.name})
    address = _resolved(place)
    try:
        meeting = Meeting(address, place.port, key)
    except ChannelError as error:
        raise LaunchError(
            "hosts.cannot_listen",
            "host 0 ({host}) must accept connections, but {error}. {advice}",
            host=place.name,
            error=error,
            advice=_PORT,
        ) from error
    with ExitStack() as unless_met:
        unless_met.callback(meeting.close)
        links = links_of(place, key, meeting)
        absent = sorted(set(range(1, place.count)) - {link.number for link in links})
        if absent:
            _say(
                f"{len(links) + 1} of at most {place.count} hosts are there: the run begins, and takes in hosts "
                f"{', '.join(map(str, absent))} when they come"
            )
        away = [AbsentLink(number, f"host-{number}", own) for number in absent]
        hosts = welcomed(own, meeting, sorted([*links, *away], key=lambda link: link.number), key)
        hosts.least = place.least
        unless_met.pop_all()
    return hosts


def welcomed(own: Host, meeting: Meeting, links: Sequence[Link], key: RunKey, *, measures: bool = True) -> Hosts:
    """Welcome the hosts that have connected to this coordinator, and measure their links.

    Args:
        meeting: listener to which the hosts have connected.
        measures: True to measure the links.

    Raises:
        SystemExit: with exit code 130 or 143, if a host received SIGINT or SIGTERM during this call.
    """
    names = _different([own.name, *(link.name for link in links)])
    for link, name in zip(links, names[1:], strict=True):
        link.name, link.host = name, link.host.model_copy(update={"name": name})
        link.send(Welcome(names))
    try:
        cluster = measured_cluster(own.model_copy(update={"name": names[0]}), links, measures=measures)
    except BaseException as error:  # a signal to this host or to another host
        for link in links:
            link.send(Dismiss(exit_code_of(error)))
            link.connection.close()
        raise
    hosts = Hosts(cluster, meeting.address[0], links, key)
    hosts.meeting = meeting
    return hosts


def links_of(place: HostPlace, key: RunKey, meeting: Meeting, check: Callable[[], None] = lambda: None) -> list[Link]:
    """Wait for all other hosts; return the links in the order of host numbers.

    After this call, the hosts wait for a `Welcome`.

    Args:
        check: called a few times a second. An exception from this function ends the wait.

    Raises:
        LaunchError: a host does not connect, or cannot take part.
    """
    links: dict[int, Link] = {}
    try:
        _await_all(place, key, meeting, links, check)
    except BaseException as error:
        refuse(links.values(), error)
        raise
    return [links[number] for number in sorted(links)]


def refuse(links: Iterable[Link], error: BaseException) -> None:
    """Send the reason for a refusal to the connected hosts, and disconnect these hosts."""
    for link in links:
        reason = str(error) if isinstance(error, PacelineError) else "host 0 was stopped"
        link.send(
            error.told
            if isinstance(error, GoesOnElsewhere)
            else Refused(reason, exit_code_of(error), getattr(error, "code", ""))
        )
        link.connection.close()


def joined(place: HostPlace, key: RunKey, *, succeeds: bool = False) -> Coordinator:
    """Join host 0 from another host; return once all hosts have connected.

    Args:
        succeeds: True if this host may become the coordinator after the loss of host 0.

    Raises:
        LaunchError: host 0 cannot be reached, or refuses this host.
    """
    who = f"host {place.name} (number {place.number})"
    connection = _reached(place, key, who)
    with ExitStack() as unless_taken_in:
        standby = unless_taken_in.enter_context(closing(_standby(place, key, connection))) if succeeds else None
        try:
            coordinator = taken_in(place, key, connection, hosts_wait_s() + MESSAGE_S, standby)
        except (OSError, ChannelError) as error:
            raise LaunchError(
                "hosts.rejected_key",
                "host 0 at {coordinator}:{port} rejected {host}: {error}. Check that both hosts have the same key. "
                "The key of this host is {fingerprint}.",
                host=who,
                coordinator=place.coordinator,
                port=place.port,
                error=error,
                fingerprint=key.fingerprint,
            ) from error
        unless_taken_in.pop_all()
    return coordinator


def taken_in(
    place: HostPlace,
    key: RunKey,
    connection: Connection,
    wait_s: float,
    standby: Meeting | None,
    *,
    again: bool = False,
    held: Held | None = None,
) -> Coordinator:
    """Wait until the coordinator at the other end has accepted this host.

    Args:
        again: True if this host has lost a previous coordinator.
        held: ranks that this host has kept since the loss of the previous coordinator.

    Raises:
        LaunchError: the coordinator refuses this host.
        ChannelError: the coordinator was lost during this call.
        DeadlineError: the coordinator does not answer in time.
    """
    connection.end_when_silent(KERNEL_SILENT_S)
    with ExitStack() as unless_taken_in:
        unless_taken_in.callback(connection.close)
        # links are not measured if kept ranks continue, or if the links are emulated and their rates are known
        measured = held is None and place.engine != EMULATED
        probes = answer_probes(_own_address(connection), key) if measured else None
        if probes is not None:
            unless_taken_in.callback(probes.close)
        joining = joining_of(place, connection, standby, probes)
        connection.send(msgspec.structs.replace(joining, again=again, held=held))
        answer = connection.receive(wait_s)
        if isinstance(answer, Welcome):
            unless_taken_in.pop_all()
            return Coordinator(connection, answer.names[0], place.run_name, standby, probes)
    if isinstance(answer, Elsewhere):
        raise GoesOnElsewhere(answer)
    refusal = answer if isinstance(answer, Refused) else Refused("it speaks otherwise")
    who = f"host {place.name} (number {place.number})"
    if refusal.error:
        told = LaunchError.of_json({"code": refusal.error, "text": refusal.reason})
        raise LaunchError.of_error(told, f"{who} was refused by host 0", exit_code=refusal.code)
    raise LaunchError(
        "hosts.refused",
        "host 0 refused {host}: {reason}",
        host=who,
        reason=refusal.reason,
        exit_code=refusal.code,
    )


def _standby(place: HostPlace, key: RunKey, connection: Connection) -> Meeting:
    """Open a listener where other hosts connect if this host becomes the coordinator.

    The listener uses the port number of host 0 if it is free on this host. It is opened early, so that other hosts can
    learn its port, and can see from the open port that this host's process runs.
    """
    address = _own_address(connection)
    try:
        return Meeting(address, place.port, key)
    except ChannelError:
        return Meeting(address, 0, key)


def _reached(place: HostPlace, key: RunKey, who: str) -> Connection:
    """Connect to host 0, which may not have started yet."""
    began, wait_s = time.monotonic(), hosts_wait_s()
    with told_elsewhere(place, key) as told:
        while not told:
            passed_s = time.monotonic() - began
            try:
                where, left_s = (place.coordinator, place.port), round(min(_TELL_S, wait_s - passed_s), 1)
                return connect(where, key, ToHost, deadline_s=max(0.1, left_s), stopped=lambda: told)
            except DeadlineError as error:
                if told:
                    break
                text = f"{who} does not reach host 0. {error}"
                if (passed_s := time.monotonic() - began) > wait_s - 0.1:
                    raise LaunchError(
                        "hosts.not_reached", "{text}. {advice}", text=text, advice=_advice(place)
                    ) from error
                _say(f"{text}; trying for {wait_s - passed_s:.0f} s more")
            except ChannelError as error:
                raise LaunchError("hosts.rejected", "{host} was rejected: {error}", host=who, error=error) from error
        raise GoesOnElsewhere(told[0])


def _await_all(
    place: HostPlace,
    key: RunKey,
    meeting: Meeting,
    links: dict[int, Link],
    check: Callable[[], None],
) -> None:
    began = told = time.monotonic()
    wait_s = hosts_wait_s()
    while len(links) < place.count - 1:
        try:
            connection = meeting.came.get(timeout=0.2)
        except queue.Empty:
            check()
            now = time.monotonic()
            if now - began > _FEW_S and len(links) + 1 >= (place.least or place.count):
                return
            if now - told >= _TELL_S or now - began > wait_s:
                told, text = now, _missing(place, key, meeting, links, now - began)
                if now - began > wait_s:
                    raise LaunchError(
                        "hosts.missing",
                        "{text}. Start these hosts, or use fewer hosts. {variable} sets how long to wait.",
                        text=text,
                        variable=WAIT,
                    ) from None
                _say(text)
            continue
        if connection is not None:
            take(place, connection, links)


def _missing(place: HostPlace, key: RunKey, meeting: Meeting, links: dict[int, Link], waited_s: float) -> str:
    absent = [str(number) for number in range(1, place.count) if number not in links]
    hosts = f"host{'s' * (len(absent) > 1)} {', '.join(absent)} of {place.count} {'have' if len(absent) > 1 else 'has'}"
    at = f"{place.coordinator}:{place.port}"
    unauthenticated = (
        f"; {meeting.unauthenticated} connections did not prove the run's key ({key.fingerprint})"
        if meeting.unauthenticated
        else ""
    )
    return f"{hosts} not come to host 0 ({place.name}) at {at} after {waited_s:.0f} s{unauthenticated}"


def take(place: HostPlace, connection: Connection, links: dict[int, Link]) -> None:
    """Accept a host, or refuse it.

    Raises:
        LaunchError: the host cannot take part.
    """
    try:
        joining = connection.receive(MESSAGE_S)
        if isinstance(joining, Elsewhere) and joining.run_name == place.run_name:
            connection.close()
            raise GoesOnElsewhere(joining)
        if not isinstance(joining, Joining):
            raise LaunchError("hosts.unnamed", "the first message does not contain the name of a host")
        host = Host.model_validate_json(joining.host)
    except GoesOnElsewhere:
        raise
    except (OSError, PacelineError, ValidationError) as error:
        connection.close()
        _say(f"{connection.peer} held the run's key, and was sent away: {error}")
        return
    if reason := _of_another_run(place, joining):
        connection.send(Refused(reason))
        connection.close()
        _say(f"host {joining.name} was sent away: {reason}")
        return
    if unfit := _unfit(place, joining, links):
        connection.send(Refused(str(unfit)))
        connection.close()
        raise unfit
    link = links[joining.number] = Link(connection, joining.number, joining.name, joining.address, host)
    link.clock_ahead_s, link.standby_port = joining.clock_s - time.time(), joining.port % 2**16
    link.probes_port = joining.probes_port % 2**16
    link.meets_again, link.held = joining.again, joining.held


def _of_another_run(place: HostPlace, joining: Joining) -> str | None:
    if joining.run_name == place.run_name:
        return None
    return (
        f"host {joining.name} belongs to the run {joining.run_name!r} of {joining.engine}, and this is "
        f"{place.run_name!r} of {place.engine}: two runs use port {place.port} of {place.coordinator}. Give each one "
        "of its own."
    )


def _unfit(place: HostPlace, joining: Joining, links: dict[int, Link]) -> LaunchError | None:
    who = f"host {joining.name} (number {joining.number})"
    if joining.count != place.count:
        return LaunchError(
            "hosts.count_differs",
            "{host} was started as one of {count} hosts, but host 0 ({coordinator}) was started as one of "
            "{expected}. Give all hosts the same number of hosts.",
            host=who,
            count=joining.count,
            coordinator=place.name,
            expected=place.count,
        )
    if not 1 <= joining.number < place.count:
        return LaunchError(
            "hosts.number_out_of_range",
            "{host} has an invalid number: the numbers of {count} hosts are 0 to {last}.",
            host=who,
            count=place.count,
            last=place.count - 1,
        )
    if joining.number in links:
        return LaunchError(
            "hosts.number_taken",
            "two hosts have the number {number}: {first} and {second}.",
            number=joining.number,
            first=links[joining.number].name,
            second=joining.name,
        )
    for name, own in versions().items():
        if (theirs := joining.versions.get(name)) != own:
            return LaunchError(
                "hosts.version_differs",
                "{host} has {package} {version}, but host 0 ({coordinator}) has {expected}. Install the same version "
                "on all hosts.",
                host=who,
                package=name,
                version=theirs,
                coordinator=place.name,
                expected=own,
            )
    apart_s = joining.clock_s - time.time()
    if abs(apart_s) > _CLOCKS_S:
        return LaunchError(
            "hosts.clock_differs",
            "the clock of {host} is {apart_s:.0f} s {direction} the clock of host 0 ({coordinator}). Synchronize both, "
            "for example with NTP.",
            host=who,
            apart_s=abs(apart_s),
            direction="ahead of" if apart_s > 0 else "behind",
            coordinator=place.name,
        )
    if joining.identity != host_identity() and _is_loopback(joining.address):
        return LaunchError(
            "hosts.loopback_address",
            "{host} connects from {address}, where no other host can reach it. {advice}",
            host=who,
            address=joining.address,
            advice=_advice(place),
        )
    return None


def versions() -> dict[str, str]:
    """Return the versions of software that must be equal on all hosts."""
    found = {"Python": platform.python_version()}
    for package in ("paceline", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def joining_of(
    place: HostPlace, connection: Connection, standby: Meeting | None = None, probes: Listener | None = None
) -> Joining:
    """Make the first message that a host sends to host 0."""
    return Joining(
        number=place.number,
        count=place.count,
        name=place.name,
        engine=place.engine,
        run_name=place.run_name,
        versions=versions(),
        clock_s=time.time(),
        identity=host_identity(),
        address=_own_address(connection),
        host=discover().hosts[0].model_copy(update={"name": place.name}).model_dump_json(exclude_defaults=True),
        port=standby.address[1] if standby else 0,
        probes_port=probes.port if probes else 0,
    )


def _own_address(connection: Connection) -> str:
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return str(end.getsockname()[0])


def _resolved(place: HostPlace) -> str:
    """Resolve the name of host 0 to an address, which must belong to this host."""
    try:
        return str(socket.getaddrinfo(place.coordinator, place.port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(
            "hosts.coordinator_unknown",
            "the name of host 0, {coordinator}, cannot be resolved to an address: {reason}.",
            coordinator=place.coordinator,
            reason=error.strerror,
        ) from error


def _different(names: list[str]) -> list[str]:
    """Make host names unique. Append the number of the host to names that occur more than once."""
    return [f"{name}-{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _advice(place: HostPlace) -> str:
    if _is_loopback(place.coordinator):
        return f"{place.coordinator} is reached on its own machine only: name host 0 by an address of the network."
    return "Is host 0 started, and does the network let this port pass?"


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # the address is a host name
        return False


def _say(text: str) -> None:
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)


class GoesOnElsewhere(LaunchError):
    """Raised if the run of this host now has another coordinator."""

    def __init__(self, told: Elsewhere) -> None:
        super().__init__(
            "hosts.continues_elsewhere",
            "the run continues under host {host}, at {address}:{port}",
            host=told.names[0],
            address=told.address,
            port=told.port,
        )
        self.told = told

    def place_of(self, place: HostPlace) -> HostPlace:
        """Return the place that a host with this original place now has in the run.

        Raises:
            LaunchError: the host is not a host of the run.
        """
        told = self.told
        for number, name in enumerate(told.names[1:], 1):
            # a host that had not connected yet is listed under the last of these names
            if name in (place.name, f"{place.name}-{place.number}", f"host-{place.number}"):
                there = replace(place, number=number, count=len(told.names), name=name)
                return replace(there, coordinator=told.address, port=told.port)
        raise LaunchError(
            "hosts.not_a_host",
            "{error}, but host {host} is not a host of this run: {names}.",
            error=self,
            host=place.name,
            names=list(told.names),
        )


@contextmanager
def told_elsewhere(place: HostPlace, key: RunKey) -> Iterator[list[Elsewhere]]:
    """Collect messages from a new coordinator while this host cannot reach host 0.

    The list stays empty if this host and host 0 have the same address.
    """
    told: list[Elsewhere] = []

    def note(_: Connection, message: Elsewhere) -> None:
        if message.run_name == place.run_name:
            told.append(message)

    try:
        own, coordinator = _route(place)
        if own == coordinator:
            raise ChannelError("hosts.listens_there", "host 0 accepts connections there")
        listener = Listener((own, place.port), key, Elsewhere, lambda _: None, on_message=note)
    except (OSError, ChannelError):
        yield told
        return
    with closing(listener):
        yield told


def _route(place: HostPlace) -> tuple[str, str]:
    """Return the addresses at which this host and host 0 reach each other. Nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(place.coordinator, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as link:
        link.connect(where)
        return str(link.getsockname()[0]), str(where[0])
