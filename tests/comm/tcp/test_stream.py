"""A stream survives lost connections: nothing is lost, doubled or mixed up."""

from __future__ import annotations

import os
import random
import select
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.comm.tcp.stream as stream_module
from paceline.comm.tcp.stream import FRAME_BYTES, WINDOW_BYTES, ByteStream, SealedWire, Wire
from paceline.errors import SyncError
from refusals import raises


class Tape:
    """A sink that writes down all it gets, in parts of at most so many bytes."""

    def __init__(self, part: int) -> None:
        self.all = bytearray()
        self._part = memoryview(bytearray(part))

    def target(self) -> memoryview:
        """Where the next bytes go."""
        return self._part

    def advance(self, count: int) -> None:
        """They are there."""
        self.all += self._part[:count]


def over_tcp() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def connect(
    a: ByteStream, b: ByteStream, sealed: bool = True, ends: tuple[socket.socket, socket.socket] | None = None
) -> None:
    """As two ranks do that have found each other: each tells how much it has received."""
    one, other = ends or socket.socketpair()
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**13)
    received, keys = (a.received, b.received), (os.urandom(32), os.urandom(32))
    a.attach(SealedWire(one, *keys) if sealed else Wire(one), received[1])
    b.attach(SealedWire(other, *reversed(keys)) if sealed else Wire(other), received[0])


def carry(streams: tuple[ByteStream, ByteStream], limit: int) -> bool:
    """Read and write at both ends until all has arrived, or so many bytes have: then the connection is cut.

    Returns whether it is.
    """
    begin = sum(stream.received for stream in streams)
    until = time.monotonic() + 20
    while any(stream.outstanding for stream in streams):
        assert time.monotonic() < until, "bytes are missing, and none comes"
        for stream in streams:
            stream.write()
            stream.read()
            if sum(stream.received for stream in streams) - begin >= limit:
                return True
            stream.acknowledge_soon()
    return False


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 200_000), max_size=8),
    lent=st.booleans(),
    sealed=st.booleans(),
    part=st.sampled_from([1000, 70_000]),
    seed=st.integers(0, 1000),
)
def test_every_byte_arrives_once_and_in_order(
    sizes: list[int], cuts: list[int], lent: bool, sealed: bool, part: int, seed: int
) -> None:
    chance = random.Random(seed)
    tapes = Tape(part), Tape(part)
    streams = ByteStream(tapes[0]), ByteStream(tapes[1])
    expected = bytearray(), bytearray()
    for size in sizes:
        end = chance.randrange(2)
        data = bytearray(chance.randbytes(size))
        expected[1 - end].extend(data)
        piece = streams[end].give(memoryview(data), lent=lent)
        if lent and chance.random() < 0.5:  # the memory is wanted back, and written to
            streams[end].keep(piece)
            data[:] = bytes(size)
    for cut in cuts:
        connect(*streams, sealed)
        if not carry(streams, cut):
            break
        for stream in chance.sample(streams, 2):
            stream.detach()
    connect(*streams, sealed)
    carry(streams, limit=2**60)
    assert (tapes[0].all, tapes[1].all) == expected
    for stream in streams:
        stream.detach()


@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_left_for_the_next_turn_shows_in_a_poll(monkeypatch: pytest.MonkeyPatch, sealed: bool) -> None:
    """A turn ends after so many bytes; what was read before is not waited for again."""
    monkeypatch.setattr(stream_module, "_TURN_BYTES", 10_000)
    tape = Tape(1000)
    streams = ByteStream(Tape(1)), ByteStream(tape)
    connect(*streams, sealed)
    for _ in range(30):
        streams[0].give(memoryview(bytes(1000)), lent=False)
    reader = streams[1].connection
    assert reader is not None
    while streams[1].received < 30_000:
        streams[0].write()
        readable, _, _ = select.select([reader], [], [], 5)
        assert readable, f"only {streams[1].received} bytes were seen"
        streams[1].read()
    for stream in streams:
        stream.detach()


@pytest.mark.parametrize("sealed", [True, False])
def test_small_records_after_large_ones_show_in_a_poll(monkeypatch: pytest.MonkeyPatch, sealed: bool) -> None:
    """After a wait for the rest of a large record, small records still wake the reader."""
    monkeypatch.setattr(stream_module, "_TURN_BYTES", 1)
    streams = ByteStream(Tape(1)), ByteStream(Tape(70_000))
    connect(*streams, sealed, over_tcp())
    writer, reader = (stream.connection for stream in streams)
    assert writer is not None
    assert reader is not None
    for nbytes in (300_000, 100, 5_000, 1, 300_000, 2_000):
        streams[0].give(memoryview(bytes(nbytes)), lent=False)
        while streams[1].received < streams[0].given:
            streams[0].write()
            ready = select.select([reader], [writer] if streams[0].wants_to_write else [], [], 5)
            assert any(ready), f"only {streams[1].received} of {streams[0].given} bytes were seen"
            if reader in ready[0]:
                streams[1].read()
    for stream in streams:
        stream.detach()


def test_no_more_is_on_its_way_than_the_window() -> None:
    """What a lost connection may have to carry again is kept, so it has a bound."""
    stream = ByteStream(Tape(1))
    one, other = socket.socketpair()
    with other:
        one.setblocking(False)
        stream.attach(Wire(one), 0)
        stream.give(memoryview(bytes(WINDOW_BYTES + 2 * FRAME_BYTES)), lent=False)
        taken = 0
        while stream.wants_to_write:
            stream.write()
            taken += len(other.recv(2**20))
        assert WINDOW_BYTES <= stream.sent < WINDOW_BYTES + FRAME_BYTES
        stream.detach()


def test_a_connection_that_closes_is_lost_and_one_that_says_goodbye_has_ended() -> None:
    streams = ByteStream(Tape(1)), ByteStream(Tape(1))
    connect(*streams)
    streams[0].detach()
    with pytest.raises(ConnectionError, match="closed by the other side"):
        streams[1].read()
    connect(*streams)
    streams[0].say_goodbye()
    streams[0].detach()
    streams[1].read()
    assert streams[1].ended
    streams[1].detach()


def test_an_end_that_is_not_the_one_from_before_is_refused() -> None:
    stream = ByteStream(Tape(1))
    one, other = socket.socketpair()
    with one, other, raises(SyncError, "ranks.bytes_inconsistent", acknowledged=0, received=5, sent=0):
        stream.attach(Wire(one), 5)
