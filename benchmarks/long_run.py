"""A long run under faults: do its memory, processes, descriptors, threads and files grow?

    python benchmarks/long_run.py [--json] [--minutes N] [--emulate N] [--seed N] [--out DIR]

A job of short steps that wait for their data trains for 30 minutes as four replicas on this machine, or (as root) on
emulated hosts. A fault comes every 10 s: ranks, hosts and links, by `paceline chaos`, but never the command itself,
whose growth would end with it. The two undisturbed runs, with which losses are compared, do not wait for their data.
Figures, each of a sum over all processes of the run while no rank is lost:
- `long_run_NAME_early` and `_late`: median of the second quarter and of the last; `_per_minute`: slope.
- `long_run_held`: 1 where every promise was held, that nothing grows among them; `long_run_faults` that were made.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from long_run_data import CLASSES, READ_S
from measure import environment_line, parser_of, print_figures
from paceline.console import Console
from paceline.job.job import Job
from paceline_lab.chaos.faults import possible_kinds
from paceline_lab.chaos.invariants import as_trained, reference
from paceline_lab.chaos.schedule import Schedule, draw
from paceline_lab.chaos.session import Found, Session
from paceline_lab.cli.chaos import show

REPLICAS, BATCH, STEP_S, EVERY_S = 4, 48, 0.05, 10.0
NOT_HERE = ("disk-full", "corrupt", "clock")  # may end the command, or change losses for good
JOB: dict[str, Any] = {
    "name": "long-run",
    "model": {"zoo": "mlp", "args": {"hidden": 16, "classes": CLASSES}},
    "data": {"kind": "dataset", "factory": f"{Path(__file__).with_name('long_run_data.py')}:Points", "held_out": 0.02},
    "global_batch": BATCH,
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.01},
    "checkpoint": {"every_steps": 200},
    "evaluate": {"every_steps": 150},
    "stop": {"steps": 1},  # as many as the schedule says
}


def main() -> None:
    """Run, and show what came of it."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the run, where nothing happens")
    parser.add_argument(
        "--emulate", type=int, default=0, help="number of emulated hosts, one replica on each; needs root"
    )
    parser.add_argument("--seed", type=int, default=1, help="draws the faults")
    parser.add_argument("--out", type=Path, help="directory of the runs (default: a temporary one)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        begin = time.monotonic()
        found = run(asked.minutes, asked.emulate, asked.seed, asked.out or Path(temporary))
        minutes = (time.monotonic() - begin) / 60
    show(found, Console(highlight=False, markup=False))
    print(f"{minutes:.1f} minutes with undisturbed runs; {environment_line()}")
    if asked.json:
        print_figures(figures(found))


def run(minutes: float, hosts: int, seed: int, folder: Path) -> Found:
    """Play the faults of a seed."""
    session = Session(Job.model_validate(JOB), hosts, folder.absolute(), lambda text: print(text, file=sys.stderr))
    schedule = drawn(minutes, hosts, seed)
    reference(as_trained(session.job, schedule.steps), schedule.plan, session.cluster, session.folder, session.say)
    os.environ[READ_S] = str(STEP_S / (BATCH / REPLICAS))
    try:
        return session.tried(schedule, f"seed-{seed}")
    finally:
        del os.environ[READ_S]


def drawn(minutes: float, hosts: int, seed: int) -> Schedule:
    """The schedule of a seed, without what ends the command."""
    kinds = [kind for kind in possible_kinds(hosts) if kind not in NOT_HERE]
    replicas = hosts or REPLICAS
    plan, count = f"dp={replicas} precision=fp64", max(len(kinds), round(minutes * 60 / EVERY_S))
    steps = max(100, round(minutes * 60 / STEP_S))
    schedule = draw(kinds, seed, count=count, plan=plan, ranks=replicas, hosts=hosts, steps=steps)
    return schedule.with_only([f for f in schedule.faults if not (f.kind == "kill" and f.target == "command")])


def figures(found: Found) -> dict[str, float]:
    """Figures of a run."""
    told: dict[str, float] = {"long_run_held": int(found.held), "long_run_faults": len(found.rows)}
    for course in found.played.grown:
        name = f"long_run_{course.name}"
        told |= {f"{name}_early": course.early, f"{name}_late": course.late, f"{name}_per_minute": course.per_minute}
    return told


if __name__ == "__main__":
    main()
