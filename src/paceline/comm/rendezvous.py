"""Key-value stores in which ranks meet: paceline's store, or torch's own store.

Torch's store is used for runs without a key that another launcher has started.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.cluster.machine import host_identity, own_address
from paceline.errors import ChannelError, DeadlineError, LaunchError
from paceline.rank_environment import RankEnvironment, take_store_fd
from paceline.wire.key import RunKey, name_of, own_key
from paceline.wire.status import GenerationOver, generation_is_over, generations_are_watched
from paceline.wire.store import StoreClient, StoreServer

_TORCHS_PLACE = "torch's store"  # key under which rank 0 publishes the address of torch's store
_open: list[ChannelStore | StoreServer] = []  # torch keeps only the C++ part of a store alive


def rendezvous_store(environment: RankEnvironment, deadline_s: float, number: int) -> Store:
    """Return the store in which the ranks meet, scoped by attempt and number of joins.

    A restarted run, or ranks that meet again, therefore do not read earlier keys.

    Raises:
        LaunchError: the store cannot be reached or served.
        GenerationOver: another generation has begun meanwhile.
    """
    try:
        if environment.store is not None:
            store = _channels(environment.store, own_key(), deadline_s)
        elif (key := own_key()) is not None:
            store = _behind_key(environment, key, deadline_s, number)
        else:
            store = _torchs(environment, deadline_s)
    except ChannelError as error:
        if generation_is_over():
            raise GenerationOver(
                "rendezvous.over", "rank {rank} no longer communicates with these ranks", rank=environment.rank
            ) from error
        raise LaunchError(
            "rendezvous.refused",
            "rank {rank} cannot reach the other ranks at {error}",
            rank=environment.rank,
            error=error,
        ) from error
    return _scoped(store, environment, number)


def torchs_store(environment: RankEnvironment, store: Store, deadline_s: float) -> tuple[Store, str | None]:
    """Return a store of torch's own, and a note with its address.

    This store is for libraries that accept no other store. Rank 0 serves the store on the cluster's address, and
    publishes the port in `store`. If `store` already is torch's own store, the note is None.
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
    page = "docs/how-to/secure_the_network.md"
    note = f"it needs torch's own store, which listens on {place} without authentication ({page})"
    return _scoped(found, environment, 0), note


def drop_torchs_port() -> None:
    """Close the launcher's socket for torch's own store, which is not needed."""
    if (listening := take_store_fd()) is not None:
        os.close(listening)


def close_stores() -> None:
    """Close this rank's connections to the channel's store, and any store that it serves."""
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
    """Return the authenticated store of ranks that another launcher started.

    Rank 0 serves the store. Under torchrun, the agent owns the port, so rank 0 publishes its address in the agent's
    store. An attacker that changes this address can end the run, but cannot join it.
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
            "rendezvous.unreachable",
            "rank {rank} cannot reach the other ranks at {address}:{port}: {error}. The port may be in use by "
            "another run, or rank 0 was not started. Choose another MASTER_PORT (torchrun --master-port), which "
            "must be the same on every host.",
            rank=rank,
            address=address,
            port=port,
            error=error,
        ) from error


def _listen(address: str, port: int) -> int:
    """Listen only on the cluster's address; by default, TCPStore listens on every interface."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
        return listener.detach()


