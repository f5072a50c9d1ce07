"""A model in three parts, placed by hand: the first and the last in other processes, microbatches in flight.

No process holds more than its part, parameters, gradients and optimizer state included.

python by_hand.py
python by_hand.py --steps 5 --width 32
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from serving_processes import serving
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline_server as remote

CLASSES, BATCH, MICROBATCHES = 10, 256, 4


def part(inputs: int, width: int, outputs: int) -> nn.Module:
    """A third of the model."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs)
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Synthetic data: the class is the nearest of ten points."""
    points = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(0))
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(1 + number))
    return x, torch.cdist(x, points).argmin(1)


def main() -> None:
    """Train, and print losses, where parameters are, and samples a second."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--width", type=int, default=256)
    args = options.parse_args()
    torch.set_num_threads(1)  # several processes share the cores
    torch.manual_seed(0)
    path, width = f"{Path(__file__).resolve()}:part", args.width
    with serving(["first", "last"], [path]):
        first = remote.module("first", path, 16, width, width, seed=1)
        last = remote.module("last", path, width, width, CLASSES, seed=2)
        model = nn.Sequential(first, part(width, width, width), last)
        here = torch.optim.Adam(model.parameters(), lr=1e-3)
        there = remote.optimizer([first, last], "adam", lr=1e-3)
        for place, each in zip(("first", "here", "last"), model, strict=True):
            print(f"{place}: {sum(math.prod(tensor.shape) for tensor in each.state_dict().values()):,} parameters")

        def step(microbatch: tuple[Tensor, Tensor]) -> float:
            x, y = microbatch
            loss = cross_entropy(model(x), y) / MICROBATCHES
            loss.backward()
            return loss.item()

        begin = time.perf_counter()
        for number in range(args.steps):
            x, y = batch(number)
            here.zero_grad()
            parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
            loss = sum(remote.microbatches(step, parts))
            here.step()
            there.step()
            if number % max(1, args.steps // 5) == 0 or number == args.steps - 1:
                print(f"step {number + 1}  loss {loss:.4f}")
        print(f"{args.steps * BATCH / (time.perf_counter() - begin):,.0f} samples/s")


if __name__ == "__main__":
    main()
