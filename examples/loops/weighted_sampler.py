"""Rare classes drawn more often.

A `WeightedRandomSampler` for training, a `SubsetRandomSampler` that keeps validation data apart.

python weighted_sampler.py
torchrun --nproc-per-node 2 weighted_sampler.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import paceline


def rare_digits() -> tuple[TensorDataset, list[int], list[int]]:
    """Handwritten digits with few of 5 to 9; the indices of those to train on, and of those to validate with."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    kept = torch.nonzero((labels < 5) | (torch.rand(len(labels)) < 0.1)).flatten()
    order = torch.randperm(len(kept)).tolist()
    return TensorDataset(images[kept], labels[kept]), order[100:], order[:100]


def main() -> None:
    """Train for four epochs and validate after each."""
    torch.manual_seed(0)
    data, train, validation = rare_digits()
    labels = data.tensors[1][train]
    weights = 1.0 / torch.bincount(labels, minlength=10)[labels]  # every class is drawn equally often
    balanced = WeightedRandomSampler(weights.tolist(), num_samples=1024, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Subset(data, train), batch_size=64, sampler=balanced)
    held_out = DataLoader(data, batch_size=50, sampler=SubsetRandomSampler(validation))

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = paceline.setup(model, optimizer, loader=loader)
    for epoch in range(4):
        for images, labels in engine.loader:
            engine.backward(F.cross_entropy(model(images), labels))
            result = engine.update()
        measured = engine.evaluate(
            held_out, lambda batch: {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).double()}
        )
        engine.print(f"epoch {epoch + 1}  loss {result.loss:.5f}  validation accuracy {measured['accuracy']:.3f}")


if __name__ == "__main__":
    main()
