"""Trace of a model: matrix products, other kernels, parameters and activations of each block."""

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
    """Equal matrix products (rows × k) · (k × n) in one forward pass.

    Attributes:
        rows: number of rows of one sample. If the right operand is a weight, the rows of all samples in a microbatch
            form one product.
        n, k: width of the result, and size of the summed dimension.
        batch: number of products per sample if both operands are activations, such as heads in attention; 0 means that
            the right operand is a weight.
        divided: dimension that tensor parallelism divides; `none` means that every tp rank computes the whole product.
        times: number of equal products.
        experts: number of experts over whose weights the rows are distributed; 0 means a single weight.
        causal: True if a causal mask makes half of the product unnecessary.
        read: number of elements in the left operand if it differs from rows × k, as for the image of a convolution;
            else 0.
        taps: number of positions in the kernel of a convolution, each with k / taps channels; 1 for other products.
        data: True if the left operand depends only on the batch, and therefore needs no gradient.
        frozen: True if the right operand is a weight that is not trained, and therefore needs no gradient.
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
    frozen: bool = False

    @property
    def flops(self) -> float:
        """Forward FLOPs of one sample. A multiply-add counts as two FLOPs.

        Attention scores count as a whole even under a causal mask.
        """
        return 2.0 * self.rows * self.n * self.k * max(self.batch, 1) * self.times


@dataclass(frozen=True)
class BlockTrace:
    """Part of a model that pipeline stages never divide, such as a transformer layer.

    The parts before, between and after the repeated blocks are blocks as well. Activations are counted in elements per
    sample, because their bytes depend on the precision. One-byte masks count as fractions of an element.

    Attributes:
        kind: name that equal blocks share, such as `layer`, `embedding` or `head`.
        name: name of the module, or of the first of several equal modules.
        gemms: matrix products of the block.
        inside: elements that other kernels read and write in the forward pass, and that tp divides.
        outside: elements that other kernels read and write, and that only sequence parallelism divides, such as those
            of norms and residuals.
        scores: elements of attention scores that other kernels read and write if attention is not fused.
        kept_inside, kept_outside, kept_scores: elements saved for the backward pass, divided like `inside`, `outside`
            and `scores`.
        fixed: elements that other kernels read and write once per microbatch, whatever its number of samples, such as
            weights that autocast casts, positions and masks.
        kept_fixed: elements in `fixed` that are saved for the backward pass.
        selective_inside, selective_outside: elements that remat=selective keeps besides the block's input, divided like
            `inside` and `outside`. They are results of matrix products with weights and of fused attention. Both are 0
            if unknown.
        kernels: number of kernels launched in the forward pass, including those of matrix products.
        matrices, vectors, experts: numbers of parameters that tp divides, that tp does not divide, and that belong to
            experts (divided by ep).
        boundary: elements per sample passed to the next block. The pipeline sends them, and remat=block keeps them.
        reductions: number of tp all-reduces in the forward pass, each of `reduced` elements; the backward pass has the
            same number.
        keys: elements of keys and values per sample, which context parallelism exchanges; 0 if there are none, or if
            unknown.
        routed: elements per sample that are sent to experts, in one direction.
        trained: True if the block has a backward pass.
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
        """Total number of parameters."""
        return self.matrices + self.vectors + self.experts

    @cached_property
    def flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(gemm.flops for gemm in self.gemms)

    @cached_property
    def training_flops(self) -> tuple[float, float]:
        """FLOPs of one sample in the forward and backward pass, without recomputation.

        The first number is of products with weights and grows with the tokens. The second is of products of
        activations, as in attention, and grows with the square of the tokens. The backward pass computes two gradients
        of each product, but only one for a frozen weight, and none before the first trained parameter.
        """
        each = [(gemm.batch, gemm.flops * (1 if not self.trained else 2 if gemm.frozen else 3)) for gemm in self.gemms]
        return sum(flops for batch, flops in each if not batch), sum(flops for batch, flops in each if batch)

    @cached_property
    def reduced(self) -> float:
        """Elements per sample in one tp all-reduce.

        The value is the mean size of the results of products whose summed dimension tp divides. In a layer it equals
        `boundary`. In a model without repeated layers it may be much larger.
        """
        sums = [gemm for gemm in self.gemms if gemm.divided == "k" and not gemm.batch and not gemm.experts]
        wide = sum(gemm.rows * gemm.n * gemm.times for gemm in sums) / max(sum(gemm.times for gemm in sums), 1)
        return max(wide, self.boundary)


@dataclass(frozen=True)
class SparseTable:
    """Embedding table whose gradients are sparse.

    `ids` is the number of rows that each sample looks up.
    """

    rows: int
    width: int
    ids: float

    def touched(self, samples: float) -> float:
        """Return the maximum number of elements in the rows that `samples` samples look up."""
        return min(self.rows, samples * self.ids) * self.width


