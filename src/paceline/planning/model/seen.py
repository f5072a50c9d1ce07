"""Observations of a forward pass as data: kernels, their products, saved tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Product:
    """A matrix product as computed: (batch ×) rows × k times k × n.

    `weight` is the parameter that k × n, or a part of it, is.
    """

    rows: float
    n: int
    k: int
    batch: int = 0
    weight: str = ""
    causal: bool = False
    flops: float = 0.0
    # elements of the left operand, if they are not rows × k: of an image
    read: float = 0.0
    # positions of a convolution's kernel
    taps: int = 1
    # True if no parameter made the left operand
    data: bool = False


@dataclass
class Kernel:
    """One kernel; for attention, the two products and the softmax together.

    Attributes:
        part: index of the part of the model in which it was launched.
        numbers: elements that it reads and writes; products have none of their own.
        fixed: True if it works on no sample, so that it costs the same for any number of them.
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

    Parts are the repeated blocks, and what lies before, between and after them.

    Attributes:
        samples: samples in the batch.
        tokens: length of the batch's sequences; 1 if the model reads none.
        parts: the name of each part of the model in the order of the pass; `""` outside of repeated blocks.
        entered: elements that each repeated block received.
        left: elements that each repeated block passed on.
        kernels: in order.
        kept: for each storage that the backward pass needs, its elements and the parts that saved it.
        routed: for each part, elements sent to experts.
        used: for each parameter, the parts that read it.
        asked: the types of modules whose code read values that do not exist.
        of_samples: storages whose content was made of the batch.
        ids: for each table with sparse gradients, by module name, its rows and width, and ids looked up for a sample.
        names: for each storage that holds a parameter, or was computed from parameters alone, the parameter's name.
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
        """Name of the parameter that a storage holds or was computed from, or ""."""
        return self.names.get(storage, "")
