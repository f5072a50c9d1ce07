"""Models that classify images: ResNet, ResNeXt, VGG, AlexNet, DenseNet, MobileNet and EfficientNet."""

from __future__ import annotations

from math import ceil

from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.images.builder import ImageBuilder

CLASSES = 1000


def resnet_stages(
    image: ImageBuilder,
    depths: tuple[int, ...],
    deep: bool = True,
    groups: int = 1,
    width: int = 64,
    excited: bool = False,
    strides: tuple[int, ...] = (1, 2, 2, 2),
) -> ImageBuilder:
    """The stem of a ResNet and its blocks (arXiv:1512.03385, table 1), stride in the 3 × 3 convolution (v1.5).

    Args:
        deep: three convolutions in a block instead of two.
        groups, width: of the 3 × 3 convolutions: of ResNeXt (arXiv:1611.05431).
        excited: with squeeze and excitation (arXiv:1709.01507).
    """
    image.convolution(64, kernel=7, stride=2).pool(kernel=3, padded=True).close("embedding")
    for stage, (depth, first) in enumerate(zip(depths, strides, strict=False)):
        planes = 64 * 2**stage
        out = 4 * planes if deep else planes
        for index in range(depth):
            stride, channels = first if index == 0 else 1, image.channels
            if deep:
                inner = planes * width // 64 * groups
                image.convolution(inner, kernel=1).convolution(inner, stride=stride, groups=groups)
                image.convolution(out, kernel=1, activation=False)
            else:
                image.convolution(out, stride=stride).convolution(out, activation=False)
            if excited:
                image.excited(out // 16)

            def shortcut(way: ImageBuilder, out: int = out, stride: int = stride) -> object:
                return way.convolution(out, kernel=1, stride=stride, activation=False)

            image.plus(shortcut if channels != out or stride > 1 else None).close()
    return image


def resnet(depths: tuple[int, ...], side: int = 224, **kind: bool | int) -> ModelTrace:
    """A ResNet that classifies images."""
    image = ImageBuilder(3, (side, side))
    return resnet_stages(image, depths, **kind).mean().linear(CLASSES).close().trace(CLASSES)  # type: ignore[arg-type]


def vgg(depths: tuple[int, ...]) -> ModelTrace:
    """VGG without norms (arXiv:1409.1556, table 1)."""
    image = ImageBuilder(3, (224, 224))
    for depth, out in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            image.convolution(out, norm=False, bias=True)
        image.pool().close()
    return image.linear(4096).activated().linear(4096).activated().linear(CLASSES).close().trace(CLASSES)


def alexnet() -> ModelTrace:
    """AlexNet for one device (arXiv:1404.5997)."""
    # a border of 2 instead of the one that keeps the size
    image = ImageBuilder(3, (220, 220))
    image.convolution(64, kernel=11, stride=4, norm=False, bias=True).pool(kernel=3)
    image.convolution(192, kernel=5, norm=False, bias=True).pool(kernel=3)
    for out in (384, 256, 256):
        image.convolution(out, norm=False, bias=True)
    image.pool(kernel=3).close()
    return image.linear(4096).activated().linear(4096).activated().linear(CLASSES).close().trace(CLASSES)


def densenet(depths: tuple[int, ...], growth: int = 32) -> ModelTrace:
    """DenseNet (arXiv:1608.06993, table 1): each layer reads the channels of all before it."""
    image = ImageBuilder(3, (224, 224)).convolution(64, kernel=7, stride=2).pool(kernel=3, padded=True)
    image.close("embedding")
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            before = image.channels
            # the norm stands before each convolution
            image.normed().convolution(4 * growth, kernel=1).convolution(growth, norm=False, activation=False)
            image.joined(before).close()
        image.normed()
        if stage < len(depths) - 1:
            image.convolution(image.channels // 2, kernel=1, norm=False, activation=False).pool().close()
    return image.mean().linear(CLASSES).close().trace(CLASSES)


def mobilenet_v2() -> ModelTrace:
    """MobileNet v2 (arXiv:1801.04381, table 2)."""
    image = ImageBuilder(3, (224, 224)).convolution(32, stride=2).close("embedding")
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, out, depth, first in rows:
        for index in range(depth):
            _inverted(image, out, expansion, 3, first if index == 0 else 1, squeezed=0)
    return image.convolution(1280, kernel=1).mean().linear(CLASSES).close().trace(CLASSES)


def efficientnet(width: float, depth: float, side: int) -> ModelTrace:
    """EfficientNet (arXiv:1905.11946, table 1), wider and deeper by these factors."""
    image = ImageBuilder(3, (side, side)).convolution(_rounded(32 * width), stride=2).close("embedding")
    rows = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    for expansion, out, layers, first, kernel in rows:
        for index in range(ceil(layers * depth)):
            stride = first if index == 0 else 1
            _inverted(image, _rounded(out * width), expansion, kernel, stride, squeezed=max(image.channels // 4, 1))
    return image.convolution(_rounded(1280 * width), kernel=1).mean().linear(CLASSES).close().trace(CLASSES)


def efficientnet_v2_s(side: int = 384) -> ModelTrace:
    """EfficientNetV2-S (arXiv:2104.00298, table 4)."""
    image = ImageBuilder(3, (side, side)).convolution(24, stride=2).close("embedding")
    for expansion, out, layers, first in ((1, 24, 2, 1), (4, 48, 4, 2), (4, 64, 4, 2)):
        for index in range(layers):
            _fused(image, out, expansion, first if index == 0 else 1)
    for expansion, out, layers, first in ((4, 128, 6, 2), (6, 160, 9, 1), (6, 256, 15, 2)):
        for index in range(layers):
            _inverted(image, out, expansion, 3, first if index == 0 else 1, squeezed=image.channels // 4)
    return image.convolution(1280, kernel=1).mean().linear(CLASSES).close().trace(CLASSES)


def _inverted(image: ImageBuilder, out: int, expansion: int, kernel: int, stride: int, squeezed: int) -> None:
    """An inverted residual: wider, a convolution of each channel alone, and narrow again."""
    before = image.channels
    inner = before * expansion
    if expansion > 1:
        image.convolution(inner, kernel=1)
    image.convolution(inner, kernel=kernel, stride=stride, groups=inner)
    if squeezed:
        image.excited(squeezed)
    image.convolution(out, kernel=1, activation=False)
    if stride == 1 and before == out:
        image.plus(None, activation=False)
    image.close()


def _fused(image: ImageBuilder, out: int, expansion: int, stride: int) -> None:
    """An inverted residual whose first two convolutions are one."""
    before = image.channels
    if expansion > 1:
        image.convolution(before * expansion, stride=stride).convolution(out, kernel=1, activation=False)
    else:
        image.convolution(out, stride=stride)
    if stride == 1 and before == out:
        image.plus(None, activation=False)
    image.close()


def _rounded(channels: float) -> int:
    """Channels as a multiple of 8, at most a tenth fewer."""
    whole = max(8, int(channels + 4) // 8 * 8)
    return whole + 8 if whole < 0.9 * channels else whole
