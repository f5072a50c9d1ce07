"""Data-parallel training as people write it by hand.

PyTorch's DistributedDataParallel over gloo, for local_speed.py to compare with.

It imports nothing of paceline, so that its memory is that of such a script. The folder in the first argument has the
data, the weights to start from, and the order of the samples; `--bucket-view` is DDP's `gradient_as_bucket_view`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LR = 1e-4


def cifar_cnn() -> nn.Module:
    """The model of this name in paceline's zoo, written out."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def wide() -> nn.Module:
    """25 million parameters, as many as ResNet-50 has, in four layers."""
    return nn.Sequential(
        nn.Linear(1024, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


class GivenOrder(DistributedSampler[int]):
    """A distributed sampler with a given order.

    Both sides of the comparison train on the same batches so.
    """

    def __init__(self, dataset: TensorDataset, orders: list[list[list[int]]]) -> None:
        super().__init__(dataset)
        self.orders = orders  # by epoch, then by rank

    def __iter__(self) -> Iterator[int]:
        return iter(self.orders[self.epoch % len(self.orders)][self.rank])


def main() -> None:
    """Train as far as the questions on stdin ask."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    saved = torch.load(folder / "work.pt")
    dataset = TensorDataset(saved["inputs"], saved["target"])
    sampler = GivenOrder(dataset, saved["orders"])
    loader = DataLoader(dataset, batch_size=saved["batch"], sampler=sampler)
    model: nn.Module = {"cifar_cnn": cifar_cnn, "wide": wide}[saved["model"]]()
    model.load_state_dict(saved.pop("weights"))
    model = DistributedDataParallel(model, gradient_as_bucket_view="--bucket-view" in sys.argv)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused="--fused" in sys.argv or None)
    answer(steps(model, optimizer, loader, sampler), batches(loader, sampler))
    dist.destroy_process_group()


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[list[torch.Tensor]], sampler: GivenOrder
) -> Iterator[float]:
    """Train; yields the loss of this rank's part of each batch."""
    for inputs, target in batches(loader, sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        yield loss.item()


def batches(loader: Iterable[list[torch.Tensor]], sampler: GivenOrder) -> Iterator[list[torch.Tensor]]:
    """Epoch after epoch."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def answer(losses: Iterator[float], data: Iterator[object]) -> None:
    """Answer questions on stdin.

    `["losses", n]` of n steps, `["steps", n]` seconds a step, `["batches", n]` seconds a batch alone.
    """
    for line in sys.stdin:
        question, n = json.loads(line)
        found: list[float] | float = (
            [next(losses) for _ in range(n)]
            if question == "losses"
            else timed(losses if question == "steps" else data, n)
        )
        print(json.dumps(found), flush=True)


def timed(work: Iterator[object], n: int) -> float:
    """Seconds an item, over the next `n`."""
    started = time.perf_counter()
    for _ in range(n):
        next(work)
    return (time.perf_counter() - started) / n


if __name__ == "__main__":
    main()
