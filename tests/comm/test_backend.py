"""How ranks find each other: on loopback alone, through complete variables alone, and each attempt by itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm.backend import join, joined, leave
from paceline.elastic.attempt import launch
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting
from paceline.errors import LaunchError
from ranks import Ranks

SOCKETS = """
import os
from pathlib import Path

import torch

from paceline.comm.backend import joined


def listening():
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.append(words[1].split(":")[0])
    return found


def show(arguments):
    with joined(deadline_s=30, transport=arguments[1]) as group:
        group.all_reduce(torch.ones(100_000))
        Path(arguments[0], f"sockets-{group.rank}").write_text(" ".join(listening()))
        group.barrier()
"""  # noqa: E501
# 127.0.0.1, mapped into IPv6, and ::1
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_listen_on_loopback_only(tmp_path: Path, transport: str) -> None:
    script = tmp_path / "ranks_that_listen.py"
    script.write_text(SOCKETS)
    arguments = [f"{script}:show", str(tmp_path), transport]
    launch(Setting(arguments, on_this_machine(2)))
    found = [(tmp_path / f"sockets-{rank}").read_text().split() for rank in range(2)]
    assert set(found[0] + found[1]) <= LOOPBACK
    assert bool(found[0] + found[1]) == (transport == "gloo"), "shared memory and the store need no port"


AGAIN = """
from pathlib import Path

import torch

from paceline.comm.backend import joined


def meet(arguments):
    transports = []
    for turn in range(3):
        with joined(deadline_s=30) as group:
            tensor = torch.ones(100_000)
            group.all_reduce(tensor)
            assert (tensor == 2).all()
            transports.append((group.transport.name, group.transport_note))
    Path(arguments[0], f"transports-{group.rank}").write_text(str(transports))
"""


def test_a_rank_may_join_again_after_it_has_left(tmp_path: Path) -> None:
    script = tmp_path / "ranks_that_meet_again.py"
    script.write_text(AGAIN)
    launch(Setting([f"{script}:meet", str(tmp_path)], on_this_machine(2)))
    for rank in range(2):
        assert (tmp_path / f"transports-{rank}").read_text() == str([("shm", None)] * 3)


BROKEN_OFF = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.comm.backend as backend
from paceline.comm.backend import joined
from paceline.wire.status import Generation, watch_generation

def meet(arguments):
    folder, rank = arguments[0], int(os.environ["RANK"])
    if rank == 0:  # it comes to a generation that ends before its group is made, and the other one does not
        met, backend._met = backend._met, lambda *_: (dist.HashStore(), ("gloo", None))
        try:
            with watch_generation(lambda: True), joined(deadline_s=0.1, generation=Generation(0, (0, 1))):
                pass
        except Exception as error:
            Path(folder, "broken-off").write_text(type(error).__name__)
        backend._met = met
    with joined(deadline_s=20, generation=Generation(1, (0, 1))) as group:
        group.all_reduce(tensor := torch.tensor([rank + 1.0]))
        Path(folder, f"sum-{rank}").write_text(str(tensor.item()))
"""


def test_ranks_meet_though_one_of_them_could_not_make_its_group_before(tmp_path: Path) -> None:
    script = tmp_path / "ranks_that_meet_late.py"
    script.write_text(BROKEN_OFF)
    launch(Setting([f"{script}:meet", str(tmp_path)], on_this_machine(2)))
    assert "Error" in (tmp_path / "broken-off").read_text()
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_alone_there_is_a_group_of_one_and_no_process_group() -> None:
    with joined() as group:
        assert (group.rank, group.size, group.device) == (0, 1, torch.device("cpu"))
        assert not dist.is_initialized()


def test_incomplete_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="RANK is set but MASTER_ADDR, MASTER_PORT not"):
        join(deadline_s=5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_that_cannot_be_served_or_reached_is_named(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if rank == 1:
            taken.close()  # nobody serves there
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            LaunchError, match=rf"rank {rank} cannot meet the others at 127\.0\.0\.1:{port}.*Choose another MASTER_PORT"
        ):
            join(deadline_s=1)


def own_group() -> tuple[int, int, bool]:
    group = join(deadline_s=30)  # the fixture has initialised a process group
    leave(group)
    return group.rank, group.size, dist.is_initialized()


def test_a_process_group_of_the_users_own_is_used_and_left_alone(ranks: Ranks) -> None:
    assert ranks(2, own_group) == [(0, 2, True), (1, 2, True)]
