"""Recorder that numbers the tensors of a forward pass and logs their operations."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from types import CodeType
from typing import Any, Literal, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.device import CPU, forked_random
from paceline.job.batch import Batch

BeforeCall = Callable[[int, str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class Recorder:
    """Recorder of the operations in a forward pass. Tensors are identified by numbers."""

    def __init__(self, opaque: Collection[str] | None, rewrite: BeforeCall | None) -> None:
        self.graph = Graph()
        self.opaque = opaque
        self.rewrite = rewrite
        self.paths = [""]
        self.quiet = 0
        self.device = torch.device("cpu")
        self._known: dict[int, int] = {}
        # keeps the tensors alive, so that no id is reused
        self._kept: list[Tensor] = []

    def see(self, tensor: Tensor, kind: Kind = "constant", name: str = "", producer: int = -1) -> int:
        """Return the number of a tensor. A tensor that has none gets a new number."""
        known = self._known.get(id(tensor))
        if known is None:
            known = len(self.graph.values)
            self.graph.values.append(TracedTensor(tuple(tensor.shape), kind, _has_gradients(tensor), name, producer))
            self.same(tensor, known)
        return known

    def same(self, tensor: Tensor, number: int) -> None:
        """Treat `tensor` as value `number` from now on."""
        self._known[id(tensor)] = number
        self._kept.append(tensor)

    def refs(self, tree: Any) -> Any:
        """Copy a tree with every tensor replaced by a `Ref`."""
        return map_tensors(lambda x: Ref(self.see(x)), tree)

    def operation(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an ATen operation, unless the recorder is paused.

        The recorder works below autograd, where composite operations are not decomposed. The recorded operations are
        therefore few and high-level.
        """
        if not self.quiet:
            with silence(self):
                self.add(op, args, kwargs, result)

    def add(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[int] | None = None
    ) -> None:
        """Add an operation to the graph.

        If `inputs` is None, the inputs are the tensors among the arguments.
        """
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
        """Record that a hook may read and change the gradients of these tensors."""
        for tensor in tensors_within(tree):
            self.add("hook", (tensor,), {}, None)

    def forget(self, nodes: int, entries: int) -> None:
        """Remove all nodes from number `nodes` on, and all entries from number `entries` on."""
        for number in range(nodes, len(self.graph.nodes)):
            for value in self.graph.nodes[number].inputs:
                self.graph.values[value].uses = [use for use in self.graph.values[value].uses if use[0] < nodes]
        del self.graph.nodes[nodes:], self.graph.entries[entries:]

    def finish(self, result: Any, kept: list[Tensor]) -> None:
        """Record the outputs of the model, including tensors that its modules store in attributes."""
        self.graph.outputs = [self.see(x) for x in (*tensors_within(result), *kept)]
        first = result if isinstance(result, Tensor) else getattr(result, "logits", None)
        self.graph.logits = self.see(first) if isinstance(first, Tensor) else None


_current: ContextVar[Recorder | None] = ContextVar("_current", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Make `recorder` the current recorder, which `unrecorded` pauses."""
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Pause the current recorder in this context. Hooks of modules use this function."""
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
# operations in a graph whose backward pass is custom code of the model
UNSEEN_GRADIENT = ("hook", "function")


@dataclass
class Graph:
    """Recorded graph of a model's forward pass.

    Attributes:
        outputs: tensors in the model's result.
        opaque: maps the path of each opaque module to the reason why it is opaque.
        logits: the model's result if it is a tensor, else the attribute `logits` of the result; None without logits.
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
    """Tensor in the recorded graph.

    Attributes:
        floating: True for a floating-point or complex tensor, which can have a gradient.
        name: name of the parameter in the model; "" for other tensors.
        uses: pairs (node, slot) that read the tensor. The slot is the position among the node's inputs.
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
    """Operation in the recorded graph.

    `op` is an ATen overload, or a name such as `linear`, `embedding`, `opaque`, `function` or `hook`.

    `args` and `kwargs` have a `Ref` in place of every tensor.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    path: str

    @property
    def name(self) -> str:
        """Name of the operation without its overload, such as `view` or `linear`."""
        return self.op if isinstance(self.op, str) else self.op.overloadpacket.__name__


@dataclass(frozen=True)
class Ref:
    """Reference to a tensor among the arguments of a node."""

    value: int


@dataclass
class Entry:
    """Call of a module, which ran the nodes from `start` up to `stop`.

    Attributes:
        arguments: tensors passed directly as arguments, by position or keyword.
        results: tensors in the result of the call.
    """

    path: str
    arguments: dict[int | str, int]
    start: int
    stop: int = 0
    results: list[int] = field(default_factory=list)


@dataclass
class PythonCall:
    """A call to a torch function in the model's code.

    The arguments have a `Ref` in place of every tensor.
    """

    name: str
    path: str
    site: Site | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Site:
    """Position of a call in the model's source code.

    `span` is the tuple (first line, last line, first column, last column) in the file of `code`.
    """

    code: CodeType
    span: tuple[int | None, int | None, int | None, int | None]


class Unfollowable(Exception):
    """Raised if the division of a tensor cannot be propagated through the graph.

    The text names the operation. `path` is the path of the module.
    """

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
    """Return the tensors in the arguments or results of a call, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the argument tensors to which an ATen operation writes."""
    return tensors_in(
        [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Copy a tree with `function` applied to every tensor."""
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
    """Return the tensors in a tree, including those in mappings and data classes.

    Key-value caches are skipped, because only generation reads them.
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


_CONTAINERS = (dict, OrderedDict, list, set, deque)
# attributes that torch itself keeps in a module
_OF_MODULES = set(nn.Module().__dict__)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes and random states after this context, and clear caches of results.

    Every forward pass that is not a training step runs in this context. Containers in attributes are restored as well.
    Caches are cleared because they may contain tensors without data. Parameters are not restored, except those of
    embeddings with `max_norm`, whose forward pass rescales rows.
    """
    held: list[tuple[Any, Any]] = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    for _, attributes in list(held):
        held += [(value, copy(value)) for value in attributes.values() if type(value) in _CONTAINERS]
    tensors = [(tensor, tensor.detach().clone()) for tensor in _written(model)]
    device = next((p.device for p in model.parameters()), torch.device(CPU))
    try:
        with forked_random(device):
            yield
    finally:
        for container, content in reversed(held):
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)
        for clear in _caches(model):
            clear()


