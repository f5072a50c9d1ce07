"""Model info of a transformer from its dimensions, without torch.

It has the parameters that `transformer.py` counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.job.read.dimensions import Dimensions
from paceline.planning.model.model_info import ModelInfo, ParameterShape
from paceline.planning.model.weights import Layer, encoder_layers, further_layers, layers, norm, vectors, weights

_Sizes = tuple[tuple[str, tuple[int, ...], bool], ...]


def model_info_by_dimensions(d: Dimensions) -> ModelInfo:
    """Model info like that of a GPT-2 or, if `gated`, of a Llama without biases.

    Llama's norms have no shifts. Its layers are `layers.0`, `layers.1`, …, those of an encoder `encoder.0`, …
    """
    stacks = {"encoder": encoder_layers(d), "layers": layers(d), "further": further_layers(d)}
    blocks = {f"{stack}.{n}": layer for stack, found in stacks.items() for n, layer in enumerate(found)}
    parameters = {layer: _layer(d, layer) for layer in dict.fromkeys(blocks.values())}
    outside = dict(_outside(d))
    inside = (
        ParameterShape(f"{block}.{name}", sizes, True, block, expert)
        for block, layer in blocks.items()
        for name, sizes, expert in parameters[layer]
    )
    before, after = ("tokens", "positions", "segments", "embedding_norm", "encoder_norm"), ("norm", "head", "pooler")
    first, last = (_shapes(outside, names) for names in (before, after))
    return ModelInfo(
        modules=(
            "tokens",
            *(("positions",) if d.positions else ()),
            *(stack for stack, found in stacks.items() if found),
            *(name for block, layer in blocks.items() for name in _modules(block, parameters[layer])),
            "norm",
            "head",
        ),
        blocks=tuple(blocks),
        parameters=(*first, *inside, *last),
        tied=(("tokens.weight", "head.weight"),) if d.tied else (),
        heads=tuple(dict.fromkeys((d.heads, *((d.mamba.heads,) if d.mamba else ())))),
        key_value_heads=(d.key_value_heads,) if d.key_value_heads != d.heads else (),
        vocabulary=(d.vocab,),
        experts=(d.experts,) if d.experts > 1 else (),
        batch_norms=(),
        takes_positions=True,
    )


def _layer(d: Dimensions, layer: Layer) -> _Sizes:
    """Parameters of one layer: names, sizes, and whether they are experts'."""
    own = weights(d, layer)
    return (
        *((name, (size,), False) for name, size in vectors(d, layer)),
        *(
            (f"{weight.name}.weight", (*((weight.experts,) if weight.experts else ()), weight.out, weight.into), True)
            if weight.experts
            else (f"{weight.name}.weight", (weight.out, weight.into), False)
            for weight in own
        ),
    )


def _outside(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters outside of all layers."""
    yield "tokens.weight", (d.vocab, d.hidden)
    if d.positions:
        yield "positions.weight", (d.table, d.hidden)
    if d.segments:
        yield "segments.weight", (d.segments, d.hidden)
        yield from ((name, (size,)) for name, size in norm("embedding_norm", d))
    if d.encoder_layers:
        yield from ((name, (size,)) for name, size in norm("encoder_norm", d))
    yield from ((name, (size,)) for name, size in norm("norm", d))
    if not d.tied:
        yield "head.weight", (d.vocab, d.hidden)
    if d.predicted is not None:
        yield "head.bias", (d.vocab,)
        yield "head.dense.weight", (d.hidden, d.hidden)
        yield "head.dense.bias", (d.hidden,)
    if d.pooled:
        yield "pooler.weight", (d.hidden, d.hidden)
        yield "pooler.bias", (d.hidden,)


def _shapes(outside: dict[str, tuple[int, ...]], modules: tuple[str, ...]) -> Iterator[ParameterShape]:
    """Shapes of some modules' parameters outside of all layers."""
    return (
        ParameterShape(name, sizes, True, "", False)
        for name, sizes in outside.items()
        if name.partition(".")[0] in modules
    )


def _modules(block: str, parameters: _Sizes) -> Iterator[str]:
    yield block
    yield from (f"{block}.{name}" for name in dict.fromkeys(part for name, *_ in parameters for part in _parents(name)))


def _parents(name: str) -> Iterator[str]:
    words = name.split(".")[:-1]
    return (".".join(words[: n + 1]) for n in range(len(words)))
