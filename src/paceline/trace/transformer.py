"""Trace of a transformer from its dimensions alone: no module, no torch.

Counts follow Korthikanti et al. (2022, arXiv:2205.05198).
"""

from __future__ import annotations

from paceline.job.read.dimensions import Dimensions
from paceline.trace.graph import BlockTrace, Gemm, ModelTrace

# 2 norms, 6 products, 3 biases, softmax, 2 residuals, dropout, 4 copies that move heads first and back
LAYER_KERNELS = 19
# norm, product, cast, and the cross entropy's maximum, difference, exponential, sums, gather, logarithm
HEAD_KERNELS = 14
# with those that prepare the data and the mask
EMBEDDING_KERNELS = 16
# a mask of one byte beside numbers of two
MASK = 0.5


def transformer(d: Dimensions) -> ModelTrace:
    """Embedding, layers and head of a transformer, as blocks.

    Activations saved for the backward pass are those of §4.1: per token and layer `34 + 5 · heads · seq / hidden` times
    `hidden` bytes with two-byte elements, of which tensor parallelism divides `24 + 5 · heads · seq / hidden`.
    """
    layer = _layer(d)
    tied = d.vocab * d.hidden if d.tied else 0
    return ModelTrace((_embedding(d), *([layer] * d.layers), _head(d)), tokens=d.seq, tied=tied)


def _layer(d: Dimensions) -> BlockTrace:
    head = d.hidden // d.heads
    narrow = head * d.key_value_heads  # of keys, and of values
    squares = float(d.heads) * d.seq * d.seq
    mask = MASK if d.dropout and not d.gated else 0.0
    wide = d.feed_forward * (d.top_k if d.experts else 1)
    return BlockTrace(
        kind="layer",
        name="layers",
        gemms=(
            Gemm(d.seq, d.hidden + 2 * narrow, d.hidden, divided="n"),
            Gemm(d.seq, d.seq, head, batch=d.heads, divided="batch", causal=d.causal),
            Gemm(d.seq, head, d.seq, batch=d.heads, divided="batch", causal=d.causal),
            Gemm(d.seq, d.hidden, d.hidden, divided="k"),
            *_feed_forward_gemms(d),
        ),
        inside=d.seq * (d.hidden + 2.0 * narrow + 2.0 * d.hidden + (3.0 if d.gated else 2.0) * wide),
        # two norms read and write, two residuals read two, and a mask, and write one
        outside=d.seq * d.hidden * (10.0 + 2 * mask),
        # softmax reads and writes, dropout reads, writes and keeps a mask
        scores=squares * (4.0 + mask if mask else 2.0),
        kept_inside=d.seq * (2.0 * d.hidden + 2.0 * narrow + (3.0 if d.gated else 2.0) * wide),
        kept_outside=d.seq * d.hidden * (4.0 + 2 * mask),
        kept_scores=squares * (2.0 + mask if mask else 1.0),
        kernels=LAYER_KERNELS + (1 if d.gated else 0) + (12 if d.experts else 0),
        matrices=d.hidden * (2 * d.hidden + 2 * narrow) + (0 if d.experts else _matrix(d)),
        vectors=_vectors(d, narrow),
        experts=d.experts * _matrix(d),
        boundary=float(d.seq * d.hidden),
        reductions=2,
        keys=2.0 * d.seq * narrow,
        routed=float(d.seq * d.hidden * d.top_k) if d.experts else 0.0,
    )


def _vectors(d: Dimensions, narrow: int) -> int:
    """Number of norms' and biases' parameters.

    Gated models are assumed to have no biases and norms without a shift (as Llama's).
    """
    if d.gated:
        return 2 * d.hidden + d.hidden * d.experts
    return 4 * d.hidden + 3 * d.hidden + 2 * narrow + d.feed_forward + d.hidden * d.experts


def _matrix(d: Dimensions) -> int:
    return d.hidden * d.feed_forward * (3 if d.gated else 2)


def _feed_forward_gemms(d: Dimensions) -> tuple[Gemm, ...]:
    rows = float(d.seq * (d.top_k if d.experts else 1))
    up = Gemm(rows, d.feed_forward, d.hidden, divided="n", times=2 if d.gated else 1, experts=d.experts)
    down = Gemm(rows, d.hidden, d.feed_forward, divided="k", experts=d.experts)
    router = (Gemm(d.seq, d.experts, d.hidden),) if d.experts else ()
    return (*router, up, down)


def _embedding(d: Dimensions) -> BlockTrace:
    numbers = float(d.seq * d.hidden)
    return BlockTrace(
        kind="embedding",
        name="embedding",
        outside=numbers * 5.0,
        kept_outside=numbers * MASK,
        kernels=EMBEDDING_KERNELS,
        matrices=d.vocab * d.hidden,
        vectors=d.seq * d.hidden if d.positions else 0,
        boundary=numbers,
        reductions=1,
    )


def _head(d: Dimensions) -> BlockTrace:
    """The last norm, the product with the vocabulary and the loss, computed in four-byte elements."""
    logits = float(d.seq * d.vocab)
    return BlockTrace(
        kind="head",
        name="head",
        gemms=(Gemm(d.seq, d.vocab, d.hidden, divided="n"),),
        inside=logits * 6.0,
        outside=d.seq * d.hidden * 3.0,
        kept_inside=logits * 3.0,
        kept_outside=d.seq * d.hidden * 2.0,
        kernels=HEAD_KERNELS,
        matrices=d.vocab * d.hidden,
        vectors=d.hidden if d.gated else 2 * d.hidden,
        boundary=float(d.seq),  # the loss of each token
        reductions=1,
    )
