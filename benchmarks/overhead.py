"""Overhead of paceline compared with a hand-written PyTorch loop, and overhead of checkpoints.

    python benchmarks/overhead.py [--json]

Figures:
- `ratio_to_plain_loop`: step time of `paceline train` divided by the step time of a plain loop. Both use one rank with
  one thread, the same model, weights, batches and fused optimizer, and the memory-allocator settings of paceline's
  launcher. The ratio shows the cost of paceline's own code in a step of about 10 ms.
- `ratio_to_default_loop`: the same ratio to a plain loop with torch's default optimizer step and without these
  allocator settings, as `python` runs it. The settings avoid page faults.
- `overhead_us_per_step`: step time of `paceline train` minus the step time of the plain loop, in microseconds. The
  model is one small layer, which takes almost no time to compute.
- `overhead_us_own_loop`: the same difference for a user's own loop that calls `engine.step`.
- `overhead_us_two_ranks`: the same difference between two ranks of `paceline train`, which reduce their gradients in
  shared memory, and two plain loops side by side, which do not communicate.
- `checkpoint_stall_share`: additional step time while a checkpoint of 200 MB is written, as a share of the step time
  without a checkpoint.
- the figures of `overhead_launches.py`.

Each loop runs in its own processes. The loops take turns in blocks of steps, so other load on the machine affects all
loops equally. Ratios and differences are medians over neighbouring blocks. All processes are restarted several times,
because the addresses of the weights alone change the step time by a few percent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import paceline
from ddp_loop import timed
from measure import environment_line, our_steps, parser_of, print_figures
from overhead_launches import launch_figures
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.elastic.forkserver import ALLOCATOR
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.planning.plan import Plan
from paceline.run.build import build_engine
from paceline.run.loop import Loop
from paceline.run.record.run import Run
from paceline.stats import Interval, median_interval
from served import Ranks

BLOCKS, STARTS, PROOF_STEPS, CHECKPOINTS = 20, 5, 40, 8
AS_RUN = dict.fromkeys(ALLOCATOR)  # removes the variables
CNN: dict[str, Any] = {
    "model": "cifar_cnn",
    "data": {"kind": "synthetic", "samples": 1600, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 1e-4},
    "global_batch": 32,
    "stop": {"steps": 10**9},
}
JOBS: dict[str, dict[str, Any]] = {
    "cnn": CNN,
    "small": CNN
    | {
        "model": {"factory": f"{Path(__file__).resolve()}:small_model"},
        "data": {"kind": "synthetic", "samples": 32_000, "shape": [8], "held_out": 0},
    },
    # the weights and AdamW's two moments take 67 MB each
    "wide": CNN
    | {
        "model": {"factory": f"{Path(__file__).resolve()}:wide_model"},
        "data": {"kind": "synthetic", "samples": 1280, "shape": [1024], "held_out": 0},
        "global_batch": 128,
    },
}
STEPS = {"cnn": 20, "small": 100}  # steps per block


@dataclass(frozen=True)
class Side:
    """One of the compared loops.

    Attributes:
        kind: `plain`, `default` (a plain loop without a fused optimizer step and allocator settings), `train`
            (paceline's training loop) or `own` (a user's loop that calls `engine.step`).
        job: a key of `JOBS`.
    """

    kind: str
    job: str
    ranks: int = 1

    def start(self, folder: Path) -> Ranks:
        """Start the processes of this side."""
        job = JOBS[self.job]
        each = 1 if self.kind == "train" else self.ranks  # each plain loop has its own run
        batch = job["global_batch"] * self.ranks // each
        runs = Path(tempfile.mkdtemp(dir=folder))
        plan = Plan(dp=self.ranks // each, threads=1)
        for rank in range(each):
            Run.create(runs / str(rank), Job.model_validate(job | {"global_batch": batch}), discover(), plan)
        return Ranks(
            [__file__, "--serve", self.kind, str(runs)],
            ranks=self.ranks,
            environment=AS_RUN if self.kind == "default" else ALLOCATOR,
        )


def small_model() -> nn.Module:
    """One layer with 90 parameters."""
    return nn.Linear(8, 10)


def wide_model() -> nn.Module:
    """16.7 million parameters in three layers."""
    return nn.Sequential(nn.Linear(1024, 3440), nn.ReLU(), nn.Linear(3440, 3830), nn.ReLU(), nn.Linear(3830, 10))


def main() -> None:
    """Measure, and print the tables; with --json, print the figures as JSON in the last line."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "RUNS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], Path(arguments.serve[1]))
        return
    plain, ours, default = (Side(kind, "cnn") for kind in ("plain", "train", "default"))
    times_s = step_times([plain, ours, default])
    print(f"cifar_cnn, 32 samples a step, one rank of one thread, {STARTS} x {BLOCKS} blocks of {STEPS['cnn']} steps")
    found = {
        "ratio_to_plain_loop": compared(times_s[ours], times_s[plain], "/"),
        "ratio_to_default_loop": compared(times_s[ours], times_s[default], "/"),
    }
    plain, ours, own = Side("plain", "small"), Side("train", "small"), Side("own", "small")
    times_s |= step_times([plain, ours, own])
    found["overhead_us_per_step"] = compared(times_s[ours], times_s[plain], "-")
    found["overhead_us_own_loop"] = compared(times_s[own], times_s[plain], "-")
    plain, ours = Side("plain", "small", 2), Side("train", "small", 2)
    times_s |= step_times([plain, ours], same_losses=False)
    found["overhead_us_two_ranks"] = compared(times_s[ours], times_s[plain], "-")
    for side, values in times_s.items():
        name = f"{side.job}, {side.kind}, {side.ranks} ranks"
        print(f"  {name:40} {statistics.median(values) * 1e3:8.3f} ms a step (median)")
    for name, figure in found.items():
        print(f"  {name:40} {figure}  median of neighbouring blocks, 95 % interval")
    figures = {name: figure.middle for name, figure in found.items()}
    figures["checkpoint_stall_share"] = checkpoint_stall()
    figures |= launch_figures()
    print(environment_line())
    if arguments.json:
        print_figures(figures)


