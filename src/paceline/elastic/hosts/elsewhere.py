"""Return of hosts to a run that another host coordinates now.

That one calls where hosts that were lost would listen.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts.messages import Elsewhere
from paceline.errors import ChannelError, LaunchError
from paceline.wire.connection import Connection
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener


class GoesOnElsewhere(LaunchError):
    """The run that this host was started for goes on under another coordinator."""

    def __init__(self, told: Elsewhere) -> None:
        super().__init__(f"the run goes on under host {told.names[0]}, at {told.address}:{told.port}")
        self.told = told

    def place_of(self, place: HostPlace) -> HostPlace:
        """Place there of a host with this place at its start.

        Raises:
            LaunchError: it has none.
        """
        told = self.told
        for number, name in enumerate(told.names[1:], 1):
            # the last is that of one that came late
            if name in (place.name, f"{place.name}-{place.number}", f"host-{place.number}"):
                there = replace(place, number=number, count=len(told.names), name=name)
                return replace(there, coordinator=told.address, port=told.port)
        raise LaunchError(f"{self}, and host {place.name} is none of its hosts: {', '.join(told.names)}.")


@contextmanager
def told_elsewhere(place: HostPlace, key: RunKey) -> Iterator[list[Elsewhere]]:
    """Messages of another coordinator to a host that does not reach host 0.

    Nothing, where this host cannot be told apart from host 0 by its address.
    """
    told: list[Elsewhere] = []

    def note(_: Connection, message: Elsewhere) -> None:
        if message.run_name == place.run_name:
            told.append(message)

    try:
        own, coordinator = _route(place)
        if own == coordinator:
            raise ChannelError("host 0 listens there")
        listener = Listener((own, place.port), key, Elsewhere, lambda _: None, on_message=note)
    except (OSError, ChannelError):
        yield told
        return
    with closing(listener):
        yield told


def _route(place: HostPlace) -> tuple[str, str]:
    """Addresses of this host and of host 0, as they reach each other. Nothing is sent."""
    family, kind, _, _, where = socket.getaddrinfo(place.coordinator, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as link:
        link.connect(where)
        return str(link.getsockname()[0]), str(where[0])
