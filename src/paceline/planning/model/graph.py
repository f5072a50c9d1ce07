"""Trace of a model on one sample: products, other kernels, parameters and activations by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

from paceline.job.model import ATTENTION, DELTA, FEED_FORWARD, MIXTURE, STATE_SPACE, Dimensions

Divided = Literal["rows", "n", "k", "batch", "none"]


@dataclass(frozen=True)
class Gemm:
    """Matrix products in one forward pass: (rows × k) · (k × n), repeated `times` times.

    Attributes:
        rows: rows of one sample. If k × n is a weight, the rows of all samples of a microbatch form one product.
        n, k: the width of the result and the summed dimension.
        batch: products per sample if both operands are activations, such as heads in attention; 0: k × n is a weight.
        divided: the dimension that tensor parallelism divides; `none`: every tp rank computes all of it.
        times: number of such products.
        experts: number of experts' weights among which the rows are distributed; 0: one weight.
        causal: True if only half of the result is needed (attention with a causal mask).
        read: elements of the left operand if they differ from rows × k, as for the image that a convolution reads; else
            0.
        taps: positions of a convolution's kernel, each of k / taps channels; else 1.
        data: True if the left operand depends on the batch alone: it needs no gradient.
    """

    rows: float
    n: int
    k: int
    batch: int = 0
    divided: Divided = "none"
    times: int = 1
    experts: int = 0
    causal: bool = False
    read: float = 0.0
    taps: int = 1
    data: bool = False

    @property
    def flops(self) -> float:
        """Forward FLOPs of one sample: two for each multiplication.

        Score matrices count as a whole, even if causal.
        """
        return 2.0 * self.rows * self.n * self.k * max(self.batch, 1) * self.times


@dataclass(frozen=True)
class BlockTrace:
    """A part of the model that stays together, such as a layer of a transformer.

    The parts before, between and after the repeated blocks are blocks as well. Activations are counted in elements per
    sample, not in bytes: `precision` determines the size of one; one-byte masks count as fractions.

    Attributes:
        kind: equal for blocks that cost the same, such as `layer`, `embedding`, `head`.
        name: name of the module, or of the first of several.
        gemms: its matrix products.
        inside: elements that the other kernels read and write in the forward pass, as far as tp divides them.
        outside: the same for elements that only sequence parallelism divides: norms, residuals.
        scores: elements of the attention scores that the other kernels read and write; a fused attention kernel has
            none.
        kept_inside, kept_outside, kept_scores: elements saved for the backward pass, divided in the same way.
        fixed: elements that other kernels read and write once per microbatch, independent of its samples: weights that
            autocast casts, positions, masks.
        kept_fixed: the part of `fixed` that is saved for the backward pass.
        selective_inside, selective_outside: elements that remat=selective keeps besides the block's input, divided as
            `kept_` ones: results of products with weights and of fused attention; both 0 if unknown.
        kernels: kernels launched in the forward pass, including products.
        matrices, vectors, experts: parameters that tp divides, parameters that it does not divide, and parameters of
            experts (divided by ep).
        boundary: elements per sample passed to the next block, which pp sends and remat=block keeps.
        reductions: all-reduces of `reduced` over tp in the forward pass; the backward pass has as many.
        keys: elements of keys and values per sample, which context parallelism passes around; 0 if there are none, or
            if unknown.
        routed: elements per sample sent to experts, one way.
        trained: True if it has a backward pass.
    """

    kind: str
    name: str = ""
    gemms: tuple[Gemm, ...] = ()
    inside: float = 0.0
    outside: float = 0.0
    scores: float = 0.0
    kept_inside: float = 0.0
    kept_outside: float = 0.0
    kept_scores: float = 0.0
    fixed: float = 0.0
    kept_fixed: float = 0.0
    selective_inside: float = 0.0
    selective_outside: float = 0.0
    kernels: int = 0
    matrices: int = 0
    vectors: int = 0
    experts: int = 0
    boundary: float = 0.0
    reductions: int = 0
    routed: float = 0.0
    keys: float = 0.0
    trained: bool = True

    def __hash__(self) -> int:
        """Hash, computed only once: searches look blocks up thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.kind, self.name, self.gemms, self.inside, self.outside, self.kernels, self.matrices, self.vectors)
        )

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.matrices + self.vectors + self.experts

    @cached_property
    def flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(gemm.flops for gemm in self.gemms)

    @cached_property
    def reduced(self) -> float:
        """Elements of a sample in one reduction over tp.

        It is the mean result of products whose summed dimension tp divides. In a layer it equals `boundary`; in a model
        without repeated layers it may be far more.
        """
        sums = [gemm for gemm in self.gemms if gemm.divided == "k" and not gemm.batch and not gemm.experts]
        wide = sum(gemm.rows * gemm.n * gemm.times for gemm in sums) / max(sum(gemm.times for gemm in sums), 1)
        return max(wide, self.boundary)