def step_times(sides: Sequence[Side], *, same_losses: bool = True) -> dict[Side, list[float]]:
    """Seconds per step in every block of every side; the i-th blocks of all sides are neighbours in time."""
    times_s: dict[Side, list[float]] = {side: [] for side in sides}
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory(prefix="paceline-overhead-") as folder, ExitStack() as running:
            served = {side: running.enter_context(side.start(Path(folder))) for side in sides}
            proofs = {side: ranks.ask(["losses", PROOF_STEPS])[0] for side, ranks in served.items()}
            for side in sides[1:] if same_losses else ():  # before measuring, check that all compute the same
                if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(proofs[side], proofs[sides[0]], strict=True)):
                    raise SystemExit(f"{side} does not compute the same steps as the plain loop: the losses differ")
            for block in range(BLOCKS):
                turn = block % len(sides)
                for side in [*sides[turn:], *sides[:turn]]:
                    times_s[side].append(max(served[side].ask(["steps", STEPS[side.job]])))
    return times_s


def compared(ours: list[float], others: list[float], how: str) -> Interval:
    """The median ratio (`/`) or difference in microseconds (`-`) of neighbouring blocks."""
    pairs = zip(ours, others, strict=True)
    return median_interval([a / b if how == "/" else (a - b) * 1e6 for a, b in pairs])


def checkpoint_stall() -> float:
    """Additional step time while a checkpoint is written, as a share of a step without one."""
    with ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="paceline-overhead-"))
        ranks = running.enter_context(Side("train", "wide").start(Path(folder)))
        rounds = ranks.ask(["checkpoints", CHECKPOINTS])[0]
    share = median_interval(rounds["share"])
    print(f"200 MB of weights and AdamW state, one rank of one thread, {CHECKPOINTS} checkpoints")
    print(f"  quiet step                   {statistics.median(rounds['quiet_s']) * 1e3:8.1f} ms (median)")
    print(f"  written in                   {statistics.median(rounds['write_s']):8.2f} s (median)")
    print(f"  steps slower by              {share} of a quiet step")
    return share.middle


