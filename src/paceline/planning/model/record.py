"""Recording of a model's forward pass on the meta device, as a list of operations.

Weights and activations are on the meta device. Tensors that are computed only from the integers in the batch, such as
masks and positions, have values that the model's code may read. A module that reads values of activations cannot run
this way. An example is a mixture of experts that routes tokens. Such a module is recorded as one opaque operation,
whose output is assumed to have the shape of its first input.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from paceline.device import is_device_type
from paceline.job.batch import Batch
from paceline.planning.model.recorder import (
    BeforeCall,
    Entry,
    Graph,
    PythonCall,
    Recorder,
    Ref,
    Shapes,
    Site,
    Unfollowable,
    is_embedding,
    is_linear,
    is_transposed,
    kept_tensors,
    map_tensors,
    placed,
    put_placeholders,
    recording,
    restored,
    silence,
    tensors_in,
    tensors_within,
    weighted,
)

Call = Callable[[nn.Module, Batch], Any]


def record_graph(
    model: nn.Module,
    example: Batch,
    call: Call,
    shapes: Shapes | None = None,
    opaque: Collection[str] | None = None,
    rewrite: BeforeCall | None = None,
) -> Graph:
    """Run `call(model, example)` in training mode with weights on the meta device, and record the operations.

    The model and its buffers are restored after the pass.

    Args:
        shapes: maps names of parameters to shapes that replace the real ones.
        opaque: paths of the modules that may be recorded as opaque; None allows all.
        rewrite: function that is called before every call of a torch function and may change the arguments.

    Raises:
        Unfollowable: a module that may not be opaque fails.
        Exception: the model's own code, outside of submodules, raises it.
    """
    recorder = Recorder(opaque, rewrite)
    before = {id(x) for module in model.modules() for x in tensors_within(module.__dict__)}
    with ExitStack() as stack:
        stack.enter_context(recording(recorder))
        stack.enter_context(restored(model))
        if not model.training:
            model.train()
        put_placeholders(model, recorder, shapes or {})
        report_calls(model, recorder)
        batch = placed(example, recorder)
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(own_functions(recorder))
        stack.enter_context(FunctionMode(recorder))
        stack.enter_context(OperationMode(recorder.operation))
        result = call(model, batch)
        with silence(recorder):
            recorder.finish(result, kept_tensors(model, before))
    return recorder.graph


_DEVICE = Tensor.device.__get__
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)


class FunctionMode(TorchFunctionMode):
    """Function mode that records the torch functions that the model's code calls.

    If some arguments of a call are on meta, the others are moved to meta as well.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self.recorder, kwargs or {}
        name = getattr(func, "__name__", str(func))
        # masks and positions that are created on the device of a meta tensor must have values as well
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
        # meta tensors stay on meta
        if name == "to" and args[0].is_meta:
            args = (args[0], *(x for x in args[1:] if not isinstance(x, (str, torch.device))))
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            if len(args) + len(kwargs) == 1:
                kwargs = {"dtype": args[0].dtype}
        noted = PythonCall(
            name, recorder.paths[-1], _site(sys._getframe(1)), recorder.refs(args), recorder.refs(kwargs)
        )
        recorder.graph.calls.append(noted)
        result = args[0] if is_device_type(name) else func(*args, **kwargs)
        noted.results = [recorder.see(x) for x in tensors_in(result)]
        return result

    def _on_one_device(self, args: Any, kwargs: Any) -> Any:
        if len({x.is_meta for x in tensors_in((args, kwargs))}) < 2:
            return args, kwargs

        def move(x: Tensor) -> Tensor:
            if x.is_meta:
                return x
            with silence(self.recorder):
                moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.recorder.same(moved, self.recorder.see(x))
            return moved

        return map_tensors(move, args), map_tensors(move, kwargs)


