"""Recorder that numbers tensors and logs their operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

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


Kind = Literal["parameter", "input", "constant", "result"]
Shapes = Mapping[str, tuple[int, ...]]
# operations of a graph whose backward pass is the model's own code
UNSEEN_GRADIENT = ("hook", "function")


@dataclass
class Graph:
    """A trace of a model.

    Attributes:
        outputs: the tensors of the model's result.
        opaque: path of each opaque module -> reason.
        logits: the result itself if it is a tensor, else its `logits`, or None.
    """

    values: list[TracedTensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[PythonCall] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    logits: int | None = None


@dataclass
class TracedTensor:
    """A tensor of the trace.

    Attributes:
        floating: True for floating point or complex numbers, which can have a gradient.
        name: a parameter's name in the model.
        uses: (node, slot), the slots counted over the node's inputs.
    """

    shape: tuple[int, ...]
    kind: Kind
    floating: bool
    name: str = ""
    producer: int = -1
    requires_grad: bool = False
    uses: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Node:
    """An operation: an ATen overload, or `linear`, `embedding` (leaf modules) or `opaque`.

    `args` holds `Ref`s in place of tensors.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    path: str

    @property
    def name(self) -> str:
        """The operation's name without its overload, such as `view` or `linear`."""
        return self.op if isinstance(self.op, str) else self.op.overloadpacket.__name__


@dataclass(frozen=True)
class Ref:
    """A tensor among a node's arguments."""

    value: int


@dataclass
class Entry:
    """A call of a module, with nodes `start` to `stop`.

    Attributes:
        arguments: the tensors among its own arguments, by position or keyword.
        results: the tensors in its result.
    """

    path: str
    arguments: dict[int | str, int]
    start: int
    stop: int = 0
    results: list[int] = field(default_factory=list)


@dataclass
class PythonCall:
    """A call of a torch function in the model's own code. Arguments have `Ref`s in place of tensors."""

    name: str
    path: str
    site: Site | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Site:
    """Position of a call in the model's source code.

    `span` is (first line, last line, first column, last column) of `code`.
    """

    code: CodeType
    span: tuple[int | None, int | None, int | None, int | None]


class Unfollowable(Exception):
    """Raised if a division of tensors cannot be propagated. The text names the operation, `path` the module."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.path = path


_LEAVES = (
    int,
    float,
    bool,
    str,
    type(None),
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(...),
)


def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors of a call's arguments or results, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Copy of `tree` with `function` applied to its tensors."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if kind in _LEAVES:
        return tree
    if kind is tuple or kind is list:
        return kind([map_tensors(function, x) for x in tree])
    if kind is dict:
        return {key: map_tensors(function, x) for key, x in tree.items()}
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def tensors_within(tree: Any) -> list[Tensor]:
    """Tensors also of mappings and data classes, such as models return.

    Key-value caches are skipped; only generation reads them.
    """
    found = []
    for leaf in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += [x for f in fields(leaf) for x in tensors_within(getattr(leaf, f.name, None))]
        elif isinstance(leaf, Mapping):
            found += [x for value in leaf.values() for x in tensors_within(value)]
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for x in tree:
            _collect(x, found)
    elif kind is dict:
        for x in tree.values():
            _collect(x, found)
    elif kind not in _LEAVES:
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
