"""Speed and memory of training on one machine's cores, beside PyTorch's DDP over gloo.

    python benchmarks/local_speed.py [--json]

`cifar_cnn`, 32 samples a rank, 2 ranks of one thread, fp32, AdamW, invented data of CIFAR's shape. DDP runs
ddp_loop.py, a script as people write it.

Figures; step times are compared:
- `ratio_to_ddp_same_layout`: DDP / paceline, both in the default layout, with the memory-allocator settings of
  paceline's launcher and a fused optimizer step.
- `ratio_to_ddp_as_run_same_layout`: the same, DDP as written, with the allocator as torchrun leaves it.
- `ratio_to_ddp`: DDP as written and as run / paceline with the settings that it chooses itself.
- `ratio_to_ddp_equal_allocator`: the same, DDP with those allocator settings and a fused step.
- `share_of_no_communication_limit`: two ranks that train alone, side by side and with the same settings / paceline; the
  smaller one of both layouts.
- `memory_ratio_to_ddp`: memory of a rank after 60 steps (proportional set size: shared pages count by their share),
  paceline / DDP with `gradient_as_bucket_view`, each as run. `memory_ratio_to_ddp_large`: the same for 25 million
  parameters, after 8 steps.
- `peak_memory_ratio_to_ddp`, `peak_memory_ratio_to_ddp_large`: the same of the most seen while those steps ran, after
  two first ones.

All ways to train are pairs of processes that live side by side and take turns in blocks of 20 steps, so what else the
machine does falls on all alike. A block's time is that of its slower rank; each ratio is of neighbouring blocks. The
pairs are started anew several times. Before any time is taken, all that exchange gradients show the same losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_loop import LR, answer
from measure import environment_line, our_steps, parser_of, print_figures
from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.deferred_compiler import defer_compiler
from paceline.elastic.forkserver import ALLOCATOR
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.planning.plan import Plan, cores_of
from paceline.planning.shortlist import SETTINGS
from paceline.run.build import build_engine
from paceline.run.loop import Loop
from paceline.run.record.run import Run
from paceline.run.tuning.auto import choose
from paceline.stats import Interval, median_interval
from served import Ranks

TRANSPORT = "shm"
BLOCK_STEPS, BLOCKS, STARTS, PROOF_STEPS, EPOCHS = 20, 12, 4, 40, 8
MEMORY_STARTS, MEMORY_STEPS, MEMORY_STEPS_LARGE = 3, 60, 8
AS_RUN = dict.fromkeys(ALLOCATOR)  # not set
DDP, DDP_EQUAL = "DDP", "DDP, same settings"
OURS, LIMIT = "paceline, same layout", "no communication, same layout"
OURS_TUNED, LIMIT_TUNED = "paceline, own settings", "no communication, own settings"
Times = dict[str, list[float]]  # seconds a step of every block; the i-th blocks are neighbours in time
CNN: dict[str, Any] = {
    "model": "cifar_cnn",
    "data": {"kind": "synthetic", "samples": 1600, "held_out": 0},
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": LR},
    "global_batch": 64,
    "stop": {"steps": 10**9},
}
WIDE: dict[str, Any] = CNN | {
    "model": {"factory": f"{Path(__file__).with_name('ddp_loop.py').resolve()}:wide"},
    "data": {"kind": "synthetic", "samples": 640, "shape": [1024], "held_out": 0},
}
SAME_LAYOUT = Plan(dp=2, threads=1)


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("RUN", "TRANSPORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(Path(arguments.serve[0]), arguments.serve[1])
        return
    with tempfile.TemporaryDirectory(prefix="paceline-speed-") as folder:
        tuned = own_settings(Path(folder))
        print(f"paceline's own settings: {tuned}")
        print(
            f"cifar_cnn, 32 samples a rank, 2 ranks of one thread, {STARTS} x {BLOCKS} blocks of {BLOCK_STEPS} "
            "steps (invented data)"
        )
        times_s, data_s = step_times(Path(folder), tuned)
        found = ratios(times_s)
        print("\n".join(lines(times_s, data_s, found)), flush=True)
        memory = {name: memory_bytes(Path(folder), job, steps) for name, job, steps in memory_cases()}
    print("\n".join(memory_lines(memory)))
    print(environment_line())
    if arguments.json:
        print_figures(figures(found, memory))


def own_settings(folder: Path) -> Plan:
    """The settings that `--plan auto` finds for this job, measured now, whatever an earlier start found.

    On two ranks of one thread.
    """
    os.environ["XDG_CACHE_HOME"] = str(folder)
    chosen = choose(Job.model_validate(CNN), discover(), lambda line: print(line, flush=True)).plan
    if chosen.dp != 2:
        print(f"note: the choice is {chosen}; its settings are measured here with two replicas, as DDP has")
    # all read in the same way
    settings: dict[str, Any] = {key: getattr(chosen, key) for key in SETTINGS if key != "num_workers"}
    return Plan(dp=2, threads=1, **settings)


# The work, the same for all


@dataclass(frozen=True)
class Work:
    """What is trained, laid out in files for the processes that train it."""

    folder: Path
    job: dict[str, Any]

    @classmethod
    def lay_out(cls, folder: Path, job: dict[str, Any]) -> Work:
        """Write the samples, first weights and order that paceline's job has, for DDP to use the same."""
        folder.mkdir()
        torch.manual_seed(0)
        spec = Job.model_validate(job)
        model = spec.model.build()
        data: Any = spec.data.build(input_shape=spec.model.input_shape(), seed=0).train
        parts = [
            Partition(
                spec.partition,
                samples=len(data),
                global_batch=spec.global_batch,
                seed=spec.seed,
                replica=rank,
                replicas=2,
            )
            for rank in range(2)
        ]
        work = {
            "model": "cifar_cnn" if job is CNN else "wide",
            "inputs": data.inputs,
            "target": data.target,
            "weights": model.state_dict(),
            "batch": spec.global_batch // 2,
            "orders": [
                [[i for batch in part.batches(epoch) for i in batch] for part in parts] for epoch in range(EPOCHS)
            ],
        }
        torch.save(work, folder / "work.pt")
        return cls(folder, job)

    def ddp(self, *flags: str, allocator: dict[str, str] | dict[str, None]) -> Ranks:
        """Two ranks of the hand-written loop."""
        return Ranks(
            [str(Path(__file__).with_name("ddp_loop.py")), str(self.folder), *flags], ranks=2, environment={**allocator}
        )

    def paceline(self, plan: Plan) -> Ranks:
        """The ranks of a run of paceline; those of `dp=1` are two runs side by side, each of half the batch."""
        run = Path(tempfile.mkdtemp(dir=self.folder))
        for rank in range(2 if plan.dp == 1 else 1):
            job = Job.model_validate(self.job | {"global_batch": self.job["global_batch"] * plan.dp // 2})
            Run.create(run / str(rank), job, discover(), plan)
        return Ranks([__file__, "--serve", str(run), TRANSPORT], ranks=2, environment={**ALLOCATOR})


def step_times(folder: Path, tuned: Plan) -> tuple[Times, dict[str, float]]:
    """Seconds per step of every block of every side, and the median time spent on data.

    The latter of DDP and of paceline.
    """
    times_s: Times = {}
    data_s: Times = {}
    work = Work.lay_out(folder / "cnn", CNN)
    for _ in range(STARTS):
        with ExitStack() as running:
            sides = {name: running.enter_context(side) for name, side in all_sides(work, tuned).items()}
            prove_same_work(sides)
            for block in range(BLOCKS):
                turn = block % len(sides)
                for name in [*sides][turn:] + [*sides][:turn]:
                    times_s.setdefault(name, []).append(max(sides[name].ask(["steps", BLOCK_STEPS])))
            for name in (DDP, OURS):
                data_s.setdefault(name, []).append(max(sides[name].ask(["batches", BLOCK_STEPS])))
    return times_s, {name: statistics.median(values) for name, values in data_s.items()}


def all_sides(work: Work, tuned: Plan) -> dict[str, Ranks]:
    """Every way to train, not started yet."""
    return {
        DDP: work.ddp(allocator=AS_RUN),
        DDP_EQUAL: work.ddp("--fused", allocator=ALLOCATOR),
        OURS: work.paceline(SAME_LAYOUT),
        OURS_TUNED: work.paceline(tuned),
        LIMIT: work.paceline(replace(SAME_LAYOUT, dp=1)),
        LIMIT_TUNED: work.paceline(replace(tuned, dp=1)),
    }


def prove_same_work(sides: dict[str, Ranks]) -> None:
    """Take every side's first steps and compare their losses.

    Compared are the sides that exchange gradients, in the mean over the ranks.

    Raises:
        SystemExit: a side does other work than DDP.
    """
    losses = {
        name: [statistics.fmean(step) for step in zip(*side.ask(["losses", PROOF_STEPS]), strict=True)]
        for name, side in sides.items()
    }
    for name in losses.keys() - {DDP, LIMIT, LIMIT_TUNED}:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[DDP], strict=True))
        if worst > 1e-5:
            raise SystemExit(f"{name} does not do the work of DDP: their losses differ by up to {worst:.1e}")


