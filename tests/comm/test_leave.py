"""After the ranks have parted, no thread of the transport is left that could abort the process at its end."""

from __future__ import annotations

from pathlib import Path

import paceline.launch.local

RANK = """
import sys
from pathlib import Path

import torch
from torch import nn

from paceline.comm.backend import joined
from paceline.sync import AllReduce, Replica


def transport_threads():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sorted(name for name in names if "gloo" in name or "store" in name)


def train(arguments):
    with joined(deadline_s=60) as group:
        model = nn.Linear(4, 4)
        rule = AllReduce()
        rule.attach(Replica(model, group, torch.zeros(6)))
        model(torch.ones(2, 4)).sum().backward()
        rule.after_backward()
        torch.optim.AdamW(model.parameters()).step()  # imports modules of torch that keep the group of the moment
        during = transport_threads()
    Path(arguments[0], f"threads-{group.rank}").write_text(f"{during}\\n{transport_threads()}")
"""


def test_leaving_ends_the_threads_of_the_transport(tmp_path: Path) -> None:
    script = tmp_path / "rank_that_trains.py"
    script.write_text(RANK)
    paceline.launch.local.launch([f"{script}:train", str(tmp_path)], ranks=2, threads=1, pin_cores=None, deadline_s=60)
    for rank in range(2):
        during, after = (tmp_path / f"threads-{rank}").read_text().splitlines()
        assert "gloo" in during
        assert after == "[]"
