"""Runs whose files are written by hand, step by step, for tests of what follows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from handmade_search import cluster, job
from paceline.engine.meter import PARTS
from paceline.planning.plan import Plan
from paceline.run.record.run import Run

NOW = 1000.0


def begun_run(path: Path, plan: str = "dp=2") -> Run:
    """A run that has begun, without a step."""
    made = Run.create(path, job(), cluster(), Plan.parse(plan))
    happens(made, "start", total_steps=500)
    return made


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A step's line; of its 10 ms 8 are compute and 2 are waiting for another rank."""
    parts = {f"{part}_s": 0.0 for part in PARTS} | {"compute_s": 0.008, "imbalance_s": 0.002}
    about = {"step": number, "epoch": 0, "time": NOW + 0.01 * number, "loss": 2.0 / number, "samples": 64}
    return about | {"local_samples": 32, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.01} | parts | changes


def trains(run: Run, *numbers: int, rank: int = 0, **changes: Any) -> None:
    """Write these steps of a rank."""
    (run.path / "steps").mkdir(exist_ok=True)
    with (run.path / "steps" / f"rank-{rank}.jsonl").open("a") as file:
        file.writelines(json.dumps(step(number, **changes)) + "\n" for number in numbers)


def happens(run: Run, event: str, **details: Any) -> None:
    """Write an event."""
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "time": NOW} | details) + "\n")
