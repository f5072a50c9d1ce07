"""Trace of a transformer, built from its dimensions without a module or torch.

Element counts follow Korthikanti et al. (2022, arXiv:2205.05198). The same rules apply to latent attention, mixtures
and state spaces: count the elements that a kernel reads and writes, and those that its backward pass needs.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from paceline.job.model import Dimensions
from paceline.planning.limits import shares_heads
from paceline.planning.model.graph import (
    BlockTrace,
    Gemm,
    Layer,
    ModelTrace,
    Weight,
    encoder_layers,
    further_layers,
    key_value_weights,
    layers,
    vectors,
    weights,
)

# norm, product, cast, and the cross entropy's maximum, difference, exponential, sums, gather, logarithm
HEAD_KERNELS = 14
# including the kernels that prepare the data and the mask
EMBEDDING_KERNELS = 16
# additional kernels of a head for masked tokens: gather, product, bias, activation, norm, bias of the vocabulary
MASKED_KERNELS = 6


def transformer(d: Dimensions, tp: int = 1) -> ModelTrace:
    """Return the trace of a transformer: embedding, layers and head.

    Activations saved for the backward pass follow §4.1 of the paper. With two-byte elements, each token and layer saves
    `34 + 5 · heads · seq / hidden` times `hidden` bytes. Tensor parallelism divides `24 + 5 · heads · seq / hidden` of
    these.

    Args:
        tp: number of tensor-parallel ranks. If there are more ranks than key-value heads, several ranks compute the
            same heads, and each rank holds the whole projections.
    """
    stacks = encoder_layers(d), (*layers(d), *further_layers(d))
    by_layer = {layer: _layer(d, layer, tp) for layer in dict.fromkeys(stacks[0] + stacks[1])}
    encoder, decoder = ([by_layer[layer] for layer in stack] for stack in stacks)
    tied = d.vocab * d.hidden if d.tied else 0
    between = (_between(d),) if encoder else ()
    return ModelTrace((_embedding(d), *encoder, *between, *decoder, _head(d)), tokens=d.seq, tied=tied)


def active_parameters(d: Dimensions) -> int:
    """Return the number of parameters that are used for one token.

    Experts to which the token is not sent do not count.
    """
    trace = transformer(d)
    experts = sum(block.experts for block in trace)
    return trace.parameters - experts + (experts // d.experts * d.top_k if d.experts else 0)


def _layer(d: Dimensions, layer: Layer, tp: int) -> BlockTrace:
    tokens, computed = d.source if layer.encodes else d.seq, _with_copied_keys(d, tp)
    own, done = weights(d, layer), work(computed, layer, tokens)
    parts = Work.total(done)
    copied = 0 if computed is d else key_value_weights(d, layer)
    divided = sum(weight.numel for weight in own if weight.divided != "none" and not weight.experts) - copied
    whole = sum(weight.numel for weight in own if weight.divided == "none") + copied
    mixture = layer.feed_forward == "mixture"
    return BlockTrace(
        kind=layer.kind,
        name="encoder" if layer.encodes else "layers",
        gemms=_gemms(d, weights(computed, layer), done, tokens),
        inside=parts.inside,
        outside=parts.outside,
        scores=parts.scores,
        kept_inside=parts.kept_inside,
        kept_outside=parts.kept_outside,
        kept_scores=parts.kept_scores,
        kernels=parts.kernels,
        matrices=divided,
        vectors=whole + sum(size for _, size in vectors(d, layer)),
        experts=sum(weight.numel * weight.experts for weight in own),
        boundary=float(tokens * d.hidden),
        reductions=1 if d.parallel else layer.parts,
        keys=parts.keys,
        routed=float(tokens * (d.expert_hidden or d.hidden) * d.top_k) if mixture else 0.0,
    )


def _with_copied_keys(d: Dimensions, tp: int) -> Dimensions:
    """Return the dimensions with `tp` key-value heads if the ranks must share the heads."""
    if d.mla or d.key_value_heads % tp == 0 or d.heads % tp or not shares_heads((d.key_value_heads,), tp):
        return d
    return d.model_copy(update={"kv_heads": tp})


def _gemms(d: Dimensions, own: tuple[Weight, ...], done: dict[str, Work], tokens: int) -> tuple[Gemm, ...]:
    """Return the matrix products of a layer in the order of computation."""
    found: list[Gemm] = []
    for part, of_part in groupby(own, key=lambda weight: weight.name.partition(".")[0]):
        products = [
            Gemm(
                float((d.source if weight.source else tokens) * (d.top_k if weight.experts else 1)),
                weight.out,
                weight.into,
                divided=weight.divided,
                times=len(list(equal)),
                experts=weight.experts,
            )
            for weight, equal in groupby(of_part, key=lambda weight: weight._replace(name=""))
        ]
        squares = done[part].gemms if part in done else ()
        # the last weight belongs to the output
        found += [*products[:-1], *squares, products[-1]]
    return tuple(found)


def _embedding(d: Dimensions) -> BlockTrace:
    tokens = d.source if d.encoder_layers else d.seq
    numbers = float(tokens * d.hidden)
    learned = (d.table + d.segments) * d.hidden + (_norm(d) if d.segments else 0)
    return BlockTrace(
        kind="embedding",
        name="embedding",
        outside=numbers * 5.0,
        kept_outside=numbers * MASK,
        kernels=EMBEDDING_KERNELS,
        matrices=d.vocab * d.hidden,
        vectors=learned,
        boundary=numbers,
        reductions=1,
    )


def _between(d: Dimensions) -> BlockTrace:
    """Return the block between encoder and decoder.

    The block contains the last norm of the encoder and the decoder's embedding, which shares the table of the encoder.
    """
    source, tokens = float(d.source * d.hidden), float(d.seq * d.hidden)
    return BlockTrace(
        kind="between",
        name="between",
        outside=source * 2.0 + tokens * 5.0,
        kept_outside=source + tokens * MASK,
        kernels=EMBEDDING_KERNELS // 2,
        vectors=_norm(d),
        boundary=tokens + source,
        reductions=1,
    )


def _head(d: Dimensions) -> BlockTrace:
    """Return the head: the last norm, the product with the vocabulary and the loss.

    Logits are four-byte elements, which count as two.
    """
    predictions = 1 + d.mtp
    rows = d.seq * (d.predicted or 1.0)
    logits = float(rows * d.vocab) * predictions
    dense = (Gemm(rows, d.hidden, d.hidden),) if d.predicted else ()
    pooler = (Gemm(1.0, d.hidden, d.hidden),) if d.pooled else ()
    whole = _norm(d) + sum(gemm.n * gemm.k + gemm.n for gemm in (*dense, *pooler))
    return BlockTrace(
        kind="head",
        name="head",
        gemms=(*pooler, *dense, Gemm(rows, d.vocab, d.hidden, divided="n", times=predictions)),
        inside=logits * 6.0,
        outside=rows * d.hidden * (3.0 + (5.0 if d.predicted else 0.0)),
        kept_inside=logits * 2.0,
        kept_outside=rows * d.hidden * (2.0 + (3.0 if d.predicted else 0.0)),
        kernels=HEAD_KERNELS * predictions + (MASKED_KERNELS if d.predicted else 0) + (4 if d.pooled else 0),
        matrices=d.vocab * d.hidden,
        vectors=whole + (d.vocab if d.predicted else 0),
        boundary=float(d.seq),  # the loss of each token
        reductions=1,
    )


def _norm(d: Dimensions) -> int:
    return 2 * d.hidden if d.biased else d.hidden


# norm, 4 products, 2 biases, softmax, dropout and residual, 4 copies that move heads first and back
ATTENTION_KERNELS = 13
# norm, 2 products, bias, activation, residual
FEED_FORWARD_KERNELS = 6
# additional kernels of a mixture: scores, top k, counts, sorts, permutation and back
MIXTURE_KERNELS = 12
# additional kernels of latent attention: 2 products, 2 norms, 2 splits, 2 concatenations
LATENT_KERNELS = 8
# norm, 2 products, convolution, 3 splits, 5 of the scan, gated norm, residual (state-spaces/mamba, ops/triton)
STATE_SPACE_KERNELS = 14
# norm, 2 products, convolution, 4 splits, norms of queries and keys, 6 of the rule, gated norm, residual
DELTA_KERNELS = 17
# tokens of a chunk; inside it, a state space is computed like attention (NemotronH: chunk_size)
CHUNK = 128
# tokens of a chunk of the gated delta rule (fla-org/flash-linear-attention: chunk_size)
DELTA_CHUNK = 64
# attention kernels count widths of windows in tiles
TILE = 64
# a one-byte mask, in units of two-byte elements
MASK = 0.5


class Work(NamedTuple):
    """Work of one sublayer. Elements are counted per sample, as in `BlockTrace`."""

    gemms: tuple[Gemm, ...] = ()
    kernels: int = 0
    inside: float = 0.0
    outside: float = 0.0
    scores: float = 0.0
    kept_inside: float = 0.0
    kept_outside: float = 0.0
    kept_scores: float = 0.0
    keys: float = 0.0

    @staticmethod
    def total(parts: dict[str, Work]) -> Work:
        """Return the total work of several sublayers."""
        gemms = tuple(gemm for part in parts.values() for gemm in part.gemms)
        kernels, *numbers = (sum(values) for values in zip(*(part[1:] for part in parts.values()), strict=True))
        return Work(gemms, int(kernels), *numbers)


def work(d: Dimensions, layer: Layer, tokens: int) -> dict[str, Work]:
    """Return the work of each sublayer of a layer.

    The keys are the first words of the names of the weights.
    """
    found: dict[str, Work] = {}
    if layer.joins:
        # two norms read and write, one concatenation
        width = float(tokens * d.hidden)
        found["join"] = Work(outside=8 * width, kept_outside=4 * width, kernels=4)
    if layer.mixer == "attention":
        found["attention"] = _latent_attention(d, tokens) if d.mla else _attention(d, layer, tokens)
    elif layer.mixer == "mamba":
        found["mamba"] = _state_space(d, tokens)
    elif layer.mixer == "delta":
        found["delta"] = _delta(d, tokens)
    if layer.cross:
        found["cross_attention"] = _cross_attention(d, tokens)
    if layer.feed_forward:
        found["mlp"] = _feed_forward(d, layer, tokens)
    residual = _residuals(d, layer, tokens)
    return {**found, "residual": residual}


def _residuals(d: Dimensions, layer: Layer, tokens: int) -> Work:
    """Return the work of the norms and residual connections of a layer.

    A norm reads and writes one tensor. A residual connection reads two tensors and a mask, and writes one tensor.
    """
    mask, parts = _mask(d), layer.parts
    norms = 1 if d.parallel else parts
    adds = 4.0 if d.parallel and parts > 1 else 3.0 * parts
    width = float(tokens * d.hidden)
    return Work(outside=width * (2.0 * norms + adds + mask * parts), kept_outside=width * (2.0 * norms + mask * parts))


def _attention(d: Dimensions, layer: Layer, tokens: int) -> Work:
    queries, narrow = d.heads * d.head_width, d.key_value_heads * d.head_width
    seen, gate = _seen(layer.window, tokens), 1.0 if d.gated_attention else 0.0
    causal = d.causal and not layer.encodes and seen == tokens
    return _squares(d, tokens, seen, d.head_width, d.head_width, causal)._replace(
        # a gate is read, together with the tensor that it multiplies, and kept
        inside=tokens * (queries + 2.0 * narrow + 2.0 * queries + gate * 3.0 * queries),
        kept_inside=tokens * (2.0 * queries + 2.0 * narrow + gate * 2.0 * queries),
        keys=2.0 * tokens * narrow,
    )


def _cross_attention(d: Dimensions, tokens: int) -> Work:
    queries, narrow = d.heads * d.head_width, d.key_value_heads * d.head_width
    return _squares(d, tokens, d.source, d.head_width, d.head_width, causal=False)._replace(
        inside=tokens * 3.0 * queries + d.source * 2.0 * narrow,
        kept_inside=tokens * 2.0 * queries + d.source * 2.0 * narrow,
    )


def _latent_attention(d: Dimensions, tokens: int) -> Work:
    """Return the work of latent attention.

    Queries and keys are wider than values. The two compressed vectors are not divided among tp ranks.
    """
    assert d.mla is not None
    wide, values = d.heads * (d.mla.nope + d.mla.rope), d.heads * d.mla.value
    ranks = (d.mla.q_rank or 0) + d.mla.kv_rank
    squares = _squares(d, tokens, tokens, d.mla.nope + d.mla.rope, d.mla.value, d.causal)
    return squares._replace(
        # compared to plain attention, queries, keys and values are split, rotated and concatenated once more
        inside=tokens * (2.0 * (2.0 * wide + values) + 2.0 * values),
        outside=tokens * 2.0 * ranks,
        kept_inside=tokens * (2.0 * wide + 2.0 * values),
        kept_outside=tokens * (2.0 * ranks + d.mla.rope),
        keys=float(tokens * (wide + values)),
        kernels=squares.kernels + LATENT_KERNELS,
    )


def _squares(d: Dimensions, tokens: int, seen: int, width: int, values: int, causal: bool) -> Work:
    """Return the two matrix products of attention, and the kernels between them."""
    squares, mask = float(d.heads) * tokens * seen, _mask(d)
    return Work(
        (
            Gemm(tokens, seen, width, batch=d.heads, divided="batch", causal=causal),
            Gemm(tokens, values, seen, batch=d.heads, divided="batch", causal=causal),
        ),
        # softmax reads and writes, dropout reads, writes and keeps a mask
        scores=squares * (4.0 + mask if mask else 2.0),
        kept_scores=squares * (2.0 + mask if mask else 1.0),
        kernels=ATTENTION_KERNELS,
    )


def _seen(window: int, tokens: int) -> int:
    """Return the mean number of tokens to which a token attends within a window.

    The number is rounded to whole tiles of the attention kernel.
    """
    if not window or window >= tokens:
        return tokens
    mean = window - window * window / (2 * tokens)
    return min(max(round(mean / TILE) * TILE, min(TILE, window)), tokens)


def _state_space(d: Dimensions, tokens: int) -> Work:
    """Return the work of the scan of Mamba-2 (arXiv:2405.21060, §6).

    The scan has matrix products within chunks, products that compute the states of chunks, and products that compute
    outputs from states.
    """
    assert d.mamba is not None
    m, chunk = d.mamba, min(CHUNK, tokens)
    channels = m.inner + 2 * m.groups * m.state
    into = m.inner + channels + m.heads
    # a chunk's state has four-byte elements, which count as two, and is written and read twice
    states = 8.0 * m.inner * m.state * tokens / chunk
    return Work(
        (
            Gemm(tokens, chunk, m.state, batch=m.groups, divided="batch", causal=True),
            Gemm(tokens, m.head_dim, chunk, batch=m.heads, divided="batch", causal=True),
            Gemm(tokens, m.head_dim, m.state, batch=m.heads, divided="batch", times=2),
        ),
        # the convolution reads and writes, the scan reads and writes, the gated norm reads two and writes one
        inside=tokens * (3.0 * channels + m.heads + 4.0 * m.inner) + states,
        kept_inside=tokens * (into + 2.0 * m.inner),
        kernels=STATE_SPACE_KERNELS,
    )


def _delta(d: Dimensions, tokens: int) -> Work:
    """Return the work of the gated delta rule in chunks (arXiv:2412.06464, §3.3).

    Within a chunk, keys are multiplied with keys and with queries, and the resulting scores with values. Across chunks,
    there are products with the states.
    """
    assert d.delta is not None
    width, heads, chunk = d.delta.head_dim, d.delta.value_heads, min(DELTA_CHUNK, tokens)
    channels, values = (2 * d.delta.key_heads + heads) * width, heads * width
    # a chunk's state has four-byte elements, which count as two, and is written and read twice
    states = 8.0 * values * width * tokens / chunk
    return Work(
        (
            Gemm(tokens, chunk, width, batch=heads, divided="batch", causal=True, times=2),
            Gemm(tokens, width, chunk, batch=heads, divided="batch", causal=True, times=3),
            Gemm(tokens, width, width, batch=heads, divided="batch", times=3),
        ),
        # the convolution reads and writes, the rule reads and writes, the gated norm reads two and writes one
        inside=tokens * (3.0 * channels + 4.0 * values + 2.0 * heads) + states,
        kept_inside=tokens * (2.0 * channels + 3.0 * values + 2.0 * heads),
        kernels=DELTA_KERNELS,
    )


def _feed_forward(d: Dimensions, layer: Layer, tokens: int) -> Work:
    factors = 3.0 if d.gated else 2.0
    kernels = FEED_FORWARD_KERNELS + (1 if d.gated else 0)
    if layer.feed_forward == "dense":
        wide = factors * tokens * d.feed_forward
        return Work(inside=wide, kept_inside=wide, kernels=kernels)
    wide = factors * tokens * (d.top_k * d.expert_width + d.shared_width)
    sent = float(tokens * d.top_k * (d.expert_hidden or d.hidden))
    narrow = float(tokens * (d.expert_hidden or 0))
    return Work(
        inside=wide,
        # tokens are read and written in the experts' order, and read and written back
        outside=4.0 * sent + 4.0 * narrow,
        kept_inside=wide,
        kept_outside=sent + 2.0 * narrow,
        kernels=kernels + MIXTURE_KERNELS + (3 if d.shared_width else 0) + (2 if d.expert_hidden else 0),
    )


def _mask(d: Dimensions) -> float:
    return MASK if d.dropout and not d.gated else 0.0