def tell_all(store: Store, what: str, rank: int, size: int, timeout_s: float, value: Any) -> list[Any]:
    """Exchange one JSON value per rank through the store; return the values by rank.

    Raises:
        LaunchError: ranks did not arrive in time; the error names them.
        GenerationOver: another generation has begun meanwhile.
    """
    keys = [f"transport/{what}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistStoreError
        if generation_is_over():
            raise GenerationOver(
                "rendezvous.wait_over", "rank {rank} no longer waits for these ranks", rank=rank
            ) from error
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(
            "rendezvous.timeout",
            "rank {rank} waited {timeout_s:g} s for ranks {missing}, which did not start",
            rank=rank,
            timeout_s=timeout_s,
            missing=missing,
        ) from error
    return [json.loads(value) for value in store.multi_get(keys)]


T = TypeVar("T")
_LOOK_S = 0.05  # between two checks for the end of the generation


class ChannelStore(Store):
    """Store whose server accepts only processes of the run.

    The creator must keep a reference to the store, because torch's objects keep only its C++ part alive. The store
    raises the same errors as torch's `TCPStore`: DistStoreError after a deadline, and DistNetworkError if the server is
    lost.
    """

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client = client
        self.set_timeout(timedelta(seconds=client.deadline_s))

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(self._client.set, key, _bytes(value))

    def get(self, key: str) -> bytes:
        if generations_are_watched():
            self.wait([key])
        return self._ask(self._client.get, key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline_s = self._deadline_s if timeout is None else timeout.total_seconds()
        if not generations_are_watched():
            return self._ask(self._client.wait, keys, deadline_s=deadline_s)
        until = time.monotonic() + deadline_s
        while not self._ask(self._came, keys, deadline_s=until - time.monotonic()):
            if generation_is_over():
                raise dist.DistStoreError(
                    f"the wait for {', '.join(keys[:3])} has ended, because the generation is over"
                )
        return None

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(self._client.check, keys)

    def add(self, key: str, amount: int) -> int:
        return self._ask(self._client.add, key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(self._client.append, key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(self._client.compare_set, key, _bytes(expected), _bytes(desired))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(self._client.get_all, keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(self._client.set_all, dict(zip(keys, map(_bytes, values), strict=True)))

    def delete_key(self, key: str) -> bool:
        return self._ask(self._client.delete, key)

    def num_keys(self) -> int:
        return self._ask(self._client.num_keys)

    def has_extended_api(self) -> bool:
        """Return True, because `append`, `multi_get` and `multi_set` are supported."""
        return True

    # torch's C++ code uses these names
    deleteKey, getNumKeys = delete_key, num_keys

    def _came(self, keys: Sequence[str], *, deadline_s: float) -> bool:
        """Return True once all keys exist; False after a short wait."""
        try:
            self._client.wait(keys, max(0.0, min(deadline_s, _LOOK_S)))
        except DeadlineError:
            if deadline_s <= _LOOK_S:
                raise
            return False
        return True

    @property
    def _deadline_s(self) -> float:
        return float(self.timeout.total_seconds())  # type: ignore[attr-defined]

    def _ask(self, call: Callable[..., T], *arguments: Any, deadline_s: float | None = None) -> T:
        """Call with a deadline (default: the store's), and raise the errors of torch's store."""
        try:
            return call(*arguments, deadline_s=self._deadline_s if deadline_s is None else deadline_s)
        except DeadlineError as error:
            raise dist.DistStoreError(str(error)) from error
        except ChannelError as error:
            raise dist.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def register(store: Store | None, rank: int) -> None:
    """Publish this rank's process id, so that other ranks can detect its death later."""
    if store is not None:
        store.set(f"process/{rank}", f"{_processes()} {os.getpid()}")


def _processes() -> str:
    """Return an identity that is equal for processes that see each other's process ids.

    Each container of a host may have a separate set of process ids.
    """
    return f"{host_identity()}@{os.readlink('/proc/self/ns/pid') if os.path.exists('/proc/self/ns/pid') else ''}"


def missing_ranks(store: Store | None, rank: int, size: int, failure: int, patience_s: float = 2.0) -> list[int] | None:
    """Return the ranks that have not reported that they also noticed failure number `failure`.

    The result is None if there is no store, or if the store does not answer. The call waits up to `patience_s` seconds
    for other ranks, but not for ranks of this host that have ended.
    """
    if store is None:
        return None
    found: list[list[int]] = []
    # A thread is used because each call takes as long as the deadline if the link to the store's host has failed.
    asking = threading.Thread(target=lambda: found.append(_ask(store, rank, size, failure, patience_s)), daemon=True)
    asking.start()
    asking.join(patience_s + 1.0)
    return found[0] if found else None


def _ask(store: Store, rank: int, size: int, failure: int, patience_s: float) -> list[int]:
    key = f"waiting/{failure}/"
    missing = [r for r in range(size) if r != rank]
    try:
        store.set(f"{key}{rank}", "here")
        until = time.monotonic() + patience_s
        while True:
            missing = [r for r in missing if not store.check([f"{key}{r}"])]
            if all(_has_ended(store, r) for r in missing) or time.monotonic() > until:
                return missing
            time.sleep(0.02)
    except RuntimeError:  # the store ended with the rank that served it
        return [0] if rank else []


def _has_ended(store: Store, rank: int) -> bool:
    """Return True if a rank is a process of this host and has ended."""
    if not store.check([f"process/{rank}"]):
        return False
    host, _, pid = store.get(f"process/{rank}").decode().rpartition(" ")
    if host != _processes():
        return False
    try:
        # the process is dead, even if its parent has not reaped it yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
