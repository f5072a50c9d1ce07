"""Modules, classes and functions that the tests' processes serve."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline_server.values import sendable


@sendable
@dataclass
class Heads:
    score: Tensor
    label: Tensor
    name: str


class Tower(nn.Module):
    def __init__(self, width: int = 4, out: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.second = nn.Linear(8, out, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return out

    def width(self) -> int:
        return self.first.in_features

    def _secret(self) -> str:
        return "secret"


def table(rows: int = 10, width: int = 4, sparse: bool = False) -> nn.Embedding:
    return nn.Embedding(rows, width, sparse=sparse, dtype=torch.float64)


def linear(width: int = 4, out: int = 4) -> nn.Linear:
    return nn.Linear(width, out, dtype=torch.float64)


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, inputs: dict[str, Any], *, factor: float = 1.0) -> tuple[Any, ...]:
        y = self.layer(inputs["x"][0]) * factor
        return {"y": y, "twice": [2 * y]}, Heads(y.sum(1), y.argmax(1), "heads"), 7


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, fault: str = "") -> Tensor:
        _do(fault)
        y = x * self.weight
        if fault.startswith("backward "):
            y.register_hook(lambda _: _do(fault.removeprefix("backward ")))
        return y


def _do(fault: str) -> None:
    if fault == "raise":
        raise ValueError("the tower is on fire")
    if fault == "hang":
        time.sleep(20.0)
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start
        self._lock = threading.Lock()

    def add(self, number: int) -> int:
        with self._lock:
            self.value += number
            return self.value

    def add_value_of(self, other: Counter) -> int:
        return self.add(other.value)

    def up_to(self, end: int) -> Iterator[int]:
        yield from range(self.value, end)


def double(x: Any) -> Any:
    return 2 * x


def squares(count: int) -> Iterator[Tensor]:
    for number in range(count):
        yield torch.tensor(number**2)


def not_a_module() -> int:
    return 3
