"""A command over all hosts of the engine that started this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from paceline.cluster.launch_engines import HostPlace, own_engine
from paceline.elastic.forkserver import warm_up
from paceline.elastic.hosts.agent import Coordinator, run_agent
from paceline.elastic.hosts.gather import GoesOnElsewhere, gathered, joined
from paceline.elastic.hosts.hosts import Hosts, coordinating, current_hosts
from paceline.elastic.hosts.returns import Returns
from paceline.elastic.hosts.takeover import met_again
from paceline.elastic.signals import exit_code_of, sigterm_as_exit
from paceline.errors import LaunchError
from paceline.rank_environment import KEY_FILE
from paceline.text import printable
from paceline.wire.key import RunKey, default_key_file, own_key, read_key


@contextmanager
def over_hosts() -> Iterator[None]:
    """Within it, ranks are started on all hosts of this run.

    On host 0 the context's body is the command; on the others this process serves until it has ended there. Where host
    0 is lost in a run that goes on without it, the body is run on the next host, with a `Hosts.takeover`.

    Raises:
        LaunchError: the hosts do not meet.
        SystemExit: on a host other than 0, with the exit code of host 0.
    """
    place = None if current_hosts() else own_engine().hosts()
    if place is None or place.count < 2:
        yield
        return
    key = _key(place)
    with sigterm_as_exit():
        warm_up()  # it imports while the hosts meet
        yield from _met(place, key)


def _key(place: HostPlace) -> RunKey:
    """The key handed to this host, or else its user's own.

    The latter is in the environment from here on, for the ranks.
    """
    if (key := own_key()) is not None:
        return key
    file = default_key_file()
    if not file.exists():
        raise LaunchError(
            f"{place.count} hosts meet under one key, and host {place.name} has none. `paceline key` makes one, in "
            f"{file}: copy it to the same place on every host, or anywhere, and set {KEY_FILE} there."
        )
    os.environ[KEY_FILE] = str(file)
    return read_key(file)


def _met(place: HostPlace, key: RunKey) -> Iterator[None]:
    hosts, code = _hosts(place, key), 1
    try:
        with _returns(hosts, place), coordinating(hosts):
            yield
        code = 0
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        if hosts.takeover is not None:
            hosts.takeover.close()
        hosts.dismiss(code)


def _hosts(place: HostPlace, key: RunKey) -> Hosts:
    """The hosts that this one coordinates, at the start or later."""
    now = place
    while True:
        try:
            return _served(now, key) if now.number else gathered(now, key)
        except GoesOnElsewhere as told:  # this host was lost, and was started again
            print(printable(f"paceline: {told}"), file=sys.stderr, flush=True)
            now = told.place_of(place)


def _returns(hosts: Hosts, place: HostPlace) -> Returns:
    """A meeting place for hosts that come back.

    Those that were started with another coordinator's address have to be told of this one's.
    """
    assert hosts.meeting is not None
    if hosts.takeover is None:
        return Returns(hosts, place, hosts.meeting)
    own = replace(place, number=0, count=len(hosts.cluster.hosts), name=hosts.cluster.hosts[0].name)
    return Returns(hosts, own, hosts.meeting, calls=True)


def _served(place: HostPlace, key: RunKey) -> Hosts:
    """Serve host 0 until it is lost; the hosts that this one coordinates then.

    Raises:
        SystemExit: with the exit code of host 0.
    """
    found: Hosts | Coordinator = joined(place, key, succeeds=True)
    while isinstance(found, Coordinator):
        with closing(found.connection):
            code = run_agent(found, f"host {place.name} (number {place.number})")
        if found.lost is None or found.succession is None or code != 1:
            found.close()
            failed = f"{'was stopped' if code in (130, 143) else 'has failed'} (exit code {code})"
            how = "has ended" if code == 0 else failed
            if found.released:
                how = "goes on without this host, as `paceline scale` has asked,"
            if found.lost is None or found.released:
                print(printable(f"paceline: the run {how} on {found.who}"), file=sys.stderr, flush=True)
            raise SystemExit(code)
        with ExitStack() as unless_met:
            unless_met.callback(found.close)
            found = met_again(place, key, found)
            unless_met.pop_all()
    return found
