"""How ranks find each other: on loopback alone, through complete variables alone, and each attempt by itself."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.comm import backend
from paceline.comm.backend import join, joined, leave
from paceline.errors import LaunchError
from paceline.wire.status import Generation, watch_generation
from ranks import Ranks
from refusals import raises

# 127.0.0.1, mapped into IPv6, and ::1
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(transport: str) -> list[str]:
    """Addresses that this process listens on while it is in the group."""
    with joined(deadline_s=30, transport=transport) as group:
        group.all_reduce(torch.ones(100_000))
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        own = {os.readlink(link) for link in links if os.path.islink(link)}
        lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        words = [line.split() for line in lines]
        group.barrier()
        return [w[1].split(":")[0] for w in words if w[3] == "0A" and f"socket:[{w[9]}]" in own]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_listen_on_loopback_only(launched: Ranks, transport: str) -> None:
    first, second = launched(2, listening, transport)
    assert set(first + second) <= LOOPBACK
    assert bool(first + second) == (transport == "gloo"), "shared memory and the store need no port"


def meet_again() -> list[tuple[str, str | None]]:
    transports = []
    for _ in range(3):
        with joined(deadline_s=30) as group:
            tensor = torch.ones(100_000)
            group.all_reduce(tensor)
            assert (tensor == 2).all()
            transports.append((group.transport.name, group.transport_note))
    return transports


def test_a_rank_may_join_again_after_it_has_left(launched: Ranks) -> None:
    assert launched(2, meet_again) == [[("shm", None)] * 3] * 2


def meet_late() -> float:
    """Rank 0 comes to a generation that ends before its group is made, and the other one does not."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        with (
            patch.object(backend, "_met", lambda *_: (HashStore(), ("gloo", None))),
            pytest.raises(Exception, match=r"(?s)."),
            watch_generation(lambda: True),
            joined(deadline_s=0.1, generation=Generation(0, (0, 1))),
        ):
            pass
    with joined(deadline_s=20, generation=Generation(1, (0, 1))) as group:
        group.all_reduce(tensor := torch.tensor([rank + 1.0]))
        return tensor.item()


def test_ranks_meet_though_one_of_them_could_not_make_its_group_before(launched: Ranks) -> None:
    assert launched(2, meet_late) == [3.0, 3.0]


def test_alone_there_is_a_group_of_one_and_no_process_group() -> None:
    with joined() as group:
        assert (group.rank, group.size, group.device) == (0, 1, torch.device("cpu"))
        assert not dist.is_initialized()


def test_incomplete_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with raises(LaunchError, "launch.environment_incomplete", absent=["MASTER_ADDR", "MASTER_PORT"]):
        join(deadline_s=5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_that_cannot_be_served_or_reached_is_named(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if rank == 1:
            taken.close()  # nobody serves there
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with raises(LaunchError, "rendezvous.unreachable", address="127.0.0.1"):
            join(deadline_s=1)


def own_group() -> tuple[int, int, bool]:
    group = join(deadline_s=30)  # the fixture has initialised a process group
    leave(group)
    return group.rank, group.size, dist.is_initialized()


def test_a_process_group_of_the_users_own_is_used_and_left_alone(ranks: Ranks) -> None:
    assert ranks(2, own_group) == [(0, 2, True), (1, 2, True)]
