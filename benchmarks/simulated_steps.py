"""Host waits and kernel launches of one step: of paceline's loop, and of the same step in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from measure import our_steps
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.files import scratch_folder
from paceline.run.build import build_engine, built, seed_all
from paceline.run.loop import Loop
from paceline.run.record.run import Run
from simulated_cases import Case
from simulated_ranks import describe
from simulated_sets import DEADLINE_S, environment

# whole epochs, at whose ends nothing is left to be read; replicas are compared before steps 1, 2, 4, 8, 16
WARM_UP, STEPS = 18, 12


@dataclass
class StepCounts:
    """Kernel launches and host waits of one step, in the mean over some.

    Attributes:
        waits_before_update: those before the update of the step is queued.
        lines: of code that waited, and how often in all steps.
    """

    launches: float
    waits: float
    waits_before_update: float
    lines: dict[str, int]


def counts_of_a_step(device: Mapping[str, str], ranks: int = 1) -> tuple[StepCounts, StepCounts]:
    """Counts of our step, and of the plain one of the same batch, on the first of so many simulated devices."""
    with environment(device), scratch_folder() as folder:
        both, *_ = run_on_ranks(
            count, folder, places=on_this_machine(ranks), deadline_s=DEADLINE_S, start_deadline_s=DEADLINE_S
        )
    return both[0], both[1]


def count(folder: Path) -> list[StepCounts]:
    """In a rank: the counts of our step and of the plain one."""
    torch.set_num_threads(1)
    with joined() as group:
        case = Case(f"dp={group.size}")
        return [_ours(case, folder / "run", group), _plain(case, group.device)]


def _ours(case: Case, folder: Path, group: Group) -> StepCounts:
    if group.rank == 0:
        describe(case, WARM_UP + STEPS + 1, folder, group)
    group.gather_json(None)  # the others read it
    run = Run(folder)
    seed_all(run.job.seed)
    data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=run.job.seed)
    engine = build_engine(run.job, run.plan, built(run.job, run.plan), data, group)
    loop = Loop(run, engine, data, group)
    loop.events.progress = None
    with closing(loop.checkpoints.writer), closing(loop):
        steps = our_steps(loop)
        return _counted(lambda: next(steps), engine.optimizer)


def _plain(case: Case, device: torch.device) -> StepCounts:
    """The step as anybody would write it: batches copied from pinned memory, no number read."""
    job = case.job()
    seed_all(job.seed)
    model = job.model.build().to(device)
    optimizer = job.optimizer.build(model.parameters())
    data = job.data.build(input_shape=None, seed=job.seed).train
    batches = torch.utils.data.DataLoader(data, batch_size=job.global_batch, shuffle=True, pin_memory=True)
    endless: Iterator[list[torch.Tensor]] = itertools.chain.from_iterable(itertools.repeat(batches))

    def step() -> None:
        inputs, target = (part.to(device, non_blocking=True) for part in next(endless))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), target.flatten()).backward()
        optimizer.step()

    return _counted(step, optimizer)


def _counted(step: Callable[[], object], optimizer: torch.optim.Optimizer) -> StepCounts:
    device: Any = torch.get_device_module()
    for _ in range(WARM_UP):
        step()
    device.trace_waits(True)
    device.reset_counts()
    begun = before_update = 0

    def count_waits(*_: object) -> None:
        nonlocal before_update
        before_update += device.counts()["host_waits"] - begun

    hook = optimizer.register_step_pre_hook(count_waits)
    for _ in range(STEPS):
        begun = device.counts()["host_waits"]
        step()
    hook.remove()
    counts, lines = device.counts(), device.wait_lines()
    device.trace_waits(False)
    return StepCounts(counts["launches"] / STEPS, counts["host_waits"] / STEPS, before_update / STEPS, lines)