@dataclass(frozen=True)
class SparseTable:
    """A table of embeddings whose gradients are sparse.

    `ids` of its rows are looked up for each sample.
    """

    rows: int
    width: int
    ids: float

    def touched(self, samples: float) -> float:
        """Return the largest count of numbers in the rows that the samples look up."""
        return min(self.rows, samples * self.ids) * self.width


@dataclass(frozen=True)
class ModelTrace:
    """A model, block by block in the order of the forward pass.

    Attributes:
        blocks: the blocks; equal ones are the same object, or compare equal.
        tokens: tokens of one sample; 1 if it is not a sequence. Context parallelism divides them.
        tied: parameters that two blocks share (an embedding that is also the head) and that count in both.
        names: module name of each of `blocks`, `""` outside of repeated blocks; () if there is no module.
        notes: sentences on facts that could not be determined.
        sparse: tables with sparse gradients.
    """

    blocks: tuple[BlockTrace, ...]
    tokens: int = 1
    tied: int = 0
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sparse: tuple[SparseTable, ...] = ()

    def __hash__(self) -> int:
        """Hash, computed only once: searches look traces up thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.blocks, self.tokens))

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(block.parameters for block in self.blocks) - self.tied

    @cached_property
    def flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(block.flops for block in self.blocks)

    @cached_property
    def runs(self) -> tuple[tuple[BlockTrace, int], ...]:
        """Runs of equal consecutive blocks, each with its length."""
        return tuple((block, len(list(same))) for block, same in groupby(self.blocks))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Cache of the memory model's intermediate results."""
        return {}

    def __iter__(self) -> Iterator[BlockTrace]:
        return iter(self.blocks)


_KINDS = {
    STATE_SPACE: "mamba",
    DELTA: "delta",
    ATTENTION: "attention",
    FEED_FORWARD: "feed_forward",
    MIXTURE: "mixture",
}


class Layer(NamedTuple):
    """Parts of one layer.

    Attributes:
        kind: kind of its block.
        mixer: `attention`, `mamba`, `delta` or "".
        feed_forward: `dense`, `mixture` or "".
        window: tokens that attention reaches back over; 0: all.
        cross: True if it attends to an encoder's tokens as well.
        encodes: True if it is part of an encoder.
        joins: True if it predicts a further token from the last layer's output and the next token's embedding.
    """

    kind: str
    mixer: str = "attention"
    feed_forward: str = "dense"
    window: int = 0
    cross: bool = False
    encodes: bool = False
    joins: bool = False

    @property
    def parts(self) -> int:
        """Number of parts, each with a norm and a residual."""
        return bool(self.mixer) + bool(self.feed_forward) + self.cross


class Weight(NamedTuple):
    """The weight of a product, `out` × `into`.

    Attributes:
        divided: the side that tensor parallelism divides; `none`: every rank has the whole weight.
        bias: True if the product has a bias.
        experts: number of experts, each with its own weight; 0: it belongs to no expert.
        source: True if it is applied to an encoder's tokens.
    """

    name: str
    out: int
    into: int
    divided: Divided
    bias: bool = False
    experts: int = 0
    source: bool = False

    @property
    def numel(self) -> int:
        """Number of elements, of one expert."""
        return self.out * self.into


def encoder_layers(d: Dimensions) -> tuple[Layer, ...]:
    """Yield the layers of the encoder, if there is one."""
    return (Layer("encoder", encodes=True),) * d.encoder_layers


def layers(d: Dimensions) -> tuple[Layer, ...]:
    """Yield the layers of the model, or of its decoder."""
    if d.pattern is not None:
        return tuple(_of_letter(d, letter) for letter in d.pattern)
    return tuple(_of_index(d, index) for index in range(d.layers))


def further_layers(d: Dimensions) -> tuple[Layer, ...]:
    """Return layers that predict further tokens.

    Each is like the last layer, with attention and a feed-forward part.
    """
    last = layers(d)[-1]
    if d.pattern is not None:
        last = Layer("", feed_forward="mixture" if d.experts else "dense")
    return (last._replace(kind="mtp", joins=True),) * d.mtp


def weights(d: Dimensions, layer: Layer) -> tuple[Weight, ...]:
    """Yield the weights of a layer's products, in the order of use."""
    found: list[Weight] = []
    if layer.joins:
        found.append(Weight("join", d.hidden, 2 * d.hidden, "n"))
    if layer.mixer == "attention":
        found += _latent_attention(d) if d.mla else _attention(d)
    elif layer.mixer == "mamba":
        found += _state_space(d)
    elif layer.mixer == "delta":
        found += _delta(d)
    if layer.cross:
        found += _cross_attention(d)
    if layer.feed_forward == "dense":
        found += _feed_forward(d, "mlp", d.feed_forward, d.hidden)
    elif layer.feed_forward == "mixture":
        found += _mixture(d)
    return tuple(found)


