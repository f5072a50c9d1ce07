"""A pipeline stage made from the model itself: the model's own forward pass, in which the other stages' modules are stand-ins."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.split.pipeline.forward_trace import Attribute, Call, Cut, Shape, Trace, Turn, Visit, is_in
from paceline.split.pipeline.observed import without_reentrant_checkpoints

Finish = Callable[[Any], Any]  # what the last stage does with the model's output
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


@dataclass
class Extent:
    """What a stage does in a forward pass for one shape of batch: `first` and `last` are its cuts, None at the ends of the model.

    Attributes:
        stands_in: the calls before the stage, and the outputs they had.
        ends: the calls behind it.
        changed_before_sending: the outputs that are sent as they were returned, whatever changes them in place afterwards.
        received, sent: the tensors that come in and go out.
    """

    trace: Trace
    first: Cut | None
    last: Cut | None
    stands_in: dict[Turn, Visit] = field(init=False)
    ends: set[Turn] = field(init=False)

    def __post_init__(self) -> None:
        self.stands_in = {v.key: v for v in self.trace.done(self.start)} if self.first else {}
        self.ends = {v.key for v in self.trace.to_come(self.stop)} if self.last else set()
        self._given = {s: i for i, value in enumerate(self.first.values) for s in value.sources} if self.first else {}
        self._changed = {key: self.trace.changed_elsewhere(v) for key, v in self.stands_in.items()}
        self._received_nodes = {value.node: i for i, value in enumerate(self.first.values)} if self.first else {}
        self.changed_before_sending = {s for value in self.last.values if value.changed for s in value.sources} if self.last else set()

    @property
    def start(self) -> int:
        return self.first.time if self.first else -1

    @property
    def stop(self) -> int:
        return self.last.time if self.last else Trace.END

    @property
    def received(self) -> list[Shape]:
        return [value.shape for value in self.first.values] if self.first else []

    @property
    def sent(self) -> list[Shape]:
        return [value.shape for value in self.last.values] if self.last else []

    def parameters(self) -> set[str]:
        """The parameters that the stage computes with."""
        return self.trace.used(self.start, self.stop) | (set(self.first.parameters) if self.first else set())

    def calls_module_of(self, parameter: str) -> bool:
        """Whether the innermost module around a parameter that is called at all is called here."""
        visits = [v for v in self.trace.visits if v.name and parameter.startswith(v.name + ".")]
        return bool(visits) and self.start <= max(visits, key=lambda v: len(v.name)).enter < self.stop

    def stand_in(self, key: Turn, received: tuple[Tensor, ...], device: torch.device) -> Any:
        """The output of a call before the stage: what was received where it was, zeros of the right shapes elsewhere."""
        visit = self.stands_in[key]
        leaves = list(visit.leaves)
        for i, leaf in enumerate(leaves):
            if (place := self._given.get((*key, i))) is not None:
                assert self.first is not None
                leaves[i] = received[place].clone() if self.first.values[place].changed else received[place]
            elif isinstance(leaf, Shape):
                leaves[i] = torch.zeros(leaf.size, dtype=leaf.dtype, device=device) if i in self._changed[key] else leaf.zero(device)
        return visit.output(leaves)

    def attributes(self, name: str) -> Iterator[tuple[Attribute, int]]:
        """What modules within `name` keep as attributes of what is received, each with the number of the received tensor."""
        for attribute in self.trace.attributes:
            if is_in(attribute.module, name) and attribute.node in self._received_nodes:
                yield attribute, self._received_nodes[attribute.node]

    def sources(self) -> list[tuple[str, int, int] | int]:
        """Where each sent tensor comes from: (module, turn, leaf) of a call of this stage, or the number of a received tensor."""
        found: list[tuple[str, int, int] | int] = []
        for value in self.last.values if self.last else ():
            passed = next((self._given[s] for s in value.sources if s in self._given), None)
            found.append(value.sources[-1] if passed is None else passed)
        return found


class _End(BaseException):
    """The stage's part of the forward pass is over. No `Exception`, so that no model's code takes it for an error of its own."""


@dataclass
class _Pass:
    """The forward pass under way."""

    extent: Extent
    received: tuple[Tensor, ...]
    turns: Counter[str] = field(default_factory=Counter)
    returned: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)


class Stage:
    """The `forward` of a stage's module: `(*received, batch)` to the tensors that the next stage needs, or to `finish(output)`.

    Attributes:
        module: a copy of the model's structure that holds this stage's parameters only, under their names. Calling it calls this.
        finish: applied to the model's output on the last stage.
    """

    def __init__(
        self, model: nn.Module, extent: Extent, extent_of: Callable[[Batch], Extent], call: Call, device: torch.device, own: set[str]
    ) -> None:
        self.call, self.device, self.extent_of = call, device, extent_of
        self.finish: Finish = as_it_is
        self._observed = extent.trace.observed
        self._is_last = extent.last is None
        self._pass: _Pass | None = None
        self.module = copied(model)
        give_away(self.module, model, own, device)
        self._stand_in_for_others(extent)
        leave_buffers(self.module, extent.trace.buffers_changed_after(extent.stop), device)
        root = self.module.__dict__
        self._as_model = {"forward": self.module.forward} | {kind: root[kind] for kind in _HOOKS}
        root.update({"forward": self._forward} | {kind: type(root[kind])() for kind in _HOOKS})

    def _forward(self, *received: Tensor, batch: Batch) -> Any:
        extent = self.extent_of(batch)
        self._pass = current = _Pass(extent, received)
        if self._observed.writes_input:
            batch = tree_map(torch.clone, batch)
        try:
            with self._the_model(), without_reentrant_checkpoints() if self._observed.reentrant else nullcontext():
                output = self.call(self.module, batch)
        except _End:
            output = None
        finally:
            self._pass = None
        if self._is_last:
            return self.finish(output)
        sent = tuple((received[s] if isinstance(s, int) else _returned(current, s)).contiguous() for s in extent.sources())
        return sent if len(sent) > 1 else sent[0]

    @contextmanager
    def _the_model(self) -> Iterator[None]:
        """Within, calling the stage's module is calling the model, with the hooks that its author put on it."""
        root = self.module.__dict__
        stage = {key: root[key] for key in self._as_model}
        root.update(self._as_model)
        try:
            yield
        finally:
            root.update(stage)

    def _stand_in_for_others(self, extent: Extent) -> None:
        modules = dict(self.module.named_modules())
        calls = Counter(visit.name for visit in extent.trace.visits)
        away = extent.stands_in.keys() | extent.ends
        never = {n for n in {n for n, _ in away} if sum(n == name for name, _ in away) == calls[n]}  # called for real
        _forget([modules[n] for n in never], self.module, self.device)
        for name in {name for name, _ in away}:
            modules[name].__dict__["forward"] = partial(self._turn, name, modules[name].forward)
        for name in {s[0] for s in extent.sources() if not isinstance(s, int)}:
            module, keep = modules[name], partial(self._keep, name, name in {n for n, _ in away})
            if name in self._observed.direct:  # past all hooks
                module.__dict__["forward"] = partial(_then, module.forward, partial(keep, module, ()))
            elif module._backward_hooks or module._backward_pre_hooks:  # they are put on the output after all forward hooks
                module.__dict__["_call_impl"] = partial(_then, module._call_impl, partial(keep, module, ()))
            else:
                module.register_forward_hook(keep, prepend=True)

    def _turn(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._pass
        if current is None:
            return forward(*args, **kwargs)
        key = name, current.turns[name]
        current.turns[name] += 1
        if key in current.extent.ends:
            raise _End
        if key in current.extent.stands_in:
            for attribute, i in current.extent.attributes(name):
                kept = current.received[i] if attribute.requires_grad else current.received[i].detach()
                setattr(self.module.get_submodule(attribute.module), attribute.name, kept)
            return current.extent.stand_in(key, current.received, self.device)
        return forward(*args, **kwargs)

    def _keep(self, name: str, counted: bool, module: nn.Module, args: Any, output: Any) -> None:
        current = self._pass
        if current is None:
            return
        if not counted:
            current.turns[name] += 1
        turn = current.turns[name] - 1
        for i, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                changes = (name, turn, i) in current.extent.changed_before_sending
                current.returned[name, turn, i] = leaf.clone() if changes else leaf


def copied(model: nn.Module) -> nn.Module:
    """The same tree of modules, with the same parameters, buffers and other attributes; what is set on a copy does not show in the model.

    Functions that a module keeps as attributes or hooks, and that are bound to a module or have captured one, get its copy instead; so do
    lists, tuples and dictionaries that hold modules.
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


def give_away(copy_: nn.Module, model: nn.Module, own: set[str], device: torch.device) -> None:
    """Replace the parameters that are not `own` in a copy of `model` by zeros of their shape that are no parameters.

    Code of the model may still ask for their dtype or device, or compute with them what nobody uses.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for module in copy_.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and names[id(parameter)] not in own:
                del module._parameters[name]
                module.__dict__[name] = Shape(tuple(parameter.shape), parameter.dtype, False).zero(device)


def leave_buffers(copy_: nn.Module, others: set[str], device: torch.device) -> None:
    """Make buffers that another stage changes plain attributes of a stage's modules, so that nothing outdated is saved."""
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
    """Take the buffers and hooks from modules that only stand in, and from those in them that nobody else has.

    Forward hooks of a stand-in itself stay, as they may pass on its output; of those before it only users'.
    """
    others: set[nn.Module] = set()
    _reachable(root, set(away), others)
    for module in away:
        for part in module.modules():
            if part in others:
                continue
            for hooks in _HOOKS if part is not module else ("_forward_pre_hooks",):
                kept = () if part is not module else part.__dict__[hooks].items()
                made = type(part.__dict__[hooks])()
                made.update({k: hook for k, hook in kept if not _is_a_librarys(hook)})
                part.__dict__[hooks] = made
            for hooks in _BACKWARD_HOOKS:
                part.__dict__[hooks] = type(part.__dict__[hooks])()
            for name in list(part._buffers):
                _no_buffer(part, name, device)


def _no_buffer(module: nn.Module, name: str, device: torch.device) -> None:
    """Make a buffer a plain attribute, without values where it has none yet."""
    buffer = module._buffers.pop(name)
    module._non_persistent_buffers_set.discard(name)
    if buffer is not None and buffer.is_meta:
        buffer = Shape(tuple(buffer.shape), buffer.dtype, False).zero(device)
    module.__dict__[name] = buffer


def _is_a_librarys(hook: Any) -> bool:
    """Whether a hook before a module makes its weights (`torch.nn.utils`) or divides its input (tensor parallel)."""
    made_by = hook.func if isinstance(hook, partial) else hook
    where = str(getattr(made_by, "__module__", None) or type(made_by).__module__)
    return where.startswith(("torch.nn.utils", "paceline."))


def _reachable(module: nn.Module, without: set[nn.Module], found: set[nn.Module]) -> None:
    if module not in without and module not in found:
        found.add(module)
        for child in module.children():
            _reachable(child, without, found)


def _then(forward: Callable[..., Any], keep: Callable[[Any], None], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    keep(output)
    return output


def _returned(current: _Pass, source: tuple[str, int, int]) -> Tensor:
    if source not in current.returned:
        raise PlanError(
            f"pp: {source[0]} was not called as when the pipeline was built, so what the next stage needs is not there. A model that calls "
            "other modules from batch to batch (layer drop, early exit) cannot be cut there; switch that off, or train without pp."
        )
    return current.returned[source]


def as_it_is(output: Any) -> Any:
    """The output of a stage that makes nothing else of it."""
    return output
