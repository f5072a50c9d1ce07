"""Module calls of a recording, reported by each module.

Leaf layers stay whole, failing ones become opaque.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.planning.model.recording.graph import Entry, Ref, Unfollowable
from paceline.planning.model.recording.layers import is_embedding, is_linear, is_transposed, weighted
from paceline.planning.model.recording.recorder import Recorder, silence
from paceline.planning.model.recording.trees import tensors_within


def report_calls(model: nn.Module, recorder: Recorder) -> None:
    """Let every module report its calls to the recorder, until `restored` restores it."""
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
    """Record a module that failed on meta as one operation. None if it has no input to take the output's shape from."""
    path = recorder.paths[-1]
    if recorder.opaque is not None and path not in recorder.opaque:
        text = " ".join(str(error).split())[:200]
        raise Unfollowable(f"{path or 'the model'} does not run on a rank's part: {text}", path) from error
    with silence(recorder):
        first = next((x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if not path or first is None:
            return None
        graph = recorder.graph
        # with the attributes that it read
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
    """Record each autograd function of the model as one operation of unknown gradient.

    Functions shown to be pointwise are recorded as their operations.
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
    """Output of a linear layer or embedding, recorded as one operation on (x, weight, bias)."""
    weight, bias = weighted(module).weight, getattr(module, "bias", None)
    taken, given = weight.shape[::-1] if is_transposed(module) else weight.shape, x.shape
    with silence(recorder):
        if kind == "embedding":
            result = torch.empty((*given, weight.shape[1]), dtype=weight.dtype, device="meta")
        elif given[-1] != taken[1]:
            raise RuntimeError(f"a linear layer for {taken[1]} features is given {given[-1]}")
        else:
            result = torch.empty((*given[:-1], taken[0]), dtype=x.dtype, device="meta")
        about = {"transposed": is_transposed(module), "dims": x.dim()}
        recorder.add(kind, (x, weight) if bias is None else (x, weight, bias), about, result)
    return result


# Operations without the tag `pointwise` that keep every element's position, or only allocate.
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
    """True if a function's results and gradients are element-wise, whatever the shape.

    Constants must be the same for any shape.

    The function and its backward pass are run on tensors without data, of the given shape and of a larger one.
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
    """Operations of both passes with their constants; None if one is not pointwise or fails."""
    found: list[list[Any] | None] = [None]

    def run() -> None:
        try:
            found[0] = _run(function, args, kwargs, shape)
        except Exception:  # noqa: BLE001 - any error of the function's code: nothing is shown then
            found[0] = None

    # A thread of its own, because a trace is active in this one, below autograd.
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
    """Dispatch mode that checks that every operation is pointwise, on one shape and scalars."""

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
