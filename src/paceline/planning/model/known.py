"""Traces of well-known language and image models, looked up by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import NamedTuple

from paceline.job.known import candidates, find_model, key
from paceline.job.model import Dimensions
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.model.image_classifiers import (
    ImageBuilder,
    alexnet,
    densenet,
    efficientnet,
    efficientnet_v2_s,
    mobilenet_v2,
    resnet,
    ssd300,
    unet_3d_medical,
    unet_industrial,
    unet_medical,
    vgg,
)
from paceline.planning.model.transformer import transformer

# widths of a diffusion model's time embedding, and of Wan's text encoder (umT5-XXL)
TIME, TEXT = 256, 4096
DIT_CLASSES = 1001
KERNELS = 6


def vision_transformer(
    layers: int, hidden: int, ffn: int, heads: int, patch: int = 16, side: int = 224, classes: int = 1000
) -> ModelTrace:
    """Build the trace of ViT (arXiv:2010.11929), whose tokens are image patches and a class token."""
    patches = (side // patch) ** 2
    d = _plain(layers, hidden, ffn, heads, patches + 1)
    head = _part("head", (Gemm(1.0, classes, hidden),), extra=2 * hidden + classes)
    learned = hidden + (patches + 2) * hidden
    stem = _part("embedding", (Gemm(float(patches), hidden, 3 * patch**2, read=3.0 * side**2, data=True),), learned)
    return ModelTrace((stem, *transformer(d).blocks[1:-1], replace(head, boundary=1.0, kept_inside=3.0 * classes)))


def diffusion_transformer(layers: int, hidden: int, heads: int, side: int = 32, patch: int = 2) -> ModelTrace:
    """Build the trace of DiT (arXiv:2212.09748) for latents with 4 channels.

    Each layer computes the scales and shifts of its norms from the time step and the class.
    """
    tokens, out = (side // patch) ** 2, patch**2 * 8
    d = _plain(layers, hidden, 4 * hidden, heads, tokens)
    blocks = tuple(_modulated(block, hidden, tokens, 6 * hidden**2) for block in transformer(d).blocks[1:-1])
    told = (Gemm(1.0, hidden, TIME), Gemm(1.0, hidden, hidden))
    stem = _part("embedding", (*told, Gemm(float(tokens), hidden, patch**2 * 4)), (DIT_CLASSES + 3) * hidden)
    head = _part("head", (Gemm(1.0, 2 * hidden, hidden), Gemm(float(tokens), out, hidden)), 2 * hidden + out)
    return _with_same(blocks, stem, head)


def wan(layers: int, hidden: int, ffn: int, heads: int, tokens: int, text: int = 512, latent: int = 16) -> ModelTrace:
    """Build the trace of Wan 2.1, whose layers attend to video and text tokens.

    Source: arXiv:2503.20314, §4.2.
    """
    d = Dimensions(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        seq=tokens,
        vocab=1,
        encoder_layers=1,
        source_seq=text,
        causal=False,
        dropout=False,
        positions=False,
    )
    decoder = transformer(d).blocks[3:-1]
    # one product computes the scales of all layers; each layer adds six vectors of its own
    blocks = tuple(_modulated(block, hidden, tokens, 0) for block in decoder)
    patch = latent * 4
    told = (Gemm(1.0, hidden, TIME), Gemm(1.0, hidden, hidden), Gemm(1.0, 6 * hidden, hidden))
    read = (Gemm(float(text), hidden, TEXT), Gemm(float(text), hidden, hidden))
    stem = _part("embedding", (*told, *read, Gemm(float(tokens), hidden, patch)), 11 * hidden)
    head = _part("head", (Gemm(float(tokens), patch, hidden),), 2 * hidden + patch)
    return replace(_with_same(blocks, stem, head), tokens=tokens)


def _plain(layers: int, hidden: int, ffn: int, heads: int, tokens: int) -> Dimensions:
    return Dimensions(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, seq=tokens, vocab=1, causal=False, dropout=False
    )


def _modulated(block: BlockTrace, hidden: int, tokens: int, weight: int) -> BlockTrace:
    """Return a layer whose norms and outputs are scaled and shifted for each sample."""
    made = (Gemm(1.0, 6 * hidden, hidden),) if weight else ()
    width = float(tokens * hidden)
    return replace(
        block,
        gemms=(*made, *block.gemms),
        outside=block.outside + 8 * width,
        kept_outside=block.kept_outside + 4 * width,
        kernels=block.kernels + KERNELS,
        matrices=block.matrices + weight,
        # without shifts of norms if the sample's shifts replace them
        vectors=block.vectors + (2 if weight else 6) * hidden,
    )


def _part(kind: str, gemms: tuple[Gemm, ...], extra: int) -> BlockTrace:
    """Return the first or last part of a model."""
    made = sum(gemm.rows * gemm.n for gemm in gemms)
    return BlockTrace(
        kind=kind,
        gemms=gemms,
        outside=4.0 * made,
        kept_outside=2.0 * made,
        kernels=3 * len(gemms),
        matrices=sum(gemm.n * gemm.k for gemm in gemms),
        vectors=extra,
        boundary=gemms[-1].rows * gemms[-1].n,
    )


def _with_same(blocks: tuple[BlockTrace, ...], stem: BlockTrace, head: BlockTrace) -> ModelTrace:
    """Return a trace in which equal layers share one object."""
    first: dict[BlockTrace, BlockTrace] = {}
    return ModelTrace((stem, *(first.setdefault(block, block) for block in blocks), head))


# tokens of the text prompt
CAPTION = 77
# norms, products, residuals and copies of heads of a transformer block with two attentions
DIFFUSION_KERNELS = 35


class LatentUNet(NamedTuple):
    """Dimensions of a U-Net on latents.

    Attributes:
        widths: number of channels at each level. Each level halves the side length of the previous level.
        depths: number of transformer blocks after each residual block of a level.
        middle: number of transformer blocks in the middle of the U-Net.
        context: width of the embedded text tokens.
        side: side length of the latents.
        head: width of an attention head; 0 means 8 heads at every level.
        labels: width of the conditioning in addition to the time step; 0 means none.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    middle: int
    context: int
    side: int
    head: int = 0
    labels: int = 0


