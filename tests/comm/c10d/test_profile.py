"""Collectives and messages of ours show up in torch's profilers.

Where they are missing, a trace shows waiting as nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ranks import Backend, Ranks


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_trace_names_each_collective_and_message_with_its_shapes(ranks: Ranks, backend: Backend) -> None:
    expected = [
        (f"{backend}:all_gather", [[2, 3]]),
        (f"{backend}:all_reduce", [[2, 3]]),
        (f"{backend}:all_reduce", [[4]]),
        (f"{backend}:recv", [[5]]),
        (f"{backend}:send", [[5]]),
    ]
    assert ranks(2, traced, backend=backend) == [expected, expected]


def traced() -> list[tuple[str, list[list[int]]]]:
    other = 1 - dist.get_rank()
    matrix = torch.ones(2, 3)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        dist.all_reduce(matrix)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], matrix)
        sent = dist.isend(torch.ones(5), other)
        dist.recv(torch.empty(5), other)
        for pending in (work, sent):
            assert pending is not None
            pending.wait()
    dist.all_reduce(matrix)  # no profiler sees it
    return sorted(
        (event.name, event.input_shapes) for event in trace.events() or () if event.name.startswith(("shm:", "tcp:"))
    )
