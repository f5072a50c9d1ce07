"""Trace of a model as a list of operations, run on the meta device.

Weights and activations are on the meta device. Tensors made of the batch's whole numbers alone (masks, positions) are computed for
real, so that code may read them. A module that reads values of activations (a mixture of experts that routes tokens) cannot run so:
it is recorded as one opaque operation, whose output is assumed to have the shape of its first input.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from paceline.job.batch import Batch
from paceline.split.tensor.pointwise import is_pointwise

Call = Callable[[nn.Module, Batch], Any]
Kind = Literal["parameter", "input", "constant", "result"]
Shapes = Mapping[str, tuple[int, ...]]
_DEVICE = Tensor.device.__get__
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
# operations of a trace whose backward pass is the model's own code
UNSEEN_GRADIENT = ("hook", "function")
# attributes that torch itself keeps in a module
_OF_MODULES = set(nn.Module().__dict__)
_TORCH = str(Path(torch.__file__).parent)


class Unfollowable(Exception):
    """Raised if a division of tensors cannot be propagated. The text names the operation, `path` the module."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.path = path


@dataclass
class Value:
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


@dataclass(frozen=True)
class Site:
    """Position of a call in the model's source code. `span` is (first line, last line, first column, last column) of `code`."""

    code: CodeType
    span: tuple[int | None, int | None, int | None, int | None]


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
class PythonCall:
    """A call of a torch function in the model's own code. Arguments have `Ref`s in place of tensors."""

    name: str
    path: str
    site: Site | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int] = field(default_factory=list)


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
class Graph:
    """A trace of a model.

    Attributes:
        outputs: the tensors of the model's result.
        opaque: path of each opaque module -> reason.
        logits: the result itself if it is a tensor, else its `logits`, or None.
    """

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[PythonCall] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    logits: int | None = None


def trace(
    model: nn.Module,
    example: Batch,
    call: Call,
    shapes: Shapes | None = None,
    opaque: Collection[str] | None = None,
    rewrite: BeforeCall | None = None,
) -> Graph:
    """Run `call(model, example)` without weights, in training mode, and record it.

    The model and its buffers are restored afterwards.

    Args:
        shapes: other shapes for parameters, by name.
        opaque: the modules that may be opaque; None for any.
        rewrite: called before every Python call; may change its arguments.

    Raises:
        Unfollowable: a module fails and is not among those that may be opaque.
        Exception: any error of the model's own code outside of its submodules.
    """
    recorder = _Recorder(opaque, rewrite)
    before = {id(x) for module in model.modules() for x in tensors_of(module.__dict__)}
    with ExitStack() as stack:
        stack.callback(_current.reset, _current.set(recorder))
        stack.enter_context(_restored(model))
        stack.enter_context(_training(model))
        stack.enter_context(_placeholders(model, recorder, shapes or {}))
        stack.enter_context(_watched(model, recorder))
        batch = _placed(example, recorder)
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(_own_functions(recorder))
        stack.enter_context(_Functions(recorder))
        stack.enter_context(_Operations(recorder))
        result = call(model, batch)
        with _silence(recorder):
            recorder.finish(result, _kept(model, before))
    return recorder.graph


