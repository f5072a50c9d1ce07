"""Prepared sums have the same bits as all-reduces, also between other collectives."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from paceline.comm.backend import joined
from paceline.errors import SyncError
from ranks import Backend, Ranks


def sums_among_other_calls() -> list[tuple[list[float], list[float]]]:
    """Return prepared sums and all-reduces of the same tensors, between other collectives.

    Rank 1 is sometimes late.
    """
    found = []
    with joined(deadline_s=30) as group:
        generator = torch.Generator().manual_seed(group.rank)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = group.empty(37, dtype)
            summed = group.prepared_sum(tensor)
            for turn in range(6):
                tensor.copy_(torch.randn(37, generator=generator))
                expected = tensor.clone()
                if group.rank == 1 and turn % 2:
                    time.sleep(0.01)
                summed()
                group.all_reduce(expected)
                found.append((tensor.tolist(), expected.tolist()))
                if turn % 3 == 1:
                    group.broadcast(expected)
                    pending = group.start_all_reduce(expected)
                    summed()
                    pending.wait()
            group.release(tensor)
    return found


@pytest.mark.parametrize(("backend", "size"), [("shm", 2), ("shm", 3), ("gloo", 2)])
def test_a_prepared_sum_has_the_bits_of_an_all_reduce(ranks: Ranks, backend: Backend, size: int) -> None:
    for result in ranks(size, sums_among_other_calls, backend=backend):
        for prepared, plain in result:
            assert prepared == plain


def different_calls() -> list[str]:
    """Return the errors of two sums in which one rank sums fewer numbers."""
    with joined(deadline_s=30) as group:
        tensor = torch.zeros(4)[: 3 if group.rank else 4]
        summed, codes = group.prepared_sum(tensor), []
        for _ in range(2):
            try:
                summed()
            except SyncError as error:
                codes.append(error.code)
            except RuntimeError as error:
                codes.append(type(error).__name__)
        return codes


def test_prepared_sums_of_different_sizes_are_refused_and_end_the_group(ranks: Ranks) -> None:
    for codes in ranks(2, different_calls, backend="shm"):
        assert codes[0] == "ranks.calls_differ"
        assert len(codes) == 2, "after different calls, the group cannot be used any more"


def one_rank_stays_away() -> Any:
    with joined(deadline_s=1) as group:
        summed = group.prepared_sum(torch.ones(2))
        if group.rank == 1:
            time.sleep(3)
            return None
        try:
            summed()
        except SyncError as error:
            return error.code
        return "summed"


def test_a_rank_that_stays_away_from_a_prepared_sum_is_reported_at_the_deadline(ranks: Ranks) -> None:
    assert ranks(2, one_rank_stays_away, backend="shm")[0] == "ranks.deadline"
