"""The zoo's small image models, in plain PyTorch."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn


def mlp(*, hidden: PositiveInt = 1024, classes: PositiveInt = 10) -> nn.Module:
    """784 - `hidden` - `classes` with ReLU, for images of 1 x 28 x 28; output (n, classes)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cifar_cnn(*, classes: PositiveInt = 10) -> nn.Module:
    """Two convolutions and two linear layers for images of 3 x 32 x 32.

    Output (n, classes). 268,650 parameters with 10 classes.
    """
    head = nn.Sequential(nn.Linear(CIFAR_FEATURES, 128), nn.ReLU(), nn.Linear(128, classes))
    return nn.Sequential(*cifar_convolutions(), *head)


CIFAR_FEATURES = 32 * 8 * 8


def cifar_convolutions() -> nn.Sequential:
    """The convolutional part of `cifar_cnn`: (n, 3, 32, 32) to (n, 2048)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
