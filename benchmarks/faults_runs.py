"""Runs of `faults.py`: their start, the kills of their ranks, and their records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml

from faults_found import REPLICAS, read

BIN = Path(sys.executable).parent
JOB = {
    "name": "faults",
    # in float64: sums over fewer replicas differ in the last digits, which a long training in float32 amplifies
    "model": f"{Path(__file__).parent}/double_cnn.py:build",
    "data": {"kind": "synthetic", "samples": 4096, "shape": [3, 32, 32], "classes": 10},
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    "global_batch": 64,
    "checkpoint": {"every_steps": 500},
    "deadline_s": 60,
}
SETTINGS = {"PACELINE_LOSSES_PER_HOUR": "1000"}
CLUSTER = {"emulate": {"hosts": REPLICAS}}
PLAN = f"dp={REPLICAS} balance=off"


@contextmanager
def training(
    folder: Path,
    transport: str,
    name: str,
    *,
    steps: int,
    recovery: str = "on",
    plan: str = PLAN,
    job: Mapping[str, Any] = JOB,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run `paceline train` in a context; yield the process and the run directory."""
    (cluster := folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    command = command_of(folder, name, steps, plan, job)
    command += ["--cluster", str(cluster)] if transport == "hosts" else []
    environ = {**os.environ, **SETTINGS, "PACELINE_RECOVERY": recovery, **settings}
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        yield process, folder / name
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def command_of(folder: Path, name: str, steps: int, plan: str, job: Mapping[str, Any] = JOB) -> list[str]:
    """Return the command that trains the job for a number of steps."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**job, "stop": {"steps": steps}}))
    return [str(BIN / "paceline"), "train", str(file), "--plan", plan, "--run", str(folder / name)]


def kill(rank: int, run: Path, launcher: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> float:
    """Send SIGKILL or another signal to a rank, and return the time."""
    there = processes_of_ranks(launcher)
    if rank not in there:
        raise RuntimeError(f"{run}: rank {rank} has no process")
    at = time.time()
    os.kill(there[rank], number)
    return at


def processes_of_ranks(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """Return the process ids of the ranks that a command has started on this machine."""
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.Error):
            title = process.cmdline()[:1]
            if title and title[0].startswith("paceline rank "):
                found[int(title[0].split()[2])] = process.pid
    return found


def losses(run: Path) -> dict[int, float]:
    """Return the newest loss of every step."""
    return {line["step"]: line["loss"] for line in read(run / "steps" / "rank-0.jsonl")}
