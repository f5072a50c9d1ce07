"""Comparable computations on one process and on many ranks: no dropout, and float64 where asked.

Everything here is undone at the end of its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.device import widened
from paceline.job.batch import Batch
from paceline.planning.model.recording.model_state import restored

if TYPE_CHECKING:
    from paceline.engine.compute import Compute

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_TO_NARROW = (Tensor.float, Tensor.half, Tensor.bfloat16)


@contextmanager
def nothing_dropped() -> Iterator[None]:
    """Torch's dropout functions return their input within this context.

    Masks are drawn per rank, so two plans have different ones.
    """
    before = {name: getattr(F, name) for name in _DROPOUTS}
    for name in _DROPOUTS:
        setattr(F, name, _returned)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def without_dropout(model: nn.Module) -> None:
    """Have no module drop anything: values, paths (stochastic depth) or layers."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (drops and name in ("p", "prob", "rate"))):
                setattr(module, name, 0.0)


def random_module(compute: Compute, batch: Batch) -> str | None:
    """First module whose output depends on random numbers, or None.

    Found by two passes over a batch with different random states.

    `the loss`, where only that differs.
    """
    model, found = compute.model, list[dict[str, float]]()
    with suppress(Exception), torch.no_grad():
        for seed in (1, 2):
            with restored(model):
                torch.manual_seed(seed)
                found.append(_sums(compute, batch))
    if len(found) < 2:
        return None  # it does not run so; the steps tell why
    return next((name for name, value in found[0].items() if value == value and found[1].get(name) != value), None)


def _sums(compute: Compute, batch: Batch) -> dict[str, float]:
    """Sum of every module's output and of the loss, in order of computation."""
    sums: dict[str, float] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                sums[name] = sums.get(name, 0.0) + float(widened(first).sum())

        return hook

    hooks = [module.register_forward_hook(note(name or "the model")) for name, module in compute.model.named_modules()]
    try:
        placed = compute.place(batch)
        output = compute.call(placed)
        if not getattr(compute.loss, "whole_batch", False):
            sums["the loss"] = float(compute.step_loss(output, compute.normalization.target(placed)))
    finally:
        for hook in hooks:
            hook.remove()
    return sums


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Context in which modules that ask for float32 or less get float64.

    They ask by `x.float()`, a new tensor, or a softmax in float32.
    """
    call, depth = nn.Module.__call__, 0

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:  # and no hooks: they are not called where a pipeline's stage leaves the model's forward pass early
            with _Wide() if depth == 1 else nullcontext():
                return call(module, *args, **kwargs)
        finally:
            depth -= 1

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def in_float64(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose own tensors may be of float32, computed in float64."""

    def wide(*args: Any) -> Any:
        with _Wide():
            return loss(*args)

    return wide


class _Wide(TorchFunctionMode):
    """Mode in which floating-point tensors are float64.

    Applies to tensors asked for in fewer bits, and to operations that mix both.
    """

    def __enter__(self) -> Any:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TO_NARROW:
            return Tensor.double(args[0])
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
        kwargs = {
            name: torch.float64 if isinstance(v, torch.dtype) and v in _NARROW else v for name, v in kwargs.items()
        }
        name = getattr(func, "__name__", "")
        if name == "__get__" or not _is_mixed((*args, *kwargs.values())):
            return func(*args, **kwargs)
        in_place = (name.endswith("_") and not name.endswith("__")) or name in (
            "__setitem__",
            "__iadd__",
            "__isub__",
            "__imul__",
        )
        first = args[:1] if in_place else ()
        args = (*first, *(_double(a) for a in args[len(first) :]))
        return func(*args, **{key: value if key == "out" else _double(value) for key, value in kwargs.items()})


def _is_mixed(values: tuple[Any, ...]) -> bool:
    """True if some floating-point tensors are float64 and others are not."""
    tensors = [
        t
        for v in values
        for t in (v if isinstance(v, (tuple, list)) else (v,))
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    return len({t.dtype == torch.float64 for t in tensors}) == 2


def _double(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_double(v) for v in value) if not hasattr(value, "_fields") else value
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _returned(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In the place of a dropout function."""
    return input
