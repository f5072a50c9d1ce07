"""A training loop of one's own on paceline's engine.

On one rank and on several it does the same work and prints the same losses:

python own_loop.py
torchrun --nproc-per-node 2 own_loop.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    """Train a small network on scikit-learn's handwritten digits for five epochs."""
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=64, shuffle=True)  # 64 samples a step, over all ranks together

    engine = paceline.setup(model, optimizer, loss=cross_entropy, loader=loader)
    for epoch in range(5):
        # each: forward, backward, reduction over the ranks, update
        results = [engine.step(batch) for batch in engine.loader]
        mean = sum(r.loss * r.samples for r in results) / len(data)
        engine.print(f"epoch {epoch + 1}  step {results[-1].step}  loss {mean:.5f}")


if __name__ == "__main__":
    main()