def latent_unet(shape: LatentUNet) -> ModelTrace:
    """Build the trace of a U-Net on latents.

    The encoders of images and text are not trained, so the trace does not include them.
    """
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
    """Add two matrix products that embed the conditioning for all blocks."""
    gemms = (Gemm(1.0, told, width), Gemm(1.0, told, told))
    image.products(gemms, vectors=2 * told, moved=6.0 * told, kept=3.0 * told, kernels=5)


def _residual(image: ImageBuilder, out: int, told: int) -> None:
    """Add a residual block of two convolutions with norms. The conditioning is added between the convolutions."""
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
    """Add transformer blocks.

    Each block has self-attention over positions, cross-attention to text tokens, and a gated feed-forward part.
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
        Gemm(float(CAPTION), width, shape.context, times=2),
        *_squares(tokens, CAPTION, head, heads),
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
        kernels=DIFFUSION_KERNELS * depth,
        scores=float(heads * tokens * (tokens + CAPTION) * depth),
    )


def _squares(tokens: int, seen: int, head: int, heads: int) -> tuple[Gemm, Gemm]:
    return Gemm(tokens, seen, head, batch=heads), Gemm(tokens, head, seen, batch=heads)


_TORCHVISION = "torchvision's table of classification weights"
# tokens of 81 frames of 1280 × 720: a fourth of the frames and one, an eighth of each side, patches of 2 × 2
_WAN_TOKENS = 75_600


class KnownImageModel(NamedTuple):
    """Image model whose dimensions are published.

    Attributes:
        parameters: published number of parameters in millions; None if it is not published.
        gmacs: published number of multiply-adds for one image, in billions; None if it is not published.
        also: alternative names of the model.
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


def known_dimensions(name: str) -> Dimensions | None:
    """Return the published dimensions of a language model, or None for an unknown name."""
    found = find_model(name)
    return Dimensions.model_validate(dict(found.dimensions)) if found else None


def known_model(name: str, *, seq: int | None = None, vocab: int | None = None) -> ModelTrace | None:
    """Return the trace of a known model, or None for an unknown name.

    Args:
        seq: sequence length in tokens; None uses the length of the original training. Image models ignore it.
        vocab: number of rows in the token embedding, such as a padded vocabulary size; None uses the published size.
    """
    found = find_model(name)
    if found is None:
        image = find_image_model(name)
        return _built(image.name) if image else None
    given = {name: value for name, value in (("seq", seq), ("vocab", vocab)) if value is not None}
    return transformer(Dimensions.model_validate({**found.dimensions, **given}))


def find_image_model(name: str) -> KnownImageModel | None:
    """Return the known image model with this name, or None."""
    by_name = _image_models()
    return next((by_name[word] for words in candidates(name) if (word := "".join(words)) in by_name), None)


@cache
def _image_models() -> dict[str, KnownImageModel]:
    return {key(name): model for model in IMAGE_MODELS for name in (model.name, *model.also)}


@cache
def _built(name: str) -> ModelTrace:
    return _image_models()[key(name)].build()
