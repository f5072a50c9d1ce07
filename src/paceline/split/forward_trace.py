"""Trace of one forward pass, with module calls, operations and possible cuts.

A cut lists the tensors that cross from one stage to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from paceline.errors import PlanError


@dataclass
class Observed:
    """Observations of one forward pass, which remain available if the pass fails.

    Attributes:
        transformed: modules that are called within a transform of `torch.func` (vmap, grad).
        substituted: modules that are called with other tensors in place of their parameters
            (`torch.func.functional_call`).
        direct: modules whose `forward` is called directly, which bypasses all hooks.
        written: parameters that the forward pass changes, each with the operation that changes it.
        differentiates: True if the forward pass calls autograd, for example to compute a gradient penalty.
        writes_input: True if the batch is changed in place.
        checkpointed: start and end times of the model's activation checkpoints, on the trace's clock.
        reentrant: True if an activation checkpoint of the model is re-entrant.
        functions: start and end times of the forward passes of `torch.autograd.Function`s.
        keeps: (module, attribute) of lists and dictionaries in which modules keep tensors that depend on parameters.
        changes_attributes: True if modules change numbers or strings in their attributes, such as a counter.
    """

    transformed: set[str] = field(default_factory=set)
    substituted: set[str] = field(default_factory=set)
    direct: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)
    differentiates: bool = False
    writes_input: bool = False
    checkpointed: list[tuple[int, int]] = field(default_factory=list)
    reentrant: bool = False
    functions: list[tuple[int, int]] = field(default_factory=list)
    keeps: list[tuple[str, str]] = field(default_factory=list)
    changes_attributes: bool = False

    @contextmanager
    def of_autograd_and_checkpoints(self, clock: Callable[[], int]) -> Iterator[None]:
        """Record calls of autograd and activation checkpoints within this context."""
        autograd: Any = torch.autograd
        engine, generator = autograd._engine_run_backward, checkpointing._checkpoint_without_reentrant_generator

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.differentiates = True
            return engine(*args, **kwargs)

        def without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
            started = clock()
            yield from generator(*args, **kwargs)
            self.checkpointed.append((started, clock()))

        function = autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return function.__get__(None, cls)(*args, **kwargs)
            finally:
                self.functions.append((started, clock()))

        def note() -> None:
            self.reentrant = True

        with ExitStack() as stack:
            stack.callback(setattr, autograd, "_engine_run_backward", engine)
            stack.callback(setattr, checkpointing, "_checkpoint_without_reentrant_generator", generator)
            stack.callback(setattr, autograd.Function, "apply", function)
            autograd._engine_run_backward = run_backward
            autograd.Function.apply = classmethod(apply)
            checkpointing._checkpoint_without_reentrant_generator = without_reentrant
            stack.enter_context(without_reentrant_checkpoints(note))
            yield


@contextmanager
def without_reentrant_checkpoints(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run re-entrant activation checkpoints as non-reentrant ones, with the same results.

    Re-entrant checkpoints hide the autograd graph, but tensors from other stages must be found in this graph. As with
    re-entrant checkpoints, the output has no gradient if no input has a gradient.
    """
    original = checkpointing.CheckpointFunction

    class NotReentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            note()
            if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
                with torch.no_grad():
                    return function(*args)
            return checkpointing.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    checkpointing.CheckpointFunction = NotReentrant  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = original  # type: ignore[misc]


IN_TRANSFORM = (
    "pp: the model calls its modules within a transform of torch.func (vmap, grad), whose tensors cannot be sent from "
    "stage to stage: pp=1 (fsdp divides such a model)."
)


def refuse_unsupported_code(observed: Observed) -> None:
    """Raise an error if stages cannot compute the model's forward pass.

    Raises:
        PlanError: the forward pass calls autograd, or changes parameters.
    """
    if observed.differentiates:
        raise PlanError(
            "plan.autograd_in_forward",
            "pp: the model's forward pass runs autograd itself (torch.autograd.grad or backward). This call would "
            "have to run through other stages. Use pp=1 (fsdp divides such a model).",
        )
    for name, operation in observed.written.items():
        # the backward pass of an embedding does not read the weight, so the embedding may change it
        if not operation.startswith("aten.embedding_renorm_"):
            raise PlanError(
                "plan.parameter_changed_in_flight",
                "pp: the model's forward pass changes its parameter {name} ({operation}), but the backward passes of "
                "other microbatches still need the old values. Change the parameter after the optimizer's step "
                "instead, or use pp=1.",
                name=name,
                operation=operation,
            )


