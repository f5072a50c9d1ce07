"""SimCLR: representations learned without labels (Chen et al., 2020, arXiv:2002.05709).

Every image gives two random views, whose representations are to be near.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job.zoo.models.huggingface import ResNetEncoder
from paceline.job.zoo.models.vision import CIFAR_FEATURES, cifar_convolutions


class SimCLR(nn.Module):
    """Projections (n, 2, dim), of length 1, of two random views of each image (n, 3, size, size).

    They are for the loss `contrastive`.

    The views of an image follow from its pixels and the number of training steps before, whichever rank has it: every
    plan trains on the same views, and a resumed run goes on with them. Evaluation has views too, the same each time,
    for the task is to tell which two belong together.
    `image_size` is what the data is resized to: 224 by default for `resnet50`; `cifar_cnn` takes 32 and no other.

    Raises:
        JobError: an `image_size` that the encoder does not take.
    """

    steps: Tensor

    def __init__(
        self,
        *,
        encoder: Literal["cifar_cnn", "resnet50"] = "cifar_cnn",
        dim: PositiveInt = 128,
        image_size: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        if encoder == "cifar_cnn" and image_size not in (None, 32):
            raise JobError(
                f"model simclr: the encoder cifar_cnn takes images of 32 x 32, not {image_size}; leave "
                "image_size out, or use resnet50"
            )
        features = CIFAR_FEATURES if encoder == "cifar_cnn" else ResNetEncoder.features
        self.encoder = cifar_convolutions() if encoder == "cifar_cnn" else ResNetEncoder()
        self.projection = nn.Sequential(nn.Linear(features, features // 4), nn.ReLU(), nn.Linear(features // 4, dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) to (n, 2, dim)."""
        if self.training:
            self.steps += 1
        time = self.steps if self.training else torch.zeros_like(self.steps)
        views = torch.cat([random_view(images, time, number) for number in (0, 1)])
        projected = F.normalize(self.projection(self.encoder(views)), dim=-1)
        return projected.view(2, len(images), -1).transpose(0, 1)


@torch.no_grad()
def random_view(images: Tensor, time: Tensor, number: int) -> Tensor:
    """Random crop, flip, contrast and brightness of images (n, c, h, w).

    The crop keeps 40 to 100 % of each side; the shape stays. `time` and `number` tell an image's views apart.
    """
    drawn = _uniform(images, 2 * time + number)
    scale = 0.4 + 0.6 * drawn[:, 0]
    shift = (2 * drawn[:, 1:3] - 1) * (1 - scale)[:, None]  # the crop stays within the image
    flip = torch.where(drawn[:, 3] < 0.5, -1, 1)
    crop = images.new_zeros(len(images), 2, 3, dtype=torch.float32)
    crop[:, 0, 0], crop[:, 1, 1], crop[:, :, 2] = scale * flip, scale, shift
    grid = F.affine_grid(crop, list(images.shape), align_corners=False).to(images.dtype)
    view = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    contrast, brightness = (0.6 + 0.8 * drawn[:, 4]), 0.8 * drawn[:, 5] - 0.4
    mean = view.mean(dim=(1, 2, 3), keepdim=True)
    # brightness in the image's own units, however the data is normalised
    spread = view.std(dim=(1, 2, 3), keepdim=True)
    return ((view - mean) * _of_each(contrast) + mean + _of_each(brightness) * spread).to(images.dtype)


def _of_each(numbers: Tensor) -> Tensor:
    return numbers[:, None, None, None]


_DRAWS = 6
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number


def _uniform(images: Tensor, key: Tensor) -> Tensor:
    """Numbers from 0 to 1, float32 (n, 6), that follow from pixels and key alone.

    torch's generators would draw them in the order of a rank's samples.
    """
    pixels = (images.flatten(1).to(torch.float32) * 2**16).to(
        torch.int32
    )  # the same in every precision that holds the images
    place = torch.arange(pixels.shape[1], device=images.device)
    odd = (_mixed(place * _GOLDEN) & 2**31 - 1 | 1).to(torch.int32)
    of_image = (pixels * odd).sum(1, dtype=torch.int64)
    streams = torch.arange(1, _DRAWS + 1, device=images.device) * _GOLDEN
    mixed = _mixed(_mixed(of_image + _mixed(key * _GOLDEN))[:, None] + streams)
    return (mixed >> 40 & 0xFFFFFF).float() / 2**24


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), on int64."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 2**33 - 1)
