"""Sealed records: what is read is what was written, or the connection is lost."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.tcp import stream as wire_module
from paceline.comm.tcp.stream import RECORD_BYTES, AlteredError, SealedWire

KEYS = bytes(16), bytes(range(16))


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            end.setblocking(False)
        yield one, other


def sealed(parts: list[bytes]) -> list[bytes]:
    """Each part as the record that is sent."""
    with sockets() as (one, other):
        wire, records = SealedWire(one, *KEYS), []
        for part in parts:
            wire.send([memoryview(part)])
            records.append(other.recv(2**20))
        return records


def opened(data: bytes) -> tuple[bytes, str]:
    """What a receiver takes from those bytes, and what it says at their end."""
    with sockets() as (one, other):
        one.sendall(data)
        wire, found, place = SealedWire(other, *reversed(KEYS)), b"", memoryview(bytearray(1000))
        try:
            while True:
                found += place[: wire.receive(place)]
        except AlteredError as error:
            return found, str(error)
        except BlockingIOError:
            return found, "waits"


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=5), st.integers(1, 4000))
def test_what_is_sealed_in_parts_is_opened_whole(parts: list[bytes], room: int) -> None:
    with sockets() as (one, other):
        sender, receiver = SealedWire(one, *KEYS), SealedWire(other, *reversed(KEYS))
        left, found, place = [memoryview(part) for part in parts], b"", memoryview(bytearray(room))
        while left:
            count = sender.send(left)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
        while len(found) < sum(map(len, parts)):
            found += place[: receiver.receive(place)]
        assert found == b"".join(parts)
        assert not receiver.buffered


def test_a_record_is_no_longer_than_agreed_and_needs_no_copy_of_what_is_large() -> None:
    with sockets() as (one, other):
        sender, large = SealedWire(one, *KEYS), memoryview(os.urandom(3 * RECORD_BYTES))
        assert sender.send([memoryview(bytes(12)), memoryview(bytes(45)), large]) == 57 + RECORD_BYTES
        receiver, place = SealedWire(other, *reversed(KEYS)), memoryview(bytearray(2 * RECORD_BYTES))
        assert receiver.receive(place) == 57
        for alone in (False, True):
            assert not alone or sender.send([large]) == RECORD_BYTES
            while (count := _received(receiver, place)) is None:
                with suppress(BlockingIOError):
                    sender.flush()
            assert count == RECORD_BYTES
            assert place[:count] == large[:count]
        one.close()
        assert receiver.receive(place) == 0


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with some changed, taken out, repeated, or put in."""
    at, count = chance.randrange(len(data)), chance.randrange(1, 100)
    return data[:at] + chance.choice(
        [
            bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :],
            data[at + count :],
            data[at : at + count] + data[at:],
            chance.randbytes(count) + data[at:],
        ]
    )


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_changed_bytes_are_never_read(count: int) -> None:
    parts = [os.urandom(length) for length in (5, 2000, 300)]
    data, prefixes = b"".join(sealed(parts)), [b"".join(parts[:some]) for some in range(4)]
    for seed in range(count):
        found, end = opened(mutated(data, random.Random(seed)))
        assert found in prefixes, seed
        assert end == "waits" or "changed in transit" in end or "is not valid" in end


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 1), (0, 2), (2,)], ids=["swapped", "repeated", "left out", "late"])
def test_records_out_of_order_are_refused(order: tuple[int, ...]) -> None:
    records = sealed([b"first", b"second", b"third"])
    found, end = opened(b"".join(records[i] for i in order))
    assert "changed in transit" in end
    assert b"firstsecondthird".startswith(found)


def test_records_of_the_other_direction_and_of_another_connection_are_refused() -> None:
    [record] = sealed([b"a gradient"])
    for keys in (KEYS, (os.urandom(16), os.urandom(16))):
        with sockets() as (one, other):
            one.sendall(record)
            with pytest.raises(AlteredError, match="changed in transit"):
                SealedWire(other, *keys).receive(memoryview(bytearray(100)))


def test_keys_that_have_sealed_enough_are_used_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "_MOST_BYTES", 40)  # a record of a byte has 21
    with sockets() as (one, _):
        wire = SealedWire(one, *KEYS)
        wire.send([memoryview(b"x")])
        wire.send([memoryview(b"x")])
        with pytest.raises(ConnectionError, match="the maximum number of bytes"):
            wire.send([memoryview(b"x")])


def test_what_the_kernel_does_not_take_is_pending_and_goes_first() -> None:
    with sockets() as (one, other):
        sender, receiver = SealedWire(one, *KEYS), SealedWire(other, *reversed(KEYS))
        data, sent = memoryview(os.urandom(RECORD_BYTES)), 0
        while not sender.pending:
            sender.send([data])
            sent += 1
        with pytest.raises(BlockingIOError):
            sender.send([data])
        place = memoryview(bytearray(RECORD_BYTES))
        for _ in range(sent):
            while (count := _received(receiver, place)) is None:
                with suppress(BlockingIOError):
                    sender.flush()
            assert place[:count] == data
        assert not sender.pending


def _received(wire: SealedWire, place: memoryview) -> int | None:
    try:
        return wire.receive(place)
    except BlockingIOError:
        return None
