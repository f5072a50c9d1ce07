"""Data of `long_run.py`: random points, read as slowly as an environment variable says."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES, SAMPLES = 4, 2400
READ_S = "LONG_RUN_READ_S"


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points in four classes at random, each of which takes a moment to read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 1, 28, 28, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.read_s = float(os.environ.get(READ_S, "0"))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.read_s)
        return self.inputs[index], self.labels[index]
