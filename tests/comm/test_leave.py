"""After the ranks have parted, no thread of the transport is left that could abort the process at its end."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.comm.backend import joined
from paceline.sync import AllReduce, Replica
from ranks import Ranks


def transport_threads() -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    maps = {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line}
    ours = [thread.name for thread in threading.enumerate() if "paceline" in thread.name]
    return sorted(
        name for name in [*names, *maps, *ours] if any(word in name for word in ("gloo", "store", "paceline"))
    )


def train(transport: str) -> tuple[list[str], list[str]]:
    with joined(deadline_s=60, transport=transport) as group:
        model = nn.Linear(4, 4)
        rule = AllReduce()
        rule.attach(Replica(model, group, 6))
        group.start_all_reduce(torch.ones(100_000)).wait()
        model(torch.ones(2, 4)).sum().backward()
        rule.after_backward(1, torch.zeros(6))
        torch.optim.AdamW(model.parameters()).step()  # imports modules of torch that keep the group of the moment
        during = transport_threads()
        rule.detach()
    del model, rule  # gradients in shared memory live as long as whoever has them
    gc.collect()
    return during, transport_threads()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_leaving_ends_the_threads_and_the_memory_of_the_transport(launched: Ranks, transport: str) -> None:
    for during, after in launched(2, train, transport):
        assert any(transport.replace("shm", "memfd:paceline-tensor") in name for name in during)
        assert after == []
