"""Overhead of paceline beside a hand-written PyTorch loop, and of checkpoints.

The checkpoints are asynchronous; the cost is that while one is written.

    python benchmarks/overhead.py [--json]

Figures:
- `ratio_to_plain_loop`: step time of `paceline train` / of a plain loop, all settings equal: one rank of one thread;
  same model, weights, batches and optimizer, and the memory-allocator settings that paceline's launcher gives to its
  ranks on both sides. It is the cost of paceline's own code.
- `ratio_to_default_allocator`: the same, the plain loop as `python` runs it, without those settings (they spare page
  faults).
- `checkpoint_stall_share`: how much longer a step takes while a checkpoint of 200 MB is written beside it, as a share
  of a quiet step.

The loops run in processes of their own, in turn, in blocks of 20 steps, so what else the machine does falls on all
alike. Each ratio is of neighbouring blocks. Processes are started anew several times, as the place of the weights in
memory alone moves a step by some per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from measure import environment_line, our_steps, parser_of, print_figures
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.elastic.forkserver import ALLOCATOR
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.planning.plan import Plan
from paceline.run.build import build_engine
from paceline.run.loop import Loop
from paceline.run.record.run import Run
from paceline.stats import median_interval

BLOCK_STEPS, BLOCKS, STARTS, PROOF_STEPS, CHECKPOINTS = 20, 20, 5, 40, 8
PLAIN, PLAIN_ALLOCATOR, OURS = "plain loop", "plain loop, same allocator", "paceline train"
CNN: dict[str, Any] = {
    "model": "cifar_cnn",
    "data": {"kind": "synthetic", "samples": 1600, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 1e-4},
    "global_batch": 32,
    "stop": {"steps": 10**9},
}
# The weights and Adam's two moments, each of 67 MB.
WIDE: dict[str, Any] = CNN | {
    "model": {"factory": f"{Path(__file__).resolve()}:wide_model"},
    "data": {"kind": "synthetic", "samples": 1280, "shape": [1024], "held_out": 0},
    "global_batch": 128,
}


def wide_model() -> nn.Module:
    """16.7 million parameters in three layers."""
    return nn.Sequential(nn.Linear(1024, 3440), nn.ReLU(), nn.Linear(3440, 3830), nn.ReLU(), nn.Linear(3830, 10))


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", choices=("plain", "paceline", "checkpoint"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    times_s = step_times()
    ratio, equal = (median_interval(quotients(times_s[OURS], times_s[other])) for other in (PLAIN, PLAIN_ALLOCATOR))
    print(
        f"cifar_cnn, 32 samples a step, one rank of one thread, {STARTS} x {BLOCKS} blocks of {BLOCK_STEPS} "
        "steps (synthetic data)"
    )
    for name, values in times_s.items():
        print(f"  {name:28} {statistics.median(values) * 1e3:8.3f} ms a step (median)")
    print(f"  paceline / plain loop                  {ratio}  median of neighbouring blocks, 95 % interval")
    print(f"  paceline / plain loop, same allocator  {equal}")
    with Side("checkpoint", ALLOCATOR) as side:
        rounds = side.ask("rounds")
    share = median_interval(rounds["share"])
    print(f"200 MB of weights and AdamW state, one rank of one thread, {CHECKPOINTS} checkpoints")
    print(f"  quiet step                   {statistics.median(rounds['quiet_s']) * 1e3:8.1f} ms (median)")
    print(f"  written in                   {statistics.median(rounds['write_s']):8.2f} s (median)")
    print(f"  steps slower by              {share} of a quiet step")
    print(environment_line())
    if arguments.json:
        figures = {
            "ratio_to_plain_loop": equal.middle,
            "ratio_to_default_allocator": ratio.middle,
            "checkpoint_stall_share": share.middle,
        }
        print_figures(figures)


def step_times() -> dict[str, list[float]]:
    """Seconds a step of every block of every loop; the i-th blocks of all loops are neighbours in time."""
    times_s: dict[str, list[float]] = {PLAIN: [], PLAIN_ALLOCATOR: [], OURS: []}
    for _ in range(STARTS):
        with Side("plain", {}) as plain, Side("plain", ALLOCATOR) as tuned, Side("paceline", ALLOCATOR) as ours:
            sides = [(PLAIN, plain), (PLAIN_ALLOCATOR, tuned), (OURS, ours)]
            proof = plain.ask("losses")
            for name, side in sides[1:]:  # before any time is measured: all do the same work
                if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(side.ask("losses"), proof, strict=True)):
                    raise SystemExit(f"{name} does not do the work of the plain loop: their losses differ")
            for block in range(BLOCKS):
                for name, side in sides[block % 3 :] + sides[: block % 3]:
                    times_s[name].append(side.ask("block"))
    return times_s


def quotients(ours: list[float], others: list[float]) -> list[float]:
    """The ratio of each pair of neighbouring blocks."""
    return [a / b for a, b in zip(ours, others, strict=True)]


class Side:
    """A process that runs one of the loops and works only when it is asked to."""

    def __init__(self, kind: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # an end of questions ends it

    def ask(self, question: str) -> Any:
        """The answer to `losses`, `block` or `rounds`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that was asked for {question} ended; its error is above")
        return json.loads(answer)


def serve(kind: str) -> None:
    """Answer the questions on stdin, one line of JSON each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="paceline-overhead-") as folder:
        loop = our_loop(Path(folder) / "run", WIDE if kind == "checkpoint" else CNN)
        steps = plain_steps(loop) if kind == "plain" else our_steps(loop)
        for question in sys.stdin:
            if question == "losses\n":
                answer: Any = [next(steps) for _ in range(PROOF_STEPS)]
            else:
                answer = timed(steps, BLOCK_STEPS) if question == "block\n" else beside_checkpoints(loop, steps)
            print(json.dumps(answer), flush=True)
        steps.close()
        loop.checkpoints.writer.close()
        loop.close()


def beside_checkpoints(loop: Loop, steps: Generator[float, None, None]) -> dict[str, list[float]]:
    """For each checkpoint.

    The slow-down of the steps beside it, quiet steps before and after it, the time to write it.
    """
    timed(steps, 20)
    rounds: dict[str, list[float]] = {"share": [], "quiet_s": [], "write_s": []}
    for _ in range(CHECKPOINTS):
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


def plain_steps(loop: Loop) -> Generator[float, None, None]:
    """The loop that one would write by hand, over the batches of `loop`; yields the loss of each step."""
    dataset, partition = loop.data.train, cast(Partition, loop.engine.loader.partition)
    model = loop.engine.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
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


def our_loop(folder: Path, job: dict[str, Any]) -> Loop:
    """The loop of a run of one rank in this process."""
    run = Run.create(folder, Job.model_validate(job), discover(), Plan(threads=1))
    torch.manual_seed(0)
    model = run.job.model.build()
    data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=0)
    group = Group()
    loop = Loop(run, build_engine(run.job, run.plan, model, data, group), data, group)
    loop.events.progress = None  # under `paceline train` the launcher shows it, from another process
    return loop


def timed(steps: Iterator[float], n: int) -> float:
    """Seconds a step, over the next `n`."""
    started = time.perf_counter()
    for _ in range(n):
        next(steps)
    return (time.perf_counter() - started) / n


if __name__ == "__main__":
    main()
