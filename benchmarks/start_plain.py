"""The first step of a small network as people write it by hand.

Alone or under torchrun with DDP, for start.py to compare with.

It imports nothing of paceline. It prints the loss of its one step and the time of day at the end of it.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES = 32  # of the data and of a batch: whatever the order, the first step is of all


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Noise of the shape of CIFAR-10's images, with labels."""

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(0)
        self.images = torch.randn(SAMPLES, 3, 32, 32, generator=noise)
        self.labels = torch.randint(10, (SAMPLES,), generator=noise)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def network() -> nn.Module:
    """A small convolutional network, with the same weights at every call."""
    torch.manual_seed(0)
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


def main() -> None:
    """Take one step."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    data, model = Images(), network()
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] | None = DistributedSampler(data) if ranks > 1 else None
    loader = DataLoader(data, batch_size=SAMPLES // ranks, sampler=sampler, shuffle=sampler is None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(whole)
        if int(os.environ.get("RANK", "0")) == 0:
            print(whole.item() / ranks, time.time(), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
