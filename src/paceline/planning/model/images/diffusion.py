"""U-Nets of latent diffusion models (arXiv:2112.10752): Stable Diffusion 1.5, 2 and XL."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from paceline.planning.model.graph import Gemm, ModelTrace
from paceline.planning.model.images.builder import ImageBuilder

# tokens of the text
TEXT = 77
# norms, products, residuals and copies of heads of a transformer block with two attentions
KERNELS = 35


class LatentUNet(NamedTuple):
    """Shape of a U-Net on latents.

    Attributes:
        widths: channels of each level; each has half the side of the one before.
        depths: transformer blocks of each place of a level.
        middle: transformer blocks of the middle.
        context: width of the text's tokens.
        side: of the latents.
        head: width of an attention head; 0: each place has 8 of them.
        labels: width of what is told besides the time; 0: nothing.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    middle: int
    context: int
    side: int
    head: int = 0
    labels: int = 0


def latent_unet(shape: LatentUNet) -> ModelTrace:
    """Trace of the U-Net alone: the encoders of images and text are not trained."""
    first = shape.widths[0]
    image, told = ImageBuilder(4, (shape.side, shape.side)), 4 * first
    _tell(image, first, told)
    if shape.labels:
        _tell(image, shape.labels, told)
    image.convolution(first, norm=False, activation=False, bias=True).close("embedding")
    kept = [image.channels]
    for level, (width, depth) in enumerate(zip(shape.widths, shape.depths, strict=True)):
        for _ in range(2):
            _residual(image, width, told)
            _attended(image, depth, shape)
            kept.append(image.close().channels)
        if level < len(shape.widths) - 1:
            image.convolution(width, stride=2, norm=False, activation=False, bias=True)
            kept.append(image.close().channels)
    _residual(image, image.channels, told)
    _attended(image, shape.middle, shape)
    _residual(image, image.channels, told)
    image.close()
    for level in reversed(range(len(shape.widths))):
        for _ in range(3):
            image.joined(kept.pop())
            _residual(image, shape.widths[level], told)
            _attended(image, shape.depths[level], shape)
            image.close()
        if level:
            image.widened().convolution(image.channels, norm=False, activation=False, bias=True).close()
    return image.normed().convolution(4, norm=False, activation=False, bias=True).close().trace()


def _tell(image: ImageBuilder, width: int, told: int) -> None:
    """Two products that make what every block is told."""
    gemms = (Gemm(1.0, told, width), Gemm(1.0, told, told))
    image.products(gemms, vectors=2 * told, moved=6.0 * told, kept=3.0 * told, kernels=5)


def _residual(image: ImageBuilder, out: int, told: int) -> None:
    """Two convolutions behind norms, what is told added between them, and a way past them."""
    channels = image.channels
    if channels != out:
        past = (Gemm(float(prod(image.size)), out, channels),)
        image.products(past, vectors=out, moved=0.0, kept=0.0, kernels=1)
    image.normed().convolution(out, norm=False, activation=False, bias=True)
    added = 2 * image.elements
    image.products((Gemm(1.0, out, told),), vectors=out, moved=added, kept=0.0, kernels=3)
    image.normed().convolution(out, norm=False, activation=False, bias=True)
    image.products((), vectors=0, moved=3 * image.elements, kept=0.0, kernels=1)


def _attended(image: ImageBuilder, depth: int, shape: LatentUNet) -> None:
    """Transformer blocks over all places, between two products.

    Each attends to places and to the text, and has a gated feed-forward part.
    """
    if not depth:
        return
    width, tokens = image.channels, prod(image.size)
    head = shape.head or width // 8
    heads, rows = width // head, float(tokens)
    ends = Gemm(rows, width, width, times=2)
    image.products((ends,), vectors=4 * width, moved=6 * image.elements, kept=2 * image.elements, kernels=4)
    block = (
        Gemm(rows, width, width, times=3),
        *_squares(tokens, tokens, head, heads),
        Gemm(rows, width, width, times=3),
        Gemm(float(TEXT), width, shape.context, times=2),
        *_squares(tokens, TEXT, head, heads),
        Gemm(rows, 8 * width, width),
        Gemm(rows, width, 4 * width),
    )
    # three norms, biases of two outputs and of the feed-forward part
    vectors = 6 * width + 2 * width + 8 * width + width
    wide = tokens * width
    # norms and residuals 15, queries, keys, values and results 14, gate and product 12
    image.products(
        block * depth,
        vectors=vectors * depth,
        moved=41.0 * wide * depth,
        kept=28.0 * wide * depth,
        kernels=KERNELS * depth,
        scores=float(heads * tokens * (tokens + TEXT) * depth),
    )


def _squares(tokens: int, seen: int, head: int, heads: int) -> tuple[Gemm, Gemm]:
    return Gemm(tokens, seen, head, batch=heads), Gemm(tokens, head, seen, batch=heads)
