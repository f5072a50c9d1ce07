"""Trackers in loops of users' own: told of every step by a thread, and of the script's end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from commands import ended, started, wait_for
from noting_trackers import installed, noted

LOOP = """
import sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
from paceline.run.trackers import tracker

data = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=4)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
logs = [tracker("noting", file="noted.jsonl"), tracker("noting", file="failed.jsonl", fails_at=3)]
engine = paceline.setup(model, optimizer, loss=torch.nn.functional.mse_loss, loader=data, on_step=logs)
for epoch in range(1 if sys.argv[1] != "long" else 1_000_000):
    for batch in engine.loader:
        engine.step(batch)
if sys.argv[1] == "raises":
    raise RuntimeError("after the loop")
print("done", engine.step_count)
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "loop.py").write_text(LOOP)
    return {"PYTHONPATH": os.pathsep.join([str(installed(tmp_path / "site")), os.environ["PYTHONPATH"]])}


@pytest.mark.parametrize(
    ("how", "end"), [("ends", "finished"), pytest.param("raises", "failed", marks=pytest.mark.slow)]
)
def test_every_step_is_logged_and_the_end_of_the_script_told(
    how: str, end: str, tmp_path: Path, site: dict[str, str]
) -> None:
    """What another tracker raises is said once, and the loop goes on."""
    with started("python", "loop.py", how, folder=tmp_path, environment=site) as process:
        outcome = ended(process)
    assert (outcome.code == 0) == (how == "ends"), outcome.err
    told = noted(tmp_path / "noted.jsonl")
    assert [entry["step"] for entry in told if "step" in entry] == list(range(1, 11))
    assert {"train/loss", "train/grad_norm"} == told[1]["values"].keys()
    assert told[-1]["end"] == end
    assert outcome.err.count('tracker "noting" failed: ConnectionError: no answer') == 1


def test_a_loop_that_is_interrupted_is_told_as_such(tmp_path: Path, site: dict[str, str]) -> None:
    with started("python", "loop.py", "long", folder=tmp_path, environment=site) as process:
        wait_for(lambda: len(noted_so_far(tmp_path / "noted.jsonl")) > 3, process)
        process.send_signal(signal.SIGINT)
        ended(process)
    assert noted(tmp_path / "noted.jsonl")[-1]["end"] == "interrupted"


def noted_so_far(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
def test_of_two_ranks_the_first_alone_makes_the_tracker(tmp_path: Path, site: dict[str, str]) -> None:
    words = ("--nproc-per-node", 2, "loop.py", "ends")
    with started("torchrun", *words, folder=tmp_path, environment=site) as process:
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    told = noted(tmp_path / "noted.jsonl")
    assert sum("begin" in entry for entry in told) == 1
    assert [entry["step"] for entry in told if "step" in entry] == list(range(1, 11))
