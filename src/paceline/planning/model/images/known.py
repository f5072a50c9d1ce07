"""Image models by name, with what is printed of their size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.images.classifiers import (
    alexnet,
    densenet,
    efficientnet,
    efficientnet_v2_s,
    mobilenet_v2,
    resnet,
    vgg,
)
from paceline.planning.model.images.dense import ssd300, unet_3d_medical, unet_industrial, unet_medical
from paceline.planning.model.images.diffusion import LatentUNet, latent_unet
from paceline.planning.model.images.patches import diffusion_transformer, vision_transformer, wan

_TORCHVISION = "torchvision's table of classification weights"
# tokens of 81 frames of 1280 × 720: a fourth of the frames and one, an eighth of each side, patches of 2 × 2
_WAN_TOKENS = 75_600


class KnownImageModel(NamedTuple):
    """An image model with a published shape.

    Attributes:
        parameters: published number in millions; None: none is published.
        gmacs: published billions of multiplications and additions of one image; None: none is published.
        also: other names.
    """

    name: str
    source: str
    build: Callable[[], ModelTrace]
    parameters: float | None = None
    gmacs: float | None = None
    also: tuple[str, ...] = ()


def _classifier(
    name: str, build: Callable[[], ModelTrace], parameters: float, gmacs: float | None, *also: str
) -> KnownImageModel:
    return KnownImageModel(name, _TORCHVISION, build, parameters, gmacs, also)


def _vit(
    name: str, parameters: float, layers: int, hidden: int, ffn: int, heads: int, patch: int, *also: str
) -> KnownImageModel:
    build = partial(vision_transformer, layers, hidden, ffn, heads, patch)
    return KnownImageModel(name, "arXiv:2010.11929, table 1; arXiv:2106.04560", build, parameters, None, also)


def _dit(name: str, parameters: float, layers: int, hidden: int, heads: int, gmacs: float) -> KnownImageModel:
    build = partial(diffusion_transformer, layers, hidden, heads)
    return KnownImageModel(name, "arXiv:2212.09748, table 4", build, parameters, gmacs)


def _diffusion(name: str, parameters: float, shape: LatentUNet, *also: str) -> KnownImageModel:
    source = "arXiv:2112.10752; arXiv:2307.01952, table 1; config.json of the U-Net in its Hugging Face repository"
    return KnownImageModel(name, source, partial(latent_unet, shape), parameters, None, also)


_EFFICIENTNETS = (
    (1.0, 1.0, 224, 5.289, 0.386),
    (1.0, 1.1, 240, 7.794, 0.687),
    (1.1, 1.2, 260, 9.110, 1.0),
    (1.2, 1.4, 300, 12.233, 1.827),
    (1.4, 1.8, 380, 19.342, 4.394),
    (1.6, 2.2, 456, 30.390, 10.266),
    (1.8, 2.6, 528, 43.041, 19.068),
    (2.0, 3.1, 600, 66.348, 37.746),
)
_R50, _R101, _R152 = (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)
_DLE = "NVIDIA/DeepLearningExamples"

IMAGE_MODELS: tuple[KnownImageModel, ...] = (
    _classifier("resnet-18", partial(resnet, (2, 2, 2, 2), deep=False), 11.690, 1.814),
    _classifier("resnet-34", partial(resnet, _R50, deep=False), 21.798, 3.664),
    _classifier("resnet-50", partial(resnet, _R50), 25.557, 4.089, "resnet-50-v1.5", "resnet-v1.5"),
    _classifier("resnet-101", partial(resnet, _R101), 44.549, 7.801, "resnet-101-v1.5"),
    _classifier("resnet-152", partial(resnet, _R152), 60.193, 11.514, "resnet-152-v1.5"),
    _classifier("resnext-101-32x4d", partial(resnet, _R101, groups=32, width=4), 44.178, None, "resnext-101"),
    KnownImageModel(
        "se-resnext-101-32x4d",
        f"{_DLE}: PyTorch/Classification/ConvNets",
        partial(resnet, _R101, groups=32, width=4, excited=True),
        48.955,
        None,
        ("se-resnext-101",),
    ),
    _classifier("vgg-16", partial(vgg, (2, 2, 3, 3, 3)), 138.358, 15.470),
    _classifier("vgg-19", partial(vgg, (2, 2, 4, 4, 4)), 143.667, 19.632),
    _classifier("alexnet", alexnet, 61.101, 0.714),
    _classifier("densenet-121", partial(densenet, (6, 12, 24, 16)), 7.979, 2.834),
    _classifier("densenet-169", partial(densenet, (6, 12, 32, 32)), 14.149, 3.360),
    _classifier("mobilenet-v2", mobilenet_v2, 3.505, 0.301),
    *(
        KnownImageModel(
            f"efficientnet-b{n}",
            f"arXiv:1905.11946, table 2; {_TORCHVISION}",
            partial(efficientnet, width, depth, side),
            millions,
            gmacs,
        )
        for n, (width, depth, side, millions, gmacs) in enumerate(_EFFICIENTNETS)
    ),
    _classifier("efficientnet-v2-s", efficientnet_v2_s, 21.458, 8.366),
    _vit("vit-s/16", 22.05, 12, 384, 1536, 6, 16, "vit-small", "deit-small", "deit-s"),
    _vit("vit-b/16", 86.57, 12, 768, 3072, 12, 16, "vit-base", "vit-base-patch16-224", "deit-base", "deit-b"),
    _vit("vit-b/32", 88.22, 12, 768, 3072, 12, 32),
    _vit("vit-l/16", 304.33, 24, 1024, 4096, 16, 16, "vit-large"),
    _vit("vit-h/14", 632.05, 32, 1280, 5120, 16, 14, "vit-huge"),
    _vit("vit-g/14", 1843, 48, 1664, 8192, 16, 14, "vit-giant"),
    _dit("dit-s/2", 33, 12, 384, 6, 6.06),
    _dit("dit-b/2", 130, 12, 768, 12, 23.01),
    _dit("dit-l/2", 458, 24, 1024, 16, 80.71),
    _dit("dit-xl/2", 675, 28, 1152, 16, 118.64),
    KnownImageModel(
        "wan-2.1-14b",
        "Wan2.1: wan/configs/wan_t2v_14B.py",
        partial(wan, 40, 5120, 13824, 40, _WAN_TOKENS),
        14_288,
        None,
        ("wan2.1-t2v-14b",),
    ),
    KnownImageModel(
        "wan-2.1-1.3b",
        "Wan2.1: wan/configs/wan_t2v_1_3B.py",
        partial(wan, 30, 1536, 8960, 12, 32_760),
        1_419,
        None,
        ("wan2.1-t2v-1.3b",),
    ),
    _diffusion(
        "stable-diffusion-1.5",
        859.521,
        LatentUNet((320, 640, 1280, 1280), (1, 1, 1, 0), middle=1, context=768, side=64),
        "stable-diffusion-v1.5",
        "stable-diffusion-1.4",
        "stable-diffusion",
        "sd-1.5",
    ),
    _diffusion(
        "stable-diffusion-2",
        865.911,
        LatentUNet((320, 640, 1280, 1280), (1, 1, 1, 0), middle=1, context=1024, side=64, head=64),
        "stable-diffusion-v2",
        "stable-diffusion-2.1",
        "sd-2",
        "sd-2.1",
    ),
    _diffusion(
        "stable-diffusion-xl",
        2567.464,
        LatentUNet((320, 640, 1280), (0, 2, 10), middle=10, context=2048, side=128, head=64, labels=2816),
        "sdxl",
        "stable-diffusion-xl-1.0",
    ),
    KnownImageModel("ssd300", f"{_DLE}: PyTorch/Detection/SSD/ssd/model.py", ssd300, also=("ssd",)),
    KnownImageModel("unet-medical", f"{_DLE}: TensorFlow2/Segmentation/UNet_Medical/model", unet_medical),
    KnownImageModel("unet-industrial", f"{_DLE}: TensorFlow/Segmentation/UNet_Industrial/model", unet_industrial),
    KnownImageModel("unet-3d-medical", f"{_DLE}: TensorFlow/Segmentation/UNet_3D_Medical/model", unet_3d_medical),
)
