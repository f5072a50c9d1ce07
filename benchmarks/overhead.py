"""What paceline costs beside a hand-written PyTorch loop, and what an asynchronous checkpoint costs while it is written.

    python benchmarks/overhead.py [--json]

Figures:
- `ratio_to_plain_loop`: step time of the loop of `paceline train` / of a plain loop; one rank of one thread; same model, weights, batches
  and optimizer. Blocks of steps in turn, the ratio pair by pair. Both read their batches through torch's loader classes.
- `checkpoint_stall_share`: how much longer a step takes while a checkpoint of 200 MB is written beside it, as a share of a quiet step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from measure import Interval, environment_line, median_interval
from torch import nn
from torch.utils.data import DataLoader

from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.job.job import Job
from paceline.plan.plan import Plan
from paceline.train.loop import Loop, build_engine
from paceline.train.run import Run

BLOCK_STEPS, PAIRS = 5, 600  # short blocks: what else the machine does falls on both alike
CHECKPOINTS = 8
CNN: dict[str, Any] = {
    "model": "cifar_cnn",
    "data": {"kind": "synthetic", "samples": 1600, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 1e-4},
    "global_batch": 32,
    "stop": {"steps": 10**9},
}
# Three tensors of the size of the weights are saved (Adam's two moments with them): 200 MB.
WIDE: dict[str, Any] = CNN | {"model": {"factory": f"{Path(__file__).resolve()}:wide_model"}, "global_batch": 128}
WIDE["data"] = {"kind": "synthetic", "samples": 1280, "shape": [1024], "held_out": 0}


def wide_model() -> nn.Module:
    """16.7 million parameters in three layers."""
    return nn.Sequential(nn.Linear(1024, 3440), nn.ReLU(), nn.Linear(3440, 3830), nn.ReLU(), nn.Linear(3830, 10))


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="paceline-overhead-") as folder:
        ratio, plain_s, ours_s = ratio_to_plain_loop(Path(folder))
        share, quiet_s, write_s, stall_s = checkpoint_stall_share(Path(folder))
    print(f"cifar_cnn, 32 samples a step, one rank of one thread, {PAIRS} pairs of {BLOCK_STEPS} steps (synthetic data)")
    print(f"  plain PyTorch loop {plain_s * 1e3:8.3f} ms a step\n  paceline train     {ours_s * 1e3:8.3f} ms a step")
    print(f"  ratio              {ratio} (median of the pairs, bootstrap 95 % interval)")
    print(f"200 MB of weights and AdamW state, one rank of one thread, {CHECKPOINTS} checkpoints")
    print(f"  quiet step         {quiet_s * 1e3:8.1f} ms\n  written in         {write_s:8.2f} s, of it {stall_s * 1e3:.1f} ms waited for")
    print(f"  slow-down          {share} of a step, while it is written")
    print(environment_line())
    if as_json:
        figures = {"ratio_to_plain_loop": ratio.middle, "checkpoint_stall_share": share.middle}
        print(json.dumps({"figures": figures, "environment": environment_line()}))


def ratio_to_plain_loop(folder: Path) -> tuple[Interval, float, float]:
    """The ratio of step times pair by pair, and the median step of the plain loop and of ours, in seconds."""
    loop = our_loop(folder / "ratio", CNN)
    plain, ours = plain_steps(loop), our_steps(loop)
    for _ in range(60):  # warm-up, and proof that both do the same work
        expected, got = next(plain), next(ours)
        if abs(expected - got) > 1e-5 * abs(expected):
            raise SystemExit(f"the two loops do not do the same work: losses {expected} and {got}")
    plain_s, ours_s = [], []
    for pair in range(PAIRS):
        turns = [(plain, plain_s), (ours, ours_s)]
        for steps, times_s in turns if pair % 2 else reversed(turns):
            times_s.append(timed(steps, BLOCK_STEPS))
    finish(loop)
    return median_interval([o / p for o, p in zip(ours_s, plain_s, strict=True)]), statistics.median(plain_s), statistics.median(ours_s)


def checkpoint_stall_share(folder: Path) -> tuple[Interval, float, float, float]:
    """The slow-down of a step beside a checkpoint as a share, the quiet step, the time to write one, and the time waited for it, in seconds."""
    loop = our_loop(folder / "checkpoint", WIDE)
    steps = our_steps(loop)
    timed(steps, 20)
    shares, quiet, writes, stalls = [], [], [], []
    for _ in range(CHECKPOINTS):
        before_s = timed(steps, 8)
        started = time.perf_counter()
        loop.save()
        saved_s = time.perf_counter() - started
        taken = 0
        while loop.checkpointer.busy:
            next(steps)
            taken += 1
        beside_s = time.perf_counter() - started
        writes.append(beside_s)
        stalls.append(saved_s + sum(t["checkpoint_s"] for t in loop.run_directory.steps()[-taken:]))
        quiet_s = (before_s + timed(steps, 8)) / 2
        quiet.append(quiet_s)
        shares.append(beside_s / (taken * quiet_s) - 1)
    finish(loop)
    return median_interval(shares), statistics.median(quiet), statistics.median(writes), statistics.median(stalls)


def plain_steps(loop: Loop) -> Iterator[float]:
    """The loop that one would write by hand, over the batches of `loop`; yields the loss of each step."""
    dataset, partition = loop.data.train, loop.engine.loader.partition
    model = loop.job.model.build()
    model.load_state_dict(loop.engine.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for epoch in count():
        order = [index for batch in partition.batches(epoch) for index in batch]
        for images, labels in DataLoader(dataset, batch_size=partition.global_batch, sampler=order, collate_fn=lambda batch: batch):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            yield loss.item()


def our_steps(loop: Loop) -> Iterator[float]:
    """What `paceline train` does at every step, with its record, stop rule and status; yields the loss."""
    while True:
        for batch in loop.engine.loader:
            result = loop.advance(batch)
            assert result is not None
            loop.after_step(result)
            yield result.loss


def our_loop(folder: Path, job: dict[str, Any]) -> Loop:
    """The loop of a run of one rank in this process."""
    run = Run.create(folder, Job.model_validate(job), discover(), Plan(threads=1))
    torch.manual_seed(0)
    model = run.job.model.build()
    data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=0)
    group = Group()
    loop = Loop(run, build_engine(run.job, run, model, data, group), data, group)
    loop.progress = None  # under `paceline train` the launcher shows it, from another process
    return loop


def finish(loop: Loop) -> None:
    """End the loop's files."""
    loop.checkpointer.close()
    loop.recorder.close()


def timed(steps: Iterator[float], n: int) -> float:
    """Seconds a step, over the next `n`."""
    started = time.perf_counter()
    for _ in range(n):
        next(steps)
    return (time.perf_counter() - started) / n


if __name__ == "__main__":
    main()
