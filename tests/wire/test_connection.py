"""Connections: what was sent arrives whole and typed; what is no message ends the connection and nothing else."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from channel_ends import DEADLINE_S, Blob, Messages, Note, pair
from paceline.errors import ChannelError, DeadlineError
from paceline.wire.connection import LIMIT_BYTES, Connection, connect
from paceline.wire.key import RunKey
from refusals import raises

LOOPBACK = ("127.0.0.1", 0)
MESSAGES = st.one_of(st.builds(Note, st.text(), st.integers(-(2**63), 2**63 - 1)), st.builds(Blob, st.binary()))


@pytest.fixture(params=["TLS", "Unix socket"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Connection, Connection]]:
    tmp_path.chmod(0o700)
    where, key = (LOOPBACK, RunKey.make()) if request.param == "TLS" else (tmp_path / "socket", None)
    with pair(where, key) as both:
        yield both


def test_messages_arrive_in_order_in_both_directions(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    for number in range(100):
        here.send(Note("to there", number))
        there.send(Note("to here", number))
    for number in range(100):
        assert there.receive(DEADLINE_S) == Note("to there", number)
        assert here.receive(DEADLINE_S) == Note("to here", number)


def test_long_messages_go_both_ways_at_once_from_several_threads(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    long = Blob(bytes(range(256)) * 2**13)
    senders = [
        threading.Thread(target=lambda end=end: [end.send(long) for _ in range(3)]) for end in (here, there, here)
    ]
    for sender in senders:
        sender.start()
    for _ in range(6):
        assert there.receive(DEADLINE_S) == long
    for _ in range(3):
        assert here.receive(DEADLINE_S) == long
    for sender in senders:
        sender.join()


def test_a_wait_ends_at_its_deadline_and_the_connection_goes_on(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    with raises(DeadlineError, "channel.receive_deadline", deadline_s=0.05):
        here.receive(0.05)
    there.send(Note("late"))
    assert here.receive(DEADLINE_S) == Note("late")


def test_who_waits_for_a_peer_that_ends_is_told_and_so_is_who_sends(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    there.send(Note("last words"))
    there.close()
    assert here.receive(DEADLINE_S) == Note("last words")
    with pytest.raises(ChannelError):
        here.receive(DEADLINE_S)
    with raises(ChannelError, "channel.closed"):
        here.send(Note("too late"))
    assert here.lost


def test_a_peer_that_was_killed_is_told_in_plain_words_to_who_sends(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    there.end()  # as the kernel does: TLS says no word
    with pytest.raises(ChannelError, match=r"has closed the connection|Broken pipe|reset by peer"):
        _ = [here.send(Note("too late")) for _ in range(10_000)]  # type: ignore[func-returns-value]


def test_closing_wakes_the_thread_that_waits_for_a_message(ends: tuple[Connection, Connection]) -> None:
    here, _ = ends
    failures: list[ChannelError] = []

    def wait() -> None:
        try:
            here.receive(DEADLINE_S)
        except ChannelError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    here.close()
    waiting.join(DEADLINE_S)
    assert len(failures) == 1
    assert not isinstance(failures[0], DeadlineError)


def test_a_message_beyond_the_limit_is_refused_before_it_is_sent(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    with raises(ChannelError, "channel.message_too_large"):
        here.send(Blob(bytes(LIMIT_BYTES)))
    here.send(Note("short"))
    assert there.receive(DEADLINE_S) == Note("short")


def test_a_peer_that_reads_nothing_is_given_up(ends: tuple[Connection, Connection]) -> None:
    here, _ = ends

    def send_on() -> None:
        for _ in range(40):
            here.send(Blob(bytes(2**21)), deadline_s=0.05)

    with raises(ChannelError, "channel.send_deadline"):
        send_on()


def test_nobody_at_an_address_is_told_at_the_deadline(tmp_path: Path) -> None:
    with socket.create_server(LOOPBACK) as taken:
        where = taken.getsockname()
    begin = time.monotonic()
    for place, key in ((where, RunKey.make()), (tmp_path / "nobody", None)):
        with raises(DeadlineError, "channel.connect_deadline", deadline_s=0.2):
            connect(place, key, Messages, deadline_s=0.2)
    assert time.monotonic() - begin < DEADLINE_S


def test_between_hosts_there_is_nothing_without_a_key() -> None:
    with raises(ChannelError, "channel.no_key"):
        connect(("127.0.0.1", 1), None, Messages, deadline_s=1)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        (LIMIT_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\0",
        b"\0\0\0\5\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 things
        b"\0\0\x10\0" + b"\x91" * 2**12,  # an array in an array in an array …
        b"\0\0\0\4\x81\xa4ty",
    ],
)
def test_a_frame_that_no_peer_sends_ends_the_connection_without_taking_memory(frame: bytes) -> None:
    intruder, ours = socket.socketpair()
    connection = Connection(ours, Messages, "the other end")
    intruder.sendall(frame)
    with pytest.raises(ChannelError, match=r"the other end (announced|sent data that is not a message)"):
        connection.receive(DEADLINE_S)
    assert connection.lost
    connection.close()
    intruder.close()


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 40)))
def test_messages_arrive_whole_however_the_bytes_are_cut(messages: list[Note | Blob], sizes: list[int]) -> None:
    bodies = map(msgspec.msgpack.encode, messages)
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    with cut_stream() as (sender, connection):
        found: list[Note | Blob] = []
        for size in [*sizes, len(stream)]:
            sender.sendall(stream[:size])
            stream = stream[size:]
            while (message := connection.take()) is not None:
                found.append(message)
        assert found == messages


def receive_all(connection: Connection) -> None:
    """Receive messages until the connection ends."""
    while True:
        assert isinstance(connection.receive(DEADLINE_S), Note | Blob)


class cut_stream:
    """A raw end, and a connection at the other."""

    def __enter__(self) -> tuple[socket.socket, Connection]:
        self.sender, ours = socket.socketpair()
        self.connection = Connection(ours, Messages, "the other end")
        return self.sender, self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.sender.close()


def check_mutated(messages: list[Note | Blob], edits: list[tuple[int, int]], cut: int) -> None:
    """Frames with some bytes changed give messages or a closed connection: never another error, never a wait."""
    bodies = list(map(msgspec.msgpack.encode, messages))
    stream = bytearray(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
    for place, value in edits:
        stream[place % len(stream)] = value
    with cut_stream() as (sender, connection):
        sender.sendall(stream[: len(stream) - cut % len(stream)])
        sender.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            receive_all(connection)


EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)
MUTATED = (st.lists(MESSAGES, min_size=1, max_size=3), EDITS, st.integers(0, 40))


@given(*MUTATED)
@settings(max_examples=200)
def test_mutated_frames_close_the_connection_and_nothing_else(
    messages: list[Note | Blob], edits: list[tuple[int, int]], cut: int
) -> None:
    check_mutated(messages, edits, cut)


@pytest.mark.slow
def test_a_hundred_thousand_mutated_frames_close_connections_and_nothing_else() -> None:
    chance = random.Random(0)
    for _ in range(100_000):
        messages: list[Note | Blob] = [
            Note("some words", chance.getrandbits(62)),
            Blob(chance.randbytes(chance.randrange(40))),
        ]
        edits = [(chance.getrandbits(16), chance.getrandbits(8)) for _ in range(chance.randint(1, 4))]
        check_mutated(messages, edits, chance.randrange(40))
