"""Connections are lost, and nothing that they carried.

Ranks go on where the network comes back, and end with names where it does not.
"""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hosts import Hosts
from paceline.comm.backend import joined
from paceline.comm.rendezvous import tell_all
from paceline.comm.tcp import TcpProcessGroup, mesh
from paceline.comm.tcp import link as link_module
from paceline.errors import SyncError
from paceline.wire.listener import TlsHandshake
from ranks import Ranks
from unauthenticated import mutated_hello


def work(rounds: int, numel: int) -> list[int]:
    """Collectives and messages of many sizes; the results' bits, as whole numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(7)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(rounds):
        tensor = torch.randn(chance.randrange(1, numel), generator=generator)
        dist.all_reduce(tensor)
        place = torch.empty(chance.randrange(1, numel // 4))
        sent = dist.isend(torch.randn(len(place), generator=generator), (rank + 1) % size)
        dist.recv(place, (rank - 1) % size)
        assert sent is not None
        sent.wait()
        found.append(int(torch.cat([tensor, place]).view(torch.int32).to(torch.int64).sum()))
    return found


@contextmanager
def connections_that_break(every_s: float) -> Iterator[None]:
    """Context in which this rank's connections are shut down one after the other."""
    group = dist.group.WORLD
    assert isinstance(group, TcpProcessGroup)
    stop = threading.Event()

    def break_them() -> None:
        chance = random.Random(dist.get_rank())
        while not stop.wait(every_s * chance.random()):
            with group.mesh.loop.lock:
                link = chance.choice(list(group.mesh.links.values()))
                if link.stream.connection is not None:
                    link.stream.connection.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=break_them)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def disturbed() -> tuple[list[int], list[int], int]:
    group = dist.group.WORLD
    assert isinstance(group, TcpProcessGroup)
    undisturbed = work(25, 400_000)
    with connections_that_break(0.06):
        result = work(25, 400_000)
    dist.barrier()
    return undisturbed, result, max(link.connections for link in group.mesh.links.values())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_connections_that_break_again_and_again_change_no_bit(ranks: Ranks, size: int) -> None:
    for undisturbed, result, connections in ranks(size, disturbed, backend="tcp"):
        assert connections > 3, "they broke"
        assert result == undisturbed


def through_a_cut(rounds: int, folder: Path) -> tuple[list[int], float, str]:
    """Tell rank by rank when it is in the middle; the test cuts the link then."""
    with joined(transport="tcp", deadline_s=40) as group:
        assert group.transport.name == "tcp"
        expected = work(5, 300_000)
        (folder / f"begun-{group.rank}").touch()
        longest, found = 0.0, []
        for _ in range(rounds):
            started = time.monotonic()
            found = work(5, 300_000)
            longest = max(longest, time.monotonic() - started)
            assert found == expected
        backend = group.backend
        assert isinstance(backend, TcpProcessGroup)
        states = "; ".join(link.state() for link in backend.mesh.links.values())
        dist.barrier()  # nobody has left when the other reads its state
        return found, longest, states


@contextmanager
def cut_once_begun(up: object, folder: Path, for_s: float | None) -> Iterator[None]:
    """Cut host 1's link when its rank has begun; for good, or for so long."""

    def cut() -> None:
        until = time.monotonic() + 40
        while not (folder / "begun-1").exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        up.cut(1)  # type: ignore[attr-defined]
        if for_s is not None:
            time.sleep(for_s)
            up.mend(1)  # type: ignore[attr-defined]

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_a_link_that_is_cut_for_two_seconds_costs_two_seconds(hosts: Hosts, tmp_path: Path) -> None:
    up = hosts(2, rate="100mbit")
    with cut_once_begun(up, tmp_path, for_s=2):
        results = up.run(through_a_cut, 6, tmp_path, deadline_s=60)
    assert results[0][1] > 1.5, "it was in the middle of the cut"
    assert all(re.search(r"after [1-9]\d* lost connections", states) for _, _, states in results), results


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_a_link_that_is_cut_for_a_minute_is_waited_for(hosts: Hosts, tmp_path: Path) -> None:
    up = hosts(2, rate="100mbit")
    with cut_once_begun(up, tmp_path, for_s=60):
        results = up.run(through_a_long_cut, tmp_path, deadline_s=150)
    assert all(result for result in results)


def through_a_long_cut(folder: Path) -> bool:
    with joined(transport="tcp", deadline_s=120) as group:
        (folder / f"begun-{group.rank}").touch()
        until = time.monotonic() + 70
        go_on = torch.ones(1)
        while go_on.item():  # as long as one rank's clock says so: no rank leaves before the others
            tensor = torch.full((100_000,), float(group.rank))
            group.all_reduce(tensor)
            assert (tensor == sum(range(group.size))).all()
            go_on.fill_(time.monotonic() < until)
            group.all_reduce(go_on, "max")
        return True


