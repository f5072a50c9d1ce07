"""Pipeline stages: the model's own forward pass, with placeholders for other stages' modules.

There are two kinds of stages, because neither supports every model. A `TracedStage` runs the model's own code. This
kind is used if modules return all tensors that later modules need. It supports control flow that depends on data
(routing in a mixture of experts), and its blocks can be recomputed, compiled and sharded separately. An `ExportedStage`
runs a graph of `torch.export`. This kind is used only if the code cannot be cut at the blocks, for example because
modules pass tensors to later modules in a list, or code between modules draws random numbers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.split.forward_trace import (
    Attribute,
    CallKey,
    Cut,
    ForwardTrace,
    TensorShape,
    is_in,
    reachable,
    without_reentrant_checkpoints,
)
from paceline.split.record_forward import Call

# function that the last stage applies to the model's output
Finish = Callable[[Any], Any]
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


class StageBounds(Protocol):
    """Bounds of a stage for one batch shape: `TracedBounds` or `StageGraph`.

    Attributes:
        trace: the trace of the forward pass; None for a graph of `torch.export`.
        received, sent: the tensors that the stage receives and sends.
    """

    received: list[TensorShape]
    sent: list[TensorShape]

    @property
    def trace(self) -> ForwardTrace | None: ...

    def parameters(self) -> set[str]:
        """Parameters that the stage computes with."""

    def calls_module_of(self, parameter: str) -> bool:
        """True if the stage calls the innermost called module around a parameter."""


class Stage:
    """A stage, whose `_forward` replaces the forward pass of the stage's module.

    `_forward` maps `(*received, batch)` to the tensors that the next stage needs, or to `finish(output)` on the last
    stage.

    Attributes:
        module: a copy of the model's structure with only this stage's parameters, under their original names. A call of
            the module runs this stage.
        finish: function that the last stage applies to the model's output.
    """

    def __init__(self, model: nn.Module, own: set[str], device: torch.device, *, is_last: bool) -> None:
        self.finish: Finish = identity
        self._device, self._is_last = device, is_last
        self.module = copied(model)
        drop_parameters(self.module, model, own, device)

    def _forward(self, *received: Tensor, batch: Batch) -> Any:
        computed = self._compute(received, batch)
        if self._is_last:
            return self.finish(computed)
        sent = tuple(t.contiguous() for t in computed)
        return sent if len(sent) > 1 else sent[0]

    def _compute(self, received: tuple[Tensor, ...], batch: Batch) -> Any:
        raise NotImplementedError


@dataclass
class TracedBounds:
    """Bounds of a stage in a traced forward pass, for one batch shape.

    `first` and `last` are the cuts before and after the stage; None at the ends of the model.

    Attributes:
        start, stop: start and end of the stage, on the trace's clock.
        placeholders: the module calls before the stage, with their outputs.
        ends: calls of modules that come after the stage.
        changed_before_sending: the outputs that later code changes in place, so they must be copied before they are
            sent.
    """

    trace: ForwardTrace
    first: Cut | None
    last: Cut | None

    def __post_init__(self) -> None:
        trace, first, last = self.trace, self.first, self.last
        self.start, self.stop = first.time if first else -1, last.time if last else ForwardTrace.END
        self.placeholders = {v.key: v for v in trace.done(self.start)} if first else {}
        self.ends = {v.key for v in trace.to_come(self.stop)} if last else set()
        self._arriving, self._leaving = first.values if first else (), last.values if last else ()
        self.received, self.sent = [v.shape for v in self._arriving], [v.shape for v in self._leaving]
        self._given = {s: i for i, value in enumerate(self._arriving) for s in value.sources}
        self._changed = {key: trace.changed_elsewhere(v) for key, v in self.placeholders.items()}
        self._received_nodes = {value.node: i for i, value in enumerate(self._arriving)}
        self.changed_before_sending = {s for value in self._leaving if value.changed for s in value.sources}

    def parameters(self) -> set[str]:
        """Parameters that the stage computes with."""
        return self.trace.used(self.start, self.stop) | (set(self.first.parameters) if self.first else set())

    def calls_module_of(self, parameter: str) -> bool:
        """True if the stage calls the innermost called module around a parameter."""
        module_calls = [v for v in self.trace.module_calls if v.name and parameter.startswith(v.name + ".")]
        return bool(module_calls) and self.start <= max(module_calls, key=lambda v: len(v.name)).enter < self.stop

    def placeholder_output(self, key: CallKey, received: tuple[Tensor, ...], device: torch.device) -> Any:
        """Return the output of a call before the stage.

        The output contains received tensors. All other tensors in the output are zeros of the correct shape.
        """
        module_call = self.placeholders[key]
        leaves = list(module_call.leaves)
        for i, leaf in enumerate(leaves):
            if (place := self._given.get((*key, i))) is not None:
                leaves[i] = received[place].clone() if self._arriving[place].changed else received[place]
            elif isinstance(leaf, TensorShape):
                leaves[i] = (
                    torch.zeros(leaf.size, dtype=leaf.dtype, device=device)
                    if i in self._changed[key]
                    else leaf.zero(device)
                )
        return module_call.output(leaves)

    def attributes(self, name: str) -> Iterator[tuple[Attribute, int]]:
        """Yield module attributes in `name` that are received tensors, with the tensors' indices."""
        for attribute in self.trace.attributes:
            if is_in(attribute.module, name) and attribute.node in self._received_nodes:
                yield attribute, self._received_nodes[attribute.node]

    def sources(self) -> list[tuple[str, int, int] | int]:
        """Return the source of each sent tensor.

        A source is (module, call index, leaf) for a call in this stage, or the index of a received tensor.
        """
        return [
            next((self._given[s] for s in value.sources if s in self._given), value.sources[-1])
            for value in self._leaving
        ]


