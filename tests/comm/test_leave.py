"""After the ranks have parted, no thread of the transport is left that could abort the process at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.elastic.attempt import launch
from paceline.elastic.place import on_this_machine
from paceline.elastic.ranks import Setting

RANK = """
import gc
import sys
from pathlib import Path

import threading

import torch
from torch import nn

from paceline.comm.backend import joined
from paceline.sync import AllReduce, Replica


def transport_threads():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    maps = {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line}
    ours = [thread.name for thread in threading.enumerate() if "paceline" in thread.name]
    return sorted(name for name in [*names, *maps, *ours] if any(word in name for word in ("gloo", "store", "paceline")))


def train(arguments):
    with joined(deadline_s=60, transport=arguments[1]) as group:
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
    Path(arguments[0], f"threads-{group.rank}").write_text(f"{during}\\n{transport_threads()}")
"""  # noqa: E501


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_leaving_ends_the_threads_and_the_memory_of_the_transport(tmp_path: Path, transport: str) -> None:
    script = tmp_path / "rank_that_trains.py"
    script.write_text(RANK)
    launch(Setting([f"{script}:train", str(tmp_path), transport], on_this_machine(2)))
    for rank in range(2):
        during, after = (tmp_path / f"threads-{rank}").read_text().splitlines()
        assert transport.replace("shm", "memfd:paceline-tensor") in during
        assert after == "[]"
