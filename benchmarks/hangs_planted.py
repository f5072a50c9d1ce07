"""Model of `hangs.py`: in one of its layers, one rank hangs, ends, or makes different calls."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANK = int(os.environ.get("RANK", 0))
WIDTH, LAYERS = 32, 4


class Net(nn.Module):
    """Model of several layers, one of which has a fault."""

    def __init__(self, kind: str, layer: int, rank: int, step: int, folder: str) -> None:
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(WIDTH, 10)
        own = partial(Centred, group="own") if kind.endswith("own") else partial(Centred, group="world")
        kinds = {"skip": own, "mismatch": own}
        made = kinds.get(kind.partition("-")[0], Layer)
        self.body = nn.Sequential(*(made() if i == layer else Layer() for i in range(LAYERS)))
        self.fault = Fault(kind.partition("-")[0], rank, step, Path(folder))
        faulty: Any = self.body[layer]
        faulty.fault = self.fault

    def forward(self, x: Tensor) -> Tensor:
        self.fault.count(training=self.training)
        result: Tensor = self.head(self.body(self.flat(x)))
        return result


class Fault:
    """Kind of fault, with its step and rank."""

    def __init__(self, kind: str, rank: int, step: int, folder: Path) -> None:
        self.kind, self.rank, self.step, self.folder = kind, rank, step, folder
        self.passes = 0

    def count(self, *, training: bool) -> None:
        """Count the passes of the training loop, but not those that only trace the model."""
        calls = {frame.f_code.co_qualname for frame, _ in traceback.walk_stack(None)} if training else ()
        self.passes += "Loop.advance" in calls

    @property
    def is_due(self) -> bool:
        """True if the fault is due on this rank, which is recorded once."""
        begun = self.folder / "begun.json"
        if self.rank != RANK or self.passes != self.step or begun.exists():
            return False
        begun.write_text(json.dumps({"time": time.time()}))
        return True

    def happen(self) -> None:
        """Hang or end, if the kind of fault does so."""
        if self.kind not in ("sleep", "stop", "kill") or not self.is_due:
            return
        if self.kind == "sleep":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


class Layer(nn.Module):
    """A residual layer."""

    fault: Fault | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault is not None:
            self.fault.happen()
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class Centred(nn.Module):
    """A layer that subtracts the mean over the samples of all ranks."""

    fault: Fault | None = None

    def __init__(self, group: str) -> None:
        super().__init__()
        self.layer, self._kind, self._group = nn.Linear(WIDTH, WIDTH), group, None

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if dist.is_initialized() and dist.get_backend() != "fake" and mean.device.type != "meta":
            if self._kind == "own" and self._group is None:
                self._group = dist.new_group()
            due = self.fault is not None and self.fault.is_due
            if due and self.fault and self.fault.kind == "mismatch":
                dist.all_reduce(mean[: WIDTH // 2].contiguous(), group=self._group)
            elif not due:
                dist.all_reduce(mean, group=self._group)
                mean = mean / dist.get_world_size()
        result: Tensor = x + self.layer(x - mean)
        return result


def build(kind: str, layer: int, rank: int, step: int, folder: str) -> nn.Module:
    """Return the model; `folder` gets the time of the fault."""
    torch.manual_seed(0)
    return Net(kind, layer, rank, step, folder)