def _site(frame: FrameType | None) -> Site | None:
    """Return the position of the innermost call outside of torch and of this folder."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    if frame is None:
        return None
    return Site(frame.f_code, _positions(frame.f_code)[frame.f_lasti // 2])


@cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


def report_calls(model: nn.Module, recorder: Recorder) -> None:
    """Make every module report its calls to the recorder. The `restored` context undoes this change."""
    for name, module in model.named_modules():
        module.__dict__["forward"] = _reporting(name, module, recorder)


def _reporting(path: str, module: nn.Module, recorder: Recorder) -> Callable[..., Any]:
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
        with silence(recorder):
            entry = Entry(path, {k: recorder.see(v) for k, v in places.items() if isinstance(v, Tensor)}, nodes)
        graph.entries.append(entry)
        recorder.paths.append(path)
        try:
            if hooked:
                recorder.hook((args, kwargs))
            result = (
                _leaf(leaf, module, recorder, args[0] if args else kwargs["input"])
                if leaf
                else forward(*args, **kwargs)
            )
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
        with silence(recorder):
            entry.results = [recorder.see(x) for x in tensors_within(result)]
        if hooked:
            recorder.hook(result)
        return result

    return watched


def _opaque(
    module: nn.Module, recorder: Recorder, since: tuple[int, int], given: Any, error: Exception
) -> Tensor | None:
    """Record a module that failed on meta as one operation.

    Returns None if the module has no floating-point input that determines the shape of the output.
    """
    path = recorder.paths[-1]
    if recorder.opaque is not None and path not in recorder.opaque:
        text = " ".join(str(error).split())[:200]
        raise Unfollowable(f"{path or 'the model'} fails on the part of a rank: {text}", path) from error
    with silence(recorder):
        first = next((x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if not path or first is None:
            return None
        graph = recorder.graph
        # tensors that the module read from attributes are inputs as well
        read = {v for node in graph.nodes[since[0] :] for v in node.inputs if graph.values[v].producer < since[0]}
        recorder.forget(*since)
        recorder.graph.opaque[path] = " ".join(str(error).split())[:200]
        result = torch.empty_like(first, device="meta")
        known = {recorder.see(x) for x in (*tensors_within(given), *module.parameters())}
        inputs = sorted(known | read)
        recorder.add("opaque", tuple(map(Ref, inputs)), {}, result, inputs)
    return result


@contextmanager
def own_functions(recorder: Recorder) -> Iterator[None]:
    """Record each custom autograd function of the model as one operation with unknown gradient.

    If a function is proven to be pointwise, its operations are recorded instead.
    """
    apply = Function.__dict__["apply"]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        seen = recorder.quiet or cls.__module__.startswith(("torch.", "paceline."))
        if not seen:
            with silence(recorder):
                seen = is_pointwise(cls, args, kwargs)
        nodes, entries = len(recorder.graph.nodes), len(recorder.graph.entries)
        result = apply.__get__(None, cls)(*args, **kwargs)
        if not seen:
            with silence(recorder):
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


def _leaf(kind: str, module: nn.Module, recorder: Recorder, x: Tensor) -> Tensor:
    """Record a linear layer or embedding as one operation on (x, weight, bias), and return its output."""
    weight, bias = weighted(module).weight, getattr(module, "bias", None)
    taken, given = weight.shape[::-1] if is_transposed(module) else weight.shape, x.shape
    with silence(recorder):
        if kind == "embedding":
            result = torch.empty((*given, weight.shape[1]), dtype=weight.dtype, device="meta")
        elif given[-1] != taken[1]:
            raise RuntimeError(f"a linear layer with {taken[1]} input features received {given[-1]}")
        else:
            result = torch.empty((*given[:-1], taken[0]), dtype=x.dtype, device="meta")
        about = {"transposed": is_transposed(module), "dims": x.dim()}
        recorder.add(kind, (x, weight) if bias is None else (x, weight, bias), about, result)
    return result


# Operations without the tag `pointwise` that keep every element in its position, or only allocate memory.
_IN_PLACE = (
    "detach",
    "alias",
    "clone",
    "_to_copy",
    "empty_like",
    "zeros_like",
    "ones_like",
    "new_empty_strided",
    "empty_strided",
)


def is_pointwise(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the results and gradients of an autograd function are element-wise for any shape.

    Constants in both passes must not depend on the shape.

    The forward and backward passes are run on tensors without data, with the given shape and with a larger shape.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors or any(x.shape != tensors[0].shape or not x.dim() for x in tensors):
        return False
    shape = tensors[0].shape
    steps = [_steps(function, args, kwargs, size) for size in (shape, torch.Size(n + 1 for n in shape))]
    return steps[0] is not None and steps[0] == steps[1]


def _steps(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size
) -> list[Any] | None:
    """Return the operations of both passes with their constants.

    The result is None if any operation is not pointwise.
    """
    found: list[list[Any] | None] = [None]

    def run() -> None:
        try:
            found[0] = _run(function, args, kwargs, shape)
        except Exception:  # noqa: BLE001 - any error of the function's code: nothing is shown then
            found[0] = None

    # A separate thread, since a trace is active in this one, below autograd.
    thread = threading.Thread(target=run, name="pointwise")
    thread.start()
    thread.join()
    return found[0]


def _run(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size
) -> list[Any] | None:
    def without_data(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.is_floating_point() or x.is_complex())

    args, kwargs = tree_map(without_data, (args, kwargs))
    with _Pointwise(shape) as seen:
        outputs = [y for y in tree_leaves(function.apply(*args, **kwargs)) if isinstance(y, Tensor) and y.requires_grad]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs], allow_unused=True)
    return seen.steps if seen.holds and all(y.shape == shape for y in outputs) else None


class _Pointwise(TorchDispatchMode):
    """Dispatch mode that checks that every operation is pointwise.

    All tensors must have the same shape or be scalars.
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.holds, self.steps = shape, True, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs, result))
        shaped = all(x.shape in (self.shape, torch.Size()) for x in leaves if isinstance(x, Tensor))
        self.holds &= shaped and (torch.Tag.pointwise in func.tags or name in _IN_PLACE)
        self.steps.append(
            (name, [x for x in leaves if isinstance(x, (int, float, complex))] if name not in _IN_PLACE else [])
        )
        return result


_VALUE = torch.ops.aten._local_scalar_dense.default
# (operation, arguments, keyword arguments, result)
Report = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
Prepare = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class OperationMode(TorchDispatchMode):
    """Dispatch mode that reports every ATen operation to a function.

    Args:
        report: function that is called after every operation.
        answer: function that returns the value that code reads from a tensor without data, given its dtype; None raises
            torch's own error.
        prepare: function that may change the arguments of every operation.
    """

    def __init__(
        self,
        report: Report,
        answer: Callable[[torch.dtype], bool | int | float] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__()
        self._report, self._answer, self._prepare = report, answer, prepare

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._answer is not None and func is _VALUE and args[0].is_meta:
            return self._answer(args[0].dtype)
        if self._prepare is not None:
            args, kwargs = self._prepare(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if self._answer is None or func is not _VALUE:
                raise
            return self._answer(args[0].dtype)
        self._report(func, args, kwargs, result)
        return result
