"""A run that runs out of memory shows the memory by part, and proposes a plan that trains in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.job.job import Job
from paceline.planning.cost.memory import PARTS
from paceline.report.run_page import view_of
from paceline.run.record.run import Run
from simulated.environment import Simulated
from simulated.test_commands import entry_of_ones_own

MEMORY_BYTES = 16 * 2**20
JOB = {
    "name": "small-gpt",
    "model": {"zoo": "gpt", "args": {"vocab": 64, "context": 32, "layers": 2, "hidden": 64, "heads": 2}},
    "data": {"kind": "synthetic", "vocab": 64, "shape": [32], "samples": 512, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 0.001},
    "global_batch": 128,
    "stop": {"steps": 3},
    "deadline_s": 60,
}
TRAIN = """
import json, sys
import paceline
if __name__ == "__main__":
    try:
        paceline.train("job.yaml", sys.argv[1], run=sys.argv[2], restarts=2)
    except paceline.PacelineError as error:
        print(json.dumps({"code": error.code, "fields": error.fields, "text": str(error), "final": error.final}))
"""


class Trainer:
    """Trainer of `JOB` on simulated devices with little memory."""

    def __init__(self, simulated: Simulated, folder: Path) -> None:
        self.folder = folder
        sim = simulated.environment(memory_bytes=MEMORY_BYTES)
        path = f"{entry_of_ones_own(folder)}{os.pathsep}{sim['PYTHONPATH']}"
        self.environment = os.environ | sim | {"PYTHONPATH": path}
        (folder / "job.yaml").write_text(Job.model_validate(JOB).to_yaml())
        (folder / "train.py").write_text(TRAIN)

    def error_of(self, plan: str, run: str) -> dict[str, Any] | None:
        """Train, and return the error, if any."""
        command = [sys.executable, "train.py", plan, run]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1])) if done.stdout.strip() else None


@pytest.fixture
def trainer(simulated: Simulated, tmp_path: Path) -> Trainer:
    return Trainer(simulated, tmp_path)


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=1", marks=pytest.mark.slow)])
def test_the_error_has_the_memory_by_part_and_a_plan_that_trains(trainer: Trainer, plan: str) -> None:
    error = trainer.error_of(plan, "failed")
    assert error is not None
    fields = error["fields"]
    assert error["code"] == "plan.ran_out_of_memory"
    assert error["final"], "the same plan would run out again"
    assert not any(event["event"] == "restart" for event in Run(trainer.folder / "failed").events())
    assert fields["limit_bytes"] == MEMORY_BYTES
    assert fields["parts"]["weights"] == fields["predicted"]["weights"]
    assert fields["parts"]["activations"] > 0
    assert fields["used_bytes"] <= MEMORY_BYTES < fields["used_bytes"] + fields["wanted_bytes"]
    assert all(part in error["text"] for part in ("weights", "activations", "total"))
    assert fields["nearest"] in error["text"]
    assert trainer.error_of(fields["nearest"], "fitting") is None
    record = Run(trainer.folder / "fitting")
    assert len(record.losses) == 3
    start = next(event for event in record.events() if event["event"] == "start")
    use = next(step["use"] for step in reversed(record.steps()) if "weights_bytes" in step.get("use", {}))
    assert use["weights_bytes"] == use["gradients_bytes"] == fields["parts"]["weights"] == 4 * start["parameters"]
    assert use["optimizer_bytes"] >= 2 * use["weights_bytes"]
    parts = sum(use[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer", "communication", "activations"))
    assert parts == use["gpu_peak_memory_bytes"] <= MEMORY_BYTES
    assert start["predicted_memory"].keys() == PARTS.keys()
    table = {part: cells for part, *cells in view_of(record)["memory"].rows()}
    assert table["weights"][0] == table["weights"][1] != ""
