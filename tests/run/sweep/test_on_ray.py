"""Ray Tune makes the runs of a sweep, stops bad ones early, and lets an interrupted one go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from commands import ended, losses, wait_for, write_job
from ray_cluster import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.needs_engines, pytest.mark.timeout(900)]
DEADLINE_S = 300.0  # Ray takes half a minute to start on a busy machine


@contextmanager
def sweep(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    words = ["sweep", "job.yaml", "--plan", "dp=1", "--out", "out", "--on", "ray", *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    with TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # the paths of Ray's sockets begin with it
        command = [str(ENGINES / "python"), "-m", "paceline", *words]
        settings: dict[str, Any] = {"cwd": folder, "env": environment | {"RAY_TMPDIR": short}, "text": True}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings) as process:
            yield process


def runs(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "out" / "sweep.json").read_text())["runs"]
    return found


def test_runs_are_made_by_ray_and_failures_recorded(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", data={"kind": "synthetic", "samples": 48}, metrics=["accuracy"])
    with sweep(tmp_path, "--grid", "optimizer.lr=0.1,3e38") as process:
        outcome = ended(process, DEADLINE_S)
    assert outcome.code == 0, outcome.err
    first, second = runs(tmp_path)
    assert (first["state"], second["state"]) == ("finished", "failed")
    assert first["metric"] is not None
    assert sorted(losses(tmp_path / "out" / "runs" / "1")) == [1, 2, 3, 4, 5, 6]


def test_bad_runs_are_stopped_early(tmp_path: Path) -> None:
    data = {"kind": "synthetic", "samples": 48, "held_out": 0.3}
    # Labels are random, so a high rate overfits. The runs last several reports, which come once a second.
    write_job(tmp_path / "job.yaml", data=data, stop={"steps": 6000}, evaluate={"every_steps": 100})
    options = ("--grid", "optimizer.lr=1e-9,1e-8,1e-7,0.01,0.02", "--scheduler", "asha", "--metric", "loss")
    with sweep(tmp_path, *options) as process:
        outcome = ended(process, DEADLINE_S)
    assert outcome.code == 0, outcome.err
    states = [run["state"] for run in runs(tmp_path)]
    assert "stopped early" in states
    assert set(states) <= {"finished", "stopped early"}


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", data={"kind": "synthetic", "samples": 48}, stop={"steps": 20_000})
    with sweep(tmp_path, "--grid", "optimizer.lr=0.1,0.01") as process:
        wait_for(lambda: len(losses(tmp_path / "out" / "runs" / "1")) > 3, process)
        process.send_signal(signal.SIGINT)
        stopped = ended(process, DEADLINE_S)
    assert stopped.code == 130, stopped.err
    first, second = runs(tmp_path)
    assert (first["state"], second["state"]) == ("interrupted", "waiting")
    trained = len(losses(tmp_path / "out" / "runs" / "1"))
    assert trained < 20_000
