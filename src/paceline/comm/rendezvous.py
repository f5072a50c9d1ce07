"""Stores in which ranks meet: the channel's, or torch's own.

That of torch is for runs without a launcher of ours and without a key.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.comm.address import own_address
from paceline.comm.store import ChannelStore
from paceline.errors import ChannelError, LaunchError
from paceline.rank_environment import RankEnvironment, take_store_fd
from paceline.wire.ends import name_of
from paceline.wire.key import RunKey, own_key
from paceline.wire.store import StoreClient, StoreServer

_TORCHS_PLACE = "torch's store"  # key under which rank 0 says where it serves that one
_open: list[ChannelStore | StoreServer] = []  # torch holds only the C++ part of a store, so it is kept here


def rendezvous_store(environment: RankEnvironment, deadline_s: float, number: int) -> Store:
    """The store in which the ranks meet, scoped by attempt and number of joins.

    So neither a restarted run nor ranks that meet again read the keys of the time before.

    Raises:
        LaunchError: it cannot be reached or served.
    """
    try:
        if environment.store is not None:
            store = _channels(environment.store, own_key(), deadline_s)
        elif (key := own_key()) is not None:
            store = _behind_key(environment, key, deadline_s, number)
        else:
            store = _torchs(environment, deadline_s)
    except ChannelError as error:
        raise LaunchError(f"rank {environment.rank} cannot meet the others at {error}") from error
    return _scoped(store, environment, number)


def torchs_store(environment: RankEnvironment, store: Store, deadline_s: float) -> tuple[Store, str | None]:
    """A store of torch's own, and a note on where it listens.

    For libraries that take no other. Rank 0 serves it on the cluster's address, and says where in `store`. There is no
    note where `store` is one already.
    """
    if not _open:
        return store, None
    timeout, server = timedelta(seconds=deadline_s), None
    if environment.rank == 0:
        address, listening = own_address(), take_store_fd()
        listening = _listen(address, 0) if listening is None else listening
        with socket.socket(fileno=os.dup(listening)) as listener:
            port = listener.getsockname()[1]
        server = TCPStore(
            address, port, environment.world_size, True, timeout, wait_for_workers=False, master_listen_fd=listening
        )
        store.set(_TORCHS_PLACE, f"{address}:{port}")
    place = store.get(_TORCHS_PLACE).decode()
    address, _, port_text = place.rpartition(":")
    found = server or TCPStore(address, int(port_text), environment.world_size, False, timeout, wait_for_workers=False)
    note = f"it needs torch's own store, which listens on {place} and asks nobody who they are (docs/network.md)"
    return _scoped(found, environment, 0), note


def drop_torchs_port() -> None:
    """Close the socket that the launcher opened for torch's own store, where nothing needs that."""
    if (listening := take_store_fd()) is not None:
        os.close(listening)


def close_stores() -> None:
    """Close this rank's connections to the channel's store, and the store where it serves it."""
    while _open:
        _open.pop().close()


def _scoped(store: Store, environment: RankEnvironment, number: int) -> Store:
    return PrefixStore(f"paceline/{environment.attempt}/{number}", store)


def _channels(place: str, key: RunKey | None, deadline_s: float) -> Store:
    host, _, port = place.rpartition(":")
    where = Path(place) if place.startswith("/") else (host, int(port))
    store = ChannelStore(StoreClient(where, key, deadline_s))
    _open.append(store)
    return store


def _behind_key(environment: RankEnvironment, key: RunKey, deadline_s: float, number: int) -> Store:
    """The channel's store of ranks without a launcher of ours, served by rank 0.

    Under torchrun, whose agent has the port, the place is told through the agent's store: who changes it there ends the
    run, and does not enter it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        where = environment.master_address, environment.master_port
        if environment.rank == 0:
            _open.append(StoreServer(key, where))
        return _channels(name_of(where), key, deadline_s)
    agents = _scoped(_torchs(environment, deadline_s), environment, number)
    if environment.rank == 0:
        server = StoreServer(key, (own_address(), 0))
        _open.append(server)
        agents.set("channel", name_of(server.address))
    return _channels(agents.get("channel").decode(), key, deadline_s)


def _torchs(environment: RankEnvironment, deadline_s: float) -> Store:
    rank, world = environment.rank, environment.world_size
    address, port = environment.master_address, environment.master_port
    timeout = timedelta(seconds=deadline_s)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or rank != 0:
            return TCPStore(address, port, world, False, timeout, wait_for_workers=False)
        return TCPStore(
            address, port, world, True, timeout, wait_for_workers=False, master_listen_fd=_listen(address, port)
        )
    except (RuntimeError, OSError) as error:  # includes torch's DistNetworkError and DistStoreError
        raise LaunchError(
            f"rank {rank} cannot meet the others at {address}:{port}: {error}. Is the port in use by another run, or "
            "rank 0 not started? Choose another MASTER_PORT (torchrun --master-port), the same on every host."
        ) from error


def _listen(address: str, port: int) -> int:
    """A socket that listens on the cluster's address only; TCPStore alone would use every interface."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
        return listener.detach()