# What was found


def ratios(times_s: Times) -> dict[str, Interval]:
    """The ratios by figure; the limit's by layout."""
    pairs = {
        "ratio_to_ddp_same_layout": (DDP_EQUAL, OURS),
        "ratio_to_ddp_as_run_same_layout": (DDP, OURS),
        "ratio_to_ddp": (DDP, OURS_TUNED),
        "ratio_to_ddp_equal_allocator": (DDP_EQUAL, OURS_TUNED),
        LIMIT: (LIMIT, OURS),
        LIMIT_TUNED: (LIMIT_TUNED, OURS_TUNED),
    }
    return {
        figure: median_interval([a / b for a, b in zip(times_s[other], times_s[ours], strict=True)])
        for figure, (other, ours) in pairs.items()
    }


def figures(found: dict[str, Interval], memory: dict[str, dict[str, Memory]]) -> dict[str, float]:
    """The figures that the head of this file defines."""
    values = {name: ratio.middle for name, ratio in found.items() if name.startswith("ratio")}
    values["share_of_no_communication_limit"] = min(found[LIMIT].middle, found[LIMIT_TUNED].middle)
    for name, used in memory.items():
        end = "" if name == "cifar_cnn" else "_large"
        values[f"memory_ratio_to_ddp{end}"] = used[OURS].after / used[DDP].after
        values[f"peak_memory_ratio_to_ddp{end}"] = used[OURS].peak / used[DDP].peak
    return values


