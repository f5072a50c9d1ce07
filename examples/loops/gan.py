"""A GAN on scikit-learn's digits: two models, two optimizers, and gradients that stay where they belong.

python gan.py
torchrun --nproc-per-node 2 gan.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

NOISE = 16


def main() -> None:
    """Train a generator and a discriminator for 25 steps."""
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().data).float() / 8 - 1
    # a fixed draw for each image, so that the numbers do not depend on the ranks
    noise = torch.randn(len(images), NOISE)
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(images, noise), batch_size=64, shuffle=True)

    engine = paceline.setup([generator, discriminator], [of_g, of_d], loader=loader)
    for step, (real, z) in enumerate(engine.loader, 1):
        fake = generator(z)

        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        loss_d = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        mean_d = engine.backward(loss_d, of_d)
        engine.update(of_d)

        loss_g = F.softplus(-discriminator(fake)).mean()
        mean_g = engine.backward(loss_g, of_g)  # leaves no gradient in the discriminator
        engine.update(of_g)
        if step % 5 == 0:
            engine.print(f"step {step}  discriminator {mean_d:.5f}  generator {mean_g:.5f}")
        if step == 25:
            break


if __name__ == "__main__":
    main()
