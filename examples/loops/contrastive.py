"""Contrastive learning with a learned temperature.

Every sample is compared with the whole global batch, also with other ranks'.

python contrastive.py
torchrun --nproc-per-node 2 contrastive.py
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class ContrastiveLoss(nn.Module):
    """Contrastive loss: an image's two views are to be nearer than all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        scores = self.log_scale.exp() * F.normalize(one) @ F.normalize(other).T
        same = torch.arange(len(one), device=one.device)
        return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2


def main() -> None:
    """Train an encoder of images and their noisy copies for two epochs."""
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().data).float() / 16
    views = TensorDataset(images, images + 0.3 * torch.randn_like(images))
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    criterion = ContrastiveLoss()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *criterion.parameters()], lr=1e-3)
    loader = DataLoader(views, batch_size=128, shuffle=True, drop_last=True)

    engine = paceline.setup([encoder, criterion], optimizer, loader=loader)
    for epoch in range(2):
        for one, other in engine.loader:
            gathered = engine.gather(encoder(one)), engine.gather(encoder(other))  # of all ranks, with their gradients
            engine.backward(criterion(*gathered))
            result = engine.update()
        scale = criterion.log_scale.exp().item()
        engine.print(f"epoch {epoch + 1}  loss {result.loss:.5f}  temperature {1 / scale:.6f}")


if __name__ == "__main__":
    main()
