"""The rendezvous store: torch's calls for the run, and nothing for anybody else."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from channel_ends import DEADLINE_S, reached
from paceline.errors import ChannelError, DeadlineError
from paceline.wire import store as store_module
from paceline.wire.connection import connect
from paceline.wire.key import RunKey
from paceline.wire.listener import MOST_UNPROVEN
from paceline.wire.store import KEY_LIMIT, VALUE_LIMIT, Answer, Request, StoreClient, StoreServer, What
from refusals import raises
from unauthenticated import mutated_hello

Clients = Callable[[], StoreClient]
LOOPBACK = ("127.0.0.1", 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A store behind a Unix socket."""
    tmp_path.chmod(0o700)
    server = StoreServer(None, tmp_path / "store")
    yield server
    server.close()


@pytest.fixture
def clients(server: StoreServer) -> Iterator[Clients]:
    """Makes clients of one server."""
    made: list[StoreClient] = []

    def make() -> StoreClient:
        made.append(StoreClient(reached(server), None, DEADLINE_S))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_every_call_does_what_torchs_store_does(clients: Clients) -> None:
    here, there = clients(), clients()
    here.set("a", b"1")
    assert there.get("a") == b"1"
    assert there.check(["a"])
    assert not there.check(["a", "b"])
    assert [here.add("n", 5), there.add("n", -2), here.get("n")] == [5, 3, b"3"]
    here.append("a", b"2")
    assert there.get_all(["a", "n"]) == [b"12", b"3"]
    assert there.num_keys() == 2
    assert [here.delete("a"), here.delete("a"), here.num_keys()] == [True, False, 1]
    here.set_all({"x": b"7", "y": b"8"})
    assert there.get_all(["y", "x"]) == [b"8", b"7"]


def test_a_value_is_exchanged_only_where_it_is_the_expected_one(clients: Clients) -> None:
    store = clients()
    assert store.compare_set("k", b"other", b"mine") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", b"", b"mine") == b"mine"
    assert store.compare_set("k", b"other", b"new") == b"mine"
    assert store.compare_set("k", b"mine", b"new") == b"new"
    assert store.get("k") == b"new"


def test_a_wait_ends_when_the_last_key_is_there(clients: Clients) -> None:
    waiting, setting = clients(), clients()
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: waiting.wait(["a", "b", "c"])),
        threading.Thread(target=lambda: found.append(waiting.get("c"))),  # while another thread waits
    ]
    for thread in threads:
        thread.start()
    setting.set("a", b"")
    setting.append("b", b"x")
    setting.delete("a")
    setting.set_all({"c": b"last"})
    threads[1].join()
    assert threads[0].is_alive(), "one key was deleted again"
    setting.add("a", 1)
    threads[0].join()
    assert found == [b"last"]


def test_a_deadline_names_the_keys_that_nobody_has_set_and_the_store_goes_on(clients: Clients) -> None:
    store = clients()
    store.set("rank 0", b"here")
    with raises(DeadlineError, "store.deadline", reason="waited 0.05 s for rank 1, rank 2, which no process has set"):
        store.wait(["rank 0", "rank 1", "rank 2"], 0.05)
    with raises(DeadlineError, "store.deadline"):
        store.get_all([f"key {number}" for number in range(20)], 0.05)
    store.set_all({"rank 1": b"late", "rank 2": b"late"})
    assert store.get("rank 0") == b"here"
    store.wait(["rank 0", "rank 1", "rank 2"])


