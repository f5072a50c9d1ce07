"""What a forward pass consists of, as data: its kernels, their products, what is kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Product:
    """A product of matrices, (batch ×) rows × k times k × n, as computed. `weight`: the parameter that k × n, or a part of it, is."""

    rows: float
    n: int
    k: int
    batch: int = 0
    weight: str = ""
    causal: bool = False
    flops: float = 0.0
    read: float = 0.0  # numbers of the left operand, where they are not rows × k: of an image


@dataclass
class Kernel:
    """One kernel, or, of attention, the two products and the softmax that are one.

    Attributes:
        part: index of the part of the model in which it was launched.
        numbers: that it reads and writes; products have none of their own.
        fixed: whether it works on no sample, so that it costs the same for any number of them.
        reads, writes: storages.
        made: numbers in its results.
        width: of the last dimension of what it reduces over that dimension, as norms do; else 0.
        picks: whether it picks numbers out of a parameter, such as biases of attention by distance.
        keys: numbers of keys and values, of attention.
        scores: numbers of attention's squares that it would read and write, and keep, if it were not fused.
    """

    name: str
    part: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    numbers: float = 0.0
    fixed: bool = False
    products: tuple[Product, ...] = ()
    made: float = 0.0
    width: int = 0
    picks: bool = False
    keys: float = 0.0
    scores: float = 0.0
    kept_scores: float = 0.0


@dataclass
class Seen:
    """All that a forward pass did.

    Attributes:
        kernels: in their order.
        kept: of each storage that the backward pass needs, how many numbers it holds and in which parts it was kept.
        routed: of each part, numbers that go to experts.
        used: of each parameter, the parts that read it.
        asked: the kinds of modules whose code looked at values that are not there.
    """

    kernels: list[Kernel] = field(default_factory=list)
    kept: dict[int, tuple[float, set[int]]] = field(default_factory=dict)
    routed: dict[int, float] = field(default_factory=dict)
    used: dict[str, set[int]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
