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

    The views are random in evaluation as well, for the task is to tell which two belong together.
    `image_size` is what the data is resized to: 224 by default for `resnet50`; `cifar_cnn` takes 32 and no other.

    Raises:
        JobError: an `image_size` that the encoder does not take.
    """

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

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) to (n, 2, dim)."""
        views = torch.cat([random_view(images), random_view(images)])
        projected = F.normalize(self.projection(self.encoder(views)), dim=-1)
        return projected.view(2, len(images), -1).transpose(0, 1)


@torch.no_grad()
def random_view(images: Tensor) -> Tensor:
    """Random crop, flip, contrast and brightness of images (n, c, h, w).

    The crop keeps 40 to 100 % of each side; the shape stays.
    """
    n, device = len(images), images.device
    scale = torch.empty(n, device=device).uniform_(0.4, 1.0)
    shift = torch.empty(n, 2, device=device).uniform_(-1, 1) * (1 - scale)[:, None]  # the crop stays within the image
    flip = torch.randint(0, 2, (n,), device=device) * 2 - 1
    crop = torch.zeros(n, 2, 3, device=device)
    crop[:, 0, 0], crop[:, 1, 1], crop[:, :, 2] = scale * flip, scale, shift
    grid = F.affine_grid(crop, list(images.shape), align_corners=False).to(images.dtype)
    view = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    contrast = torch.empty(n, 1, 1, 1, device=device).uniform_(0.6, 1.4)
    brightness = torch.empty(n, 1, 1, 1, device=device).uniform_(-0.4, 0.4)
    mean = view.mean(dim=(1, 2, 3), keepdim=True)
    # brightness in the image's own units, however the data is normalised
    spread = view.std(dim=(1, 2, 3), keepdim=True)
    return ((view - mean) * contrast + mean + brightness * spread).to(images.dtype)