class _End(BaseException):
    """Raised to end the forward pass after the last module of the stage.

    The class derives from `BaseException`, so that the model's code does not catch it.
    """


@dataclass
class _Pass:
    bounds: TracedBounds
    received: tuple[Tensor, ...]
    call_counts: Counter[str] = field(default_factory=Counter)
    returned: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)


class TracedStage(Stage):
    """A stage that runs the model's code, with placeholders for other stages' modules.

    Hooks, counters, activation checkpoints, and sharded or compiled blocks work unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        bounds: TracedBounds,
        bounds_of: Callable[[Batch], TracedBounds],
        call: Call,
        device: torch.device,
        own: set[str],
    ) -> None:
        super().__init__(model, own, device, is_last=bounds.last is None)
        self.call, self.bounds_of = call, bounds_of
        self._observed = bounds.trace.observed
        self._pass: _Pass | None = None
        self._install_placeholders(bounds)
        drop_buffers(self.module, bounds.trace.buffers_changed_after(bounds.stop), device)
        root = self.module.__dict__
        self._as_model = {"forward": self.module.forward} | {kind: root[kind] for kind in _HOOKS}
        root.update({"forward": self._forward} | {kind: type(root[kind])() for kind in _HOOKS})

    def _compute(self, received: tuple[Tensor, ...], batch: Batch) -> Any:
        bounds = self.bounds_of(batch)
        self._pass = current = _Pass(bounds, received)
        if self._observed.writes_input:
            batch = tree_map(torch.clone, batch)
        output = None
        try:
            with self._the_model(), without_reentrant_checkpoints() if self._observed.reentrant else nullcontext():
                output = self.call(self.module, batch)
        except _End:
            pass
        finally:
            self._pass = None
        if self._is_last:
            return output
        return [received[s] if isinstance(s, int) else _returned(current, s) for s in bounds.sources()]

    @contextmanager
    def _the_model(self) -> Iterator[None]:
        """Return a context in which the stage's module behaves like the model."""
        root = self.module.__dict__
        stage = {key: root[key] for key in self._as_model}
        root.update(self._as_model)
        try:
            yield
        finally:
            root.update(stage)

    def _install_placeholders(self, bounds: TracedBounds) -> None:
        modules = dict(self.module.named_modules())
        calls = Counter(module_call.name for module_call in bounds.trace.module_calls)
        away = bounds.placeholders.keys() | bounds.ends
        # modules that this stage never computes
        never = {n for n in {n for n, _ in away} if sum(n == name for name, _ in away) == calls[n]}
        _forget([modules[n] for n in never], self.module, self._device)
        for name in {name for name, _ in away}:
            modules[name].__dict__["forward"] = partial(self._run_or_replace, name, modules[name].forward)
        for name in {s[0] for s in bounds.sources() if not isinstance(s, int)}:
            module, keep = modules[name], partial(self._keep, name, name in {n for n, _ in away})
            # its forward is called directly, without hooks
            if name in self._observed.direct:
                module.__dict__["forward"] = partial(_then, module.forward, partial(keep, module, ()))
            # torch registers backward hooks on the output after all forward hooks
            elif module._backward_hooks or module._backward_pre_hooks:
                module.__dict__["_call_impl"] = partial(_then, module._call_impl, partial(keep, module, ()))
            else:
                module.register_forward_hook(keep, prepend=True)

    def _run_or_replace(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._pass
        if current is None:
            return forward(*args, **kwargs)
        key = name, current.call_counts[name]
        current.call_counts[name] += 1
        if key in current.bounds.ends:
            raise _End
        if key in current.bounds.placeholders:
            for attribute, i in current.bounds.attributes(name):
                kept = current.received[i] if attribute.requires_grad else current.received[i].detach()
                setattr(self.module.get_submodule(attribute.module), attribute.name, kept)
            return current.bounds.placeholder_output(key, current.received, self._device)
        return forward(*args, **kwargs)

    def _keep(self, name: str, counted: bool, module: nn.Module, args: Any, output: Any) -> None:
        current = self._pass
        if current is None:
            return
        if not counted:
            current.call_counts[name] += 1
        index = current.call_counts[name] - 1
        for i, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                changes = (name, index, i) in current.bounds.changed_before_sending
                current.returned[name, index, i] = leaf.clone() if changes else leaf


def copied(model: nn.Module) -> nn.Module:
    """Copy the tree of modules, but share parameters, buffers and other attributes.

    Attributes that are set on the copy do not affect the model. A module may have functions as attributes or hooks,
    which may be bound to a module or may have captured a module. In the copy, such functions refer to the copy of this
    module. The same applies to lists, tuples and dictionaries of modules.
    """
    copies: dict[int, nn.Module] = {}
    for module in model.modules():
        new = copies[id(module)] = module.__class__.__new__(module.__class__)
        new.__dict__.update(module.__dict__)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS, *_BACKWARD_HOOKS):
            new.__dict__[name] = copy.copy(module.__dict__[name])
    for new in copies.values():
        for name, child in new._modules.items():
            if child is not None:
                new._modules[name] = copies[id(child)]
        for name, value in new.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules", *_HOOKS, *_BACKWARD_HOOKS):
                new.__dict__[name] = _bound(value, copies)
        for hooks in (*_HOOKS, *_BACKWARD_HOOKS):
            for key, hook in new.__dict__[hooks].items():
                new.__dict__[hooks][key] = _bound(hook, copies)
    return copies[id(model)]


