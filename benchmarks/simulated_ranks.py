"""A rank of simulated.py: it trains cases one after the other, by the loop that `paceline train` has.

The same code runs on simulated devices and, for the reference, on the CPU.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d as distributed

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.errors import JobError, PlanError
from paceline.planning.plan import Plan
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.run.recovery.run import train_in
from paceline.state.shard import Shard
from paceline.sync import allreduce
from simulated_cases import STEPS, Case, extensions

SMALL_BUCKET_BYTES = 2**11
DEADLINE_S = 60.0
DISK_S = 0.3


@dataclass
class Request:
    """Cases for one set of ranks, and a folder for their runs."""

    cases: list[Case]
    folder: Path


@dataclass
class Outcome:
    """What a case computed, for comparison with the same training elsewhere.

    Attributes:
        losses: of every step, and what was measured on the validation set.
        parameters: by name, two numbers that tell them apart: the L2 norm and a random projection.
        refused: why the training is refused; "" where it is not.
    """

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, tuple[float, float]] = field(default_factory=dict)
    refused: str = ""


def run_cases(request: Request, partial: Callable[[list[Outcome]], None]) -> list[Outcome]:
    """Train the cases; `partial` gets the outcomes so far after each."""
    torch.set_num_threads(1)
    found: list[Outcome] = []
    with joined(deadline_s=DEADLINE_S) as group:
        for number, case in enumerate(request.cases):
            with _order(case), _settings(case):
                found.append(_outcome(case, request.folder / str(number), group))
            gc.collect()
            _end_groups()
            partial(found)
    return found


def _outcome(case: Case, folder: Path, group: Group) -> Outcome:
    try:
        outcome = _own_loop(case) if case.own_loop else _job(case, folder, group)
    except (PlanError, JobError) as error:
        outcome = Outcome(refused=str(error))
    group.gather_json(None)  # nobody goes on before all are here
    return outcome


def _end_groups() -> None:
    """End the process groups that a case has made, all but that of all ranks."""
    for group in [group for group in distributed._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def _job(case: Case, folder: Path, group: Group) -> Outcome:
    """Train a job as `paceline train` does; checkpoints have the parameters."""
    for steps in (STEPS // 2, STEPS) if "resume" in case.features else (STEPS,):
        if group.rank == 0:
            describe(case, steps, folder, group)
        group.gather_json(None)  # the others read it
        train_in(Run(folder), group)
        gc.collect()
    if group.rank:
        return Outcome()
    run = Run(folder)
    measured = [event["metrics"].values() for event in run.events() if event["event"] == "evaluation"]
    return Outcome(run.losses + [value for values in measured for value in values], _checkpoints(run))


def _checkpoints(run: Run) -> dict[str, tuple[float, float]]:
    """What the checkpoints of a run hold, of which the one at its end has the final parameters."""
    found: dict[str, tuple[float, float]] = {}
    for checkpoint in sorted(run.checkpoints.glob("step-*")):
        weights = run.path / f"{checkpoint.name}.safetensors"
        export(checkpoint, weights)
        held = digest(load_file(weights))
        found |= {f"{checkpoint.name}/{name}": two for name, two in held.items()}
    return found


def describe(case: Case, steps: int, folder: Path, group: Group) -> None:
    """Write the run's description, or that of its second half."""
    device = group.device
    devices: tuple[Device, ...] = ()
    if device.type != "cpu":
        name = "simulated"
        devices = tuple(Device(index=i, kind=device.type, name=name, memory_bytes=2**30) for i in range(group.size))
    cluster = Cluster(name="case", hosts=(Host(name="here", cores=group.size, memory_bytes=2**33, gpus=devices),))
    if folder.exists():
        Run(folder).continue_with(case.job(steps), cluster, Plan.parse(case.plan))
    else:
        Run.create(folder, case.job(steps), cluster, Plan.parse(case.plan))


def _own_loop(case: Case) -> Outcome:
    """Train by a loop of a user's own: a function of the plan that returns its engine and losses."""
    engine, losses = getattr(importlib.import_module("simulated_loops"), case.work)(case.plan)
    of_ranks = engine.group.gather_json(digest({name: t.detach() for name, t in engine.named_parameters().items()}))
    engine.close()
    named = {f"{rank}/{name}": (two[0], two[1]) for rank, held in enumerate(of_ranks) for name, two in held.items()}
    return Outcome(losses, named)


def digest(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """L2 norm and random projection of each tensor: tensors that differ by a share of their norm differ so in these."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        whole = tensor.cpu().double().flatten()
        direction = torch.randn(len(whole), generator=torch.Generator().manual_seed(len(whole)), dtype=torch.float64)
        found[name] = float(whole.norm()), float(whole @ direction)
    return found


@contextmanager
def _order(case: Case) -> Iterator[None]:
    """Within, queued work runs in the case's order, where this rank has a simulated device."""
    device = getattr(torch, "sim", None)
    if device is None:
        yield
        return
    torch.accelerator.synchronize()
    device.set_order(case.order, case.seed)
    yield
    torch.accelerator.synchronize()


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Within, buckets are small, the disk is slow and extensions are there where the case says so."""
    bucket_bytes, write = allreduce.BUCKET_BYTES, Shard.write

    def write_late(shard: Shard, path: Path) -> Generator[None, None, str]:
        time.sleep(DISK_S)
        return write(shard, path)

    if "small buckets" in case.features:
        allreduce.BUCKET_BYTES = SMALL_BUCKET_BYTES
    if "slow disk" in case.features:
        Shard.write = write_late  # type: ignore[method-assign, assignment]
    try:
        with extensions() if case.extended else nullcontext():
            yield
    finally:
        allreduce.BUCKET_BYTES, Shard.write = bucket_bytes, write  # type: ignore[method-assign]
