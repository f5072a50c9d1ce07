"""Frames with memory beside the message: whole however they are cut, limited, and away again."""

from __future__ import annotations

import itertools
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from channel_ends import DEADLINE_S, Messages, Note
from paceline.errors import ChannelError
from paceline.wire.connection import Connection, FrameLimits, Incoming, begin_of
from refusals import raises

LIMITS = FrameLimits(attached_bytes=2**24, message_bytes=2**10, descriptors=2)


@contextmanager
def both_ends(limits: FrameLimits = LIMITS) -> Iterator[tuple[Connection, Connection]]:
    """Two connected ends."""
    one, other = socket.socketpair()
    here, there = (Connection(link, Messages, "the other end", limits) for link in (one, other))
    try:
        yield here, there
    finally:
        here.close()
        there.close()


def stream_of(parts: list[tuple[bytes, bytes]]) -> bytes:
    """Frames of messages, each with what is attached to it."""
    return b"".join(begin_of(body, len(attached)) + attached for body, attached in parts)


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=60)), max_size=6),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
)
def test_frames_are_whole_however_the_bytes_are_cut(parts: list[tuple[bytes, bytes]], sizes: list[int]) -> None:
    incoming, stream, cuts = Incoming(LIMITS), stream_of(parts), itertools.cycle(sizes)
    found: list[tuple[bytes, bytes]] = []
    while stream:
        target = incoming.target()
        piece = stream[: next(cuts)]
        if target is None:
            incoming.add(piece)
        else:
            piece = piece[: len(target)]
            target[: len(piece)] = piece
            incoming.advance(len(piece))
        stream = stream[len(piece) :]
        while (frame := incoming.next()) is not None:
            found.append((frame.body, bytes(frame.attached or b"")))
    assert found == parts


def test_attached_memory_goes_both_ways_at_once() -> None:
    data = os.urandom(2**22)
    with both_ends() as (here, there):
        sender = threading.Thread(target=lambda: here.send(Note("to there"), attached=[memoryview(data)] * 3))
        sender.start()
        until = time.monotonic() + DEADLINE_S
        while (found := there.take_attached()) is None:
            assert there.wait(select.POLLIN, until)
        sender.join(DEADLINE_S)
        message, attached = found
        assert message == Note("to there")
        assert bytes(attached or b"") == data * 3
        there.send(Note("thanks"))
        assert here.receive(DEADLINE_S) == Note("thanks")


@pytest.mark.parametrize(
    "begin",
    [
        (2**31 + 5).to_bytes(4, "big") + (2**24 + 1).to_bytes(8, "big"),
        (2**31 + 5).to_bytes(4, "big") + (2**64 - 1).to_bytes(8, "big"),
        (2**31 + 5).to_bytes(4, "big") + bytes(8),
        (2**10 + 1).to_bytes(4, "big"),
        (2**31 + 2**10 + 1).to_bytes(4, "big") + (1).to_bytes(8, "big"),
    ],
)
def test_more_than_the_limits_is_refused_before_any_memory_is_taken(begin: bytes) -> None:
    taken: list[int] = []

    def memory(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return memoryview(bytearray(nbytes))

    intruder, ours = socket.socketpair()
    connection = Connection(ours, Messages, "the other end", LIMITS._replace(memory=memory))
    intruder.sendall(begin)
    with raises(ChannelError, "channel.peer_error", peer="the other end"):
        connection.receive(DEADLINE_S)
    assert connection.lost
    assert not taken
    connection.close()
    intruder.close()


def test_a_descriptor_comes_with_its_message_and_is_closed_here() -> None:
    with tempfile.TemporaryFile() as file, both_ends() as (here, there):
        file.write(b"contents")
        file.flush()
        sent = os.dup(file.fileno())
        here.send(Note("a file"), descriptor=sent)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(sent)
        assert there.receive(DEADLINE_S) == Note("a file")
        found = there.take_descriptor()
        assert os.pread(found, 100, 0) == b"contents"
        os.close(found)
        with raises(ChannelError, "channel.descriptor_missing"):
            there.take_descriptor()


def test_more_descriptors_than_may_come_end_the_connection_and_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with both_ends() as (here, there):
        for _ in range(3):
            here.send(Note("another"), descriptor=os.open("/dev/null", os.O_RDONLY))
        with raises(ChannelError, "channel.too_many_descriptors"):
            _ = [there.receive(DEADLINE_S) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_lets_no_memory_come_refuses_it_as_a_length() -> None:
    with both_ends(FrameLimits()) as (here, there):
        here.send(Note("with memory"), attached=[memoryview(b"x" * 100)])
        with raises(ChannelError, "channel.peer_error"):
            there.receive(DEADLINE_S)


def test_a_message_is_typed_with_memory_beside_it_too() -> None:
    intruder, ours = socket.socketpair()
    connection = Connection(ours, Messages, "the other end", LIMITS)
    intruder.sendall(begin_of(msgspec.msgpack.encode({"type": "unknown"}), 4) + b"four")
    with raises(ChannelError, "channel.not_a_message"):
        connection.receive(DEADLINE_S)
    connection.close()
    intruder.close()