def lines(times_s: Times, data_s: dict[str, float], found: dict[str, Interval]) -> Iterator[str]:
    """The table of step times and ratios."""
    for name, values in times_s.items():
        data = f", of which data {data_s[name] * 1e3:.2f}" if name in data_s else ""
        yield f"  {name:34} {statistics.median(values) * 1e3:8.3f} ms a step (median){data}"
    for name, ratio in found.items():
        label = f"{name} / paceline" if name in (LIMIT, LIMIT_TUNED) else name
        yield f"  {label:42} {ratio}  median of neighbouring blocks, 95 % interval"


def memory_lines(memory: dict[str, dict[str, Memory]]) -> Iterator[str]:
    """The table of memory by model."""
    for name, used in memory.items():
        for kind in Memory._fields:
            ours, ddp = (getattr(used[side], kind) for side in (OURS, DDP))
            sizes = f"DDP {ddp / 2**20:7.1f} MiB, paceline {ours / 2**20:7.1f} MiB"
            yield f"memory of a rank, {name:22} {kind:6} {sizes}: ratio {ours / ddp:.3f}"


# Memory


class Memory(NamedTuple):
    """Bytes of a rank: after its steps, and the most while they ran."""

    after: float
    peak: float


def memory_cases() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, job and steps of each model whose memory is measured."""
    yield "cifar_cnn", CNN, MEMORY_STEPS
    yield "25 million parameters", WIDE, MEMORY_STEPS_LARGE


def memory_bytes(folder: Path, job: dict[str, Any], steps: int) -> dict[str, Memory]:
    """The memory of the larger rank, of paceline and DDP.

    One pair at a time, as what they share would count for less.
    """
    work = Work.lay_out(Path(tempfile.mkdtemp(dir=folder)) / "work", job)
    found: dict[str, list[Memory]] = {DDP: [], OURS: []}
    for _ in range(MEMORY_STARTS):
        for name, side in ((DDP, work.ddp("--bucket-view", allocator=AS_RUN)), (OURS, work.paceline(SAME_LAYOUT))):
            with side:
                found[name].append(memory_of(side, steps))
    return {
        name: Memory(*(statistics.median(values) for values in zip(*memories, strict=True)))
        for name, memories in found.items()
    }


def memory_of(side: Ranks, steps: int) -> Memory:
    """What the larger rank holds after `steps` steps, and the most that was seen while they ran."""
    side.ask(["losses", 2])
    peak = 0
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(side.ask, ["losses", steps])
        while not answer.done():
            peak = max(peak, *(proportional_bytes(pid) for pid in side.pids))
        answer.result()
    after = max(proportional_bytes(pid) for pid in side.pids)
    return Memory(after, max(peak, after))


def proportional_bytes(pid: int) -> int:
    """The memory of a process; of pages that it shares, its share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/smaps_rollup names no Pss")


# In a rank


def serve(runs: Path, transport: str) -> None:
    """Train as `paceline train` does, as far as the questions on stdin ask."""
    torch.set_num_threads(1)
    defer_compiler()  # this, and the cores, as elastic/rank.py does
    plan = Run(runs / "0").plan
    if plan.pin:
        os.sched_setaffinity(0, cores_of(int(os.environ["RANK"]), 2, discover().hosts[0]))
    with joined(deadline_s=60, transport=transport) as group:
        alone = plan.dp == 1
        run = Run(runs / str(group.rank if alone else 0))
        loop = our_loop(run, Group() if alone else group)
        with closing(loop.checkpoints.writer), closing(loop):
            answer(our_steps(loop), our_batches(loop))


def our_loop(run: Run, group: Group) -> Loop:
    """The loop of a run in this process."""
    torch.manual_seed(0)
    model = run.job.model.build()
    data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=0)
    loop = Loop(run, build_engine(run.job, run.plan, model, data, group), data, group)
    loop.events.progress = None  # under `paceline train` the launcher shows it, from another process
    return loop


def our_batches(loop: Loop) -> Iterator[object]:
    """The batches alone; the steps cannot go on after these."""
    while True:
        yield from loop.engine.loader


if __name__ == "__main__":
    main()
