"""Models that say something of every place of an image: U-Nets and SSD."""

from __future__ import annotations

from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.images.builder import ImageBuilder
from paceline.planning.model.images.classifiers import resnet_stages

# classes of COCO with that of no object; boxes at each place of the six feature maps (arXiv:1512.02325)
SSD_CLASSES, SSD_BOXES = 81, (4, 6, 6, 6, 4, 4)


def unet_medical() -> ModelTrace:
    """U-Net of arXiv:1505.04597 without borders, as in NVIDIA's UNet_Medical: 572 × 572 to 388 × 388."""
    image, kept = ImageBuilder(1, (572, 572)), []
    for out in (64, 128, 256, 512):
        _twice(image, out, padded=False)
        kept.append(image.channels)
        image.pool().close()
    for out in (1024, 512, 256, 128):
        if out < 1024:
            image.joined(kept.pop())
        _twice(image, out, padded=False)
        image.transposed(out // 2, kernel=3, activation=True).close()
    image.joined(kept.pop())
    _twice(image, 64, padded=False)
    return image.convolution(2, kernel=1, norm=False, activation=False, bias=True).close().trace()


def unet_industrial() -> ModelTrace:
    """NVIDIA's UNet_Industrial in its small form (TinyUNet, 512 × 512)."""
    image, kept = ImageBuilder(1, (512, 512)), []
    for out in (32, 32, 64, 128):
        _twice(image, out)
        kept.append(image.channels)
        image.pool().close()
    _twice(image, 256)
    image.transposed(128, activation=True).close()
    for out in (128, 64, 32):
        image.joined(kept.pop())
        image.convolution(out, norm=False, bias=True).convolution(out // 2, norm=False, bias=True)
        image.transposed(out // 2, activation=True).close()
    image.joined(kept.pop())
    _twice(image, 32)
    return image.convolution(1, kernel=1, norm=False, activation=False, bias=True).close().trace()


def unet_3d_medical(classes: int = 4) -> ModelTrace:
    """NVIDIA's UNet_3D_Medical: 128³ voxels of 4 kinds."""
    image, kept = ImageBuilder(4, (128, 128, 128)), []
    image.convolution(32).convolution(32).close()
    for out in (64, 128, 256, 320, 320):
        kept.append(image.channels)
        image.convolution(out, stride=2).convolution(out).close()
    for out in (320, 256, 128, 64, 32):
        image.transposed(out).joined(kept.pop()).convolution(out).convolution(out).close()
    return image.convolution(classes, norm=False, activation=False, bias=True).close().trace()


def ssd300() -> ModelTrace:
    """NVIDIA's SSD300 with a ResNet-50 up to its fourth stage, which keeps 38 × 38 places."""
    image = resnet_stages(ImageBuilder(3, (300, 300)), (3, 4, 6), strides=(1, 2, 1))
    shapes = [(image.channels, image.size)]
    for index, (out, inner) in enumerate(((512, 256), (512, 256), (256, 128), (256, 128), (256, 128))):
        image.convolution(inner, kernel=1).convolution(out, stride=2 if index < 3 else 1, padded=index < 3).close()
        shapes.append((image.channels, image.size))
    places = 0.0
    for boxes, (channels, size) in zip(SSD_BOXES, shapes, strict=True):
        for outputs in (4, SSD_CLASSES):
            image.channels, image.size = channels, size
            image.convolution(boxes * outputs, norm=False, activation=False, bias=True)
            places += image.elements
    image.channels, image.size = 1, (round(places),)
    return image.close().trace()


def _twice(image: ImageBuilder, out: int, padded: bool = True) -> None:
    for _ in range(2):
        image.convolution(out, norm=False, bias=True, padded=padded)
