"""Models and data sets for the runs of tests/faults: each works, but for the trouble that its arguments ask for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES, CLASSES = 4, 3
RANK = int(os.environ.get("RANK", 0))


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points of three classes.

    `trouble` is what happens: `label` and `nan` at the sample `at`; `shrink` at the second epoch; `raise`, `hang` and
    `kill` when rank 1 has read `at` samples. Reading a sample takes `sleep_s`, until there is a file `until`.
    """

    def __init__(
        self, samples: int = 96, trouble: str = "none", at: int = 40, sleep_s: float = 0.0, until: str = ""
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (samples,), generator=generator)
        self.samples, self.trouble, self.at, self.sleep_s, self.reads = samples, trouble, at, sleep_s, 0
        self.until = Path(until) if until else None
        if trouble == "label":
            self.labels[at] = 11
        if trouble == "nan":
            self.inputs[at] = float("nan")

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        if self.trouble == "shrink" and epoch == 1:
            self.samples -= 7

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.until is None or not self.until.exists():
            time.sleep(self.sleep_s)
        self.reads += 1
        if RANK == 1 and self.reads == self.at:
            self.come_to_grief(index)
        return self.inputs[index], self.labels[index]

    def come_to_grief(self, index: int) -> None:
        if self.trouble == "raise":
            raise ValueError(f"cannot decode image {index}")
        if self.trouble == "hang":
            time.sleep(600)
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


class Steep(nn.Module):
    """Its gradients overflow fp16 at the first loss scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * 64.0
        return y


class KilledInStep(torch.optim.SGD):
    """SGD that kills rank 0 once, in step `at`, after all ranks have the gradients.

    The file `again` marks the kill.
    """

    def __init__(self, parameters: Any, lr: float, at: int, again: str) -> None:
        super().__init__(parameters, lr)
        self.at, self.again, self.steps = at, Path(again), 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if RANK == 0 and self.steps == self.at and not self.again.exists():
            self.again.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


class RaisesOnRankOne(nn.Module):
    """In its fourth forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if RANK == 1 and self.passes == 4:
            raise ValueError("the attention mask has the wrong shape")
        y: Tensor = self.layer(x)
        return y


def no_module() -> str:
    return "resnet50"


def normed_net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, CLASSES))


class MomentumNet(nn.Module):
    """Half of it follows the other half, by what each forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = net(), net().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for follows, leads in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    follows.mul_(0.9).add_(leads, alpha=0.1)
        y: Tensor = self.online(x) + self.target(x)
        return y


class FlippingNet(nn.Module):
    """A bit of a weight flips on rank 1, in the forward passes `FLIPS`."""

    FLIPS = (10, 40, 70)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if RANK == 1 and self.passes in self.FLIPS:
            next(self.layer.parameters()).detach().view(torch.int32).view(-1)[0] ^= 1 << 20
        y: Tensor = self.layer(x)
        return y


class HangingNet(nn.Module):
    """Rank 1 hangs in one forward pass; `again` is a file that it makes before, and after which none hangs."""

    def __init__(self, again: str) -> None:
        super().__init__()
        self.layer, self.passes, self.again = net(), 0, Path(again)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if RANK == 1 and self.passes == 40 and not self.again.exists():
            self.again.touch()
            time.sleep(3600)
        y: Tensor = self.layer(x)
        return y


class SlowNet(nn.Module):
    """A forward pass takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = net(), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y: Tensor = self.layer(x)
        return y
