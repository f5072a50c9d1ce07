"""A rank of planner_local.py: it trains as `paceline train` does, as many steps as it is asked for.

A question is a line of JSON on stdin, `{"steps": n}`; the answer one on stdout: seconds of each step and of its parts,
and the most memory that this process ever had.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import torch

from measure import our_steps
from paceline.comm.backend import joined
from paceline.deferred_compiler import defer_compiler
from paceline.run.build import build_engine, built, seed_all
from paceline.run.loop import Loop
from paceline.run.record.recorder import kernel_bytes
from paceline.run.record.run import Run, read_lines


def serve(folder: Path) -> None:
    """Answer until there are no more questions."""
    defer_compiler()  # as elastic/rank.py does: the compiler takes more than 100 MB
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = Run(folder)
    with joined(deadline_s=run.job.deadline_s, transport=run.plan.transport) as group:
        seed_all(run.job.seed)
        data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=run.job.seed)
        engine = build_engine(run.job, run.plan, built(run.job, run.plan), data, group)
        loop = Loop(run, engine, data, group)
        loop.events.progress = None
        lines = folder / "steps" / f"rank-{group.rank}.jsonl"
        with closing(loop.checkpoints.writer), closing(loop):
            steps = our_steps(loop)
            for line in sys.stdin:
                count = json.loads(line)["steps"]
                for _ in range(count):
                    next(steps)
                newest = list(read_lines(lines))[-count:]
                parts = [{key: value for key, value in step.items() if key.endswith("_s")} for step in newest]
                peak = kernel_bytes("status", {"VmHWM": "peak"})["peak"]
                print(json.dumps({"steps": parts, "peak": peak}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
