"""Trace of a model on one sample: matrix products, other kernels, parameters, activations by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

Divided = Literal["rows", "n", "k", "batch", "none"]


@dataclass(frozen=True)
class Gemm:
    """Matrix products in one forward pass: (rows × k) · (k × n), `times` over.

    Attributes:
        rows: rows of one sample. With a weight, the rows of all samples of a microbatch are one product.
        n, k: the width of the result and the summed dimension.
        batch: products per sample if both operands are activations, such as heads in attention; 0: k × n is a weight.
        divided: the dimension that tensor parallelism divides; `none`: every rank of tp computes all of it.
        times: number of such products.
        experts: number of experts' weights that the rows are spread over; 0: one weight.
        causal: True if only half of the result is needed (attention with a causal mask).
        read: elements of the left operand if they are not rows × k: those of an image that a convolution reads; else 0.
        taps: positions of a convolution's kernel, each of k / taps channels; else 1.
        data: True if the left operand is of the batch, and not of parameters: it needs no gradient.
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
        """Forward FLOPs of one sample: two for each multiplication, whole score matrices also if causal."""
        return 2.0 * self.rows * self.n * self.k * max(self.batch, 1) * self.times


@dataclass(frozen=True)
class BlockTrace:
    """A part of the model that stays together, such as a layer of a transformer.

    There are also parts before, between and after the repeated blocks. Activations are counted in elements per sample,
    not in bytes: `precision` tells the size of one; masks of a byte are counted as fractions.

    Attributes:
        kind: equal for blocks that cost the same, such as `layer`, `embedding`, `head`.
        name: name of the module, or of the first of several.
        gemms: its matrix products.
        inside: elements that the other kernels read and write, forward, where tp divides them.
        outside: the same where only sequence parallelism does: norms, residuals.
        scores: elements of the attention scores that the other kernels read and write; a fused attention kernel has
            none.
        kept_inside, kept_outside, kept_scores: elements saved for the backward pass, divided in the same way.
        fixed: elements that other kernels read and write once for a microbatch, however many samples it has: weights
            that autocast casts, positions, masks.
        kept_fixed: those of `fixed` saved for the backward pass.
        selective_inside, selective_outside: elements that remat=selective keeps besides the block's input, divided as
            `kept_` ones: results of products with weights and of fused attention; both 0 if unknown.
        kernels: kernels launched in the forward pass, products included.
        matrices, vectors, experts: parameters that tp divides, that it does not, and of experts (ep divides them).
        boundary: elements per sample that are passed to the next block: pp sends them and remat=block keeps them.
        reductions: all-reduces of `reduced` over tp in the forward pass; the backward pass has as many.
        keys: elements of keys and values per sample, which context parallelism passes around; 0 if there are none, or
            unknown.
        routed: elements per sample that are sent to experts and back, one way.
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
        """Hash, computed once: searches look blocks up thousands of times."""
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
        """Elements of a sample in one sum over tp.

        The mean result of products whose summed dimension tp divides. In a layer these are `boundary`; in a model
        without repeated layers they may be far more.
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
        """Numbers in the rows that so many samples look up, at most."""
        return min(self.rows, samples * self.ids) * self.width


@dataclass(frozen=True)
class ModelTrace:
    """A model, block by block in the order in which data passes them.

    Attributes:
        blocks: equal ones are the same object, or equal.
        tokens: tokens of one sample; 1 if it is not a sequence. Context parallelism divides them.
        tied: parameters that are in two blocks and are one (an embedding that is also the head): counted in both.
        names: module name of each of `blocks`, `""` outside of repeated blocks; () if there is no module.
        notes: sentences on facts that could not be found.
        sparse: tables with sparse gradients.
    """

    blocks: tuple[BlockTrace, ...]
    tokens: int = 1
    tied: int = 0
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sparse: tuple[SparseTable, ...] = ()

    def __hash__(self) -> int:
        """Hash, computed once: searches look traces up thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.blocks, self.tokens))

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(block.parameters for block in self.blocks) - self.tied

    @cached_property
    def flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(block.flops for block in self.blocks)

    @cached_property
    def runs(self) -> tuple[tuple[BlockTrace, int], ...]:
        """Runs of equal neighbouring blocks, each with its length."""
        return tuple((block, len(list(same))) for block, same in groupby(self.blocks))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Cache of the memory model's intermediate results."""
        return {}

    def __iter__(self) -> Iterator[BlockTrace]:
        return iter(self.blocks)
