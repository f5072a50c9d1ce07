"""Model, optimizer, batches and loss of a job, for use in plain PyTorch scripts.

The scripts of all PyTorch-based systems share this code, so they differ only in what each system requires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

# Imported here because an import during the first optimizer step keeps the process group alive, and its threads then
# abort at exit.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.engine.calls import sparse_tables, to_channels_last
from paceline.job.batch import Batch, place, split, target_of
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import files_of
from paceline.run.build import load_published, seed_all
from paceline_lab.systems.system import JOB, Steps, Task


class Work:
    """A job in one process of a script, and the record of its steps.

    Attributes:
        settings: additional keyword settings that the script passes to the system.
        rank: rank of this process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.task, self.job = folder, Task.read(folder), Job.load(folder / JOB)
        self.settings, self.rank = self.task.settings, 0
        torch.set_num_threads(self.task.threads)
        seed_all(self.job.seed)
        self._loss = self.job.loss.build()
        self._model: nn.Module | None = None
        self._rows = False
        self._data: Any = None
        self._losses: list[float] = []
        self._ended_s: list[float] = []

    def model(self) -> nn.Module:
        """Build the job's model with initial weights that are the same in every process."""
        seed_all(self.job.seed)
        model = self.job.model.build()
        load_published(self.job, model)
        self._rows = bool(sparse_tables(model))
        if self.task.disturbed:
            _disturb(model)
        if self.task.channels_last:
            to_channels_last(model)
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter], *, fused: bool = True) -> torch.optim.Optimizer:
        """Build the job's optimizer, which is fused in a tuned run if `fused` is True."""
        # torch's fused optimizers do not support sparse gradients
        return self.job.optimizer.build(parameters, fused=fused and self.task.tuned and not self._rows)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Build the job's learning-rate schedule as a PyTorch scheduler."""
        total = self.job.stop.steps
        return LambdaLR(optimizer, lambda step: self.job.schedule.factor_at(step, total))

    def batches(self, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        """Yield one rank's samples of each global batch, for all steps of the run.

        A documented run loads single samples with torch's `DataLoader`. A tuned run uses as many loader processes as
        paceline's plan. With no loader processes, it reads a batch in one call if the data set supports that.
        """
        self.rank = rank
        data, part = self._dealt(rank, ranks)
        whole = getattr(data, "__getitems__", None) if self.task.tuned else None
        taken, workers = 0, self.task.num_workers
        indices: list[list[int]] = []  # sample indices of each batch of the epoch
        loader = DataLoader(_OneByOne(data), batch_sampler=indices, num_workers=workers, persistent_workers=workers > 0)
        for epoch in count():
            indices[:] = part.batches(epoch)
            for batch in map(partial(_at_once, whole), indices) if whole and not workers else loader:
                if taken == self.task.steps:
                    return
                taken += 1
                yield place(batch, torch.device("cpu"), dtype=None, channels_last=self.task.channels_last)

    def batch(self, step: int, rank: int, ranks: int) -> Batch:
        """Return one rank's samples of the global batch of a step, counted from 0."""
        data, part = self._dealt(rank, ranks)
        epoch, place_in_epoch = divmod(step, part.steps_per_epoch)
        found: Batch = default_collate([data[index] for index in next(iter(part.batches(epoch, place_in_epoch)))])
        return found

    def _dealt(self, rank: int, ranks: int) -> tuple[Any, Partition]:
        """Return the data set, and the partition that selects the samples of a rank."""
        if self._data is None:
            self._data = self.job.data.build(input_shape=self.job.model.input_shape(), seed=self.job.seed).train
        part = Partition(
            self.job.partition,
            samples=len(self._data),
            global_batch=self.job.global_batch,
            seed=self.job.seed,
            replica=rank,
            replicas=ranks,
            labels=getattr(self._data, "labels", None),
            drop_last=True,
            shards=files_of(self._data),
        )
        return self._data, part

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the job's loss of a model on a batch."""
        self._model = model  # keep a reference: torch 2.13 may hang if DDP's reducer is freed after its process group
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch[:-1])
        return self._loss(output, target_of(batch))

    def parts(self, batch: Batch) -> list[Batch]:
        """Split a batch into the number of equal parts that the task specifies."""
        return list(split(batch, self.task.parts))

    def clip(self, model: nn.Module) -> None:
        """Clip the gradient norm if the job sets `clip_norm`."""
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.job.clip_norm)

    def took(self, loss: Tensor) -> None:
        """Record the loss and the end time of a finished step."""
        self._losses.append(loss.item())
        self._ended_s.append(time.time())

    def record(self, losses: list[float], ended_s: list[float]) -> None:
        """Record the losses and end times of all steps, if other processes trained them."""
        self._losses, self._ended_s = losses, ended_s

    def write(self) -> None:
        """Write the recorded steps to the run's folder; write nothing if no step is recorded."""
        if self._losses:
            Steps(self._losses, self._ended_s).write(self.folder, self.rank)


@torch.no_grad()
def _disturb(model: nn.Module) -> None:
    """Change each weight by a few rounding errors, up or down at random."""
    drawn = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        up = torch.randint(0, 2, parameter.shape, generator=drawn) * 2 - 1
        parameter.mul_(1 + 4 * torch.finfo(parameter.dtype).eps * up)


def _at_once(whole: Callable[[list[int]], Any], indices: list[int]) -> Any:
    found = whole(indices)
    return default_collate(found) if isinstance(found, list) else found


class _OneByOne(Dataset[Any]):
    """View of a data set without `__getitems__`, so that samples are read one by one."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]