def vectors(d: Dimensions, layer: Layer) -> tuple[tuple[str, int], ...]:
    """Yield names and sizes of a layer's norms, biases and other vectors."""
    norms = [name for name, there in (("attention", layer.mixer), ("cross_attention", layer.cross)) if there]
    norms += ["mlp"] if layer.feed_forward and not (d.parallel and layer.mixer) else []
    norms += ["embedding", "output"] if layer.joins else []
    found = [size for name in norms for size in norm(f"{name}_norm", d)]
    if layer.mixer == "attention" and d.mla:
        found += [("attention.query_norm.weight", d.mla.q_rank)] if d.mla.q_rank else []
        found += [("attention.key_value_norm.weight", d.mla.kv_rank)]
    if layer.mixer == "mamba" and d.mamba:
        channels = d.mamba.inner + 2 * d.mamba.groups * d.mamba.state
        found += [("mamba.convolution.weight", channels * d.mamba.conv), ("mamba.convolution.bias", channels)]
        found += [(f"mamba.{name}", d.mamba.heads) for name in ("decay", "skip", "step")]
        found += [("mamba.norm.weight", d.mamba.inner)]
    if layer.mixer == "delta" and d.delta:
        channels = (2 * d.delta.key_heads + d.delta.value_heads) * d.delta.head_dim
        found += [("delta.convolution.weight", channels * d.delta.conv), ("delta.norm.weight", d.delta.head_dim)]
        found += [(f"delta.{name}", d.delta.value_heads) for name in ("decay", "step")]
    return (*found, *((f"{weight.name}.bias", weight.out) for weight in weights(d, layer) if weight.bias))


def norm(name: str, d: Dimensions) -> Iterator[tuple[str, int]]:
    """Return names and sizes of a norm's parameters."""
    yield f"{name}.weight", d.hidden
    if d.biased:
        yield f"{name}.bias", d.hidden


def _of_letter(d: Dimensions, letter: str) -> Layer:
    mixer = {STATE_SPACE: "mamba", DELTA: "delta", ATTENTION: "attention"}.get(letter, "")
    feed_forward = {FEED_FORWARD: "dense", MIXTURE: "mixture"}.get(letter, "")
    return Layer(_KINDS[letter], mixer, feed_forward, window=d.window or 0 if mixer == "attention" else 0)


def _of_index(d: Dimensions, index: int) -> Layer:
    mixture = bool(d.experts) and index >= d.dense_layers and (index + 1) % d.moe_every == 0
    local = d.window is not None and d.window < d.seq and not (d.full_every and (index + 1) % d.full_every == 0)
    # a mixture is called "layer" unless other layers are dense
    uniform = not d.dense_layers and d.moe_every == 1
    kind = "mixture" if mixture and not uniform else "layer"
    return Layer(
        f"{kind} in a window" if local else kind,
        feed_forward="mixture" if mixture else "dense",
        window=d.window or 0 if local else 0,
        cross=bool(d.encoder_layers),
    )


def key_value_weights(d: Dimensions, layer: Layer) -> int:
    """Count the weights of a layer that compute keys and values."""
    attentions = (layer.mixer == "attention") + layer.cross
    return attentions * 2 * d.key_value_heads * d.head_width * d.hidden


def _attention(d: Dimensions) -> Iterator[Weight]:
    queries, narrow = d.heads * d.head_width, d.key_value_heads * d.head_width
    biased = d.biased or d.biases == "qkv"
    gate = queries if d.gated_attention else 0
    yield Weight("attention.query_key_value", queries + gate + 2 * narrow, d.hidden, "n", biased)
    yield Weight("attention.out", d.hidden, queries, "k", d.biased)


def _cross_attention(d: Dimensions) -> Iterator[Weight]:
    queries, narrow = d.heads * d.head_width, d.key_value_heads * d.head_width
    yield Weight("cross_attention.query", queries, d.hidden, "n", d.biased)
    yield Weight("cross_attention.key_value", 2 * narrow, d.hidden, "n", d.biased, source=True)
    yield Weight("cross_attention.out", d.hidden, queries, "k", d.biased)