def can_be_exported(model: nn.Module, observed: Observed) -> bool:
    """True if a `torch.export` graph can replace the model's code.

    The graph cannot run backward hooks and cannot change module attributes.
    """
    if observed.transformed or observed.substituted or observed.keeps or observed.changes_attributes:
        return False
    return not any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())


Key = TypeVar("Key")
# identity of a tensor: (storage, shape, stride, offset)
Node = tuple[int, tuple[int, ...], tuple[int, ...], int]
# (module, number of its earlier calls in this forward pass)
CallKey = tuple[str, int]


@dataclass(frozen=True)
class TensorShape:
    """The size, dtype and `requires_grad` of a contiguous tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, t: Tensor) -> TensorShape:
        return cls(tuple(t.shape), t.dtype, t.requires_grad)

    def on(self, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor of this shape."""
        return torch.empty(self.size, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def zero(self, device: torch.device) -> Tensor:
        """Return zeros of this shape, which share the memory of a single number."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.size)


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        call_index: number of the module's earlier calls in this forward pass.
        parent: index of the enclosing module call, or -1.
        enter, leave: start and end of the call, on the trace's clock.
        leaves: the flattened output of the call, with a `TensorShape` for each tensor. `spec` is the structure of the
            output.
        nodes: for each leaf, the identity of its tensor; None if the leaf is not a tensor.
        uses_parameters: True if an operation in the call depends on a parameter.
    """

    name: str
    call_index: int
    parent: int
    enter: int
    leave: int = 0
    leaves: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    nodes: list[Node | None] = field(default_factory=list)
    uses_parameters: bool = False

    @property
    def key(self) -> CallKey:
        return self.name, self.call_index

    def output(self, leaves: Sequence[Any]) -> Any:
        assert self.spec is not None
        return tree_unflatten(list(leaves), self.spec)


@dataclass
class TracedOperation:
    """One operation of the trace."""

    time: int
    module_call: int
    reads: list[Node]
    makes: list[Node]
    changes: list[int]  # indices of the storages that the operation changes
    random: bool
    name: str
    looks: bool = False  # True if code can branch on values that the operation reads


@dataclass(frozen=True)
class Attribute:
    """A tensor that is an attribute of a module when the module is called."""

    module: str
    name: str
    node: Node
    requires_grad: bool


@dataclass(frozen=True)
class CutTensor:
    """A tensor that crosses a cut.

    Attributes:
        sources: (module, call index, leaf) for each call that returns the tensor before the cut.
        node: the tensor's identity.
        changed: True if code between the modules changes the tensor in place. Every stage runs such code.
    """

    sources: tuple[tuple[str, int, int], ...]
    node: Node
    shape: TensorShape
    changed: bool


@dataclass(frozen=True)
class Cut:
    """A possible cut, immediately before the call of module `before`.

    Attributes:
        time: the time of the call, on the trace's clock.
        values: the tensors that cross the cut.
        parameters: the parameters that are needed on both sides, because code between the modules applies them to
            tensors that cross the cut.
    """

    before: str
    time: int
    values: tuple[CutTensor, ...]
    parameters: frozenset[str]


@dataclass(eq=False)
class ForwardTrace:
    """Module calls and operations of one forward pass.

    Attributes:
        result: identities of the tensors that the model returns.
        parameters, buffers: the name of each parameter or buffer, by its storage.
        attributes: tensors that are attributes of modules.
        observed: all other observations.
        hooked: names of modules with backward hooks.
        end: end of the forward pass, on the trace's clock.
    """

    END = 1 << 62

    model: nn.Module
    observed: Observed
    module_calls: list[ModuleCall] = field(default_factory=list)
    steps: list[TracedOperation] = field(default_factory=list)
    result: list[Node] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    attributes: list[Attribute] = field(default_factory=list)
    hooked: set[str] = field(default_factory=set)
    end: int = 0

    def cut(self, before: str) -> Cut | str:
        """Return the cut before a module's first call, or why there is no cut."""
        first = next((v for v in self.module_calls if v.name == before), None)
        if first is None:
            return f"{before} is not called in the forward pass"
        time, done = first.enter, self.done(first.enter)
        if not done:
            return f"nothing is computed before {before}"
        if problem := self._problem_at(before, time, done):
            return f"a cut before {before}: {problem}"
        sources: dict[Node, list[tuple[ModuleCall, int]]] = defaultdict(list)
        for module_call in done:
            for i, node in enumerate(module_call.nodes):
                if node is not None:
                    sources[node].append((module_call, i))
        try:
            needed, parameters = self._needed(time, sources)
        except _NoCut as problem:
            return f"a cut before {before}: {problem}"
        changed = {
            storage for step in self.steps if not self._within(step.module_call, time) for storage in step.changes
        }
        values = [
            CutTensor(
                tuple((v.name, v.call_index, i) for v, i in found),
                node,
                found[-1][0].leaves[found[-1][1]],
                node[0] in changed,
            )
            for node, found in sources.items()
            if node in needed
        ]
        if not values:
            return f"a cut before {before}: nothing that comes before it is used after it"
        return Cut(before, time, tuple(values), frozenset(parameters))

    def _problem_at(self, before: str, time: int, done: Sequence[ModuleCall]) -> str | None:
        if before in self.observed.transformed or any(v.name in self.observed.transformed for v in done):
            return "the model calls modules inside of a transform of torch.func, whose tensors cannot be sent"
        for spans, what in (
            (self.observed.checkpointed, "as one activation checkpoint"),
            (self.observed.functions, "in one torch.autograd.Function, whose backward pass is its own"),
        ):
            if any(start < time < stop and any(v.enter > start for v in done) for start, stop in spans):
                return f"it would divide what the model computes {what}"
        for name, key in self.observed.keeps:
            if any(is_in(name, v.name) for v in done):
                return f"{name} keeps tensors in its {key}, from where later modules may take them"
        read = {self.buffers[n[0]] for s in self.steps if s.time < time for n in s.reads if n[0] in self.buffers}
        if late := read & self.buffers_changed_after(time):
            return f"the buffer {min(late)} is read before it, and changed after it for the next forward pass"
        for module_call in self.module_calls:
            if module_call.enter < time < module_call.leave and module_call.name in self.hooked:
                return f"{module_call.name or 'the model'} has a backward hook, which would see gradients of two stages"
        for module_call in done:
            if (name := module_call.name) in self.hooked:
                if self.model.get_submodule(name)._forward_hooks:
                    return f"{name} has forward and backward hooks"
                if any(v.name == name and v.enter > time for v in self.module_calls):
                    return f"{name} has a backward hook, and is called on both sides"
        return None

    def enters(self, module: str) -> int:
        """Return the time of a module's first call.

        The time is 0 if the module is not called, or if nothing is computed before the call.
        """
        time = next((v.enter for v in self.module_calls if v.name == module), 0)
        return time if self.done(time) else 0

    def done(self, time: int) -> list[ModuleCall]:
        """List the outermost module calls that ended before `time` and used parameters."""
        return [
            v for v in self.module_calls if v.uses_parameters and v.leave <= time and not self._ended(v.parent, time)
        ]

    def to_come(self, time: int) -> list[ModuleCall]:
        """List the outermost module calls that begin at `time` or later."""
        return [
            v
            for v in self.module_calls
            if v.enter >= time and (v.parent < 0 or self.module_calls[v.parent].enter < time)
        ]

    def used(self, start: int, stop: int) -> set[str]:
        """Return the parameters that are read between two times."""
        read = {node[0] for step in self.steps if start <= step.time < stop for node in step.reads}
        return {name for storage, name in self.parameters.items() if storage in read}

    def buffers_changed_after(self, time: int) -> set[str]:
        """Return the buffers that the forward pass changes at `time` or later."""
        return {self.buffers[s] for step in self.steps if step.time >= time for s in step.changes if s in self.buffers}

    def changed_elsewhere(self, module_call: ModuleCall) -> set[int]:
        """Return the indices of a call's output leaves that other code changes in place."""
        outside = {
            s for step in self.steps if not module_call.enter < step.time < module_call.leave for s in step.changes
        }
        return {i for i, node in enumerate(module_call.nodes) if node is not None and node[0] in outside}

    def _ended(self, module_call: int, time: int) -> bool:
        return module_call >= 0 and self.module_calls[module_call].leave <= time

    def _needed(self, time: int, sources: dict[Node, Any]) -> tuple[set[Node], set[str]]:
        """Return the nodes of `sources` that are used after `time`, and the needed parameters.

        Uses by code between modules are included, because every stage runs this code. `_NoCut` is raised if no cut is
        possible.
        """
        outside = [s for s in self.steps if s.time < time and not self._within(s.module_call, time)]
        updates = [s for s in outside if any(c in self.buffers for c in s.changes)]
        # Values that code reads are first in the list, so the search visits them last. Every stage may read a random
        # draw (layer drop).
        open_ = [
            (node, step.time) for step in outside if step.looks for node in step.reads if node[0] not in self.buffers
        ]
        looked_at = len(open_)
        open_ += self._read_after(time) + [
            (node, step.time) for step in updates for node in step.reads if node[0] not in self.buffers
        ]
        seen: set[tuple[Node, int]] = set()
        crossing: set[Node] = set()
        parameters: set[str] = set()
        only_looked_at = False
        while open_:
            node, read = open_.pop()
            only_looked_at = only_looked_at or len(open_) < looked_at
            if (node, read) in seen:
                continue
            seen.add((node, read))
            if node in sources:
                crossing.add(node)
                self._refuse_changed_since(node, read, time, [v for v, _ in sources[node]])
                changes = [
                    s for s in self._changers[node[0]] if s.time < time and not self._within(s.module_call, time)
                ]
                open_ += [(n, step.time) for step in changes for n in step.reads]
                parameters |= {self.parameters[n[0]] for step in changes for n in step.reads if n[0] in self.parameters}
                continue
            makers = [s for s in self._makers[node] if s.time < read]
            makers = [s for s in makers if not self._within(s.module_call, time)] or makers[-1:]
            for step in makers + [s for s in self._changers[node[0]] if s.time < time]:
                if inside := self._within(step.module_call, time):
                    returns = f", but a {strange}" if (strange := strange_type(inside.leaves)) else ""
                    raise _NoCut(
                        f"{inside.name} keeps a tensor {list(node[1])} for later and does not return it{returns}"
                    )
                if step.random and only_looked_at:
                    continue
                if step.random:
                    raise _NoCut(
                        f"what {step.name} draws before it is used after it, and each stage would draw its own"
                    )
                open_ += [(n, step.time) for n in step.reads]
                parameters |= {self.parameters[n[0]] for n in step.reads if n[0] in self.parameters}
        return crossing, parameters

    def _refuse_changed_since(self, node: Node, read: int, time: int, sources: Sequence[ModuleCall]) -> None:
        """Raise an error if a module changes a tensor after code between modules read it."""
        before = [s for s in self._changers[node[0]] if s.time < time]
        inside = [self._within(s.module_call, time) for s in before]
        late = [v for s, v in zip(before, inside, strict=True) if v is not None and read < time and s.time > read]
        mixed = any(v is None for v in inside) and any(
            v is not None and s.time > min(u.leave for u in sources) for s, v in zip(before, inside, strict=True)
        )
        if late or mixed:
            name = next(v for v in (*late, *inside) if v is not None).name
            raise _NoCut(f"{name} changes in place a tensor {list(node[1])} that the code between modules uses, too")

    def _read_after(self, time: int) -> list[tuple[Node, int]]:
        """List the tensors that are created before `time` and read later, with the times."""
        made: set[Node] = set()
        read = []
        for step in self.steps:
            if step.time > time:
                read += [(node, step.time) for node in step.reads if node not in made]
                made.update(step.makes)
        return read + [(node, self.end) for node in self.result if node not in made]

    def _within(self, module_call: int, time: int) -> ModuleCall | None:
        """Return the outermost finished call around an operation, if it uses parameters.

        A call is finished if it ended before `time`.
        """
        found = None
        while module_call >= 0:
            here = self.module_calls[module_call]
            if here.leave <= time and here.uses_parameters:
                found = here
            module_call = here.parent
        return found

    @cached_property
    def _makers(self) -> dict[Node, list[TracedOperation]]:
        return _by((node, step) for step in self.steps for node in step.makes)

    @cached_property
    def _changers(self) -> dict[int, list[TracedOperation]]:
        return _by((storage, step) for step in self.steps for storage in step.changes)


class _NoCut(Exception):
    """Raised if a model cannot be cut at a time; the message is the reason."""


def _by(pairs: Iterable[tuple[Key, TracedOperation]]) -> dict[Key, list[TracedOperation]]:
    found: dict[Key, list[TracedOperation]] = defaultdict(list)
    for key, step in pairs:
        found[key].append(step)
    return found


def is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def reachable(modules: Iterable[nn.Module], without: Collection[nn.Module]) -> set[nn.Module]:
    """Return the modules in `modules` that are reachable without passing through `without`."""
    found: set[nn.Module] = set()
    open_ = list(modules)
    while open_:
        module = open_.pop()
        if module not in without and module not in found:
            found.add(module)
            open_ += module.children()
    return found


def strange_type(leaves: Sequence[Any]) -> str | None:
    """Return the type of the first output leaf that could hide tensors, or None."""
    plain = (Tensor, TensorShape, int, float, str, type(None))
    return next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, plain)), None)
