"""What a model does with one sample, without running it: products of matrices, other kernels, parameters, activations, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

Divided = Literal["rows", "n", "k", "batch", "none"]


@dataclass(frozen=True)
class Gemm:
    """Products of matrices in one forward pass: (rows × k) · (k × n), `times` over.

    Attributes:
        rows: of one sample. With a weight, the rows of all samples of a microbatch are one product.
        n, k: the width of the result and what is summed over.
        batch: products per sample where both operands are activations, such as heads in attention; 0: k × n is a weight.
        divided: what tensor parallelism divides; `none`: every rank of tp computes all of it.
        times: how many such products there are.
        experts: over how many experts' weights the rows are spread; 0: one weight.
        causal: whether only half of the result is needed (attention with a causal mask).
        read: numbers of the left operand where they are not rows × k: those of an image that a convolution reads; else 0.
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

    @property
    def flops(self) -> float:
        """Of one sample, forward: two for each multiplication, whole squares also where causal."""
        return 2.0 * self.rows * self.n * self.k * max(self.batch, 1) * self.times


@dataclass(frozen=True)
class Block:
    """A part of the model that stays together: a layer of a transformer, or what lies before, between and after the repeated blocks.

    Activations are counted in numbers per sample, not in bytes: `precision` says how large one is; masks of a byte are counted as parts.

    Attributes:
        kind: equal for blocks that cost the same, such as `layer`, `embedding`, `head`.
        name: of the module, or of the first of several.
        gemms: what it multiplies.
        inside: numbers that the other kernels read and write, forward, where tp divides them.
        outside: the same where only sequence parallelism does: norms, residuals.
        scores: numbers of the attention's squares that the other kernels read and write; a fused attention kernel has none.
        kept_inside, kept_outside, kept_scores: numbers kept for the backward pass, likewise divided.
        fixed: numbers that other kernels read and write once for a microbatch, however many samples it has: weights that autocast casts,
            positions, masks.
        kept_fixed: of these, kept for the backward pass.
        selective_inside, selective_outside: numbers that remat=selective keeps besides the block's input, divided as `kept_` ones: results
            of products with weights and of fused attention; both 0 where that is not known.
        kernels: launched in the forward pass, products included.
        matrices, vectors, experts: numbers of parameters: those that tp divides, those that it does not, those of experts (ep divides).
        boundary: numbers per sample that go on to the next block: what pp sends and what remat=block keeps.
        reductions: of `boundary` over tp, in the forward pass; the backward pass has as many.
        keys: numbers of keys and values per sample, which context parallelism passes around; 0 where there are none, or unknown.
        routed: numbers per sample that go to experts and back, one way.
        trained: whether it has a backward pass.
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
        """Computed once: searches look blocks up thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.name, self.gemms, self.inside, self.outside, self.kernels, self.matrices, self.vectors))

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.matrices + self.vectors + self.experts

    @cached_property
    def flops(self) -> float:
        """Of one sample, forward."""
        return sum(gemm.flops for gemm in self.gemms)


@dataclass(frozen=True)
class Trace:
    """A model, block by block in the order in which data passes them.

    Attributes:
        blocks: equal ones are the same object, or equal.
        tokens: of one sample; 1 where it is no sequence. Context parallelism divides them.
        tied: numbers of parameters that stand in two blocks and are one (an embedding that is also the head): counted in both.
        names: of the module that each of `blocks` is, `""` for what lies outside of repeated blocks; () where there is no module.
        notes: what could not be found out, in words.
    """

    blocks: tuple[Block, ...]
    tokens: int = 1
    tied: int = 0
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Computed once: searches look traces up thousands of times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.blocks, self.tokens))

    @cached_property
    def parameters(self) -> int:
        """Tied ones once."""
        return sum(block.parameters for block in self.blocks) - self.tied

    @cached_property
    def flops(self) -> float:
        """Of one sample, forward."""
        return sum(block.flops for block in self.blocks)

    @cached_property
    def runs(self) -> tuple[tuple[Block, int], ...]:
        """Neighbours that are equal, once, with how many there are."""
        return tuple((block, len(list(same))) for block, same in groupby(self.blocks))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What the memory model has worked out of this trace, by what it depends on."""
        return {}

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)
