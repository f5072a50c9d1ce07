"""Model info of a transformer from its dimensions, without torch.

It has the parameters that `transformer.py` counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.job.read.dimensions import Dimensions
from paceline.trace.model_info import ModelInfo, ParameterShape

_Sizes = tuple[tuple[str, tuple[int, ...]], ...]


def model_info_by_dimensions(d: Dimensions) -> ModelInfo:
    """Model info like that of a GPT-2 or, if `gated`, of a Llama without biases.

    Llama's norms have no shifts. Its layers are `layers.0`, `layers.1`, …
    """
    blocks = tuple(f"layers.{layer}" for layer in range(d.layers))
    layer, outside = _layer(d), dict(_outside(d))
    inside = (
        ParameterShape(f"{block}.{name}", sizes, True, block, "experts" in name)
        for block in blocks
        for name, sizes in layer
    )
    first, last = (_shapes(outside, names) for names in (("tokens", "positions"), ("norm", "head")))
    return ModelInfo(
        modules=(
            "tokens",
            *(("positions",) if d.positions else ()),
            "layers",
            *_modules(blocks, layer),
            "norm",
            "head",
        ),
        blocks=blocks,
        parameters=(*first, *inside, *last),
        tied=(("tokens.weight", "head.weight"),) if d.tied else (),
        heads=(d.heads,),
        key_value_heads=(d.key_value_heads,) if d.key_value_heads != d.heads else (),
        vocabulary=(d.vocab,),
        experts=(d.experts,) if d.experts > 1 else (),
        batch_norms=(),
        takes_positions=True,
    )


def _layer(d: Dimensions) -> _Sizes:
    """Parameters of one layer: names and sizes."""
    narrow = d.hidden // d.heads * d.key_value_heads
    linear = (("attention.query_key_value", d.hidden + 2 * narrow, d.hidden), ("attention.out", d.hidden, d.hidden))
    up = (("mlp.gate", "mlp.up") if d.gated else ("mlp.up",), d.feed_forward, d.hidden)
    feed_forward = (*((name, *up[1:]) for name in up[0]), ("mlp.down", d.hidden, d.feed_forward))
    experts = tuple(
        (name.replace("mlp", "mlp.experts"), (d.experts, out, into)) for name, out, into in feed_forward if d.experts
    )
    whole = linear if d.experts else (*linear, *feed_forward)
    router = (("mlp.router.weight", (d.experts, d.hidden)),) if d.experts else ()
    return (
        *_norm("attention_norm", d),
        *((f"{name}.weight", (out, into)) for name, out, into in whole),
        *((f"{name}.bias", (out,)) for name, out, _ in (*linear, *feed_forward) if not d.gated),
        *_norm("mlp_norm", d),
        *router,
        *experts,
    )


def _outside(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "tokens.weight", (d.vocab, d.hidden)
    if d.positions:
        yield "positions.weight", (d.seq, d.hidden)
    yield from _norm("norm", d)
    if not d.tied:
        yield "head.weight", (d.vocab, d.hidden)


def _norm(name: str, d: Dimensions) -> _Sizes:
    return ((f"{name}.weight", (d.hidden,)), *(() if d.gated else ((f"{name}.bias", (d.hidden,)),)))


def _shapes(outside: dict[str, tuple[int, ...]], modules: tuple[str, ...]) -> Iterator[ParameterShape]:
    """Shapes of some modules' parameters outside of all layers."""
    return (
        ParameterShape(name, sizes, True, "", False)
        for name, sizes in outside.items()
        if name.partition(".")[0] in modules
    )


def _modules(blocks: tuple[str, ...], layer: _Sizes) -> Iterator[str]:
    own = dict.fromkeys(part for name, _ in layer for part in _parents(name))
    for block in blocks:
        yield block
        yield from (f"{block}.{name}" for name in own)


def _parents(name: str) -> Iterator[str]:
    words = name.split(".")[:-1]
    return (".".join(words[: n + 1]) for n in range(len(words)))
