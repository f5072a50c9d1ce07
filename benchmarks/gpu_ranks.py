"""What ranks of `gpu.py` do: describe their device, train a user's own loop, train two ways to compare in turn.

Each function is called by `paceline.elastic.run_on_ranks`; on the CPU where the environment says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline
from gpu_results import Described
from measure import our_steps
from paceline import device as devices
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.run.build import build_engine, built, seed_all
from paceline.run.loop import Loop
from paceline.run.record.run import Run

WARM_UP, PROOF_STEPS, BLOCK_S, MOST_STEPS, LEAST_PAIRS, MOST_PAIRS = 6, 4, 0.4, 200, 4, 30
Beside = Literal["plain PyTorch", "DDP", "FSDP2"]
Loops = Literal["plain PyTorch", "setup", "setup fp16", "GradScaler"]


def describe(local_rank: int) -> Described:
    """The device of this rank."""
    device = devices.use(local_rank)
    memory = devices.memory(device)
    module = torch.get_device_module(device)
    built_for = [f"{name} {found}" for name in ("cuda", "hip", "xpu") if (found := getattr(torch.version, name, None))]
    versions = {"torch is built for": ", ".join(built_for) or "the CPU"}
    if (nccl := getattr(module, "nccl", None)) is not None:
        versions["collectives"] = ".".join(map(str, nccl.version()))
    if torch.backends.cudnn.is_available():
        versions["cuDNN"] = str(torch.backends.cudnn.version())
    return Described(
        device.type,
        devices.name(device) if devices.is_accelerator(device) else "CPU",
        memory.total if memory is not None else None,
        _has_float64(device),
        vars(devices.capabilities(device)),
        versions,
    )


def _has_float64(device: torch.device) -> bool:
    try:
        return bool(torch.ones(1, dtype=torch.float64, device=device).sum().item() == 1.0)
    except (RuntimeError, TypeError):
        return False


# A loop of a user's own


@dataclass(frozen=True)
class OwnLoop:
    """Steps of a training script: `setup` with its kinds of precision, or plain PyTorch in one process."""

    kind: Loops
    precision: str = "fp32"
    steps: int = 6


def train_own_loop(request: OwnLoop) -> list[float]:
    """Losses of the script's steps, each before its update."""
    torch.manual_seed(0)
    wide = torch.float64 if request.precision == "fp64" else torch.float32
    data = TensorDataset(torch.randn(64, 20).to(wide), torch.randint(4, (64,)))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16)
    if request.kind == "plain PyTorch":
        return [_plain_update(model, optimizer, *batch) for batch in _repeated(loader, request.steps)]
    precision: Any = "fp16" if request.kind == "setup fp16" else request.precision
    engine = paceline.setup(model, optimizer, loader=loader, precision=precision)
    scaler = torch.amp.GradScaler(engine.group.device.type) if request.kind == "GradScaler" else None
    losses = []
    for x, y in _repeated(engine.loader, request.steps):
        if scaler is None:
            with engine.autocast():
                loss = F.cross_entropy(model(x), y)
            losses.append(engine.backward(loss))
            engine.update()
            continue
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        losses.append(engine.backward(scaler.scale(loss)) / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    engine.close()
    return [float(loss) for loss in losses]


def _plain_update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def _repeated(loader: Any, steps: int) -> Iterator[Any]:
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            yield batch
            done += 1


# Two ways to train, in turn


@dataclass(frozen=True)
class Comparison:
    """A run of ours, laid out in `run`, beside the same work by hand.

    Attributes:
        compiled: both through torch.compile and a fused optimizer step.
        seconds: to measure for.
    """

    run: Path
    beside: Beside
    compiled: bool
    seconds: float


@dataclass
class Compared:
    """Findings of a rank; the i-th blocks of both are neighbours in time.

    Attributes:
        ours_s, theirs_s: seconds of a step, by block.
        ours_losses, theirs_losses: of the first steps, means over the ranks.
        ours_bytes, theirs_bytes: the most in tensors of this rank's device, -1 where not counted.
    """

    ours_s: list[float]
    theirs_s: list[float]
    ours_losses: list[float]
    theirs_losses: list[float]
    ours_bytes: int
    theirs_bytes: int


def train_in_turn(request: Comparison) -> Compared:
    """Take the same first steps both ways, then steps in turn, block by block."""
    run = Run(request.run)
    with joined(deadline_s=120.0, transport=run.plan.transport) as group:
        theirs = _Watch(by_hand(run, group, request.beside, compiled=request.compiled), group)
        ours = _Watch(ours_of(run, group), group)
        block = max(group.gather_json([side.timed(3) for side in (ours, theirs)]), key=max)
        steps = max(1, min(MOST_STEPS, round(BLOCK_S / max(block))))
        pairs = max(LEAST_PAIRS, min(MOST_PAIRS, int(request.seconds / (steps * sum(block)))))
        found = Compared([], [], ours.losses, theirs.losses, ours.peak_bytes, theirs.peak_bytes)
        for pair in range(pairs):
            order = [(ours, found.ours_s), (theirs, found.theirs_s)]
            for side, times_s in order if pair % 2 else order[::-1]:
                times_s.append(side.timed(steps))
        ours.steps.close()
        return found


class _Watch:
    """One way to train: its first losses, the memory that it takes, the time of its steps.

    Args:
        steps: makes its model at the first step; each step gives its loss, on the device or as a number.
    """

    def __init__(self, steps: Generator[float | Tensor], group: Group) -> None:
        self.steps, self.group = steps, group
        devices.synchronize(group.device)
        before = devices.memory(group.device)
        devices.reset_peak_memory(group.device)
        found = [float(next(steps)) for _ in range(PROOF_STEPS)]
        for _ in range(WARM_UP):
            next(steps)
        self.losses = [statistics.fmean(step) for step in zip(*group.gather_json(found), strict=True)]
        devices.synchronize(group.device)
        after = devices.memory(group.device)
        self.peak_bytes = -1 if before is None or after is None else after.peak - before.allocated

    def timed(self, steps: int) -> float:
        """Seconds a step, to the end of what they queued on the device."""
        self.group.barrier()
        devices.synchronize(self.group.device)
        started = time.perf_counter()
        for _ in range(steps):
            next(self.steps)
        devices.synchronize(self.group.device)
        return (time.perf_counter() - started) / steps


def ours_of(run: Run, group: Group) -> Generator[float | Tensor]:
    """The loop of `paceline train` in this process; yields each loss."""
    seed_all(run.job.seed)
    model = built(run.job, run.plan)
    data = run.job.data.build(input_shape=run.job.model.input_shape(), seed=run.job.seed)
    loop = Loop(run, build_engine(run.job, run.plan, model, data, group), data, group)
    loop.events.progress = None  # under `paceline train` the launcher shows it, from another process
    with closing(loop.checkpoints.writer), closing(loop):
        yield from our_steps(loop)


def by_hand(run: Run, group: Group, beside: Beside, *, compiled: bool) -> Generator[float | Tensor]:
    """The loop that one would write on PyTorch alone; yields each loss on the device, which nobody waits for."""
    job, device = run.job, group.device
    seed_all(job.seed)
    model = job.model.build().to(device)
    bf16 = run.plan.precision_for(job) == "bf16"
    forward = _parallel(model, group, beside, bf16=bf16)
    forward = torch.compile(forward) if compiled else forward
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.optimizer.lr, weight_decay=0.0, fused=True if compiled else None
    )
    casts = bf16 and beside != "FSDP2"  # fully_shard casts by itself
    for x, y in _batches(job, group, pinned=devices.is_accelerator(device)):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=casts):
            output = forward(x.to(device, non_blocking=True))
            target = y.to(device, non_blocking=True)
            loss = F.cross_entropy(output.flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        yield loss.detach()


def _parallel(model: nn.Module, group: Group, beside: Beside, *, bf16: bool) -> Any:
    """The model as it is, in DDP, or with every block and the rest in `fully_shard`."""
    device = group.device
    if beside == "plain PyTorch":
        return model
    if beside == "DDP":
        index = [device] if devices.is_accelerator(device) else None
        return DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (group.size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _batches(job: Job, group: Group, *, pinned: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of every batch, in the job's order, epoch after epoch."""
    data: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    partition = Partition(
        job.partition,
        samples=len(data),
        global_batch=job.global_batch,
        seed=job.seed,
        replica=group.rank,
        replicas=group.size,
    )
    for epoch in count():
        order = [index for batch in partition.batches(epoch) for index in batch]
        size = job.global_batch // group.size
        yield from DataLoader(data, batch_size=size, sampler=order, collate_fn=_as_it_is, pin_memory=pinned)


def _as_it_is(batch: Any) -> Any:
    return batch