def drop_parameters(copy_: nn.Module, model: nn.Module, own: set[str], device: torch.device) -> None:
    """In a model's copy, replace every parameter that is not in `own` with zeros.

    The zeros are not parameters. The model's code may still read their dtype or device, or compute values that are not
    used.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for module in copy_.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and names[id(parameter)] not in own:
                del module._parameters[name]
                module.__dict__[name] = TensorShape(tuple(parameter.shape), parameter.dtype, False).zero(device)


def drop_buffers(copy_: nn.Module, others: set[str], device: torch.device) -> None:
    """Turn buffers that another stage changes into plain attributes.

    Checkpoints then contain no stale values of these buffers.
    """
    for name, module in copy_.named_modules():
        for key, buffer in list(module._buffers.items()):
            if f"{name}.{key}".lstrip(".") in others and buffer is not None:
                _no_buffer(module, key, device)


def _bound(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    if isinstance(value, partial):
        args = [_bound(a, copies) for a in value.args]
        return partial(_bound(value.func, copies), *args, **{k: _bound(v, copies) for k, v in value.keywords.items()})
    if isinstance(value, FunctionType):
        return _bound_function(value, copies)
    if type(value) in (list, tuple):
        items = [_bound(x, copies) for x in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        entries = {key: _bound(x, copies) for key, x in value.items()}
        return value if all(entries[key] is x for key, x in value.items()) else entries
    return value


def _bound_function(function: FunctionType, copies: Mapping[int, nn.Module]) -> FunctionType:
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    bound, defaults = [_bound(x, copies) for x in held], _bound(function.__defaults__, copies)
    if defaults is function.__defaults__ and all(new is old for new, old in zip(bound, held, strict=True)):
        return function
    cells = tuple(map(CellType, bound)) if function.__closure__ else None
    copy_ = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    copy_.__kwdefaults__, copy_.__dict__ = function.__kwdefaults__, function.__dict__
    return copy_


def _forget(away: Sequence[nn.Module], root: nn.Module, device: torch.device) -> None:
    """Remove buffers and hooks from placeholder modules and their exclusive submodules.

    A placeholder keeps its forward hooks, because they may pass on the output. It also keeps the pre-forward hooks of
    users.
    """
    others = reachable([root], without=away)
    for module in away:
        for part in module.modules():
            if part in others:
                continue
            for hooks in _HOOKS if part is not module else ("_forward_pre_hooks",):
                kept = () if part is not module else part.__dict__[hooks].items()
                part.__dict__[hooks] = type(part.__dict__[hooks])(
                    (key, hook) for key, hook in kept if not _is_a_librarys(hook)
                )
            for hooks in _BACKWARD_HOOKS:
                part.__dict__[hooks] = type(part.__dict__[hooks])()
            for name in list(part._buffers):
                _no_buffer(part, name, device)


def _no_buffer(module: nn.Module, name: str, device: torch.device) -> None:
    """Turn a buffer into a plain attribute, with zeros if it has no values."""
    buffer = module._buffers.pop(name)
    module._non_persistent_buffers_set.discard(name)
    if buffer is not None and buffer.is_meta:
        buffer = TensorShape(tuple(buffer.shape), buffer.dtype, False).zero(device)
    module.__dict__[name] = buffer


def _is_a_librarys(hook: Any) -> bool:
    """Return True if a pre-forward hook belongs to a library.

    For example, `torch.nn.utils` computes weights in such hooks, and tensor parallelism divides inputs in them.
    """
    made_by = hook.func if isinstance(hook, partial) else hook
    where = str(getattr(made_by, "__module__", None) or type(made_by).__module__)
    return where.startswith(("torch.nn.utils", "paceline."))


def _then(forward: Callable[..., Any], keep: Callable[[Any], None], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    keep(output)
    return output


def _returned(current: _Pass, source: tuple[str, int, int]) -> Tensor:
    if source not in current.returned:
        raise PlanError(
            "plan.stage_called_differently",
            "pp: the arguments of {name} differ from its arguments when the pipeline was built, so the next stage "
            "lacks its input. A model that calls different modules for different batches (layer drop, early exit) "
            "cannot be cut at this module. Switch this behavior off, or train without pp.",
            name=source[0],
        )
    return current.returned[source]


def identity(output: Any) -> Any:
    """Return the output of a stage unchanged."""
    return output
