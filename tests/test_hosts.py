"""The emulated hosts that other tests run on."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hosts import Hosts, cut_of, mend_of, namespaces_of
from paceline.cluster.network import inside
from paceline.comm.backend import joined
from ranks import RankError

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2]


def add_up(numel: int) -> tuple[int, tuple[int, ...], float]:
    with joined(deadline_s=30) as group:
        total = torch.full((numel,), float(group.rank))
        group.all_reduce(total)
        return group.rank, group.hosts, total[-1].item()


def fail_on_rank_1() -> None:
    with joined(deadline_s=30):
        if os.environ["RANK"] == "1":
            raise ValueError(f"no such label on {os.environ['PACELINE_HOST']}")


def wait_until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def wait_for_the_other_host(folder: str) -> float:
    with joined(deadline_s=30) as group:
        Path(folder, f"joined-{group.rank}").touch()
        wait_until(Path(folder, "cut").exists)
        total = torch.ones(1000)
        group.all_reduce(total)
        return total[-1].item()


def test_ranks_join_over_the_links_and_see_how_many_hosts_there_are(hosts: Hosts) -> None:
    up = hosts(2, rate="1gbit", ranks_per_host=(2, 1))
    assert up.run(add_up, 100_000) == [(0, (0, 0, 1), 3.0), (1, (0, 0, 1), 3.0), (2, (0, 0, 1), 3.0)]
    assert up.bytes()[0].sent_bytes > 400_000


def test_the_rank_that_failed_is_shown_with_its_traceback(hosts: Hosts) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first:(\n|.)*no such label on host-1"):
        hosts(2).run(fail_on_rank_1)


def test_a_link_can_be_cut_and_mended_while_ranks_run(hosts: Hosts, tmp_path: Path) -> None:
    up = hosts(2)

    def cut_and_mend() -> None:
        wait_until(lambda: len(list(tmp_path.glob("joined-*"))) == 2)
        cut_of(os.getpid(), 1)
        before = up.bytes()
        (tmp_path / "cut").touch()
        wait_until(lambda: up.bytes()[0].sent_bytes > before[0].sent_bytes)
        received.append(up.bytes()[1].received_bytes - before[1].received_bytes)
        mend_of(os.getpid(), 1)

    received: list[int] = []
    meanwhile = threading.Thread(target=cut_and_mend)
    meanwhile.start()
    assert up.run(wait_for_the_other_host, str(tmp_path)) == [2.0, 2.0]
    meanwhile.join()
    assert received == [0]


def test_a_link_is_mended_though_the_bridge_has_learned_its_address_meanwhile(hosts: Hosts) -> None:
    up = hosts(2)
    bridge, _, host_1 = namespaces_of(os.getpid())
    up.cut(1)
    learning = ["ip", "link", "set", "host-1", "master", "bridge"]  # as for a moment of every mending
    inside(bridge, lambda: subprocess.run(learning, check=True))
    with inside(host_1, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sender:
        sender.sendto(b"here", ("10.77.0.1", 9))
    up.mend(1)
    assert up.run(add_up, 1000) == [(0, (0, 1), 1.0), (1, (0, 1), 1.0)]
