"""Messages arrive whole and in order within a tag, whoever asks first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.shm.collectives import MAIL_BYTES
from ranks import Backend, RankError, Ranks

_HEADER_BYTES = 16
SIZES = [
    0,
    1,
    15,
    16,
    17,
    1000,
    *(MAIL_BYTES - _HEADER_BYTES + d for d in (-17, -1, 0, 1, 15, 16)),
    MAIL_BYTES,
    3 * MAIL_BYTES + 7,
]


def content(sender: int, receiver: int, number: int, size: int) -> Tensor:
    generator = np.random.default_rng(sender * 10_000 + receiver * 1000 + number)
    return torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8))


def exchange(sizes: list[int], tags: list[int], order: int) -> None:
    """Every rank sends all of these to every other, and receives them in another order.

    Within a tag the order is that of the sender.
    """
    rank, others = dist.get_rank(), [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    messages = list(enumerate(zip(sizes, tags, strict=True)))
    chance = random.Random(order + rank)
    early = chance.random() < 0.5
    sends = [] if early else _send_all(rank, others, messages)
    receives: list[tuple[Any, Tensor, Tensor]] = []
    for sender in others:
        asked = sorted(messages, key=lambda m: (hash((order, rank, m[1][1])), m[0]))  # the tags in any order
        for number, (size, tag) in asked:
            place = torch.zeros(size, dtype=torch.uint8)
            receives.append((dist.irecv(place, sender, tag=tag), place, content(sender, rank, number, size)))
    sends += _send_all(rank, others, messages) if early else []
    total = torch.ones(3)
    dist.all_reduce(total)  # collectives go on meanwhile
    assert total.tolist() == [dist.get_world_size()] * 3
    chance.shuffle(receives)
    for work, place, expected in receives:
        work.wait()
        assert torch.equal(place, expected)
    for work in sends:
        work.wait()


def _send_all(rank: int, others: list[int], messages: Any) -> list[Any]:
    return [
        dist.isend(content(rank, to, number, size), to, tag=tag) for to in others for number, (size, tag) in messages
    ]


@pytest.mark.parametrize("ranks_", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
@settings(
    max_examples=3,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    messages=st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 3)), min_size=5, max_size=20),
    order=st.integers(0, 1000),
)
def test_messages_of_all_sizes_cross_each_other_in_any_order(
    ranks: Ranks, ranks_: int, messages: list[tuple[int, int]], order: int
) -> None:
    sizes, tags = zip(*messages, strict=True)
    ranks(ranks_, exchange, list(sizes), list(tags), order, backend="shm")


def ways_to_send() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex128):
        own, got = torch.full((70_000,), rank, dtype=torch.float64).to(dtype), torch.zeros(70_000, dtype=dtype)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, got, left)])
        for work in works:
            work.wait()
        assert torch.equal(
            got.to(torch.complex128), torch.full((70_000,), left, dtype=torch.float64).to(dtype).to(torch.complex128)
        )
    matrix = torch.arange(12.0).view(3, 4)
    if rank == 0:
        dist.send(matrix.t(), 1)
        dist.send(matrix[:, ::2], 1)
    elif rank == 1:
        columns, gaps = torch.zeros(3, 4).t(), torch.zeros(3, 8)[:, ::4]
        dist.recv(columns, 0)
        dist.recv(gaps, 0)
        assert torch.equal(columns, matrix.t())
        assert torch.equal(gaps, matrix[:, ::2])
    with pytest.raises(ValueError, match="should not be the same"):
        dist.send(torch.zeros(1), rank)


def test_rings_types_and_layouts(ranks: Ranks) -> None:
    ranks(3, ways_to_send, backend="shm")


def from_anybody() -> list[int]:
    """Rank 0 asks for whoever comes.

    The others send in an order of their own, one of them with a larger message than fits.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((rank * MAIL_BYTES // 4,), float(rank)), 0, tag=rank)
        dist.send(torch.tensor([float(rank)]), 0)
        return []
    senders = []
    for _ in range(1, size):
        place = torch.zeros(1)
        sender = dist.recv(place)
        assert place.item() == sender
        senders.append(sender)
    for sender in range(1, size):  # these came first, and have been kept
        place = torch.zeros(sender * MAIL_BYTES // 4)
        assert dist.recv(place, tag=sender) == sender
        assert (place == sender).all()
    return sorted(senders)


def test_a_receive_from_any_rank_tells_whose_message_it_was(ranks: Ranks) -> None:
    assert ranks(4, from_anybody, backend="shm")[0] == [1, 2, 3]


def kept_of_several() -> list[float]:
    """Rank 0 asks for any rank's message after all ranks' messages of this tag have come."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        dist.send(torch.zeros(1), 0, tag=1)
        return []
    for sender in range(1, size):
        dist.recv(torch.zeros(1), sender, tag=1)
    found = []
    for _ in range(1, size):
        place = torch.zeros(1)
        assert dist.recv(place) == place.item()
        found.append(place.item())
    return sorted(found)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_receive_from_any_rank_takes_one_of_the_messages_that_were_kept(ranks: Ranks, backend: Backend) -> None:
    assert ranks(4, kept_of_several, backend=backend, deadline_s=30)[0] == [1, 2, 3]


def of_another_size() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(5), 1, tag=3)
    else:
        dist.recv(torch.zeros(4), 0, tag=3)


def test_a_message_of_another_size_than_its_place_is_an_error_that_names_both(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 0 .* 20 bytes \(tag 3\) .* 16 bytes"):
        ranks(2, of_another_size, backend="shm")


def after_a_receive_that_failed() -> list[str]:
    """Rank 0 asks for a message that comes too late; what is sent afterwards must not go to the one who gave up."""
    from datetime import timedelta

    errors = []
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        for _ in range(2):
            try:
                dist.recv(torch.zeros(1), 1, group=group)
            except Exception as error:  # noqa: BLE001 - its text is what is tested
                errors.append(str(error))
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()
    return errors


def test_a_receive_that_was_given_up_takes_no_later_message(ranks: Ranks) -> None:
    first, second = ranks(2, after_a_receive_that_failed, backend="shm")[0]
    assert first.startswith("receive from rank 1: time")
    assert "rank 1 (pid " in first
    assert "can no longer receive messages from rank 1" in second