# Functions that run in a rank


def serve(kind: str, runs: Path) -> None:
    """Answer the requests on stdin: `["losses", n]`, `["steps", n]` or `["checkpoints", n]`."""
    torch.set_num_threads(1)
    together = Run(runs / "0").plan.dp > 1
    with joined(deadline_s=60, transport="shm") if together else nullcontext(Group()) as group:
        run = Run(runs / ("0" if together else os.environ["RANK"]))
        loop = our_loop(run, group)
        steps = {"plain": plain_steps, "default": default_steps, "train": our_steps, "own": own_steps}[kind](loop)
        for line in sys.stdin:
            question, n = json.loads(line)
            if question == "losses":
                answer: Any = [next(steps) for _ in range(n)]
            else:
                answer = timed(steps, n) if question == "steps" else beside_checkpoints(loop, steps, n)
            print(json.dumps(answer), flush=True)
        steps.close()
        loop.checkpoints.writer.close()
        loop.close()


def beside_checkpoints(loop: Loop, steps: Iterator[float], checkpoints: int) -> dict[str, list[float]]:
    """For each checkpoint.

    The slow-down of the steps beside it, quiet steps before and after it, the time to write it.
    """
    timed(steps, 20)
    rounds: dict[str, list[float]] = {"share": [], "quiet_s": [], "write_s": []}
    for _ in range(checkpoints):
        before = [timed(steps, 1) for _ in range(8)]
        started = time.perf_counter()
        loop.checkpoints.save()
        saving_s = time.perf_counter() - started
        beside = [timed(steps, 1)]
        beside[0] += saving_s  # what `save` itself takes belongs to the step that it is called in
        while loop.checkpoints.writer.busy:
            beside.append(timed(steps, 1))
        rounds["write_s"].append(time.perf_counter() - started)
        quiet_s = statistics.median(before + [timed(steps, 1) for _ in range(8)])
        rounds["quiet_s"].append(quiet_s)
        rounds["share"].append((saving_s / len(beside) + statistics.median(beside)) / quiet_s - 1)
    return rounds


def plain_steps(loop: Loop, *, fused: bool = True) -> Generator[float, None, None]:
    """The loop that one would write by hand, over the batches of `loop`; yields the loss of each step."""
    dataset, partition = loop.data.train, cast(Partition, loop.engine.loader.partition)
    model = loop.engine.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=fused)
    for epoch in count():
        order = [index for batch in partition.batches(epoch) for index in batch]
        for images, labels in DataLoader(
            dataset, batch_size=partition.global_batch, sampler=order, collate_fn=lambda batch: batch
        ):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            yield loss.item()


def default_steps(loop: Loop) -> Generator[float, None, None]:
    """The plain loop with torch's default optimizer step."""
    return plain_steps(loop, fused=False)


def own_steps(loop: Loop) -> Generator[float, None, None]:
    """A user's loop that calls `engine.step`, over the batches of `loop`; yields the loss of each step."""
    dataset, partition = loop.data.train, cast(Partition, loop.engine.loader.partition)
    model = loop.engine.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    order = [index for epoch in range(20) for batch in partition.batches(epoch) for index in batch]
    loader = DataLoader(dataset, batch_size=partition.global_batch, sampler=order)
    engine = paceline.setup(model, optimizer, loss=F.cross_entropy, loader=loader, plan="threads=1")
    while True:
        for batch in engine.loader:
            yield engine.step(batch).loss


def our_loop(run: Run, group: Group) -> Loop:
    """The loop of a run in this process."""
    torch.manual_seed(0)
    model = run.job.model.build()
    data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=0)
    loop = Loop(run, build_engine(run.job, run.plan, model, data, group), data, group)
    loop.events.progress = None  # under `paceline train` the launcher shows it, from another process
    return loop


if __name__ == "__main__":
    main()
