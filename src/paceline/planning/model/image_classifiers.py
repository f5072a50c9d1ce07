"""Builder of traces of image models from convolutions, norms and pools, and known models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, prod

from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace


class ImageBuilder:
    """Builder of the trace of an image model.

    Elements are counted each time that a kernel of a training step reads or writes them. A batch norm reads its input
    twice and writes once. An activation or a pool reads and writes once. The operands of a convolution are counted in
    its `Gemm`. The inputs of convolutions, norms and pools are kept for the backward pass, each of them once.

    Attributes:
        channels, size: shape of one image at the current position in the model.
    """

    def __init__(self, channels: int, size: Sequence[int]) -> None:
        self.channels, self.size = channels, tuple(size)
        self._blocks: list[BlockTrace] = []
        self._first: dict[BlockTrace, BlockTrace] = {}
        self._begin()

    @property
    def elements(self) -> float:
        """Number of elements of one image at the current position in the model."""
        return float(self.channels * prod(self.size))

    def convolution(
        self,
        out: int,
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        norm: bool = True,
        activation: bool = True,
        bias: bool = False,
        padded: bool = True,
    ) -> ImageBuilder:
        """Add a convolution with its norm and activation."""
        read = self.elements
        size = tuple((side if padded else side - kernel + 1) for side in self.size)
        self.size = tuple(-(-side // stride) for side in size)
        taps = kernel ** len(size)
        into = self.channels // groups * taps
        rows = float(prod(self.size))
        first = not self._blocks and not self._gemms
        self._gemms.append(Gemm(rows, out // groups, into, times=groups, read=read / groups, taps=taps, data=first))
        self._matrices += out * into
        return self._behind(out, norm, activation, bias)

    def transposed(self, out: int, kernel: int = 2, norm: bool = False, activation: bool = False) -> ImageBuilder:
        """Add a transposed convolution of stride 2, which doubles each side."""
        rows, into = float(prod(self.size)), self.channels
        self._gemms.append(Gemm(rows, out * kernel ** len(self.size), into, read=self.elements))
        self._matrices += out * kernel ** len(self.size) * into
        self.size = tuple(2 * side for side in self.size)
        return self._behind(out, norm, activation, bias=not norm)

    def linear(self, out: int, rows: int = 1, bias: bool = True) -> ImageBuilder:
        """Add a product with a weight.

        The current elements are divided evenly into `rows` vectors.
        """
        into = round(self.elements / rows)
        self._gemms.append(Gemm(float(rows), out, into))
        self._matrices += out * into
        self._vectors += out if bias else 0
        self._outside += rows * out if bias else 0
        self.channels, self.size = out, (rows,)
        self._kept += self.elements
        self._kernels += 1
        return self

    def normed(self) -> ImageBuilder:
        """Add a norm and an activation of the current elements."""
        self._vectors += 2 * self.channels
        return self._moved(3 * self.elements, kept=self.elements)._moved(2 * self.elements, kept=0.0)

    def activated(self) -> ImageBuilder:
        """Add an activation of the current elements."""
        return self._moved(2 * self.elements, kept=0.0)

    def pool(self, kernel: int = 2, stride: int = 2, padded: bool = False) -> ImageBuilder:
        """Add a pooling layer with a square window."""
        before = self.elements
        reach = 0 if padded else kernel - stride
        self.size = tuple(-(-(side - reach) // stride) for side in self.size)
        return self._moved(before + self.elements, kept=self.elements)

    def mean(self) -> ImageBuilder:
        """Add the mean over each channel."""
        before = self.elements
        self.size = (1,) * len(self.size)
        return self._moved(before + self.elements, kept=self.elements)

    def excited(self, reduced: int) -> ImageBuilder:
        """Add squeeze and excitation, in which two products of the channel means scale each channel."""
        for out, into in ((reduced, self.channels), (self.channels, reduced)):
            self._gemms.append(Gemm(1.0, out, into))
            self._matrices += out * into
            self._vectors += out
        self._kernels += 6
        return self._moved(4 * self.elements, kept=self.elements)

    def products(
        self, gemms: Sequence[Gemm], vectors: int, moved: float, kept: float, kernels: int, scores: float = 0.0
    ) -> ImageBuilder:
        """Add matrix products and the kernels around them."""
        self._gemms += gemms
        self._matrices += sum(gemm.n * gemm.k * gemm.times for gemm in gemms if not gemm.batch)
        self._vectors += vectors
        self._outside += moved
        self._kept += kept
        self._kernels += kernels
        self._scores += scores
        return self

    def widened(self) -> ImageBuilder:
        """Double both sides of the image by repeating elements."""
        before = self.elements
        self.size = tuple(2 * side for side in self.size)
        return self._moved(before + self.elements, kept=0.0)

    def plus(self, other: Callable[[ImageBuilder], object] | None, activation: bool = True) -> ImageBuilder:
        """Add the result of a second path that starts at the block's input.

        If the path is None, the block's input itself is added.
        """
        channels, size = self.channels, self.size
        if other is not None:
            self.channels, self.size = self._began
            other(self)
        assert (self.channels, self.size) == (channels, size), "ways of different shapes cannot be added"
        self._moved(3 * self.elements, kept=0.0)
        return self._moved(2 * self.elements, kept=self.elements) if activation else self

    def joined(self, channels: int) -> ImageBuilder:
        """Concatenate channels from an earlier layer to the current channels."""
        self.channels += channels
        return self._moved(2 * self.elements, kept=self.elements)

    def close(self, kind: str = "layer") -> ImageBuilder:
        """End the current block."""
        block = BlockTrace(
            kind=kind,
            gemms=tuple(self._gemms),
            outside=self._outside,
            kept_outside=self._kept,
            # a softmax reads and writes its scores, and keeps them
            scores=2.0 * self._scores,
            kept_scores=self._scores,
            kernels=self._kernels,
            matrices=self._matrices,
            vectors=self._vectors,
            boundary=self.elements,
        )
        self._blocks.append(self._first.setdefault(block, block))
        self._begin()
        return self

    def trace(self, classes: int = 0) -> ModelTrace:
        """Return the trace of the whole model, including its loss."""
        loss = float(classes) or self.elements
        head = replace(self._blocks.pop(), kind="head", inside=6.0 * loss, kept_inside=3.0 * loss, boundary=1.0)
        return ModelTrace((*self._blocks, head))

    def _behind(self, out: int, norm: bool, activation: bool, bias: bool) -> ImageBuilder:
        self.channels = out
        self._vectors += (2 * out if norm else 0) + (out if bias else 0)
        self._kernels += 1
        self._kept += self.elements
        if bias:
            self._moved(2 * self.elements, kept=0.0)
        if norm:
            self._moved(3 * self.elements, kept=self.elements if activation else 0.0)
        return self._moved(2 * self.elements, kept=0.0) if activation else self

    def _moved(self, elements: float, kept: float) -> ImageBuilder:
        self._outside += elements
        self._kept += kept
        self._kernels += 1
        return self

    def _begin(self) -> None:
        self._began = (self.channels, self.size)
        self._gemms: list[Gemm] = []
        self._matrices = self._vectors = self._kernels = 0
        self._outside = self._kept = self._scores = 0.0


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
    """Return the stem of a ResNet and its blocks.

    The blocks follow arXiv:1512.03385, table 1, with the stride in the 3 × 3 convolution (v1.5).

    Args:
        deep: True for three convolutions per block, False for two.
        groups, width: groups and width of the 3 × 3 convolutions, as in ResNeXt (arXiv:1611.05431).
        excited: True for squeeze and excitation (arXiv:1709.01507).
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
    """Build the trace of a ResNet that classifies images."""
    image = ImageBuilder(3, (side, side))
    return resnet_stages(image, depths, **kind).mean().linear(CLASSES).close().trace(CLASSES)  # type: ignore[arg-type]


