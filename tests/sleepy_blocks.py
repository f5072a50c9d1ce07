"""A model of equal blocks which take longer on one rank. It imports nothing else of the tests, for runs of commands."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

CLASSES = 3


class SleepyBlocks(nn.Module):
    """Blocks that sleep in training, `factor` times as long on one rank."""

    def __init__(
        self, features: int, blocks: int, block_s: float, rank: int, factor: float, *, norm: bool = True
    ) -> None:
        super().__init__()
        slow = os.environ.get("RANK") == str(rank)
        self.first = nn.Linear(features, 16)
        self.blocks = nn.ModuleList(SleepyBlock(block_s * (factor if slow else 1.0), norm=norm) for _ in range(blocks))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


class SleepyBlock(nn.Module):
    """One of `SleepyBlocks`."""

    def __init__(self, sleep_s: float, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.layer, self.sleep_s = nn.Linear(16, 16), sleep_s

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.sleep_s)
        y: Tensor = x + torch.tanh(self.layer(self.norm(x)))
        return y
