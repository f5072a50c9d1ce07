"""Where ranks meet: behind the run's key where they have one, and unauthenticated peers in between change nothing."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from hosts import Hosts
from paceline.comm import rendezvous as deadline
from paceline.comm.backend import joined
from paceline.comm.rendezvous import close_stores, rendezvous_store, torchs_store
from paceline.errors import ChannelError, LaunchError
from paceline.rank_environment import RankEnvironment
from paceline.wire.key import RunKey, write_key
from paceline.wire.store import StoreClient
from ranks import Ranks
from refusals import raises

DEADLINE_S = 30.0


def meet_under_torchrun(port: int, key: str) -> tuple[bool, bool, str | None, int]:
    """What ranks with a key see of a torchrun whose agent serves a store."""
    rank = int(os.environ["RANK"])
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PACELINE_KEY_FILE": key}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = RankEnvironment(rank, 2, "127.0.0.1", port)
    store = rendezvous_store(environment, DEADLINE_S, 0)
    store.set(f"rank {rank}", "here")
    store.wait(["rank 0", "rank 1"], timedelta(seconds=DEADLINE_S))
    agents = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE_S), wait_for_workers=False)
    agent_knows = agents.check([f"paceline/0/0/rank {rank}"])
    own, note = torchs_store(environment, store, DEADLINE_S)
    own_knows = own.check(["rank 0"])
    total = own.add("sum", rank + 1)
    own.wait([], timedelta(seconds=DEADLINE_S))
    dist.barrier()
    del own
    close_stores()
    return agent_knows, own_knows, note, total


def test_ranks_of_torchrun_with_a_key_meet_behind_it_and_torchs_store_learns_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    write_key(RunKey.make(), tmp_path / "key")
    agents = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE_S), wait_for_workers=False)
    found = ranks(2, meet_under_torchrun, agents.port, str(tmp_path / "key"))
    assert [agent_knows or own_knows for agent_knows, own_knows, _, _ in found] == [False, False]
    assert sorted(total for _, _, _, total in found) in ([1, 3], [2, 3])
    for _, _, note, _ in found:
        assert note is not None
        assert "listens on 127.0.0.1:" in note


def test_a_rank_with_the_wrong_key_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.wire.store import StoreServer

    write_key(RunKey.make(), tmp_path / "key")
    monkeypatch.setenv("PACELINE_KEY_FILE", str(tmp_path / "key"))
    server = StoreServer(RunKey.make(), ("127.0.0.1", 0))
    assert isinstance(server.address, tuple)
    environment = RankEnvironment(1, 2, *server.address, store=f"{server.address[0]}:{server.address[1]}")
    with raises(LaunchError, "rendezvous.refused", rank=1):
        rendezvous_store(environment, DEADLINE_S, 0)
    server.close()


def sum_among_unauthenticated_peers() -> list[float]:
    """Sums of ranks, before and after unauthenticated peers did to the store whatever they could."""
    rank, (host, _, port) = int(os.environ["RANK"]), os.environ["PACELINE_STORE"].rpartition(":")
    where = host, int(port)
    with joined(deadline_s=DEADLINE_S) as group:
        sums = [_sum(group)]
        if rank == 1:
            _attack(where)
        group.barrier()
        sums.append(_sum(group.subgroup([0, 1])))  # the members meet in the store again
        sums.append(_sum(group))
    return sums


def _sum(group: object) -> float:
    tensor = torch.arange(1000, dtype=torch.float64)
    group.all_reduce(tensor)  # type: ignore[attr-defined]
    return tensor.sum().item()


def _attack(where: tuple[str, int]) -> None:
    with pytest.raises(RuntimeError):
        TCPStore(*where, None, False, timedelta(seconds=0.5), wait_for_workers=False).set("paceline/0/0/process/0", "x")
    with pytest.raises(ChannelError, match="does not have this run's key"):
        StoreClient(where, RunKey.make(), DEADLINE_S)
    for intruder in [socket.create_connection(where) for _ in range(200)]:
        intruder.close()


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_unauthenticated_peers_at_the_store_of_hosts_change_no_sum(hosts: Hosts) -> None:
    expected = [2 * 499_500.0] * 3
    assert hosts(2, rate="1gbit").run(sum_among_unauthenticated_peers) == [expected, expected]


def test_a_rank_that_has_died_is_missing_at_once() -> None:
    """A patience of an hour would not end before the test's deadline."""
    store = HashStore()
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline.register(store, 1)
    store.set("process/1", store.get("process/1").decode().replace(f" {os.getpid()}", f" {child}"))
    store.set("waiting/1/2", "here")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert deadline.missing_ranks(store, 0, 3, 1, patience_s=3600) == [1], "dead, and not yet seen by its parent"
    os.waitpid(child, 0)
    assert deadline.missing_ranks(store, 0, 3, 1, patience_s=3600) == [1], "dead and forgotten"


def test_a_rank_that_lives_or_is_on_another_host_is_given_time() -> None:
    store = HashStore()
    deadline.register(store, 1)
    store.set("process/2", "another host 1")
    store.set("waiting/1/2", "here")
    assert deadline.missing_ranks(store, 0, 3, 1, patience_s=0.1) == [1]
    store.set("waiting/2/1", "here")
    assert deadline.missing_ranks(store, 0, 3, 2, patience_s=0.1) == [2]


class Silent:
    """A store whose host is behind a cut link: its calls return when the test ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.ended.wait(60)
        raise RuntimeError("the link is cut")


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    store = Silent()
    try:
        assert deadline.missing_ranks(store, 1, 2, 1, patience_s=-0.95) is None  # type: ignore[arg-type]
    finally:
        store.ended.set()
