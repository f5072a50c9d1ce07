"""State of a model during recording, restored afterwards.

Placeholders stand for its tensors.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from paceline.device import CPU, forked_random
from paceline.job.batch import Batch
from paceline.planning.model.recording.recorder import Recorder, Shapes, tensors_within

_CONTAINERS = (dict, OrderedDict, list, set, deque)
# attributes that torch itself keeps in a module
_OF_MODULES = set(nn.Module().__dict__)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes (containers too) and random states; clear caches of results.

    Every forward pass that is not a training step runs within this context. The caches may hold tensors without data.
    Parameters are not copied, except for embeddings with `max_norm`, whose forward pass shortens rows: another
    parameter that is changed in place stays changed.
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
    """Functions that clear the caches (functools) of a model's methods and of its files' functions."""
    classes = {
        base for module in model.modules() for base in type(module).__mro__ if not base.__module__.startswith("torch.")
    }
    files = {name: sys.modules.get(name) for name in {cls.__module__ for cls in classes}}
    functions = [
        f for name, file in files.items() for f in vars(file or object).values() if getattr(f, "__module__", "") == name
    ]
    for function in (*functions, *(f for cls in classes for f in vars(cls).values())):
        # the function of a static or class method
        plain = getattr(function, "__func__", function)
        # a decorator may hold the cache
        for cached in (plain, *(getattr(plain, "__closure__", None) or ())):
            clear = getattr(getattr(cached, "cell_contents", cached), "cache_clear", None)
            if callable(clear):
                yield clear


def put_placeholders(model: nn.Module, recorder: Recorder, shapes: Shapes) -> None:
    """Replace parameters by meta tensors, and buffers by copies, until `restored` restores them."""
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


def kept_tensors(model: nn.Module, before: set[int]) -> list[Tensor]:
    """Results that the model's modules have stored in their attributes."""
    own = [{k: v for k, v in module.__dict__.items() if k not in _OF_MODULES} for module in model.modules()]
    return [x for x in tensors_within(own) if id(x) not in before]


def is_linear(module: nn.Module) -> bool:
    """True if the module computes x W (+ b) and nothing else.

    It is an `nn.Linear`, or `Conv1D` of transformers, whose weight is transposed.
    """
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`, with weight (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_embedding(module: nn.Module) -> bool:
    """True if the module looks up rows of its weight without needing all of them.

    A maximal norm or counts would need all.
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
    """The module, typed as one with a weight and perhaps a bias."""
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
