"""Timer of a model's segments, forward and backward, between its repeated modules."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# the segment after the last block; no module has such a name
END = "/end"


class SegmentTimer:
    """Timer that cuts a pass where the named modules are called.

    There is a segment before the first of them, one for each, and one after the last. Backward, a segment ends when the
    gradient of its module's first input tensor is complete. A module without such a tensor is counted with the segment
    before.

    Attributes:
        names: segments in the order of their calls, known after a pass.
        seconds: of the newest pass, both ways.
    """

    def __init__(self, model: nn.Module, modules: Sequence[str]) -> None:
        self.model, self.modules = model, list(modules)
        self.names: tuple[str, ...] = ("",)
        self.seconds = 0.0
        self._forward: list[list[float]] = []
        self._backward: list[list[float]] = []

    def clear(self) -> None:
        """Drop the passes so far."""
        self._forward, self._backward = [], []

    def medians(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each segment, forward and backward, scaled to the median pass."""
        wholes = [sum(f) + sum(b) for f, b in zip(self._forward, self._backward, strict=True)]
        scale = statistics.median(wholes)
        forward, backward = (
            [statistics.median(values) for values in zip(*passes, strict=True)]
            for passes in (self._forward, self._backward)
        )
        factor = scale / (sum(forward) + sum(backward))
        return tuple(factor * s for s in forward), tuple(factor * s for s in backward)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Time one forward and backward pass."""
        self._entered: dict[str, float] = {}
        self._complete: dict[str, float] = {}
        handles = [
            self.model.get_submodule(n).register_forward_pre_hook(partial(self._enter, n), with_kwargs=True)
            for n in self.modules
        ]
        handles += [self.model.get_submodule(name).register_forward_hook(self._leave) for name in self.modules]
        self._started = time.perf_counter()
        try:
            yield
            self._ended(time.perf_counter())
        finally:
            for handle in handles:
                handle.remove()

    def turn(self) -> None:
        """Mark the end of the forward pass."""
        self._turned = time.perf_counter()

    def _enter(self, name: str, module: nn.Module, args: Any, keywords: Any) -> None:
        if name not in self._entered:
            self._entered[name] = time.perf_counter()
            self._watch(name, (args, keywords))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # the last module to leave sets the time
        self._entered[END] = time.perf_counter()
        self._watch(END, output)

    def _watch(self, name: str, values: Any) -> None:
        given = next((t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad), None)
        if given is not None:
            given.register_hook(partial(self._done, name, given.data_ptr()))
            self._last = given.data_ptr()

    def _done(self, name: str, which: int, gradient: Tensor) -> None:
        if name != END or which == self._last:
            self._complete[name] = time.perf_counter()

    def _ended(self, now: float) -> None:
        order = sorted(self._entered, key=lambda name: self._entered[name])
        self.names = ("", *order)
        starts = [self._started, *(self._entered[name] for name in order), self._turned]
        self._forward.append([later - earlier for earlier, later in pairwise(starts)])
        ends = [now, *(self._complete.get(name, 0.0) for name in order), self._turned]
        # a missing or unordered time is counted with the segment before
        for i in range(1, len(ends) - 1):
            ends[i] = min(ends[i], ends[i - 1]) if ends[i] else ends[i - 1]
        self._backward.append([max(0.0, before - after) for before, after in pairwise(ends)])
        self.seconds = now - self._started
