"""Calls between two processes: what comes back, what a failure says, and that nobody waits in vain."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hosts import Hosts
from paceline.errors import ChannelError, DeadlineError, RemoteError
from paceline.wire.key import RunKey, read_key, write_key
from paceline_server.client import Client
from paceline_server.service import Caller, Limits, Service
from refusals import raises
from remote_services import DEADLINE_S, Point, State, ends, service, service_process

Served = tuple[Client, "subprocess.Popen[str]"]


@pytest.fixture(params=["TLS", "Unix socket"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    key = RunKey.make() if request.param == "TLS" else None
    with (
        service_process(tmp_path, key) as (where, process),
        Client(where, key, name="tester", deadline_s=DEADLINE_S) as client,
    ):
        yield client, process


@pytest.fixture(params=["TLS", "Unix socket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return ends(request.param, tmp_path)


def test_values_come_back_as_they_were_sent(served: Served) -> None:
    client, _ = served
    for value in (None, True, -1, 2.5, "ä", b"\0", [1, (2, "three")], {"a": {4: [None]}}, (), b"x" * 100_000):
        found = client.call("echo", value)
        assert found == value
        assert type(found) is type(value)
    point = client.call("echo", [Point(0.5, torch.arange(5))])[0]
    assert isinstance(point, Point)
    assert point.x == 0.5
    assert point.at.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [0, 1, 1000, 100_000, 3_000_000])
def test_tensors_of_any_size_come_back_and_may_be_changed(served: Served, count: int) -> None:
    client, _ = served
    sent = torch.rand(count)
    first, second = client.call("doubled", sent), client.call("echo", {"large": sent, "small": torch.tensor(1)})
    assert torch.equal(first, 2 * sent)
    assert torch.equal(second["large"], sent)
    first.zero_()
    second["large"].zero_()
    assert torch.equal(client.call("echo", sent), sent)


def test_answers_that_are_kept_stay_as_they_were_while_others_come(served: Served) -> None:
    client, _ = served
    sent = [torch.full((200_000,), float(number)) for number in range(40)]
    kept = [client.call("echo", tensor) for tensor in sent]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sent, kept, strict=True))


@pytest.mark.parametrize("count", [3, 200_000])
def test_a_call_runs_where_it_is_read_but_for_one_that_waits_for_a_later_call(served: Served, count: int) -> None:
    client, _ = served
    sent = torch.rand(count)
    waiting = client.begin("taken", sent)
    assert not waiting.done
    client.call("release")
    assert torch.equal(waiting.result(), 2 * sent)
    assert torch.equal(client.call("taken", sent), 2 * sent)
    waited, read = client.call("threads")
    assert (waited, read) == ("paceline-remote-call", "paceline-remote-caller")


def test_many_threads_call_at_once_and_each_gets_its_own_answer(served: Served) -> None:
    client, _ = served

    def call(thread: int) -> None:
        for number in range(30):
            sent = torch.full((40_000 if number % 5 == 0 else 3,), float(1000 * thread + number))
            assert torch.equal(client.call("echo" if number % 2 else "doubled", sent), sent * (2 - number % 2))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))


def test_calls_are_pipelined_and_answers_are_waited_for_in_any_order(served: Served) -> None:
    client, _ = served
    pending = [client.begin("echo", number) for number in range(300)]
    assert [call.result() for call in reversed(pending)] == list(reversed(range(300)))
    waits = client.begin("wait")
    assert not waits.done
    client.call("release")
    assert waits.result() == "released"


def test_calls_of_a_lane_run_in_the_order_sent_and_others_meanwhile(place: Any) -> None:
    where, key = place
    ran: list[str] = []

    def held(caller: Caller, name: str) -> None:
        ran.append(f"{name} begins")
        assert state.open.wait(DEADLINE_S)
        ran.append(f"{name} ends")

    state = State()
    functions = {**state.functions(), "held": held}
    with Service(where, key, functions) as serving, Client(serving.address, key, deadline_s=DEADLINE_S) as client:
        pending = [client.begin("held", f"call {number}", lane="one") for number in range(5)]
        assert client.begin("doubled", torch.ones(1), lane="another").result() == 2
        client.call("release")
        for call in pending:
            call.result()
    assert ran == [f"call {number} {what}" for number in range(5) for what in ("begins", "ends")]


def test_large_calls_that_nobody_reads_the_answers_of_do_not_lock_both_ends(served: Served) -> None:
    client, _ = served
    sent = torch.rand(1_000_000)
    pending = [client.begin("echo", sent) for _ in range(50)]
    assert all(torch.equal(call.result(), sent) for call in pending)


def test_a_stream_gives_results_as_they_come_and_may_be_left(served: Served) -> None:
    client, _ = served
    assert [int(number) for number in client.stream("count", 50)] == list(range(50))
    endless = client.stream("count", -1)
    assert [int(next(endless)) for _ in range(20)] == list(range(20))
    endless.close()  # type: ignore[attr-defined]
    assert [int(number) for number in client.stream("count", 3)] == [0, 1, 2]
    with raises(RemoteError, "remote.is_a_stream"):
        client.call("count", 3)
    with raises(RemoteError, "remote.raised", what="ValueError: no"):
        list(client.stream("fail", "no"))


def test_a_function_that_raises_gives_its_traceback_made_safe_to_show(served: Served) -> None:
    client, _ = served
    with raises(RemoteError, "remote.raised", function="fail", what="ValueError: red \\x1b[31m") as raised:
        client.call("fail", "red \x1b[31m")
    assert raised.value.kind == "ValueError"
    assert raised.value.function == "fail"
    assert "raise ValueError(text)" in raised.value.remote_traceback
    assert client.call("echo", 1) == 1


def test_what_cannot_be_called_or_sent_is_refused_and_the_connection_goes_on(served: Served) -> None:
    client, _ = served
    with raises(RemoteError, "remote.raised", function="ecko"):
        client.call("ecko")
    with raises(RemoteError, "remote.value_unsupported"):
        client.call("unsendable")
    with raises(RemoteError, "remote.value_unsupported", module="builtins"):
        client.call("echo", {1})
    with raises(ChannelError, "channel.message_too_large"):
        client.call("echo", "x" * 2**23)
    with raises(RemoteError, "remote.raised"):
        client.call("echo")
    assert client.call("echo", 1) == 1


def test_a_call_that_hangs_ends_at_its_deadline_and_others_go_on(served: Served) -> None:
    client, _ = served
    with raises(DeadlineError, "remote.deadline", deadline_s=0.1, function="wait"):
        client.call("wait", deadline_s=0.1)
    assert client.call("echo", 1) == 1
    client.call("release")


def test_who_waits_is_told_at_once_when_the_service_dies(served: Served) -> None:
    client, _ = served
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.call, "wait") for _ in range(3)]
        with raises(ChannelError, "remote.call_failed", function="end"):
            client.call("end")
        told = [call.exception(DEADLINE_S) for call in waiting]
    assert all(isinstance(error, ChannelError) and not isinstance(error, DeadlineError) for error in told)
    assert client.lost
    with pytest.raises(ChannelError) as later:
        client.call("echo", 1)
    assert not isinstance(later.value, DeadlineError)


def test_a_lost_connection_is_noticed_at_both_ends_and_another_client_goes_on(place: Any) -> None:
    where, key = place
    with service(where, key) as serving, Client(serving.address, key, name="first", deadline_s=DEADLINE_S) as client:
        client.talk.connection.end()
        with pytest.raises(ChannelError):
            client.call("echo", 1)
        assert client.lost
        with Client(serving.address, key, name="second", deadline_s=DEADLINE_S) as another:
            assert another.call("who_left", 1) == ["first"]


def test_a_service_that_closes_tells_those_who_wait(place: Any) -> None:
    where, key = place
    with service(where, key) as serving, Client(serving.address, key, deadline_s=DEADLINE_S) as client:
        waits = client.begin("wait")
        client.call("release")
        assert waits.result() == "released"
        serving.close()
        with pytest.raises(ChannelError):
            client.call("echo", 1, deadline_s=0.2)


def test_more_clients_than_the_limit_are_refused_in_words(place: Any) -> None:
    where, key = place
    with service(where, key, limits=Limits(callers=1)) as serving, Client(serving.address, key) as client:
        with raises(ChannelError, "remote.calls_refused"):
            Client(serving.address, key, deadline_s=DEADLINE_S)
        assert client.call("echo", 1) == 1


def test_arguments_beyond_the_limit_are_refused_before_they_are_sent(place: Any) -> None:
    where, key = place
    with (
        service(where, key, limits=Limits(attached_bytes=2**20)) as serving,
        Client(serving.address, key) as client,
    ):
        with raises(RemoteError, "remote.arguments_too_large"):
            client.call("echo", torch.zeros(2**20))
        assert client.call("echo", torch.zeros(2**17)).shape == (2**17,)


def test_a_client_with_more_calls_than_the_limit_waits_for_its_own(place: Any) -> None:
    where, key = place
    with (
        service(where, key, limits=Limits(calls_at_once=2)) as serving,
        Client(serving.address, key, deadline_s=DEADLINE_S) as client,
    ):
        waits = [client.begin("wait"), client.begin("wait")]
        with raises(DeadlineError, "remote.too_many_calls"):
            client.call("release", deadline_s=0.05)
        with Client(serving.address, key) as another:
            another.call("release")
        assert [call.result() for call in waits] == ["released"] * 2


PORT = 4100
CUT_S = 60.0  # until a cut is noticed


def serve_or_call(folder: str, address: str, cut: bool) -> Any:
    """Rank 0 serves until a client has left; rank 1 calls, and where it is cut off tells what it got."""
    place, key = Path(folder), read_key(Path(folder) / "key")
    if os.environ["RANK"] == "0":
        state = State()
        with service((address, PORT), key, state=state):
            with state.changed:
                assert state.changed.wait_for(lambda: bool(state.left), CUT_S)
            state.open.set()
            return state.left
    with Client((address, PORT), key, name="client", deadline_s=CUT_S) as client:
        sent = torch.rand(1_000_000)
        assert torch.equal(client.call("echo", sent), sent)
        if not cut:
            return None
        (place / "calls").touch()
        with pytest.raises(ChannelError) as lost:
            client.call("wait", deadline_s=10 * CUT_S)
        assert not isinstance(lost.value, DeadlineError)
        return "lost"


@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_tensors_go_between_hosts_over_tls(hosts: Hosts, tmp_path: Path) -> None:
    write_key(RunKey.make(), tmp_path / "key")
    emulated = hosts(2)
    address = emulated.emulation.hosts[0].address
    assert emulated.run(serve_or_call, str(tmp_path), address, False) == [["client"], None]


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_both_ends_lose_the_connection_when_a_host_is_cut_off(hosts: Hosts, tmp_path: Path) -> None:
    write_key(RunKey.make(), tmp_path / "key")
    emulated = hosts(2)
    address = emulated.emulation.hosts[0].address

    def cut() -> None:
        until = time.monotonic() + CUT_S
        while not (tmp_path / "calls").exists() and time.monotonic() < until:
            time.sleep(0.01)
        emulated.cut(1)

    cutting = threading.Thread(target=cut)
    cutting.start()
    found = emulated.run(serve_or_call, str(tmp_path), address, True, deadline_s=2 * CUT_S)
    cutting.join()
    assert found == [["client"], "lost"]
