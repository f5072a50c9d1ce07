"""Runs whose records are made by hand: steps of known parts, on known clocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handmade_search import job
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.engine.meter import PARTS
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run

NOW = 1_700_000_000.0
MS = 1e-3


def machines(names: str = "a", cores: int = 2) -> Cluster:
    return Cluster(hosts=tuple(Host(name=name, cores=cores, memory_bytes=2**34) for name in names))


def record(
    folder: Path,
    parts_ms: Mapping[int, Mapping[str, float]],
    *,
    plan: str = "dp=2",
    of: Job | None = None,
    steps: int = 8,
    on: Cluster | None = None,
    clock_s: Mapping[int, float] = {},
    pauses_ms: Mapping[int, float] = {},
    losses: Mapping[int, Sequence[float | None]] = {},
    decimals: int = 6,
    **changes: Any,
) -> Run:
    """A run whose steps all have the same parts.

    Args:
        clock_s: how far the clock of a rank is ahead.
        pauses_ms: time in no step, before the step of that number.
    """
    run = Run.create(folder / "run", of or job(), on or machines(), Plan.parse(plan))
    for rank, parts in parts_ms.items():
        now = NOW + clock_s.get(rank, 0.0)
        lines = []
        batch = run.job.global_batch
        about: dict[str, Any] = {"epoch": 0, "samples": batch, "local_samples": batch // len(parts_ms)}
        about |= {"lr": 0.1, "grad_norm": 1.0, "step_s": sum(parts.values()) * MS}
        about |= {f"{part}_s": parts.get(part, 0.0) * MS for part in PARTS}
        for step in range(1, steps + 1):
            now += (sum(parts.values()) + pauses_ms.get(step, 0.0)) * MS
            loss = losses[rank][step - 1] if losses else 1.0 / step
            lines.append({"step": step, "time": round(now, decimals), "loss": loss} | about | changes)
        (run.path / "steps" / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def happens(run: Run, event: str, at_s: float, **details: Any) -> None:
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "time": at_s, **details}) + "\n")
