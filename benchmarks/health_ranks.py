"""Ranks of `health.py`, which check themselves repeatedly, each time with another planted fault."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from paceline import device
from paceline.comm.backend import joined
from paceline.comm.measure.health import check

Product = Callable[..., Tensor]
LOST = 0.25  # share of its rate that a throttled device loses


@dataclass(frozen=True)
class Planted:
    """One check.

    Attributes:
        fault: `throttled`, `wrong arithmetic`, `wrong memory`, or "" for a healthy device.
        rank: rank whose device has the fault.
        noise: whether another process is busy beside the ranks.
    """

    fault: str
    rank: int
    noise: bool = False


@dataclass(frozen=True)
class Checked:
    """Codes and ranks that a check named, and the seconds that it took."""

    named: list[tuple[str, tuple[int, ...]]]
    seconds: float


def checks(cases: list[Planted]) -> list[Checked]:
    """Join the other ranks, and make all checks."""
    found = []
    with joined(deadline_s=120) as group:
        for number, case in enumerate(cases):
            busy = case.noise and group.rank == 0
            with _busy_process() if busy else nullcontext(), _fault(case, group.rank, Random(number)):
                report = check(group)
            found.append(Checked([(f.code, f.ranks) for f in report.findings], report.seconds))
        group.barrier()
    return found


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _fault(case: Planted, rank: int, random: Random) -> Iterator[None]:
    if rank != case.rank or not case.fault:
        yield
        return
    product, complement = torch.mm, torch.Tensor.bitwise_not_
    try:
        if case.fault == "throttled":
            torch.mm = _throttled(product)
        elif case.fault == "wrong arithmetic":
            torch.mm = _wrong(product, random)
        else:
            torch.Tensor.bitwise_not_ = _stuck(complement, random)  # type: ignore[method-assign]
        yield
    finally:
        torch.mm, torch.Tensor.bitwise_not_ = product, complement  # type: ignore[method-assign]


def _throttled(product: Product) -> Product:
    def mm(*args: Any, **keywords: Any) -> Tensor:
        started = time.perf_counter()
        result = product(*args, **keywords)
        device.synchronize(result.device)
        until = time.perf_counter() + (time.perf_counter() - started) * LOST / (1 - LOST)
        while time.perf_counter() < until:
            pass
        return result

    return mm


def _wrong(product: Product, random: Random) -> Product:
    """Flip the lowest bit of one number in about every 20th product, as a faulty multiplier would."""

    def mm(*args: Any, **keywords: Any) -> Tensor:
        result = product(*args, **keywords)
        if random.random() < 0.05:
            words = result.view(torch.int16 if result.element_size() == 2 else torch.int32)
            words[random.randrange(len(words)), random.randrange(len(words))] ^= 1
        return result

    return mm


def _stuck(complement: Any, random: Random) -> Any:
    """Let one bit of one word keep its value."""

    def bitwise_not_(words: Tensor) -> Tensor:
        place, bit = random.randrange(len(words)), 1 << random.randrange(62)
        kept = int(words[place].item()) & bit
        complement(words)
        words[place] = int(words[place].item()) & ~bit | kept
        return words

    return bitwise_not_
