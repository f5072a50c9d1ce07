"""Time to the first step on 8 emulated hosts, a host process each, beside 8 ranks of one host.

The time is from the start of the command `paceline train` to the record of step 1. Both are started in turn, with the
same job, and the ratio is the median of neighbouring runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.stats import Interval, median_interval

HOSTS, RUNS, DEADLINE_S = 8, 3, 300.0
JOB = """
name: start
model: {zoo: mlp, args: {hidden: 8}}
data: {kind: synthetic, samples: 64, held_out: 0}
loss: cross_entropy
optimizer: {name: sgd, lr: 0.1}
global_batch: 64
stop: {steps: 1}
"""


def first_step_ratio() -> Interval:
    """Time to the first step on 8 hosts / on one host."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "job.yaml").write_text(JOB)
        (root / "hosts.yaml").write_text(f"emulate: {{hosts: {HOSTS}}}\n")
        ratios = []
        for i in range(RUNS):
            one = first_step_s(root, f"one-{i}", [])
            ratios.append(first_step_s(root, f"many-{i}", ["--cluster", "hosts.yaml"]) / one)
    return median_interval(ratios)


def first_step_s(folder: Path, run: str, more: list[str]) -> float:
    """Seconds from the command to the end of step 1."""
    command = [sys.executable, "-m", "paceline", "train", "job.yaml", "--plan", f"dp={HOSTS}", "--run", run, *more]
    started = time.time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
    line = (folder / run / "steps" / "rank-0.jsonl").read_text().splitlines()[0]
    return float(json.loads(line)["time"]) - started


if __name__ == "__main__":
    print(first_step_ratio())
