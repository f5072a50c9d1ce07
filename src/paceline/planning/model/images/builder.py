"""Builder of a trace from convolutions, norms and pools, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from paceline.planning.model.graph import BlockTrace, Gemm, ModelTrace


class ImageBuilder:
    """Trace of an image model under construction.

    Elements count as the kernels of a training step move them: a batch norm reads its input twice and writes once, an
    activation reads and writes, and so do pools; a convolution's own operands are in its `Gemm`. Kept for the backward
    pass are the inputs of convolutions, norms and pools, each once.

    Attributes:
        channels, size: shape of one image at this place.
    """

    def __init__(self, channels: int, size: Sequence[int]) -> None:
        self.channels, self.size = channels, tuple(size)
        self._blocks: list[BlockTrace] = []
        self._first: dict[BlockTrace, BlockTrace] = {}
        self._begin()

    @property
    def elements(self) -> float:
        """Number of elements of one image at this place."""
        return float(self.channels * prod(self.size))

    def convolution(
        self,
        out: int,
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        norm: bool = True,
        activation: bool = True,
        bias: bool = False,
        padded: bool = True,
    ) -> ImageBuilder:
        """A convolution, and the norm and activation behind it."""
        read = self.elements
        size = tuple((side if padded else side - kernel + 1) for side in self.size)
        self.size = tuple(-(-side // stride) for side in size)
        taps = kernel ** len(size)
        into = self.channels // groups * taps
        rows = float(prod(self.size))
        first = not self._blocks and not self._gemms
        self._gemms.append(Gemm(rows, out // groups, into, times=groups, read=read / groups, taps=taps, data=first))
        self._matrices += out * into
        return self._behind(out, norm, activation, bias)

    def transposed(self, out: int, kernel: int = 2, norm: bool = False, activation: bool = False) -> ImageBuilder:
        """A transposed convolution of stride 2, which doubles each side."""
        rows, into = float(prod(self.size)), self.channels
        self._gemms.append(Gemm(rows, out * kernel ** len(self.size), into, read=self.elements))
        self._matrices += out * kernel ** len(self.size) * into
        self.size = tuple(2 * side for side in self.size)
        return self._behind(out, norm, activation, bias=not norm)

    def linear(self, out: int, rows: int = 1, bias: bool = True) -> ImageBuilder:
        """A product with a weight.

        Each of `rows` is a vector of as many of the elements that stand here.
        """
        into = round(self.elements / rows)
        self._gemms.append(Gemm(float(rows), out, into))
        self._matrices += out * into
        self._vectors += out if bias else 0
        self._outside += rows * out if bias else 0
        self.channels, self.size = out, (rows,)
        self._kept += self.elements
        self._kernels += 1
        return self

    def normed(self) -> ImageBuilder:
        """A norm and an activation of what stands here."""
        self._vectors += 2 * self.channels
        return self._moved(3 * self.elements, kept=self.elements)._moved(2 * self.elements, kept=0.0)

    def activated(self) -> ImageBuilder:
        """An activation of what stands here."""
        return self._moved(2 * self.elements, kept=0.0)

    def pool(self, kernel: int = 2, stride: int = 2, padded: bool = False) -> ImageBuilder:
        """A pool over so many elements of each side."""
        before = self.elements
        reach = 0 if padded else kernel - stride
        self.size = tuple(-(-(side - reach) // stride) for side in self.size)
        return self._moved(before + self.elements, kept=self.elements)

    def mean(self) -> ImageBuilder:
        """The mean over each channel."""
        before = self.elements
        self.size = (1,) * len(self.size)
        return self._moved(before + self.elements, kept=self.elements)

    def excited(self, reduced: int) -> ImageBuilder:
        """Squeeze and excitation: each channel is scaled by two products of all channels' means."""
        for out, into in ((reduced, self.channels), (self.channels, reduced)):
            self._gemms.append(Gemm(1.0, out, into))
            self._matrices += out * into
            self._vectors += out
        self._kernels += 6
        return self._moved(4 * self.elements, kept=self.elements)

    def products(
        self, gemms: Sequence[Gemm], vectors: int, moved: float, kept: float, kernels: int, scores: float = 0.0
    ) -> ImageBuilder:
        """Products of any kind, and what the kernels around them move and keep."""
        self._gemms += gemms
        self._matrices += sum(gemm.n * gemm.k * gemm.times for gemm in gemms if not gemm.batch)
        self._vectors += vectors
        self._outside += moved
        self._kept += kept
        self._kernels += kernels
        self._scores += scores
        return self

    def widened(self) -> ImageBuilder:
        """Each side doubled by repeating elements."""
        before = self.elements
        self.size = tuple(2 * side for side in self.size)
        return self._moved(before + self.elements, kept=0.0)

    def plus(self, other: Callable[[ImageBuilder], object] | None, activation: bool = True) -> ImageBuilder:
        """Sum with what another way leads to from where this block began.

        None: the block's input itself.
        """
        channels, size = self.channels, self.size
        if other is not None:
            self.channels, self.size = self._began
            other(self)
        assert (self.channels, self.size) == (channels, size), "ways of different shapes cannot be added"
        self._moved(3 * self.elements, kept=0.0)
        return self._moved(2 * self.elements, kept=self.elements) if activation else self

    def beside(self, ways: Sequence[Callable[[ImageBuilder], object]]) -> ImageBuilder:
        """Several ways from here, whose channels are put together."""
        channels, size, found = self.channels, self.size, 0
        for way in ways:
            self.channels, self.size = channels, size
            way(self)
            found += self.channels
        self.channels = found
        return self._moved(2 * self.elements, kept=self.elements)

    def joined(self, channels: int) -> ImageBuilder:
        """Channels that come from before, put together with those here."""
        self.channels += channels
        return self._moved(2 * self.elements, kept=self.elements)

    def close(self, kind: str = "layer") -> ImageBuilder:
        """End a block."""
        block = BlockTrace(
            kind=kind,
            gemms=tuple(self._gemms),
            outside=self._outside,
            kept_outside=self._kept,
            # a softmax reads and writes its scores, and keeps them
            scores=2.0 * self._scores,
            kept_scores=self._scores,
            kernels=self._kernels,
            matrices=self._matrices,
            vectors=self._vectors,
            boundary=self.elements,
        )
        self._blocks.append(self._first.setdefault(block, block))
        self._begin()
        return self

    def trace(self, classes: int = 0) -> ModelTrace:
        """The whole model, with a loss over so many classes or over each element."""
        loss = float(classes) or self.elements
        head = replace(self._blocks.pop(), kind="head", inside=6.0 * loss, kept_inside=3.0 * loss, boundary=1.0)
        return ModelTrace((*self._blocks, head))

    def _behind(self, out: int, norm: bool, activation: bool, bias: bool) -> ImageBuilder:
        self.channels = out
        self._vectors += (2 * out if norm else 0) + (out if bias else 0)
        self._kernels += 1
        self._kept += self.elements
        if bias:
            self._moved(2 * self.elements, kept=0.0)
        if norm:
            self._moved(3 * self.elements, kept=self.elements if activation else 0.0)
        return self._moved(2 * self.elements, kept=0.0) if activation else self

    def _moved(self, elements: float, kept: float) -> ImageBuilder:
        self._outside += elements
        self._kept += kept
        self._kernels += 1
        return self

    def _begin(self) -> None:
        self._began = (self.channels, self.size)
        self._gemms: list[Gemm] = []
        self._matrices = self._vectors = self._kernels = 0
        self._outside = self._kept = self._scores = 0.0
