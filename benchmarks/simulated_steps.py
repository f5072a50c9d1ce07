"""Host waits and kernel launches of one step in paceline's loops, and of the same step in plain PyTorch.

The loops are `paceline train`, `engine.step`, and `engine.backward` with `engine.update`. The plain loop has the same
model, a fused optimizer, and torch's `clip_grad_norm_` if the job clips.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from measure import our_steps
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.files import scratch_folder
from paceline.job.job import Job
from paceline.run.build import build_engine, built, seed_all
from paceline.run.loop import Loop
from paceline.run.record.run import Run
from simulated_cases import Case
from simulated_ranks import describe
from simulated_sets import DEADLINE_S, environment

# The steps 1, 2, 4, …, 32 and 64 compare replicas and verify a user's loss. The counted steps (35 to 58) do not.
WARM_UP, STEPS = 34, 12


@dataclass
class StepCounts:
    """Mean numbers of kernel launches and host waits per step.

    Attributes:
        waits: waits if the device is behind the host, so the numbers of the previous step have not arrived.
        waits_before_update: the part of `waits` before the step's update is queued.
        idle_waits: the part of `waits` that leaves the device without a kernel to run.
        eager_waits: waits if the device keeps pace with the host; only calls that always wait are left.
        lines: lines of code that waited, and their number of waits in all steps.
    """

    launches: float
    waits: float
    waits_before_update: float
    idle_waits: float
    eager_waits: float
    lines: dict[str, int]


class Steady(Case):
    """Case without the end of an epoch, at which the loop would read all numbers."""

    def job(self, steps: int = WARM_UP) -> Job:
        """See `Case.job`."""
        job = super().job(steps)
        samples = job.global_batch * (WARM_UP + 2 * STEPS + 2)
        return job.model_copy(update={"data": job.data.model_copy(update={"samples": samples})})


@dataclass
class Request:
    """A folder for a run, and whether the gradients are clipped."""

    folder: Path
    clips: bool


def counts_of_a_step(device: Mapping[str, str], ranks: int = 1, *, clips: bool = False) -> dict[str, StepCounts]:
    """Counts by name of the loop, on the first of `ranks` simulated devices; `plain` is the plain loop."""
    with environment(device), scratch_folder() as folder:
        found, *_ = run_on_ranks(
            count,
            Request(folder, clips),
            places=on_this_machine(ranks),
            deadline_s=DEADLINE_S,
            start_deadline_s=DEADLINE_S,
        )
    return found


def count(request: Request) -> dict[str, StepCounts]:
    """Counts by name of the loop, in a rank."""
    torch.set_num_threads(1)
    with joined() as group:
        case = Steady(f"dp={group.size}", features=("clip",) if request.clips else ())
        return {
            "paceline train": _train(case, request.folder / "run", group),
            "engine.step": _own(case, whole=True),
            "engine.update": _own(case, whole=False),
            "plain": _plain(case, group.device),
        }


def _train(case: Case, folder: Path, group: Group) -> StepCounts:
    if group.rank == 0:
        describe(case, WARM_UP + 2 * STEPS + 1, folder, group)
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


def _own(case: Case, *, whole: bool) -> StepCounts:
    """A user's own loop that reads no numbers."""
    model, optimizer, data, batch = _parts(case)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    loss: Any = _loss if whole else None
    clip: Any = case.job().clip_norm
    engine = paceline.setup(model, optimizer, loss=loss, loader=loader, plan=case.plan, clip_norm=clip)
    batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(engine.loader))

    def step() -> None:
        if whole:
            engine.step(next(batches))
            return
        inputs, target = next(batches)
        engine.backward(_loss(model(inputs), target))
        engine.update()

    try:
        return _counted(step, optimizer)
    finally:
        engine.loader.close()
        engine.close()


def _plain(case: Case, device: torch.device) -> StepCounts:
    """The step as anybody would write it: batches copied from pinned memory, no number read."""
    model, optimizer, data, batch = _parts(case)
    model.to(device)
    clip = case.job().clip_norm
    batches = DataLoader(data, batch_size=batch, shuffle=True, pin_memory=True)
    endless: Iterator[list[Tensor]] = itertools.chain.from_iterable(itertools.repeat(batches))

    def step() -> None:
        inputs, target = (part.to(device, non_blocking=True) for part in next(endless))
        optimizer.zero_grad()
        _loss(model(inputs), target).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return _counted(step, optimizer)


def _parts(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any, int]:
    """Model, fused optimizer, data and global batch size of a case's job."""
    job = case.job()
    seed_all(job.seed)
    model = job.model.build()
    optimizer = job.optimizer.build(model.parameters())
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    return model, optimizer, job.data.build(input_shape=None, seed=job.seed).train, job.global_batch


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


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
    device.set_order("eager")
    device.reset_counts()
    for _ in range(STEPS):
        step()
    eager_waits = device.counts()["host_waits"]
    device.set_order("late")
    return StepCounts(
        counts["launches"] / STEPS,
        counts["host_waits"] / STEPS,
        before_update / STEPS,
        counts["idle_waits"] / STEPS,
        eager_waits / STEPS,
        lines,
    )