BeforeCall = Callable[[int, str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def is_linear(module: nn.Module) -> bool:
    """True if the module computes x W (+ b) and nothing else.

    It is an `nn.Linear`, or `Conv1D` of transformers, whose weight is transposed.
    """
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`, with weight (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_embedding(module: nn.Module) -> bool:
    """True if the module looks up rows of its weight without needing all of them. A maximal norm or counts would need all."""
    if type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


class Weighted(Protocol):
    """Common attributes of linear layers and embeddings."""

    weight: Tensor
    bias: Tensor | None


def weighted(module: nn.Module) -> Weighted:
    """The module, typed as one with a weight and perhaps a bias."""
    return cast("Weighted", module)


def tensors_of(tree: Any) -> list[Tensor]:
    """Tensors in nested containers, mappings and data classes. Key-value caches are skipped; only generation reads them."""
    found = []
    for leaf in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += [x for f in fields(leaf) for x in tensors_of(getattr(leaf, f.name, None))]
        elif isinstance(leaf, Mapping):
            found += [x for value in leaf.values() for x in tensors_of(value)]
    return found


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Recorder:
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
            self.graph.values.append(Value(tuple(tensor.shape), kind, _has_gradients(tensor), name, producer))
            self.same(tensor, known)
        return known

    def same(self, tensor: Tensor, number: int) -> None:
        """Let `tensor` stand for value `number` from now on."""
        self._known[id(tensor)] = number
        self._kept.append(tensor)

    def refs(self, tree: Any) -> Any:
        """Copy of `tree` with `Ref`s in place of tensors."""
        return tree_map(lambda x: Ref(self.see(x)) if isinstance(x, Tensor) else x, tree)

    def add(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation."""
        graph, number = self.graph, len(self.graph.nodes)
        args, kwargs = self.refs(args), self.refs(kwargs)
        inputs = [leaf.value for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref)]
        if not isinstance(op, str) and not op._schema.is_mutable and isinstance(result, Tensor) and self._known.get(id(result)) in inputs:
            # `x.to(x.dtype)` is `x`
            return
        for slot, value in enumerate(inputs):
            graph.values[value].uses.append((number, slot))
        outputs = [self.see(x, "result", producer=number) for x in tree_leaves(result) if isinstance(x, Tensor)]
        learns = any(graph.values[v].requires_grad for v in inputs)
        for v in outputs:
            graph.values[v].requires_grad |= learns and graph.values[v].floating
        graph.nodes.append(Node(op, args, kwargs, inputs, outputs, self.paths[-1]))

    def hook(self, tree: Any) -> None:
        """Record a hook: code of the model sees these tensors' gradients, and may change them."""
        for tensor in tensors_of(tree):
            self.add("hook", (tensor,), {}, None)

    def forget(self, nodes: int, entries: int) -> None:
        """Remove all nodes and entries from these numbers on."""
        for number in range(nodes, len(self.graph.nodes)):
            for value in self.graph.nodes[number].inputs:
                self.graph.values[value].uses = [use for use in self.graph.values[value].uses if use[0] < nodes]
        del self.graph.nodes[nodes:], self.graph.entries[entries:]

    def finish(self, result: Any, kept: list[Tensor]) -> None:
        """Record the model's outputs, and the tensors that its modules keep in attributes."""
        self.graph.outputs = [self.see(x) for x in (*tensors_of(result), *kept)]
        first = result if isinstance(result, Tensor) else getattr(result, "logits", None)
        self.graph.logits = self.see(first) if isinstance(first, Tensor) else None


class _Functions(TorchFunctionMode):
    """Function mode that records torch functions called by the model's code. Arguments on mixed devices are moved to meta."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self.recorder, kwargs or {}
        name = getattr(func, "__name__", str(func))
        # masks and positions made for a tensor on meta are real, too
        if func == _DEVICE and not recorder.quiet:
            return recorder.device
        if func == _REQUIRES_GRAD and not recorder.quiet and not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return recorder.graph.values[recorder.see(args[0])].requires_grad
        if recorder.quiet or name in {"__get__", "__set__"}:
            return func(*args, **kwargs)
        if name in {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}:
            recorder.add("hook", (args[0],), {}, None)
            return RemovableHandle(OrderedDict())
        if recorder.rewrite is not None:
            args, kwargs = recorder.rewrite(len(recorder.graph.calls), name, args, kwargs)
        args, kwargs = self._on_one_device(args, kwargs)
        # stays on meta
        if name == "to" and args[0].is_meta:
            args = (args[0], *(x for x in args[1:] if not isinstance(x, (str, torch.device))))
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            if len(args) + len(kwargs) == 1:
                kwargs = {"dtype": args[0].dtype}
        noted = PythonCall(name, recorder.paths[-1], _site(sys._getframe(1)), recorder.refs(args), recorder.refs(kwargs))
        recorder.graph.calls.append(noted)
        result = args[0] if name in {"cpu", "cuda"} else func(*args, **kwargs)
        noted.results = [recorder.see(x) for x in tree_leaves(result) if isinstance(x, Tensor)]
        return result

    def _on_one_device(self, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if len({x.is_meta for x in tensors}) < 2:
            return args, kwargs

        def move(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.is_meta:
                return x
            with _silence(self.recorder):
                moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.recorder.same(moved, self.recorder.see(x))
            return moved

        return tree_map(move, args), tree_map(move, kwargs)


class _Operations(TorchDispatchMode):
    """Dispatch mode that records ATen operations. Below autograd, composite operations stay whole, so these are few and high-level."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.recorder.quiet:
            with _silence(self.recorder):
                self.recorder.add(func, args, kwargs or {}, result)
        return result


_current: ContextVar[_Recorder | None] = ContextVar("_current", default=None)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context whose operations, in a hook of a module, are not recorded."""
    recorder = _current.get()
    assert recorder is not None, "no trace is under way"
    with _silence(recorder):
        yield


@contextmanager
def _silence(recorder: _Recorder) -> Iterator[None]:
    recorder.quiet += 1
    try:
        yield
    finally:
        recorder.quiet -= 1


def _kept(model: nn.Module, before: set[int]) -> list[Tensor]:
    """Results that the model's modules have stored in their attributes."""
    own = [{k: v for k, v in module.__dict__.items() if k not in _OF_MODULES} for module in model.modules()]
    return [x for x in tensors_of(own) if id(x) not in before]


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes afterwards, and clear caches that hold results without data."""
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, held in contents.items():
                _refill(attributes[name], held)
        for clear in _caches(model):
            clear()


def _contents(module: nn.Module) -> dict[str, Any]:
    return {k: copy(v) for k, v in module.__dict__.items() if type(v) in (dict, list, set) and k not in _OF_MODULES}


def _refill(container: Any, held: Any) -> None:
    container.clear()
    container.extend(held) if isinstance(container, list) else container.update(held)


def _caches(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Functions that clear the caches (functools) of a model's methods and of its files' functions."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if not base.__module__.startswith("torch.")}
    files = {name: sys.modules.get(name) for name in {cls.__module__ for cls in classes}}
    functions = [f for name, file in files.items() for f in vars(file or object).values() if getattr(f, "__module__", "") == name]
    for function in (*functions, *(f for cls in classes for f in vars(cls).values())):
        # the function of a static or class method
        plain = getattr(function, "__func__", function)
        # a decorator may hold the cache
        for cached in (plain, *(getattr(plain, "__closure__", None) or ())):
            clear = getattr(getattr(cached, "cell_contents", cached), "cache_clear", None)
            if callable(clear):
                yield clear


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Switch a model in evaluation mode to training; one that trains keeps its modules' modes."""
    before = {module: module.training for module in model.modules()}
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


@contextmanager
def _placeholders(model: nn.Module, recorder: _Recorder, shapes: Shapes) -> Iterator[None]:
    """Replace parameters by meta tensors, and buffers by copies."""
    made: dict[int, Tensor] = {}
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    names = {id(p): name for name, p in model.named_parameters()}
    try:
        for module, parameters, buffers in before:
            for name, p in parameters.items():
                if p is not None:
                    if id(p) not in made:
                        shape = shapes.get(names[id(p)], p.shape)
                        made[id(p)] = nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), requires_grad=False)
                        number = recorder.see(made[id(p)], "parameter", names[id(p)])
                        recorder.graph.values[number].requires_grad = p.requires_grad
                        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                            recorder.add("hook", (made[id(p)],), {}, None)
                    module._parameters[name] = made[id(p)]  # type: ignore[assignment]
            for name, b in buffers.items():
                if b is not None:
                    module._buffers[name] = b.clone()
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def _placed(example: Batch, recorder: _Recorder) -> Batch:
    """The batch as the trace sees it: whole numbers real, floating-point tensors on meta.

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


@contextmanager
def _watched(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Let every module report its calls to the recorder."""
    had = {module: module.__dict__.get("forward") for module in model.modules()}
    try:
        for name, module in model.named_modules():
            module.__dict__["forward"] = _watch(name, module, recorder)
        yield
    finally:
        for module, forward in had.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _watch(path: str, module: nn.Module, recorder: _Recorder) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward
    leaf = "linear" if is_linear(module) else "embedding" if is_embedding(module) else None
    hooked = bool(module._backward_hooks or module._backward_pre_hooks)
    # a trace has no backward pass
    module.__dict__.update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())

    def watched(*args: Any, **kwargs: Any) -> Any:
        graph = recorder.graph
        places: dict[int | str, Any] = dict(enumerate(args))
        places.update(kwargs)
        nodes, entries = len(graph.nodes), len(graph.entries)
        with _silence(recorder):
            entry = Entry(path, {k: recorder.see(v) for k, v in places.items() if isinstance(v, Tensor)}, nodes)
        graph.entries.append(entry)
        recorder.paths.append(path)
        try:
            if hooked:
                recorder.hook((args, kwargs))
            result = _leaf(leaf, module, recorder, args[0] if args else kwargs["input"]) if leaf else forward(*args, **kwargs)
        except Unfollowable:
            raise
        except Exception as error:
            result = _opaque(module, recorder, (nodes, entries), (args, kwargs), error)
            if result is None or leaf:
                raise
            graph.entries.append(entry)
        finally:
            recorder.paths.pop()
        entry.stop = len(graph.nodes)
        with _silence(recorder):
            entry.results = [recorder.see(x) for x in tensors_of(result)]
        if hooked:
            recorder.hook(result)
        return result

    return watched


def _opaque(module: nn.Module, recorder: _Recorder, since: tuple[int, int], given: Any, error: Exception) -> Tensor | None:
    """Record a module that failed on meta as one operation. None if it has no input to take the output's shape from."""
    path = recorder.paths[-1]
    if recorder.opaque is not None and path not in recorder.opaque:
        text = " ".join(str(error).split())[:200]
        raise Unfollowable(f"{path or 'the model'} does not run on a rank's part: {text}", path) from error
    with _silence(recorder):
        first = next((x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if not path or first is None:
            return None
        graph = recorder.graph
        # with the attributes that it read
        read = {v for node in graph.nodes[since[0] :] for v in node.inputs if graph.values[v].producer < since[0]}
        recorder.forget(*since)
        recorder.graph.opaque[path] = " ".join(str(error).split())[:200]
        result = torch.empty_like(first, device="meta")
        known = {recorder.see(x) for x in (*tensors_of(given), *module.parameters())}
        recorder.add("opaque", tuple(Ref(v) for v in sorted(known | read)), {}, result)
    return result


@contextmanager
def _own_functions(recorder: _Recorder) -> Iterator[None]:
    """Record each autograd function of the model as one operation of unknown gradient.

    Functions shown to be pointwise are recorded as their operations.
    """
    apply = Function.__dict__["apply"]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        seen = recorder.quiet or cls.__module__.startswith(("torch.", "paceline."))
        if not seen:
            with _silence(recorder):
                seen = is_pointwise(cls, args, kwargs)
        nodes, entries = len(recorder.graph.nodes), len(recorder.graph.entries)
        result = apply.__get__(None, cls)(*args, **kwargs)
        if not seen:
            with _silence(recorder):
                recorder.forget(nodes, entries)
                recorder.add("function", args, kwargs, result)
                for number in recorder.graph.nodes[-1].outputs:
                    recorder.graph.values[number].producer = nodes
        return result

    setattr(Function, "apply", classmethod(applied))  # noqa: B010 - mypy forbids to assign to a method
    try:
        yield
    finally:
        setattr(Function, "apply", apply)  # noqa: B010


def _leaf(kind: str, module: nn.Module, recorder: _Recorder, x: Tensor) -> Tensor:
    """Output of a linear layer or embedding, recorded as one operation on (x, weight, bias)."""
    weight, bias = weighted(module).weight, getattr(module, "bias", None)
    taken, given = weight.shape[::-1] if is_transposed(module) else weight.shape, x.shape
    with _silence(recorder):
        if kind == "embedding":
            result = torch.empty((*given, weight.shape[1]), dtype=weight.dtype, device="meta")
        elif given[-1] != taken[1]:
            raise RuntimeError(f"a linear layer for {taken[1]} features is given {given[-1]}")
        else:
            result = torch.empty((*given[:-1], taken[0]), dtype=x.dtype, device="meta")
        about = {"transposed": is_transposed(module), "dims": x.dim()}
        recorder.add(kind, (x, weight) if bias is None else (x, weight, bias), about, result)
    return result


def _site(frame: FrameType | None) -> Site | None:
    """Site of the innermost code outside of torch and of this file."""
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    if frame is None:
        return None
    return Site(frame.f_code, _positions(frame.f_code)[frame.f_lasti // 2])


@cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())
