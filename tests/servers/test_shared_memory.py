"""Shared memory of a connection: used again, never while it is in use, and no peer steers where it is read."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.shm.segment import TOKEN_BYTES
from paceline.errors import ChannelError
from paceline_server.talk import LEAST_BYTES, MOST_BLOCKS, SEALS, OwnMemory, PeersMemory
from refusals import raises


def sent(own: OwnMemory, peers: PeersMemory, value: int, nbytes: int) -> torch.Tensor:
    """A tensor of so many equal bytes, as it comes to the peer."""
    data = np.full(nbytes, value, np.uint8)
    placed = own.place([data.data], nbytes)
    assert placed is not None
    if placed.descriptor is not None:
        peers.add(placed.number, placed.size, placed.descriptor)
    return torch.frombuffer(peers.block(placed.number, nbytes), dtype=torch.uint8)


def test_memory_is_used_again_once_its_last_tensor_is_gone() -> None:
    own, peers = OwnMemory(), PeersMemory()
    first = sent(own, peers, 1, 1000)
    part, second = first[10:20], sent(own, peers, 2, 1000)
    del first
    assert peers.returned() == []
    assert part.tolist() == [1] * 10
    del part
    numbers = peers.returned()
    assert numbers == [0]
    own.returned(numbers)
    third = sent(own, peers, 3, 500)
    assert len(own) == 2
    assert second.tolist() == [2] * 1000
    assert third.tolist() == [3] * 500


@given(st.lists(st.tuples(st.integers(1, 3 * LEAST_BYTES), st.integers(0, 5)), max_size=20))
def test_what_is_held_stays_as_it_was_whatever_comes_and_goes(steps: list[tuple[int, int]]) -> None:
    own, peers = OwnMemory(), PeersMemory()
    held: list[tuple[int, torch.Tensor]] = []
    for value, (nbytes, dropped) in enumerate(steps):
        held.append((value, sent(own, peers, value, nbytes)))
        del held[:dropped]
        own.returned(peers.returned())
    assert all(bool((tensor == value).all()) for value, tensor in held)


def test_memory_has_an_end_after_which_the_socket_is_taken() -> None:
    own, peers = OwnMemory(), PeersMemory()
    held = [sent(own, peers, number, 100) for number in range(MOST_BLOCKS)]
    assert own.place([memoryview(b"more")], 4) is None
    held.pop()
    own.returned(peers.returned())
    larger = sent(own, peers, 77, 2 * LEAST_BYTES)  # replaces the free block
    assert len(own) == MOST_BLOCKS
    assert bool((larger == 77).all())
    assert held[3].tolist() == [3] * 100


@pytest.mark.parametrize("numbers", [[7], [0, 0], [-1]])
def test_memory_that_the_peer_never_had_is_not_taken_back(numbers: list[int]) -> None:
    own, peers = OwnMemory(), PeersMemory()
    kept = sent(own, peers, 1, 100)
    with raises(ChannelError, "shared.return_unknown"):
        own.returned(numbers)
    assert kept[0] == 1


def memory(size: int, seals: int) -> int:
    """A descriptor of memory that a faulty peer might send."""
    descriptor = os.memfd_create("paceline-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("number", "nbytes", "size", "seals"),
    [
        (0, 4096, 4096 + TOKEN_BYTES, fcntl.F_SEAL_GROW),
        (0, 8192, 4096 + TOKEN_BYTES, SEALS),
        (-1, 4096, 4096 + TOKEN_BYTES, SEALS),
        (MOST_BLOCKS, 4096, 4096 + TOKEN_BYTES, SEALS),
        (0, 0, TOKEN_BYTES, SEALS),
        (0, 2**60, 4096, SEALS),
    ],
    ids=["may shrink", "shorter than said", "number below", "number above", "empty", "more than is let"],
)
def test_memory_that_no_peer_sends_is_refused_and_closed(number: int, nbytes: int, size: int, seals: int) -> None:
    descriptor = memory(size, seals)
    with pytest.raises(ChannelError):
        PeersMemory().add(number, nbytes, descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_is_no_memory_is_refused() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with raises(ChannelError, "shared.not_mapped"):
        PeersMemory().add(0, 4096, reader)


def test_bytes_outside_of_the_memory_or_still_in_use_are_refused() -> None:
    own, peers = OwnMemory(), PeersMemory()
    kept = sent(own, peers, 5, 100)
    for number, nbytes in ((0, 10), (1, 10), (-1, 10)):
        with raises(ChannelError, "shared.range_impossible"):
            peers.block(number, nbytes)
    del kept
    own.returned(peers.returned())
    for nbytes in (0, -1, LEAST_BYTES + 1, 2**62):
        with raises(ChannelError, "shared.range_impossible"):
            peers.block(0, nbytes)