def into_a_cut(folder: Path) -> tuple[str, float]:
    with joined(transport="tcp", deadline_s=6) as group:
        group.barrier()
        (folder / f"begun-{group.rank}").touch()
        started = time.monotonic()
        try:
            while time.monotonic() < started + 40:
                started = time.monotonic()
                group.all_reduce(torch.ones(1_000_000))
        except SyncError as error:
            return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_a_link_that_is_cut_for_good_ends_the_wait_and_names_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    up = hosts(2, rate="100mbit")
    with cut_once_begun(up, tmp_path, for_s=None):
        results = up.run(into_a_cut, tmp_path, deadline_s=60)
    for rank, (error, waited_s) in enumerate(results):
        own, peer = (rf"rank {r} \(host host-{r}, [\d.]+\)" for r in (rank, 1 - rank))
        pattern = (
            rf"all_reduce: timeout after [\d.]+ s, waiting: {own} for {peer}: re-connecting for [\d.]+ s, \d+ "
            r"attempts, last error: .+; "
        )
        assert re.match(pattern + r"\d+ bytes sent and not acknowledged", error), error
        assert waited_s < 20


def unauthenticated() -> int:
    """They connect, many at once, and say nothing, something, or a changed handshake; some stay."""
    group = dist.group.WORLD
    assert isinstance(group, TcpProcessGroup)
    peer = next(iter(group.mesh.links.values())).peer
    there: list[socket.socket] = []
    expected = work(3, 100_000)
    for i in range(300):
        intruder = socket.create_connection((peer.address, peer.port), timeout=10)
        intruder.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"pace-tcp" + bytes(60), mutated_hello(i)][i % 4])
        there.append(intruder)
    with connections_that_break(0.1):
        assert work(6, 100_000)[:3] == expected
    open_ones = len(
        [
            c
            for c in psutil.Process().net_connections("tcp")
            if c.laddr.port == group.mesh.address[1] and c.status == "ESTABLISHED"
        ]
    )
    for intruder in there:
        intruder.close()
    dist.barrier()
    return open_ones


def test_unauthenticated_peers_have_no_effect_and_are_sent_away(ranks: Ranks) -> None:
    for open_ones in ranks(2, unauthenticated, backend="tcp"):
        assert open_ones < 80


def listening_ports() -> tuple[list[str], list[str]]:
    """Where this process listens while it is in a group, and afterwards."""
    group = dist.new_group(backend="tcp")
    dist.barrier(group)
    during = _listening()
    dist.barrier(group)
    dist.destroy_process_group()
    return during, _listening()


def _listening() -> list[str]:
    return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_it_listens_on_its_own_address_only_and_ends_with_the_group(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ADDRESS", "127.0.0.9")
    for during, after in ranks(2, listening_ports, backend="tcp"):
        assert during == ["127.0.0.9", "127.0.0.9"]
        assert after == []


def early_leaver() -> None:
    """The last thing that rank 0 does is to send.

    The bytes arrive although it leaves, and its connection is broken just then.
    """
    group = dist.group.WORLD
    assert isinstance(group, TcpProcessGroup)
    if dist.get_rank() == 0:
        dist.send(torch.arange(3_000_000), 1)
        with group.mesh.loop.lock:
            connection = group.mesh.links[1].stream.connection
            assert connection is not None
            connection.shutdown(socket.SHUT_RDWR)
    else:
        time.sleep(0.3)
        place = torch.empty(3_000_000, dtype=torch.int64)
        dist.recv(place, 0)
        assert torch.equal(place, torch.arange(3_000_000))
        with pytest.raises(SyncError, match=r"rank 0 \(host .*\) has left the group"):
            dist.recv(place, 0)
    del group


def test_who_leaves_waits_until_all_it_sent_has_arrived(ranks: Ranks) -> None:
    ranks(2, early_leaver, backend="tcp")


def on_one_host() -> str:
    with joined(transport="tcp", deadline_s=20) as group:
        assert (group.hosts, group.size) == ((0, 0, 1, 1), 4)
        inner = dist.new_group([0, 1], backend="tcp"), dist.new_group([2, 3], backend="tcp")
        own = inner[group.rank // 2]
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=own)
        assert tensor.item() == 2
        return f"{group.transport.name}, {own.getBackendName()}"


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_a_group_of_one_host_is_shared_memory_underneath(hosts: Hosts) -> None:
    assert hosts(2, ranks_per_host=2).run(on_one_host) == ["tcp, shm"] * 4


def first_connections() -> int:
    """Attempts of rank 1 to connect in a new group, whose rank 0 knows its peers a while later than rank 1."""
    attempts = []

    def late(store: Store, what: str, *arguments: Any) -> Any:
        told = tell_all(store, what, *arguments)
        if what == "place" and dist.get_rank() == 0:
            time.sleep(0.15)
        return told

    def counted(*arguments: Any, **options: Any) -> TlsHandshake:
        attempts.append(arguments)
        return TlsHandshake(*arguments, **options)

    with patch.object(mesh, "tell_all", late), patch.object(link_module, "TlsHandshake", counted):
        group = dist.new_group(backend="tcp")
        dist.barrier(group)
    return len(attempts)


def test_a_rank_that_connects_before_the_other_knows_it_is_not_sent_away(ranks: Ranks) -> None:
    assert ranks(2, first_connections, backend="tcp") == [0, 1]