def _written(model: nn.Module) -> list[Tensor]:
    """Return the buffers and tensor attributes that a forward pass may change in place."""
    kept = {id(t): t for module in model.modules() for t in (*module._buffers.values(), *module.__dict__.values())}
    plain = [t for t in kept.values() if type(t) is Tensor]
    tables = [module.weight for module in model.modules() if has_max_norm(module)]
    return [
        t for t in (*plain, *tables) if t.device.type != "meta" and t.layout == torch.strided and 0 not in t.stride()
    ]


def _caches(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield functions that clear the functools caches of a model.

    These are the caches of methods of its classes and of functions in the same files.
    """
    classes = {
        base for module in model.modules() for base in type(module).__mro__ if not base.__module__.startswith("torch.")
    }
    files = {name: sys.modules.get(name) for name in {cls.__module__ for cls in classes}}
    functions = [
        f for name, file in files.items() for f in vars(file or object).values() if getattr(f, "__module__", "") == name
    ]
    for function in (*functions, *(f for cls in classes for f in vars(cls).values())):
        # the function behind a static or class method
        plain = getattr(function, "__func__", function)
        # a decorator may hold the cache
        for cached in (plain, *(getattr(plain, "__closure__", None) or ())):
            clear = getattr(getattr(cached, "cell_contents", cached), "cache_clear", None)
            if callable(clear):
                yield clear


def put_placeholders(model: nn.Module, recorder: Recorder, shapes: Shapes) -> None:
    """Replace parameters with meta tensors, and buffers with copies. The `restored` context undoes this change."""
    made: dict[int, Tensor] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in made:
                shape = shapes.get(names[id(p)], p.shape)
                made[id(p)] = nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), requires_grad=False)
                number = recorder.see(made[id(p)], "parameter", names[id(p)])
                recorder.graph.values[number].requires_grad = p.requires_grad
                if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                    recorder.add("hook", (made[id(p)],), {}, None)
            module._parameters[name] = made[id(p)]  # type: ignore[assignment]
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else b.clone()


def placed(example: Batch, recorder: Recorder) -> Batch:
    """Return the batch for a trace.

    Integer tensors have values, and floating-point tensors are on meta.

    If integer tensors of the example have no values, they become zeros, or ones in masks.
    """

    def move(x: Tensor, name: str = "") -> Tensor:
        if x.is_floating_point():
            x = x.detach().to("meta")
        elif x.is_meta:
            x = torch.full_like(x, int("mask" in name), device="cpu")
        recorder.see(x, "input")
        return x

    if isinstance(example, Mapping):
        return {name: move(x, name) for name, x in example.items()}
    return tuple(move(x) for x in example)


def kept_tensors(model: nn.Module, before: set[int]) -> list[Tensor]:
    """Return the new tensors that the model's modules have stored in their attributes."""
    own = [{k: v for k, v in module.__dict__.items() if k not in _OF_MODULES} for module in model.modules()]
    return [x for x in tensors_within(own) if id(x) not in before]


def is_linear(module: nn.Module) -> bool:
    """True if the forward pass of the module only computes x W (+ b).

    Such a module is an `nn.Linear`, or a `Conv1D` of transformers, whose weight is transposed.
    """
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """True for a `Conv1D` of transformers, whose weight has the shape (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_embedding(module: nn.Module) -> bool:
    """True if the module is an embedding whose rows can be divided among ranks.

    An embedding with a maximum norm, frequency scaling or sparse gradients is excluded.
    """
    if type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def has_max_norm(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """True if a module is an embedding with a maximum norm, which rescales looked-up rows."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


class Weighted(Protocol):
    """Common attributes of linear layers and embeddings."""

    weight: Tensor
    bias: Tensor | None


def weighted(module: nn.Module) -> Weighted:
    """Cast a module to a type with a weight and an optional bias."""
    return cast("Weighted", module)


_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def without_logs() -> Iterator[None]:
    """Silence torch's log messages about operations that fail on tensors without values.

    The exception itself still propagates.
    """
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
