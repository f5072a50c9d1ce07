"""Recorder that numbers tensors and logs their operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from paceline.planning.model.recording.graph import Graph, Kind, Node, Ref, TracedTensor
from paceline.planning.model.recording.trees import map_tensors, tensors_in, tensors_within

BeforeCall = Callable[[int, str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class Recorder:
    """Recorder that numbers tensors and logs their operations."""

    def __init__(self, opaque: Collection[str] | None, rewrite: BeforeCall | None) -> None:
        self.graph = Graph()
        self.opaque = opaque
        self.rewrite = rewrite
        self.paths = [""]
        self.quiet = 0
        self.device = torch.device("cpu")
        self._known: dict[int, int] = {}
        # keeps the tensors alive, so that no id is used twice
        self._kept: list[Tensor] = []

    def see(self, tensor: Tensor, kind: Kind = "constant", name: str = "", producer: int = -1) -> int:
        """The number of a tensor; a new one if it was not seen before."""
        known = self._known.get(id(tensor))
        if known is None:
            known = len(self.graph.values)
            self.graph.values.append(TracedTensor(tuple(tensor.shape), kind, _has_gradients(tensor), name, producer))
            self.same(tensor, known)
        return known

    def same(self, tensor: Tensor, number: int) -> None:
        """Let `tensor` stand for value `number` from now on."""
        self._known[id(tensor)] = number
        self._kept.append(tensor)

    def refs(self, tree: Any) -> Any:
        """Copy of `tree` with `Ref`s in place of tensors."""
        return map_tensors(lambda x: Ref(self.see(x)), tree)

    def operation(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation that the model runs.

        Below autograd composite ones stay whole, so these are few and high-level.
        """
        if not self.quiet:
            with silence(self):
                self.add(op, args, kwargs, result)

    def add(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[int] | None = None
    ) -> None:
        """Record an operation. `inputs` are those of its arguments if None."""
        graph, number = self.graph, len(self.graph.nodes)
        inputs = [self.see(x) for x in tensors_in((args, kwargs))] if inputs is None else inputs
        if (
            not isinstance(op, str)
            and not op._schema.is_mutable
            and isinstance(result, Tensor)
            and self._known.get(id(result)) in inputs
        ):
            # `x.to(x.dtype)` is `x`
            return
        for slot, value in enumerate(inputs):
            graph.values[value].uses.append((number, slot))
        outputs = [self.see(x, "result", producer=number) for x in tensors_in(result)]
        learns = any(graph.values[v].requires_grad for v in inputs)
        for v in outputs:
            graph.values[v].requires_grad |= learns and graph.values[v].floating
        graph.nodes.append(Node(op, self.refs(args), self.refs(kwargs), inputs, outputs, self.paths[-1]))

    def hook(self, tree: Any) -> None:
        """Record a hook: code of the model sees these tensors' gradients, and may change them."""
        for tensor in tensors_within(tree):
            self.add("hook", (tensor,), {}, None)

    def forget(self, nodes: int, entries: int) -> None:
        """Remove all nodes and entries from these numbers on."""
        for number in range(nodes, len(self.graph.nodes)):
            for value in self.graph.nodes[number].inputs:
                self.graph.values[value].uses = [use for use in self.graph.values[value].uses if use[0] < nodes]
        del self.graph.nodes[nodes:], self.graph.entries[entries:]

    def finish(self, result: Any, kept: list[Tensor]) -> None:
        """Record the model's outputs, and the tensors that its modules keep in attributes."""
        self.graph.outputs = [self.see(x) for x in (*tensors_within(result), *kept)]
        first = result if isinstance(result, Tensor) else getattr(result, "logits", None)
        self.graph.logits = self.see(first) if isinstance(first, Tensor) else None


_current: ContextVar[Recorder | None] = ContextVar("_current", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Context in which `recorder` is the one that hooks of modules can silence."""
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context whose operations, in a hook of a module, are not recorded."""
    recorder = _current.get()
    assert recorder is not None, "no trace is under way"
    with silence(recorder):
        yield


@contextmanager
def silence(recorder: Recorder) -> Iterator[None]:
    recorder.quiet += 1
    try:
        yield
    finally:
        recorder.quiet -= 1


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