def _latent_attention(d: Dimensions) -> Iterator[Weight]:
    assert d.mla is not None
    queries = d.heads * (d.mla.nope + d.mla.rope)
    if d.mla.q_rank:
        yield Weight("attention.query_down", d.mla.q_rank, d.hidden, "none")
    yield Weight("attention.query_up", queries, d.mla.q_rank or d.hidden, "n")
    yield Weight("attention.key_value_down", d.mla.kv_rank + d.mla.rope, d.hidden, "none")
    yield Weight("attention.key_value_up", d.heads * (d.mla.nope + d.mla.value), d.mla.kv_rank, "n")
    yield Weight("attention.out", d.hidden, d.heads * d.mla.value, "k", d.biased)


def _state_space(d: Dimensions) -> Iterator[Weight]:
    assert d.mamba is not None
    m = d.mamba
    yield Weight("mamba.into", 2 * m.inner + 2 * m.groups * m.state + m.heads, d.hidden, "n")
    yield Weight("mamba.out", d.hidden, m.inner, "k")


def _delta(d: Dimensions) -> Iterator[Weight]:
    assert d.delta is not None
    keys, values = d.delta.key_heads * d.delta.head_dim, d.delta.value_heads * d.delta.head_dim
    # queries, keys, values, a gate of the values' width; a decay and a step for each head
    yield Weight("delta.into", 2 * keys + 2 * values + 2 * d.delta.value_heads, d.hidden, "n")
    yield Weight("delta.out", d.hidden, values, "k")


def _feed_forward(d: Dimensions, name: str, width: int, hidden: int, experts: int = 0) -> Iterator[Weight]:
    for part in ("gate", "up") if d.gated else ("up",):
        yield Weight(f"{name}.{part}", width, hidden, "n", d.biased, experts)
    yield Weight(f"{name}.down", hidden, width, "k", d.biased, experts)


def _mixture(d: Dimensions) -> Iterator[Weight]:
    yield Weight("mlp.router", d.experts, d.hidden, "none")
    if d.expert_hidden:
        yield Weight("mlp.narrow", d.expert_hidden, d.hidden, "none")
    yield from _feed_forward(d, "mlp.experts", d.expert_width, d.expert_hidden or d.hidden, d.experts)
    if d.expert_hidden:
        yield Weight("mlp.widen", d.hidden, d.expert_hidden, "none")
    if d.shared_width:
        yield from _feed_forward(d, "mlp.shared", d.shared_width, d.hidden)


@dataclass
class Product:
    """A matrix product as computed: (batch ×) rows × k times k × n.

    `weight` is the parameter that contains k × n.
    """

    rows: float
    n: int
    k: int
    batch: int = 0
    weight: str = ""
    causal: bool = False
    flops: float = 0.0
    # elements of the left operand if they differ from rows × k, as for an image
    read: float = 0.0
    # positions of a convolution's kernel
    taps: int = 1
    # True if the left operand does not depend on parameters
    data: bool = False


@dataclass
class Kernel:
    """One kernel; for attention, the two products and the softmax together.

    Attributes:
        part: index of the part of the model that launched it.
        numbers: elements that it reads and writes; 0 for products.
        fixed: True if it does not process samples, so that its cost is independent of their number.
        reads, writes: storages.
        made: elements in its results.
        keys: elements of keys and values, for attention.
        scores: elements of attention scores that it would read and write, and keep, if it were not fused.
    """

    name: str
    part: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    numbers: float = 0.0
    fixed: bool = False
    products: tuple[Product, ...] = ()
    made: float = 0.0
    keys: float = 0.0
    scores: float = 0.0
    kept_scores: float = 0.0


@dataclass
class Seen:
    """Observations of a whole forward pass.

    Parts are the repeated blocks, and the modules before, between and after them.

    Attributes:
        samples: samples in the batch.
        tokens: length of the batch's sequences; 1 if the model reads none.
        parts: name of each part of the model in the order of the pass; `""` outside of repeated blocks.
        entered: elements that each repeated block received.
        left: elements that each repeated block returned.
        kernels: kernels in order.
        kept: for each storage that the backward pass needs, its elements and the parts that saved it.
        routed: for each part, elements sent to experts.
        used: for each parameter, the parts that read it.
        asked: types of modules whose code read values that do not exist.
        of_samples: storages whose content depends on the batch.
        ids: for each table with sparse gradients, by module name, its rows and width, and the number of ids looked up
            per sample.
        names: for each storage that holds a parameter, or depends on parameters alone, the parameter's name.
    """

    samples: int = 1
    tokens: int = 1
    parts: list[str] = field(default_factory=lambda: [""])
    entered: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    kept: dict[int, tuple[float, set[int]]] = field(default_factory=dict)
    routed: dict[int, float] = field(default_factory=dict)
    used: dict[str, set[int]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    of_samples: set[int] = field(default_factory=set)
    ids: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def name_of(self, storage: int) -> str:
        """Return the name of the parameter that a storage holds or was computed from, or ""."""
        return self.names.get(storage, "")
