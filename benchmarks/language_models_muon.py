"""Muon's step when ranks share the work on its matrices, and its exactness.

    python benchmarks/language_models_muon.py [--json]

Figures:
- `muon_fsdp_to_replicated`: time of Muon's step under fsdp=2 / time of the step under dp=2 if each rank orthogonalizes
  every matrix, as `torch.optim.Muon` does under DDP. `muon_dp_to_replicated`: the same for dp=2 as paceline runs it.
- `muon_parity`: largest relative difference of a parameter between a plan and one process in float64, over dp, fsdp, tp
  and fsdp with tp. `muon_parity_to_torch`: the same between one process and `torch.optim.Muon` with AdamW.

A transformer with 4 blocks of width 256 is trained on 2 ranks of one thread. All three ways live in the same processes
and take turns, in blocks of steps. The time of a block is the time of its slowest rank, and each ratio is the median of
ratios of neighbouring blocks (95 % interval).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import paceline
from measure import environment_line, parser_of, print_figures
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.job.job import Job
from paceline.job.parameters import names_of
from paceline.planning.plan import Plan
from paceline.run.build import build_engine, built, seed_all
from paceline.split.whole_updates import muon_matrices
from paceline.stats import median_interval
from served import Ranks

WAYS = {"replicated": "dp=2", "dp": "dp=2", "fsdp": "fsdp=2"}
PLANS = ["dp=2", "fsdp=2", "tp=2", "fsdp=2 tp=2"]
STARTS, BLOCKS, STEPS, PARITY_STEPS = 2, 7, 2, 3


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    figures = measure()
    print(environment_line())
    if arguments.json:
        print_figures(figures)


def measure(starts: int = STARTS, blocks: int = BLOCKS) -> dict[str, float]:
    """Measure times and parity, print both, and return the figures."""
    times = step_times(starts, blocks)
    figures = {}
    for way, found in times.items():
        ratio = median_interval([a / b for a, b in zip(found, times["replicated"], strict=True)])
        middle = median_interval(found).middle
        print(f"{way:12}{1e3 * middle:8.1f} ms   {ratio.middle:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", flush=True)
        if way != "replicated":
            figures[f"muon_{way}_to_replicated"] = round(ratio.middle, 4)
    figures["muon_parity"] = max(parity(plan) for plan in PLANS)
    figures["muon_parity_to_torch"] = parity_to_torch()
    print(
        f"parity over {', '.join(PLANS)}: {figures['muon_parity']:.1e}; to torch: {figures['muon_parity_to_torch']:.1e}"
    )
    return figures


def step_times(starts: int, blocks: int) -> dict[str, list[float]]:
    """Return the seconds of an optimizer step of every way, block by block."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(starts):
        with Ranks([__file__, "--serve"], ranks=2, environment={"OMP_NUM_THREADS": "1"}) as group:
            for block in range(blocks + 1):
                for way, found in times.items():
                    seconds = max(answer["step_s"] for answer in group.ask({"way": way}))
                    found += [seconds] if block else []  # the first block warms up
    return times


def parity(plan: str) -> float:
    """Return the largest relative difference of a parameter between a plan and one process in float64."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(_job(width=64, context=32)))
        found = paceline.check(path, f"{plan} precision=fp64", steps=PARITY_STEPS)
    return max(step.parameter.difference for step in found.steps)


def parity_to_torch() -> float:
    """Return the largest relative difference between our step and torch's Muon with AdamW, in one process."""
    job = Job(**_job(width=64, context=32))
    seed_all(job.seed)
    model = job.model.build().double()
    theirs = job.model.build().double()
    theirs.load_state_dict(model.state_dict())
    names = names_of(model)
    ours = job.optimizer.build(dict(model.named_parameters()), names=names)
    matrices = [p for name, p in theirs.named_parameters() if name in names.matrices]
    others = [p for name, p in theirs.named_parameters() if name not in names.matrices]
    lr, decay = job.optimizer.lr, job.optimizer.weight_decay
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=lr, weight_decay=decay)
    for _ in range(PARITY_STEPS):
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    return max(float(((p - q).norm() / q.norm()).detach()) for p, q in pairs)


def serve() -> None:
    """Answer each question with the seconds of an optimizer step; one rank."""
    torch.set_num_threads(1)
    with joined(deadline_s=120, transport="shm") as group:
        engines = {way: _engine(Job(**_job(width=256, context=64)), plan, group) for way, plan in WAYS.items()}
        assert muon_matrices(engines["replicated"].optimizer)
        engines["replicated"].optimizer.ranks = None  # every rank orthogonalizes every matrix
        for engine in engines.values():
            engine.step(next(iter(engine.loader)))
        for line in sys.stdin:
            optimizer = engines[json.loads(line)["way"]].optimizer
            group.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                optimizer.step()  # with the gradients of the step above
            print(json.dumps({"step_s": (time.perf_counter() - started) / STEPS}), flush=True)


def _engine(job: Job, plan: str, group: Group) -> Any:
    parsed = Plan.parse(plan)
    seed_all(job.seed)
    data = job.data.build(input_shape=None, seed=job.seed)
    return build_engine(job, parsed, built(job, parsed), data, group)


def _job(*, width: int, context: int) -> dict[str, Any]:
    model = {"layers": 4, "hidden": width, "heads": 8, "context": context, "vocab": 512}
    return {
        "model": {"zoo": "gpt", "args": model},
        "data": {"kind": "synthetic", "samples": 64, "shape": [context], "vocab": 512, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "muon", "lr": 0.005, "weight_decay": 0.1},
        "global_batch": 8,
        "stop": {"steps": PARITY_STEPS},
    }


if __name__ == "__main__":
    main()
