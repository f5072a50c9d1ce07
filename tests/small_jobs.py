"""Small jobs for tests of the loop: models and data by import path, and ways to train them here or on several ranks."""

from __future__ import annotations

import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.cluster.discover import discover
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.engine.engine import RankEngine
from paceline.errors import StorageError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run
from paceline.run.recovery.run import train_in

FEATURES, CLASSES = 6, 3

CHAOTIC = '''
import torch
from torch import nn


class Chaotic(nn.Module):
    """A logistic map doubles every difference ten times over, that of rounding, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.sigmoid(self.first(x))
        for _ in range(10):
            x = 3.99 * x * (1 - x)
        return self.last(x)
'''


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points; their class is the largest of three features.

    Those in `nan_at` are not finite, in the first `nan_epochs` epochs. Those in `spike_at` are far off in the second.
    """

    def __init__(
        self,
        samples: int = 70,
        nan_at: Sequence[int] = (),
        nan_epochs: int = 1_000_000,
        sleep_s: float = 0.0,
        noise: float = 0.0,
        spike_at: Sequence[int] = (),
    ) -> None:
        self.inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(11))
        self.labels = self.inputs[:, :CLASSES].argmax(dim=1)
        self.nan_at, self.nan_epochs, self.sleep_s, self.noise = set(nan_at), nan_epochs, sleep_s, noise
        self.spike_at = set(spike_at)
        self.epoch = self.reads = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        # `INTERRUPT=1:30` has rank 1 get a SIGTERM while it reads its 30th sample.
        if os.environ.get("INTERRUPT") == f"{os.environ.get('RANK', 0)}:{self.reads}":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.sleep_s:
            time.sleep(self.sleep_s)
        bad = index in self.nan_at and self.epoch < self.nan_epochs
        noise = self.noise * (np.random.rand() + random.random()) if self.noise else 0.0
        if index in self.spike_at and self.epoch == 1:
            return self.inputs[index] * -1000, self.labels[index]
        return self.inputs[index] * (float("nan") if bad else 1.0 + noise), self.labels[index]


class Stored(Points):
    """Points in a store that refuses one sample to one rank, while there is a file `while_exists`.

    `lost` has the sample's `index`, the `epoch` and the `rank`. The store refuses `times` reads, and says with
    `may_pass` whether another read may succeed.
    """

    def __init__(
        self, samples: int, lost: dict[str, int], while_exists: str, times: int = 1_000_000, may_pass: bool = False
    ) -> None:
        super().__init__(samples)
        self.lost, self.while_exists, self.times, self.may_pass = lost, Path(while_exists), times, may_pass

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        now = {"index": index, "epoch": self.epoch, "rank": int(os.environ.get("RANK", 0))}
        if now == self.lost and self.times and self.while_exists.exists():
            self.times -= 1
            raise StorageError("test.away", "{url} is away", url="s3://bucket/shard", may_pass=self.may_pass)
        return super().__getitem__(index)


class Served(Dataset[tuple[Tensor, Tensor]]):
    """Points that a server at `url` holds, one file each; the file `note` exists once a request had no answer."""

    def __init__(self, url: str, note: str, samples: int = 70) -> None:
        self.url, self.note, self.samples = url, Path(note), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        url = f"{self.url}/{index}"
        try:
            with urllib.request.urlopen(url, timeout=0.5) as answer:
                values = torch.frombuffer(bytearray(answer.read()), dtype=torch.float32)
        except OSError as error:
            self.note.touch()
            raise StorageError("test.away", "{url} is away", url=url, may_pass=True) from error
        return values, values[:CLASSES].argmax()


def slow_points(**args: Any) -> Points:
    """Points in memory that take a while to read, beside validation data that take `args`."""
    return Points(sleep_s=0.02)


def near_points(samples: int, **args: Any) -> Points:
    """Points in memory, beside validation data in a store that take `args`."""
    return Points(samples)


def drawn_points() -> TensorDataset:
    """Random points that no seed of their own draws."""
    return TensorDataset(torch.randn(70, FEATURES), torch.randint(CLASSES, (70,)))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class WithoutLength(nn.Sequential):
    """A module that is false, as it counts something of its own that is empty."""

    def __init__(self) -> None:
        super().__init__(*plain().children())

    def __len__(self) -> int:
        return 0


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


class OneInfiniteGradient(nn.Module):
    """Its gradient overflows once, at forward pass number `at`, whatever the data."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.at, self.passes = plain(), at, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.passes += self.training
        if self.passes == self.at and y.requires_grad:
            y.register_hook(lambda gradient: gradient * float("inf"))
        return y


class SlowOnRankZero(nn.Module):
    """Takes 0.2 s longer in the forward pass of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = plain()

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "0":
            time.sleep(0.2)
        y: Tensor = self.layer(x)
        return y


def small_job(**changes: Any) -> Job:
    """70 points in batches of 8, so 9 steps an epoch, the last one of 6 samples; 20 steps of SGD."""
    values: dict[str, Any] = {
        "name": "small",
        "model": {"factory": "small_jobs:plain"},
        "data": points(),
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "global_batch": 8,
        "stop": {"steps": 20},
        "deadline_s": 30,
    }
    return Job(**(values | changes))


def points(*, held_out: float = 0, **args: Any) -> dict[str, Any]:
    """The data of a job: `Points`, of which a share may be held out."""
    return {"kind": "dataset", "factory": "small_jobs:Points", "held_out": held_out, "args": args}


def new_run(path: Path, job: Job, plan: str = "dp=1") -> Run:
    """A run directory for `job`, or the one at `path` to be continued."""
    if (path / "job.yaml").exists():
        run = Run(path)
        run.continue_with(job, discover(), Plan.parse(plan))
        return run
    return Run.create(path, job, discover(), Plan.parse(plan))


def train_here(path: Path, job: Job, plan: str = "dp=1") -> Run:
    """Train in this process, from the newest checkpoint in `path` where there is one."""
    train_in(new_run(path, job, plan), Group())
    return Run(path)


def train_as_rank(path: Path) -> None:
    """Train a run as one rank; for the fixture `ranks`."""
    with joined(deadline_s=30) as group:
        train_in(Run(path), group)


def facts(run: Run, rank: int = 0) -> list[tuple[Any, ...]]:
    """What every step computed, without the times."""
    keys = ("step", "epoch", "loss", "grad_norm", "lr", "samples", "local_samples")
    return [tuple(step[key] for key in keys) for step in run.steps(rank)]


RUNNING: WeakKeyDictionary[RankEngine, Iterator[Any]] = WeakKeyDictionary()


def train_on(engine: RankEngine, steps: int) -> list[float]:
    """Losses of the next steps, in epochs that go on from call to call and begin anew after a state was loaded."""
    losses: list[float] = []
    while len(losses) < steps:
        batches = RUNNING.setdefault(engine, iter(engine.loader))
        for batch in islice(batches, steps - len(losses)):
            losses.append(engine.step(batch).loss)
        if len(losses) < steps:
            del RUNNING[engine]
    return losses
