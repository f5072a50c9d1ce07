"""Recorder that numbers tensors and logs their operations."""

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
    """Recorder that numbers tensors and logs their operations."""

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
        """Return the number of a tensor, or assign a new number."""
        known = self._known.get(id(tensor))
        if known is None:
            known = len(self.graph.values)
            self.graph.values.append(TracedTensor(tuple(tensor.shape), kind, _has_gradients(tensor), name, producer))
            self.same(tensor, known)
        return known

    def same(self, tensor: Tensor, number: int) -> None:
        """Make `tensor` an alias of value `number` from now on."""
        self._known[id(tensor)] = number
        self._kept.append(tensor)

    def refs(self, tree: Any) -> Any:
        """Copy `tree` with `Ref`s instead of tensors."""
        return map_tensors(lambda x: Ref(self.see(x)), tree)

    def operation(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation that the model runs.

        Below autograd, composite operations stay whole, so the recorded operations are few and high-level.
        """
        if not self.quiet:
            with silence(self):
                self.add(op, args, kwargs, result)

    def add(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[int] | None = None
    ) -> None:
        """Record an operation. If `inputs` is None, they are the tensors among its arguments."""
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
        """Record a hook: the model's code receives these tensors' gradients, and may change them."""
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
    """Make `recorder` the one that module hooks can pause."""
    token = _current.set(recorder)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Do not record operations in this context, for use in a module's hook."""
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
    """A trace of a model.

    Attributes:
        outputs: the tensors of the model's result.
        opaque: maps the path of each opaque module to the reason.
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
        uses: (node, slot); slots are counted over the node's inputs.
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

    `args` holds `Ref`s instead of tensors.
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
    """A call of a torch function in the model's own code. Arguments have `Ref`s instead of tensors."""

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
    """Raised if a division of tensors cannot be propagated.

    The text names the operation, `path` the module.
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
    """Return the tensors of a call's arguments or results, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return argument tensors that an ATen operation writes."""
    return tensors_in(
        [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Copy `tree` with `function` applied to its tensors."""
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
    """Return tensors, including those in mappings and data classes, such as models return.

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


_CONTAINERS = (dict, OrderedDict, list, set, deque)
# attributes that torch itself keeps in a module
_OF_MODULES = set(nn.Module().__dict__)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes (including containers) and random states; clear caches of results.

    Every forward pass that is not a training step runs within this context. The caches may hold tensors without data.
    Parameters are not copied, except for embeddings with `max_norm`, whose forward pass shortens rows. Other parameters
    that are changed in place stay changed.
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
    """List the buffers and tensor attributes that a forward pass may change in place."""
    kept = {id(t): t for module in model.modules() for t in (*module._buffers.values(), *module.__dict__.values())}
    plain = [t for t in kept.values() if type(t) is Tensor]
    tables = [module.weight for module in model.modules() if has_max_norm(module)]
    return [
        t for t in (*plain, *tables) if t.device.type != "meta" and t.layout == torch.strided and 0 not in t.stride()
    ]


def _caches(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Return functions that clear the caches (functools) of a model's methods and of its files' functions."""
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
    """Replace parameters by meta tensors, and buffers by copies, until `restored` undoes it."""
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
    """Return the batch as the trace sees it: whole numbers real, floating-point tensors on meta.

    Whole numbers that the example lacks are zeros, or ones in masks.
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
    """Return results that the model's modules have stored in their attributes."""
    own = [{k: v for k, v in module.__dict__.items() if k not in _OF_MODULES} for module in model.modules()]
    return [x for x in tensors_within(own) if id(x) not in before]


def is_linear(module: nn.Module) -> bool:
    """True if the module only computes x W (+ b).

    It is an `nn.Linear`, or `Conv1D` of transformers, whose weight is transposed.
    """
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`, with weight (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_embedding(module: nn.Module) -> bool:
    """True if the module only looks up rows of its weight.

    With a maximum norm or frequency scaling, it would need all rows.
    """
    if type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def has_max_norm(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """True if a module is an embedding that renormalises the rows that it looks up."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


class Weighted(Protocol):
    """Common attributes of linear layers and embeddings."""

    weight: Tensor
    bias: Tensor | None


def weighted(module: nn.Module) -> Weighted:
    """Return the module, typed as one with a weight and an optional bias."""
    return cast("Weighted", module)


_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def without_logs() -> Iterator[None]:
    """Silence torch's logs of operations that fail on tensors without values.

    The failure itself is still raised; the caller reports it or tries another way.
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
