"""Trace of a transformer from its dimensions alone: no module, no torch.

Counts follow Korthikanti et al. (2022, arXiv:2205.05198), those of latent attention, mixtures and state spaces the same
rules: what a kernel reads and writes, and what its backward pass needs again.
"""

from __future__ import annotations

from itertools import groupby

from paceline.job.read.dimensions import Dimensions
from paceline.planning.limits import shares_heads
from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace
from paceline.planning.model.layer_work import Work, work
from paceline.planning.model.weights import (
    Layer,
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
# with those that prepare the data and the mask
EMBEDDING_KERNELS = 16
# of a head for masked tokens besides: gather, product, bias, activation, norm, bias of the vocabulary
MASKED_KERNELS = 6
# a mask of one byte beside numbers of two
MASK = 0.5


def transformer(d: Dimensions, tp: int = 1) -> ModelTrace:
    """Embedding, layers and head of a transformer, as blocks.

    Activations saved for the backward pass are those of §4.1: per token and layer `34 + 5 · heads · seq / hidden` times
    `hidden` bytes with two-byte elements, of which tensor parallelism divides `24 + 5 · heads · seq / hidden`.

    Args:
        tp: ranks of tensor parallelism. Where they are more than heads of keys and values, several compute the same
            ones, and each holds their projections whole.
    """
    stacks = encoder_layers(d), (*layers(d), *further_layers(d))
    by_layer = {layer: _layer(d, layer, tp) for layer in dict.fromkeys(stacks[0] + stacks[1])}
    encoder, decoder = ([by_layer[layer] for layer in stack] for stack in stacks)
    tied = d.vocab * d.hidden if d.tied else 0
    between = (_between(d),) if encoder else ()
    return ModelTrace((_embedding(d), *encoder, *between, *decoder, _head(d)), tokens=d.seq, tied=tied)


def active_parameters(d: Dimensions) -> int:
    """Number of parameters that one token meets.

    Those of the experts that it is not sent to are not counted.
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
    """Dimensions with the heads of keys and values that `tp` ranks compute together.

    They are `d` itself if `tp` divides its heads, or cannot share them.
    """
    if d.mla or d.key_value_heads % tp == 0 or d.heads % tp or not shares_heads((d.key_value_heads,), tp):
        return d
    return d.model_copy(update={"kv_heads": tp})


def _gemms(d: Dimensions, own: tuple[Weight, ...], done: dict[str, Work], tokens: int) -> tuple[Gemm, ...]:
    """Products with weights, those without after the ones that make their operands."""
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
        # the last weight is that of the output
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
    """The encoder's last norm, and the embedding of the decoder's tokens.

    Its table is the encoder's.
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
    """The last norm, the product with the vocabulary and the loss, computed in four-byte elements."""
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
