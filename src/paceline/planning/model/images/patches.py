"""Transformers over patches of images and videos: ViT, DiT and Wan."""

from __future__ import annotations

from dataclasses import replace

from paceline.job.read.dimensions import Dimensions
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.model.transformer import transformer

# widths of the time that a diffusion model is told, and of the text encoder that Wan reads (umT5-XXL)
TIME, TEXT = 256, 4096
DIT_CLASSES = 1001
KERNELS = 6


def vision_transformer(
    layers: int, hidden: int, ffn: int, heads: int, patch: int = 16, side: int = 224, classes: int = 1000
) -> ModelTrace:
    """ViT (arXiv:2010.11929): patches as tokens, one of them for the class."""
    patches = (side // patch) ** 2
    d = _plain(layers, hidden, ffn, heads, patches + 1)
    head = _part("head", (Gemm(1.0, classes, hidden),), extra=2 * hidden + classes)
    learned = hidden + (patches + 2) * hidden
    stem = _part("embedding", (Gemm(float(patches), hidden, 3 * patch**2, read=3.0 * side**2, data=True),), learned)
    return ModelTrace((stem, *transformer(d).blocks[1:-1], replace(head, boundary=1.0, kept_inside=3.0 * classes)))


def diffusion_transformer(layers: int, hidden: int, heads: int, side: int = 32, patch: int = 2) -> ModelTrace:
    """DiT (arXiv:2212.09748) on latents of 4 channels.

    Each layer makes its scales and shifts from time and class.
    """
    tokens, out = (side // patch) ** 2, patch**2 * 8
    d = _plain(layers, hidden, 4 * hidden, heads, tokens)
    blocks = tuple(_modulated(block, hidden, tokens, 6 * hidden**2) for block in transformer(d).blocks[1:-1])
    told = (Gemm(1.0, hidden, TIME), Gemm(1.0, hidden, hidden))
    stem = _part("embedding", (*told, Gemm(float(tokens), hidden, patch**2 * 4)), (DIT_CLASSES + 3) * hidden)
    head = _part("head", (Gemm(1.0, 2 * hidden, hidden), Gemm(float(tokens), out, hidden)), 2 * hidden + out)
    return _with_same(blocks, stem, head)


def wan(layers: int, hidden: int, ffn: int, heads: int, tokens: int, text: int = 512, latent: int = 16) -> ModelTrace:
    """Wan 2.1 (arXiv:2503.20314, §4.2): every layer attends to the video's tokens and to the text's."""
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
    # the scales of all layers come from one product; each layer adds six vectors of its own
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
    """A layer that vectors of each sample modulate.

    Its norms are scaled and shifted and its results scaled.
    """
    made = (Gemm(1.0, 6 * hidden, hidden),) if weight else ()
    width = float(tokens * hidden)
    return replace(
        block,
        gemms=(*made, *block.gemms),
        outside=block.outside + 8 * width,
        kept_outside=block.kept_outside + 4 * width,
        kernels=block.kernels + KERNELS,
        matrices=block.matrices + weight,
        # without shifts of norms where the sample's take their place
        vectors=block.vectors + (2 if weight else 6) * hidden,
    )


def _part(kind: str, gemms: tuple[Gemm, ...], extra: int) -> BlockTrace:
    """The first or the last part: products, and what stands around each."""
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
    """A model whose equal layers are one object."""
    first: dict[BlockTrace, BlockTrace] = {}
    return ModelTrace((stem, *(first.setdefault(block, block) for block in blocks), head))
