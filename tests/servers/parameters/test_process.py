"""Servers and clients in processes that die: no push is lost, none is applied twice, and the rest goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import ChannelError, DeadlineError, ServerLost, ServerRefused
from paceline.wire.key import RunKey
from paceline_server.client import Client
from paceline_server.parameters import (
    ParameterServer,
    ServerClient,
    ServerSettings,
    TensorSpec,
)
from refusals import raises
from server_processes import DEADLINE_S, TICKETS, Servers, counting, push_all, started

SGD = {"name": "sgd", "lr": 1.0}
ALL = [1.0] * TICKETS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Callable[..., ServerClient]]:
    open_now: list[ParameterServer | ServerClient] = []

    def client(settings: ServerSettings, name: str = "rank 0", deadline_s: float = DEADLINE_S) -> ServerClient:
        if not open_now:
            open_now.append(ParameterServer(folder / "server", None, settings))
        client = ServerClient([[folder / "server"]], None, name=name, settings=settings, deadline_s=deadline_s)
        open_now.append(client)
        return client

    yield client
    for end in reversed(open_now):
        end.close()


def client_of(server: ParameterServer, name: str, key: RunKey | None = None) -> ServerClient:
    return ServerClient([[server.address]], key, name=name, settings=counting(), deadline_s=DEADLINE_S)


def counted(client: ServerClient) -> list[float]:
    weights = torch.zeros(TICKETS, dtype=torch.float64)
    client.pull({"w": weights})
    return weights.tolist()


def test_two_clients_share_the_tickets_over_tls_and_an_unauthenticated_peer_is_turned_away() -> None:
    key = RunKey.make()
    with ParameterServer(("127.0.0.1", 0), key, counting()) as server:
        clients = [started(client_of(server, f"rank {n}", key)) for n in range(2)]
        with pytest.raises(ChannelError):
            Client(server.address, RunKey.make(), deadline_s=DEADLINE_S)
        with ThreadPoolExecutor(2) as pool:
            counts = list(pool.map(push_all, clients))
        assert sum(counts) == TICKETS
        clients[0].pull({"w": (weights := torch.zeros(TICKETS, dtype=torch.float64))})
        assert weights.tolist() == ALL
        (statistics,) = clients[0].statistics()
        assert statistics["unauthenticated"] == 1
        assert [statistics["clients"][f"rank {n}"]["pushes"] for n in range(2)] == counts
        for client in clients:
            client.close()


Pair = tuple[Servers, ServerClient]


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    """A primary and its backup, in processes of their own, and a client that has opened all tickets."""
    with Servers(folder, counting()) as servers:
        servers.start(0)
        servers.view()
        servers.start(1)
        with started(servers.client("rank 0", 0)) as client:
            servers.view(lambda view: view.backup is not None)
            yield servers, client


def test_a_server_that_is_killed_loses_nothing_that_was_pushed(pair: Pair) -> None:
    servers, client = pair
    killer = threading.Thread(target=lambda: servers.signal(servers.number(servers.view().primary)))

    def after_each(count: int) -> None:
        if count == TICKETS // 4:
            killer.start()  # some time in a later push
        elif count == TICKETS // 2:
            killer.join()
            servers.start(2)
            view = servers.view(lambda view: view.generation > 2 and view.backup is not None)
            servers.signal(servers.number(view.primary))

    assert push_all(client, after_each) == TICKETS
    assert counted(client) == ALL
    assert client.statistics()[0]["generation"] >= 5


def test_a_primary_that_dies_before_it_can_tell_its_backup_so_is_followed_by_it(folder: Path) -> None:
    dies = (
        "import os, signal\nfrom paceline_server.parameters.log import Log\nattend = Log.attend\n"
        "Log.attend = lambda *all: (attend(*all), os.kill(os.getpid(), signal.SIGKILL))"
    )
    with Servers(folder, counting()) as servers:
        servers.start(0, dies)
        servers.view()
        with started(servers.client("rank 0", 0, 1)) as client:
            servers.start(1)
            servers.view(lambda view: servers.number(view.primary) == 1)
            assert push_all(client) == TICKETS
            assert counted(client) == ALL


def test_a_backup_that_is_killed_holds_up_nobody(pair: Pair) -> None:
    servers, client = pair
    backup = servers.number(servers.view().backup)
    assert push_all(client, lambda count: servers.signal(backup) if count == 9 else None) == TICKETS
    assert counted(client) == ALL
    assert servers.view().backup is None


def test_a_primary_that_was_stopped_for_a_while_is_deposed_and_becomes_the_backup(pair: Pair) -> None:
    servers, client = pair
    first = servers.view()
    servers.signal(servers.number(first.primary), signal.SIGSTOP)
    servers.view(lambda view: view.primary != first.primary)
    servers.signal(servers.number(first.primary), signal.SIGCONT)
    assert push_all(client) == TICKETS
    assert counted(client) == ALL
    second = servers.view(lambda view: view.backup is not None)
    assert (second.primary, second.backup) == (first.backup, first.primary)


def test_the_loss_of_both_servers_is_told_in_time(pair: Pair) -> None:
    servers, _ = pair
    with servers.client("rank 1", deadline_s=2.0) as client:
        for number in (0, 1):
            servers.signal(number)
        with raises(ServerLost, "server.lost"):
            client.take()


def test_a_worker_that_dies_has_its_ticket_dealt_again(folder: Path) -> None:
    with ParameterServer(folder / "server", None, counting(), grace_s=0.05) as server:
        first, second = (started(client_of(server, f"rank {n}")) for n in range(2))
        assert first.take() is not None
        first.close()
        assert push_all(second) == TICKETS
        assert counted(second) == ALL
        second.close()


def test_a_worker_that_was_taken_for_dead_joins_again_and_its_late_push_is_dropped(folder: Path) -> None:
    with ParameterServer(folder / "server", None, counting()) as server, started(client_of(server, "rank 0")) as client:
        ticket = client.take()
        assert ticket is not None
        server.expel("rank 0")
        assert not client.push({"w": torch.ones(TICKETS, dtype=torch.float64)}, ticket=ticket).accepted
        assert push_all(client) == TICKETS
        assert counted(client) == ALL


def test_another_model_other_settings_and_nonsense_are_refused(served: Callable[..., ServerClient]) -> None:
    client = started(served(counting()))
    with raises(ServerRefused, "server.other_model"):
        served(counting(tickets=TICKETS + 1), "rank 1")
    with raises(ServerRefused, "server.settings_differ"):
        served(replace(counting(), staleness=3), "rank 1")
    with raises(ServerRefused, "server.push_not_finite"):
        client.push({"w": torch.full((TICKETS,), torch.nan, dtype=torch.float64)}, ticket=client.take())
    with raises(ServerRefused, "server.tensors_unowned", tensors=["v"]):
        client.push({"v": torch.zeros(1)})
    assert client.statistics()[0]["clients"]["rank 0"]["refused"] == 1


def test_only_what_changed_is_pulled(served: Callable[..., ServerClient]) -> None:
    tensors = (TensorSpec("a", (100,)), TensorSpec("b", (7,)), TensorSpec("e", (50, 4), sparse=True))
    client = served(ServerSettings(tensors, SGD))
    client.join()
    first = {spec.name: torch.ones(spec.shape) for spec in tensors}
    client.initialize(first)
    mine = {"a": torch.zeros(100), "b": torch.zeros(7)}
    assert client.pull(mine).nbytes == 4 * 107
    assert client.pull(mine).nbytes == 0
    mine["a"].zero_()
    assert client.pull(mine).nbytes == 4 * 107  # what was pulled is not there any more
    table = torch.zeros(50, 4)
    assert client.pull_changed_rows("e", table) == 50
    rows = torch.sparse_coo_tensor(torch.tensor([[40, 3, 40]]), torch.ones(3, 4), (50, 4), check_invariants=True)
    client.push({"b": torch.ones(7), "e": rows})
    assert client.pull(mine).nbytes == 4 * 7
    assert (mine["a"].unique().tolist(), mine["b"].unique().tolist()) == ([1], [0])
    assert client.pull_changed_rows("e", table) == 2
    assert table[[3, 40, 5], 0].tolist() == [0, -1, 1]
    assert torch.equal(client.pull_rows("e", torch.tensor([40, 5, 40])), table[[40, 5, 40]])
    with raises(ServerRefused, "server.rows_unknown", rows=50):
        client.pull_rows("e", torch.tensor([50]))


def test_servers_share_the_tensors_and_act_as_one() -> None:
    key = RunKey.make()
    tensors = (TensorSpec("a", (90, 3)), TensorSpec("s", ()), TensorSpec("e", (50, 4), sparse=True))
    settings = ServerSettings(tensors, {"name": "adam", "lr": 0.1})
    results = []
    for count in (1, 3):
        servers = [ParameterServer(("127.0.0.1", 0), key, settings, part=part, servers=count) for part in range(count)]
        with ServerClient([[server.address] for server in servers], key, name="rank 0", settings=settings) as client:
            client.join()
            client.initialize({spec.name: torch.zeros(spec.shape) for spec in tensors})
            mine = {"a": torch.ones(90, 3), "s": torch.ones(())}
            client.pull(mine)
            for step in range(3):
                rows = torch.sparse_coo_tensor(
                    torch.tensor([[49, 0, 20]]), torch.ones(3, 4) + step, (50, 4), check_invariants=True
                )
                gradients = {"a": torch.arange(270.0).reshape(90, 3) - step, "s": torch.tensor(2.0), "e": rows}
                client.push(gradients, mine)
            results.append([*mine.values(), client.pull_rows("e", torch.arange(50))])
            state = client.state()
            client.load_state(state)
            assert str(client.state()) == str(state)
        for server in servers:
            server.close()
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


def test_sums_are_in_the_order_of_the_members_and_the_same_for_all(served: Callable[..., ServerClient]) -> None:
    clients = [served(counting(), f"rank {n}") for n in range(3)]
    given = [torch.randn(1000) * 10**n for n in range(3)]
    expected = given[0] + given[1] + given[2]

    def steps(index: int) -> list[torch.Tensor]:
        found = []
        for number in range(5):
            begun = [
                clients[index].begin_sum(number, given[index].clone(), index=index, members=3, bucket=b)
                for b in range(2)
            ]
            found += [result() for result in begun]
        return found

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(steps, range(3)):
            assert all(torch.equal(one, expected) for one in found)


def test_a_sum_names_who_is_missing_and_takes_no_other_shape(served: Callable[..., ServerClient]) -> None:
    client = served(counting(), deadline_s=0.1)
    with raises(DeadlineError, "server.deadline", reason="no tensor arrived from clients 1, 2 for sum 7.0"):
        client.begin_sum(7, torch.ones(2), index=0, members=3)()
    with raises(ServerRefused, "server.sum_shapes_differ"):
        client.begin_sum(7, torch.ones(3), index=1, members=3)()


@pytest.mark.slow
def test_a_thousand_clients_join_at_once(served: Callable[..., ServerClient]) -> None:
    first = started(served(counting(), "first"))
    places = [[Path(text) for text in line.addresses] for line in first.lines]

    def joined(number: int) -> int:
        with ServerClient(places, None, name=f"client {number}", settings=counting()) as client:
            client.join()
            client.leave()
        return 1

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(joined, range(1000))) == 1000
    assert push_all(first) == TICKETS
