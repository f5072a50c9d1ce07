"""Rendezvous of an attempt's ranks: the channel's store, served by the launcher.

It outlives any rank, and no rank's computing slows it. Where all ranks are on this machine it is a Unix socket in the
launcher's private folder, so there is no port; else it is at the first rank's address, behind the run's key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.elastic.hosts.hosts import current_hosts
from paceline.elastic.place import RankPlace
from paceline.wire.ends import name_of
from paceline.wire.key import RunKey, key_descriptor, own_key
from paceline.wire.store import StoreServer


@dataclass(frozen=True)
class Rendezvous:
    """The place where ranks meet.

    Attributes:
        store: the store's Unix socket, or its address and port.
        key_fd: descriptor of the run's key, for ranks to inherit; None where a Unix socket does without.
    """

    store: str
    key_fd: int | None = None


@contextmanager
def rendezvous(places: Sequence[RankPlace], folder: Path, port: int | None) -> Iterator[Rendezvous]:
    """A store for ranks in these places, up within the context.

    Args:
        folder: the launcher's private one.
        port: between hosts; None takes a free one.

    Raises:
        LaunchError: it cannot be served.
    """
    if on_one_host(places):
        server = StoreServer(None, folder / "store")
        try:
            yield Rendezvous(str(folder / "store"))
        finally:
            server.close()
        return
    hosts = current_hosts()
    key = hosts.key if hosts else own_key() or RunKey.make()
    server = StoreServer(key, places[0].listen(port, backlog=max(128, 2 * len(places))))
    descriptor = key_descriptor(key)
    try:
        yield Rendezvous(name_of(server.address), descriptor)
    finally:
        os.close(descriptor)
        server.close()


def on_one_host(places: Sequence[RankPlace]) -> bool:
    """True if all ranks are on this machine as it is."""
    return all(place.host is None and place.number == 0 for place in places)