def vgg(depths: tuple[int, ...]) -> ModelTrace:
    """Build the trace of VGG without norms (arXiv:1409.1556, table 1)."""
    image = ImageBuilder(3, (224, 224))
    for depth, out in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            image.convolution(out, norm=False, bias=True)
        image.pool().close()
    return image.linear(4096).activated().linear(4096).activated().linear(CLASSES).close().trace(CLASSES)


def alexnet() -> ModelTrace:
    """Build the trace of AlexNet for one device (arXiv:1404.5997)."""
    # a padding of 2, unlike the padding that keeps the size
    image = ImageBuilder(3, (220, 220))
    image.convolution(64, kernel=11, stride=4, norm=False, bias=True).pool(kernel=3)
    image.convolution(192, kernel=5, norm=False, bias=True).pool(kernel=3)
    for out in (384, 256, 256):
        image.convolution(out, norm=False, bias=True)
    image.pool(kernel=3).close()
    return image.linear(4096).activated().linear(4096).activated().linear(CLASSES).close().trace(CLASSES)


def densenet(depths: tuple[int, ...], growth: int = 32) -> ModelTrace:
    """Build the trace of DenseNet, whose layers read the channels of all earlier layers.

    Source: arXiv:1608.06993, table 1.
    """
    image = ImageBuilder(3, (224, 224)).convolution(64, kernel=7, stride=2).pool(kernel=3, padded=True)
    image.close("embedding")
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            before = image.channels
            # the norm precedes each convolution
            image.normed().convolution(4 * growth, kernel=1).convolution(growth, norm=False, activation=False)
            image.joined(before).close()
        image.normed()
        if stage < len(depths) - 1:
            image.convolution(image.channels // 2, kernel=1, norm=False, activation=False).pool().close()
    return image.mean().linear(CLASSES).close().trace(CLASSES)


def mobilenet_v2() -> ModelTrace:
    """Build the trace of MobileNet v2 (arXiv:1801.04381, table 2)."""
    image = ImageBuilder(3, (224, 224)).convolution(32, stride=2).close("embedding")
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, out, depth, first in rows:
        for index in range(depth):
            _inverted(image, out, expansion, 3, first if index == 0 else 1, squeezed=0)
    return image.convolution(1280, kernel=1).mean().linear(CLASSES).close().trace(CLASSES)


def efficientnet(width: float, depth: float, side: int) -> ModelTrace:
    """Build the trace of EfficientNet (arXiv:1905.11946, table 1), scaled in width and depth."""
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
    """Build the trace of EfficientNetV2-S (arXiv:2104.00298, table 4)."""
    image = ImageBuilder(3, (side, side)).convolution(24, stride=2).close("embedding")
    for expansion, out, layers, first in ((1, 24, 2, 1), (4, 48, 4, 2), (4, 64, 4, 2)):
        for index in range(layers):
            _fused(image, out, expansion, first if index == 0 else 1)
    for expansion, out, layers, first in ((4, 128, 6, 2), (6, 160, 9, 1), (6, 256, 15, 2)):
        for index in range(layers):
            _inverted(image, out, expansion, 3, first if index == 0 else 1, squeezed=image.channels // 4)
    return image.convolution(1280, kernel=1).mean().linear(CLASSES).close().trace(CLASSES)


def _inverted(image: ImageBuilder, out: int, expansion: int, kernel: int, stride: int, squeezed: int) -> None:
    """Add an inverted residual block: expansion, depthwise convolution and projection."""
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
    """Add an inverted residual block whose first two convolutions are fused into one."""
    before = image.channels
    if expansion > 1:
        image.convolution(before * expansion, stride=stride).convolution(out, kernel=1, activation=False)
    else:
        image.convolution(out, stride=stride)
    if stride == 1 and before == out:
        image.plus(None, activation=False)
    image.close()


def _rounded(channels: float) -> int:
    """Round channels to a multiple of 8, without removing more than a tenth of them."""
    whole = max(8, int(channels + 4) // 8 * 8)
    return whole + 8 if whole < 0.9 * channels else whole


# COCO's classes plus background; boxes at each position of the six feature maps (arXiv:1512.02325)
SSD_CLASSES, SSD_BOXES = 81, (4, 6, 6, 6, 4, 4)


def unet_medical() -> ModelTrace:
    """Build the trace of NVIDIA's UNet_Medical, a U-Net without padding.

    It maps images of 572 × 572 to 388 × 388.

    Source: arXiv:1505.04597.
    """
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
    """Build the trace of NVIDIA's UNet_Industrial in its small form (TinyUNet, 512 × 512)."""
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
    """Build the trace of NVIDIA's UNet_3D_Medical, for 128³ voxels with 4 channels."""
    image, kept = ImageBuilder(4, (128, 128, 128)), []
    image.convolution(32).convolution(32).close()
    for out in (64, 128, 256, 320, 320):
        kept.append(image.channels)
        image.convolution(out, stride=2).convolution(out).close()
    for out in (320, 256, 128, 64, 32):
        image.transposed(out).joined(kept.pop()).convolution(out).convolution(out).close()
    return image.convolution(classes, norm=False, activation=False, bias=True).close().trace()


def ssd300() -> ModelTrace:
    """Build the trace of NVIDIA's SSD300, based on a ResNet-50 up to `conv4_x`.

    The last stage, `conv4_x`, keeps 38 × 38 positions.
    """
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