@dataclass(frozen=True)
class ModelTrace:
    """Trace of a model: its blocks in the order of the forward pass.

    Attributes:
        blocks: blocks of the model. Equal blocks compare equal.
        tokens: number of tokens of one sample, which context parallelism divides; 1 if a sample is not a sequence.
        tied: number of parameters that two blocks share and that therefore count twice, such as an embedding that is
            also the head.
        names: module name of each block, `""` outside of repeated blocks; () if the trace does not come from a module.
        notes: sentences on facts that could not be determined.
        sparse: embedding tables with sparse gradients.
        plain_head: True if the logits are exactly the output of a linear layer, which can compute its loss in chunks.
        estimated: True if the FLOPs are estimated from the parameters alone.
    """

    blocks: tuple[BlockTrace, ...]
    tokens: int = 1
    tied: int = 0
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sparse: tuple[SparseTable, ...] = ()
    plain_head: bool = True
    estimated: bool = False

    def __hash__(self) -> int:
        """Hash, computed only once: searches look traces up thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.blocks, self.tokens))

    @cached_property
    def parameters(self) -> int:
        """Number of parameters. Tied parameters count once."""
        return sum(block.parameters for block in self.blocks) - self.tied

    @cached_property
    def flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(block.flops for block in self.blocks)

    @cached_property
    def training_flops(self) -> tuple[float, float]:
        """FLOPs of one sample in a training step; see `BlockTrace.training_flops`."""
        weights, activations = zip(*(block.training_flops for block in self.blocks), strict=True)
        return sum(weights), sum(activations)

    @cached_property
    def runs(self) -> tuple[tuple[BlockTrace, int], ...]:
        """Runs of equal consecutive blocks, each with its length."""
        return tuple((block, len(list(same))) for block, same in groupby(self.blocks))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Cache for intermediate results of the memory model."""
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
    """Composition of one transformer layer.

    Attributes:
        kind: kind of the layer's block.
        mixer: `attention`, `mamba`, `delta` or "".
        feed_forward: `dense`, `mixture` or "".
        window: number of preceding tokens to which a token attends; 0 means all.
        cross: True if the layer also attends to the tokens of an encoder.
        encodes: True if the layer is part of an encoder.
        joins: True if the layer combines the last layer's output with the next token's embedding, to predict an
            additional token.
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
        """Number of sublayers, each with a norm and a residual connection."""
        return bool(self.mixer) + bool(self.feed_forward) + self.cross


class Weight(NamedTuple):
    """Weight matrix of a product, of shape `out` × `into`.

    Attributes:
        divided: dimension that tensor parallelism divides; `none` means that every rank holds the whole weight.
        bias: True if the product has a bias.
        experts: number of experts that each have such a weight; 0 means that the weight belongs to no expert.
        source: True if the weight is applied to the tokens of an encoder.
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
        """Number of elements of the weight, or of one expert's weight."""
        return self.out * self.into


def encoder_layers(d: Dimensions) -> tuple[Layer, ...]:
    """Return the layers of the encoder, or () without an encoder."""
    return (Layer("encoder", encodes=True),) * d.encoder_layers


def layers(d: Dimensions) -> tuple[Layer, ...]:
    """Return the layers of the model; of an encoder-decoder, those of the decoder."""
    if d.pattern is not None:
        return tuple(_of_letter(d, letter) for letter in d.pattern)
    return tuple(_of_index(d, index) for index in range(d.layers))


def further_layers(d: Dimensions) -> tuple[Layer, ...]:
    """Return the layers that predict additional tokens (multi-token prediction).

    Each of these layers is like the last layer, with attention and a feed-forward part.
    """
    last = layers(d)[-1]
    if d.pattern is not None:
        last = Layer("", feed_forward="mixture" if d.experts else "dense")
    return (last._replace(kind="mtp", joins=True),) * d.mtp


def weights(d: Dimensions, layer: Layer) -> tuple[Weight, ...]:
    """Return the weights of a layer's matrix products, in the order of use."""
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
    """Return the names and sizes of a layer's norms, biases and other vectors."""
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
    """Return the names and sizes of a norm's parameters."""
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
    """Return the number of weights of a layer that compute keys and values."""
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
    """Observed matrix product of a (rows × k) and a (k × n) matrix, or a batch of such products.

    `weight` is the name of the parameter that is the right operand.
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
    """Observed kernel. Attention is one kernel with two products and the softmax.

    Attributes:
        part: index of the part of the model that launched the kernel.
        numbers: elements that the kernel reads and writes; 0 for matrix products.
        fixed: True if the cost of the kernel does not depend on the number of samples.
        reads, writes: identifiers of the storages that the kernel reads and writes.
        made: elements in the results of the kernel.
        keys: elements of keys and values in attention.
        scores: elements of attention scores that would be read and written without fusion.
        kept_scores: elements of attention scores that would be kept without fusion.
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
    """Observations of a forward pass.

    A part is a repeated block, or all modules before, between or after repeated blocks.

    Attributes:
        samples: number of samples in the batch.
        tokens: length of the sequences in the batch; 1 if the batch has no sequences of tokens.
        parts: name of each part in the order of the pass; `""` outside of repeated blocks.
        entered: number of elements that each repeated block receives.
        left: number of elements that each repeated block returns.
        kernels: kernels in the order of the pass.
        kept: for each storage saved for the backward pass, its number of elements and the parts that save it.
        routed: for each part, number of elements that are sent to experts.
        used: for each parameter, the parts that read the parameter.
        asked: class names of modules whose code reads values of tensors without data.
        of_samples: storages whose content depends on the batch.
        ids: for each embedding module with sparse gradients, its rows, its width, and the number of rows that a sample
            looks up.
        names: for each storage that holds a parameter or is computed only from parameters, the name of the parameter.
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
        """Return the parameter that a storage holds or is computed from; else ""."""
        return self.names.get(storage, "")
