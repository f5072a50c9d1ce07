"""Jobs whose replicas differ in speed, for tests of the shares that follow it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from small_jobs import Points, plain


class Sleepy(nn.Module):
    """Sleeps for every sample of a training step, and `factor` times as long on one rank in some of its steps."""

    def __init__(self, sample_s: float, rank: int, factor: float, until_step: int = 1_000_000) -> None:
        super().__init__()
        self.layer, self.sample_s, self.until_step = plain(), sample_s, until_step
        self.factor = factor if os.environ.get("RANK") == str(rank) else 1.0
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.training:
            time.sleep(len(x) * self.sample_s * (self.factor if self.steps <= self.until_step else 1.0))
        y: Tensor = self.layer(x)
        return y


class Noted(Points):
    """Points that note in a file of each rank which of them were read in which epoch."""

    def __init__(self, folder: str, samples: int = 70) -> None:
        super().__init__(samples)
        self.labels = torch.arange(samples) % 3
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with (self.folder / f"read-by-{os.environ.get('RANK', 0)}").open("a") as file:
            file.write(f"{self.epoch} {index}\n")
        return super().__getitem__(index)


def read_in(folder: Path, epoch: int, rank: int | str = "*") -> list[int]:
    """Samples that a rank, or all ranks together, have read in an epoch."""
    lines = [line.split() for path in sorted(folder.glob(f"read-by-{rank}")) for line in path.read_text().splitlines()]
    return [int(index) for read, index in lines if int(read) == epoch]
