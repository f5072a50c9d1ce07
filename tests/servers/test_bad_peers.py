"""Peers that send what no client sends lose their own connection; everybody else's calls go on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ChannelError
from paceline.wire.connection import Connection, FrameLimits, begin_of, connect
from paceline.wire.key import RunKey
from paceline_server.client import Client
from paceline_server.service import Limits, Service
from paceline_server.talk import (
    VERSION,
    Answer,
    Block,
    Call,
    Forget,
    FromService,
    Hello,
    More,
    Refused,
    SharedMemory,
    Welcome,
)
from refusals import raises
from remote_services import DEADLINE_S, ends, service

HELLO = Hello(VERSION, "raw", "0")
LIMITS = FrameLimits(2**30, descriptors=4)


@pytest.fixture
def within_host(tmp_path: Path) -> Iterator[Service]:
    with service(*ends("Unix socket", tmp_path), limits=Limits(message_bytes=2**12)) as serving:
        yield serving


def raw(serving: Service, *messages: Any) -> Connection:
    connection = connect(serving.address, None, FromService, deadline_s=DEADLINE_S, limits=LIMITS)
    for message in messages:
        connection.send(message)
    return connection


def call(function: str, *args: Any, number: int = 1, block: Block | None = None, **more: Any) -> Call:
    """A call as a client sends it, but for what is given."""
    return Call(number, more.get("returned", []), function, list(args), block, False)


def still_serves(serving: Service) -> bool:
    with Client(serving.address, None, deadline_s=DEADLINE_S) as client:
        sent = torch.rand(50_000)
        return torch.equal(client.call("echo", sent), sent)


@pytest.mark.parametrize(
    "messages",
    [
        [call("echo", 1)],
        [Forget(1, [])],
        [HELLO, HELLO],
        [HELLO, Answer(1, [], 1, None)],
        [HELLO, call("echo", 1, block=Block(0, 100))],
        [HELLO, call("echo", 1, block=Block(-1, -100))],
        [HELLO, call("echo", 1, returned=[0])],
        [HELLO, SharedMemory(0, 4096)],
        [HELLO, call("wait"), call("wait")],
        [HELLO, call("echo", "x" * 2**13)],
    ],
    ids=lambda messages: ", ".join(type(message).__name__ for message in messages),
)
def test_a_message_that_no_client_sends_ends_its_connection_alone(within_host: Service, messages: list[Any]) -> None:
    connection = raw(within_host, *messages)
    with raises(ChannelError, "channel.closed_by_peer"):
        receive_all(connection)
    connection.close()
    assert still_serves(within_host)
    with Client(within_host.address, None) as client:
        client.call("release")


def receive_all(connection: Connection) -> None:
    while True:
        assert isinstance(connection.receive(DEADLINE_S), Welcome)


def test_what_belongs_to_no_call_is_let_pass(within_host: Service) -> None:
    connection = raw(within_host, HELLO, Forget(7, []), More(8, [], 2**60), call("echo", 5, number=9))
    assert isinstance(connection.receive(DEADLINE_S), Welcome)
    assert connection.receive(DEADLINE_S) == Answer(9, [], 5, None)
    connection.close()


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (
            Hello(VERSION + 1, "new", "0"),
            f"uses version {VERSION} of remote calls, but the client uses version {VERSION + 1}",
        ),
        (Hello(VERSION, "x" * 1000, "0"), "at most 200 characters"),
        (Hello(VERSION, "x", ""), "at most 200 characters"),
    ],
)
def test_another_version_or_name_is_refused_in_words(within_host: Service, hello: Hello, words: str) -> None:
    connection = raw(within_host, hello)
    refused = connection.receive(DEADLINE_S)
    assert isinstance(refused, Refused)
    assert words in refused.reason
    connection.close()


def test_descriptors_that_nobody_announced_end_the_connection_and_are_closed(within_host: Service) -> None:
    connection = raw(within_host, HELLO)
    with pytest.raises(ChannelError) as error:
        send_descriptors(connection)
    assert error.value.code in ("channel.closed_by_peer", "channel.lost")  # closed, or reset with data under way
    connection.close()
    assert still_serves(within_host)


def send_descriptors(connection: Connection) -> None:
    for number in range(100):
        connection.send(Forget(number, []), descriptor=os.open("/dev/null", os.O_RDONLY))
        connection.send(call("echo", number, number=number))
        connection.receive(DEADLINE_S)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2**12), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 40))
def test_changed_frames_end_a_connection_and_nothing_else(
    within_host: Service, edits: list[tuple[int, int]], cut: int
) -> None:
    messages = [call("echo", [1, "two", {"three": 4.0}]), Forget(1, []), call("count", 3, number=2), More(2, [], 4)]
    stream = bytearray(b"".join(begin_of(msgspec.msgpack.encode(message), 0) for message in messages))
    for place, value in edits:
        stream[place % len(stream)] = value
    connection = raw(within_host, HELLO)
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setblocking(True)
        link.sendall(stream[: len(stream) - cut])
    connection.close()
    assert still_serves(within_host)


def test_an_unauthenticated_peer_without_the_key_calls_nothing_and_is_counted(tmp_path: Path) -> None:
    where, key = ends("TLS", tmp_path)
    with service(where, key) as serving:
        with raises(ChannelError, "channel.key_differs"):
            Client(serving.address, RunKey.make(), deadline_s=DEADLINE_S)
        with raises(ChannelError, "channel.no_key"):
            Client(serving.address, None, deadline_s=DEADLINE_S)
        with Client(serving.address, key) as client:
            assert client.call("echo", 1) == 1
        assert serving.unauthenticated == 1


def many(serving: Service, key: RunKey | None, count: int) -> tuple[int, int]:

    def come(_: int) -> str:
        try:
            with Client(serving.address, key, deadline_s=DEADLINE_S) as client:
                return str(client.call("echo", "served"))
        except ChannelError as error:
            return str(error)

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(come, range(count), timeout=4 * DEADLINE_S))
    refused = [text for text in found if text != "served"]
    assert all("which is the maximum" in text for text in refused)
    return count - len(refused), len(refused)


def test_hundreds_of_clients_at_once_are_served_or_refused_in_words(tmp_path: Path) -> None:
    with service(*ends("Unix socket", tmp_path), limits=Limits(callers=10)) as serving:
        assert many(serving, None, 400)[0]
        assert still_serves(serving)


@pytest.mark.slow
def test_a_thousand_clients_at_once_are_all_served_over_tls(tmp_path: Path) -> None:
    where, key = ends("TLS", tmp_path)
    with service(where, key) as serving:
        assert many(serving, key, 1000) == (1000, 0)


def test_a_client_that_dies_in_mid_call_is_noticed_and_its_call_ends_in_peace(within_host: Service) -> None:
    connection = raw(within_host, HELLO, call("wait"))
    assert isinstance(connection.receive(DEADLINE_S), Welcome)
    connection.close()
    with Client(within_host.address, None, deadline_s=DEADLINE_S) as client:
        assert client.call("who_left", 1) == ["raw"]
        client.call("release")
        assert client.call("wait") == "released"
