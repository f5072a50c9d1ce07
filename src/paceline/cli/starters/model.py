"""Your own model and data set, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Invented points of two classes: inside and outside a circle. Replace them with your data."""

    def __init__(self, count: int) -> None:
        self.inputs = 2 * torch.rand(count, 2) - 1
        self.targets = (self.inputs.norm(dim=1) < 0.8).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Network(nn.Module):
    """Network that computes the logits of two classes. Replace it with your model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the logits, shape (batch, 2)."""
        logits: Tensor = self.layers(inputs)
        return logits