def test_what_is_too_long_is_refused_and_changes_nothing(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    store = clients()
    store.set("kept", b"value")
    store.set("long", bytes(VALUE_LIMIT))
    for refused in (
        lambda: store.set("k" * (KEY_LIMIT + 1), b""),
        lambda: store.set("key", bytes(VALUE_LIMIT + 1)),
        lambda: store.append("long", b"x"),
        lambda: store.add("kept", 1),
        lambda: store.add("long", 1),
    ):
        with pytest.raises(ChannelError):
            refused()
    store.set("largest", str(2**63 - 1).encode())
    with raises(ChannelError, "store.refused"):
        store.add("largest", 1)
    for number in range(3):
        store.set(f"long {number}", bytes(VALUE_LIMIT))
    with raises(ChannelError, "store.refused"):
        store.get_all(["long", "long 0", "long 1", "long 2"])
    monkeypatch.setattr(store_module, "TOTAL_LIMIT", 5 * VALUE_LIMIT)
    with raises(ChannelError, "store.refused"):
        store.set("one more", bytes(VALUE_LIMIT))
    store.delete("long 0")
    store.set("one more", bytes(VALUE_LIMIT))
    assert store.get("kept") == b"value"


def test_a_server_that_ends_is_told_to_who_waits(server: StoreServer, clients: Clients) -> None:
    client = clients()
    failures: list[ChannelError] = []

    def wait() -> None:
        try:
            client.wait(["never"])
        except ChannelError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.set("here", b"")
    server.close()
    waiting.join(DEADLINE_S)
    assert len(failures) == 1
    with pytest.raises(ChannelError):
        client.set("late", b"", 0.2)


KEYS, VALUES = st.text("ab", max_size=2), st.binary(max_size=4)
REQUESTS = st.tuples(
    st.sampled_from(get_args(What)),
    st.lists(KEYS, max_size=3),
    st.lists(VALUES, max_size=3),
    st.integers(-(2**63), 2**64 - 1),
)


@given(st.lists(REQUESTS, max_size=6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_requests_of_its_own_are_answered_or_refused(server: StoreServer, requests: list[tuple[Any, ...]]) -> None:
    connection = connect(server.address, None, Answer, deadline_s=DEADLINE_S)
    for number, request in enumerate(requests):
        connection.send(Request(number, *request))
        if request[0] not in ("get", "wait"):  # those may wait
            while connection.receive(DEADLINE_S).number != number:
                pass
    connection.close()


def test_unauthenticated_peers_read_and_change_nothing() -> None:
    key = RunKey.make()
    server = StoreServer(key, LOOPBACK)
    own = StoreClient(reached(server), key, DEADLINE_S)
    own.set("secret", b"ours")
    poison = msgspec.msgpack.encode(Request(0, "set", ["secret"], [b"theirs"]))
    frame = len(poison).to_bytes(4, "big") + poison
    with raises(ChannelError, "channel.key_differs"):
        StoreClient(reached(server), RunKey.make(), DEADLINE_S)
    other = RunKey.make().client_context()
    other.verify_mode = ssl.CERT_NONE
    for wrap in (lambda link: link, other.wrap_socket):
        heard = b""
        with suppress(OSError), wrap(socket.create_connection(reached(server))) as intruder:  # type: ignore[arg-type]
            intruder.settimeout(DEADLINE_S)
            intruder.sendall(frame)
            while data := intruder.recv(2**12):
                heard += data
        assert b"ours" not in heard
    assert own.get("secret") == b"ours"
    assert server.unauthenticated == 3
    own.close()
    server.close()


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_flood_of_mutated_bytes_changes_nothing_and_keeps_nobody_out(count: int) -> None:
    key = RunKey.make()
    server = StoreServer(key, LOOPBACK)
    there: list[socket.socket] = []

    def flood() -> None:
        for seed in range(count):
            while len(there) >= 2 * MOST_UNPROVEN:
                there.pop(0).close()
            own = f"127.0.0.{seed % 250 + 1}", 0  # not all ports of one address
            there.append(socket.create_connection(reached(server), DEADLINE_S, own))  # type: ignore[arg-type]
            with suppress(OSError):  # turned away already
                there[-1].sendall(mutated_hello(seed) if seed % 3 else b"")

    own = StoreClient(reached(server), key, DEADLINE_S)
    flooding = threading.Thread(target=flood)
    flooding.start()
    calls = 0
    while flooding.is_alive() or calls < 100:
        calls += 1
        assert own.add("calls", 1) == calls
        if calls % 50 == 0:
            newcomer = StoreClient(reached(server), key, DEADLINE_S)
            assert newcomer.get("calls") == str(calls).encode()
            newcomer.close()
    flooding.join()
    for intruder in there:
        intruder.close()
    until = time.monotonic() + DEADLINE_S
    while server.unauthenticated < count // 2 and time.monotonic() < until:  # the last are still coming
        calls = own.add("calls", 1)
    assert server.unauthenticated >= count // 2
    assert own.num_keys() == 1
    own.close()
    server.close()


@pytest.mark.needs_root
def test_another_user_of_the_host_reads_and_changes_nothing(clients: Clients, tmp_path: Path) -> None:
    own = clients()
    own.set("secret", b"ours")
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from paceline.wire.store import StoreClient\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: StoreClient(Path(sys.argv[1]), None, 1).set('secret', b'theirs')\n"
        "except Exception as error: print(error)\n"
    )
    tmp_path.chmod(0o711)  # as if somebody had opened the folder, and the socket
    for parent in list(tmp_path.parents)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "store").chmod(0o777)
    shown = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert f"user {os.geteuid()}" in shown or "this socket belongs to user root" in shown
    assert own.get("secret") == b"ours"


def test_a_request_of_another_kind_ends_its_connection_alone(server: StoreServer, clients: Clients) -> None:
    own = clients()
    wrong = connect(server.address, None, Answer, deadline_s=DEADLINE_S)
    wrong.send(Answer(0))
    with pytest.raises(ChannelError):
        wrong.receive(DEADLINE_S)
    wrong.close()
    own.set("still", b"there")
    assert own.get("still") == b"there"
