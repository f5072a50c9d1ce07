"""Trace of one forward pass on shapes: module calls, operations, and possible cuts.

Nothing is computed. A cut knows the tensors that cross it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.split.pipeline.observed import Observed, in_transform, restored_afterwards

# (model, batch) -> the model's output
Call = Callable[[Any, Batch], Any]
# identity of a tensor: (storage, shape, stride, offset)
Node = tuple[int, tuple[int, ...], tuple[int, ...], int]
# (module, number of its earlier calls in this forward pass)
CallKey = tuple[str, int]


@dataclass(frozen=True)
class TensorShape:
    """Shape, dtype and `requires_grad` of a contiguous tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def on(self, device: torch.device | str) -> Tensor:
        """An uninitialised tensor of this shape."""
        return torch.empty(self.size, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def zero(self, device: torch.device) -> Tensor:
        """An expanded zero of this shape, which takes almost no memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.size)


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        call_index: number of the module's earlier calls in this forward pass.
        parent: index of the calling module's call, or -1.
        enter, leave: start and end, on the trace's clock.
        leaves: its output, flattened (tensors as `TensorShape`), to be put together by `spec`.
        nodes: the leaves' tensor identities; None for other leaves.
        uses_parameters: True if something in it depends on a parameter.
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
        """An output of the same structure."""
        assert self.spec is not None
        return tree_unflatten(list(leaves), self.spec)


@dataclass
class TracedOperation:
    """One operation of the trace."""

    time: int
    module_call: int
    reads: list[Node]
    makes: list[Node]
    changes: list[int]  # storages
    random: bool
    name: str
    looks: bool = False  # whether code can decide by values that are read


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module keeps as an attribute when it is called."""

    module: str
    name: str
    node: Node
    requires_grad: bool


@dataclass(frozen=True)
class CutTensor:
    """A tensor that crosses a cut.

    Attributes:
        sources: (module, call index, leaf) of the calls before the cut that return it.
        node: its identity.
        changed: True if code between the modules, which every stage runs, changes it in place.
    """

    sources: tuple[tuple[str, int, int], ...]
    node: Node
    shape: TensorShape
    changed: bool


@dataclass(frozen=True)
class Cut:
    """A possible cut, just before module `before` is called.

    Attributes:
        time: the time of that call, on the trace's clock.
        values: the tensors that cross.
        parameters: the parameters that both sides need, since code between the modules uses them on crossing tensors.
    """

    before: str
    time: int
    values: tuple[CutTensor, ...]
    parameters: frozenset[str]


class ForwardTrace:
    """Module calls and operations of one forward pass.

    The modules run with parameters that have shapes and no memory (torch's fake tensors), and everything that does not depend on a
    parameter (positions, masks) is computed for real, so code may read its values. A module whose code reads values that do depend on
    parameters (the routing of a mixture of experts) is run alone with random weights, and its output's shape is taken from that.

    Args:
        model: parameters on the meta device or real; they are not read.
        whole: names of modules that may not be run with real weights, since they hold (nearly) all of them.
        remembered: for modules that had to be run, the input that each output resembles; filled here, and used by later traces.
        observed: receives all other observations, also of a forward pass that fails.

    Raises:
        PlanError: the model's own code, outside of the modules that could be run alone, reads values.
    """

    END = 1 << 62

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        call: Call,
        device: torch.device,
        *,
        whole: set[str],
        remembered: dict[str, Any] | None = None,
        observed: Observed | None = None,
    ) -> None:
        self.model, self.device, self._whole = model, device, whole
        self._remembered = {} if remembered is None else remembered
        self.module_calls: list[ModuleCall] = []
        self.steps: list[TracedOperation] = []
        self.result: list[Node] = []
        # parameter names by storage
        self.parameters: dict[int, str] = {}
        self._clock, self._current, self._call_counts = 0, -1, Counter[str]()
        self._watching, self._stuck = True, ""
        self.observed = Observed() if observed is None else observed
        # each module's fake parameters
        self._own: dict[nn.Module, dict[str, Any]] = {}
        self._inputs: set[int] = set()
        # buffer names by storage
        self._buffers: dict[int, str] = {}
        # active calls, by `__call__`
        self._open = Counter[nn.Module]()
        # active calls, by `forward`, with those that bypass `__call__`
        self._running = Counter[nn.Module]()
        self._undecided: list[tuple[ModuleCall, int, Tensor]] = []
        self.attributes: list[Attribute] = []
        self._with_backward_hooks = {n for n, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks}
        self._storages: dict[int, int] = {}
        # storages, so that no address is used twice
        self._kept: list[Any] = []
        self._depends: set[int] = set()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._run(batch, call)
        self._kept.clear()
        self._makers: dict[Node, list[TracedOperation]] = defaultdict(list)
        self._changers: dict[int, list[TracedOperation]] = defaultdict(list)
        for step in self.steps:
            for node in step.makes:
                self._makers[node].append(step)
            for storage in step.changes:
                self._changers[storage].append(step)

    # Queries

    def cut(self, before: str) -> Cut | str:
        """The cut before the first call of a module, or a reason against it."""
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
        needed, parameters, problem = self._needed(time, sources)
        if problem:
            return f"a cut before {before}: {problem}"
        changed = {storage for step in self.steps if not self._within(step.module_call, time) for storage in step.changes}
        values = [
            CutTensor(tuple((v.name, v.call_index, i) for v, i in found), node, found[-1][0].leaves[found[-1][1]], node[0] in changed)
            for node, found in sources.items()
            if node in needed
        ]
        if not values:
            return f"a cut before {before}: nothing that comes before it is used after it"
        return Cut(before, time, tuple(values), frozenset(parameters))

    def _problem_at(self, before: str, time: int, done: Sequence[ModuleCall]) -> str | None:
        """Reason why a model cannot be cut at a time, whatever crosses there; or None."""
        if before in self.observed.transformed or any(v.name in self.observed.transformed for v in done):
            return "the model calls modules inside of a transform of torch.func, whose tensors cannot be sent"
        if any(start < time < stop and any(v.enter > start for v in done) for start, stop in self.observed.checkpointed):
            return "it would divide what the model computes as one activation checkpoint"
        if any(start < time < stop and any(v.enter > start for v in done) for start, stop in self.observed.functions):
            return "it would divide what the model computes in one torch.autograd.Function, whose backward pass is its own"
        for name, key in self.observed.keeps:
            if any(is_in(name, v.name) for v in done):
                return f"{name} keeps tensors in its {key}, from where later modules may take them"
        late = self.buffers_changed_after(time)
        if read := {self._buffers[n[0]] for s in self.steps if s.time < time for n in s.reads if n[0] in self._buffers} & late:
            return f"the buffer {min(read)} is read before it, and changed after it for the next forward pass"
        for module_call in self.module_calls:
            if module_call.enter < time < module_call.leave and module_call.name in self._with_backward_hooks:
                return f"{module_call.name or 'the model'} has a backward hook, which would see gradients of two stages"
        for module_call in done:
            if module_call.name in self._with_backward_hooks and self.model.get_submodule(module_call.name)._forward_hooks:
                return f"{module_call.name} has forward and backward hooks"
            if module_call.name in self._with_backward_hooks and any(
                v.name == module_call.name and v.enter > time for v in self.module_calls
            ):
                return f"{module_call.name} has a backward hook, and is called on both sides"
        return None

    def enters(self, module: str) -> int:
        """Time of a module's first call; 0 without one, or without earlier computation."""
        time = next((v.enter for v in self.module_calls if v.name == module), 0)
        return time if self.done(time) else 0

    def done(self, time: int) -> list[ModuleCall]:
        """Outermost calls that ended before `time` and computed with parameters."""
        return [v for v in self.module_calls if v.uses_parameters and v.leave <= time and not self._ended(v.parent, time)]

    def to_come(self, time: int) -> list[ModuleCall]:
        """Outermost calls that begin at `time` or later."""
        return [v for v in self.module_calls if v.enter >= time and (v.parent < 0 or self.module_calls[v.parent].enter < time)]

    def used(self, start: int, stop: int) -> set[str]:
        """Parameters that are read between two times."""
        read = {node[0] for step in self.steps if start <= step.time < stop for node in step.reads}
        return {name for storage, name in self.parameters.items() if storage in read}

    def buffers_changed_after(self, time: int) -> set[str]:
        """Buffers that the forward pass changes at `time` or later."""
        return {self._buffers[s] for step in self.steps if step.time >= time for s in step.changes if s in self._buffers}

    def changed_elsewhere(self, module_call: ModuleCall) -> set[int]:
        """Indices of a call's output leaves that other code changes in place."""
        outside = {s for step in self.steps if not module_call.enter < step.time < module_call.leave for s in step.changes}
        return {i for i, node in enumerate(module_call.nodes) if node is not None and node[0] in outside}

    def _ended(self, module_call: int, time: int) -> bool:
        return module_call >= 0 and self.module_calls[module_call].leave <= time

    def _needed(self, time: int, sources: dict[Node, Any]) -> tuple[set[Node], set[str], str | None]:
        """Nodes of `sources` used after `time`, parameters needed for them, and a problem or None.

        Uses by the code between modules count, since every stage runs it.
        """
        outside = [s for s in self.steps if s.time < time and not self._within(s.module_call, time)]
        updates = [s for s in outside if any(c in self._buffers for c in s.changes)]
        # What code looks at comes first in the list and so last in the search; a draw (layer drop) may be looked at on every stage.
        open_ = [(node, step.time) for step in outside if step.looks for node in step.reads if node[0] not in self._buffers]
        looked_at = len(open_)
        open_ += self._read_after(time) + [(node, step.time) for step in updates for node in step.reads if node[0] not in self._buffers]
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
                if problem := self._changed_since(node, read, time, [v for v, _ in sources[node]]):
                    return crossing, parameters, problem
                changes = [s for s in self._changers[node[0]] if s.time < time and not self._within(s.module_call, time)]
                open_ += [(n, step.time) for step in changes for n in step.reads]
                parameters |= {self.parameters[n[0]] for step in changes for n in step.reads if n[0] in self.parameters}
                continue
            makers = [s for s in self._makers[node] if s.time < read]
            makers = [s for s in makers if not self._within(s.module_call, time)] or makers[-1:]
            for step in makers + [s for s in self._changers[node[0]] if s.time < time]:
                if inside := self._within(step.module_call, time):
                    strange = _strange(inside.leaves)
                    returns = f", but a {strange}" if strange else ""
                    return (
                        crossing,
                        parameters,
                        f"{inside.name} keeps a tensor {list(node[1])} for later and does not return it{returns}",
                    )
                if step.random and only_looked_at:
                    continue
                if step.random:
                    return crossing, parameters, f"what {step.name} draws before it is used after it, and each stage would draw its own"
                open_ += [(n, step.time) for n in step.reads]
                parameters |= {self.parameters[n[0]] for n in step.reads if n[0] in self.parameters}
        return crossing, parameters, None

    def _changed_since(self, node: Node, read: int, time: int, sources: Sequence[ModuleCall]) -> str | None:
        """Problem with reading a tensor again in a later stage, or None.

        Code between modules read it at `read`, and a module may have changed it since.
        """
        before = [s for s in self._changers[node[0]] if s.time < time]
        inside = [self._within(s.module_call, time) for s in before]
        late = [v for s, v in zip(before, inside, strict=True) if v is not None and read < time and s.time > read]
        mixed = any(v is None for v in inside) and any(
            v is not None and s.time > min(u.leave for u in sources) for s, v in zip(before, inside, strict=True)
        )
        if late or mixed:
            name = next(v for v in (*late, *inside) if v is not None).name
            return f"{name} changes in place a tensor {list(node[1])} that the code between modules uses, too"
        return None

    def _read_after(self, time: int) -> list[tuple[Node, int]]:
        """Tensors that are read after `time` and were made before it, each with its time."""
        made: set[Node] = set()
        read = []
        for step in self.steps:
            if step.time > time:
                read += [(node, step.time) for node in step.reads if node not in made]
                made.update(step.makes)
        return read + [(node, self._clock) for node in self.result if node not in made]

    def _within(self, module_call: int, time: int) -> ModuleCall | None:
        """Outermost call around an operation that ended before `time` and depends on parameters."""
        found = None
        while module_call >= 0:
            here = self.module_calls[module_call]
            if here.leave <= time and here.uses_parameters:
                found = here
            module_call = here.parent
        return found

    # Construction

    def _run(self, batch: Batch, call: Call) -> None:
        batch = tree_map(
            lambda t: _real(t, self.device),
            batch if isinstance(batch, dict) else tuple(batch) if isinstance(batch, (tuple, list)) else dict(batch),
        )
        self._inputs = {self._storage(t) for t in tree_leaves(batch) if isinstance(t, Tensor)}
        with restored_afterwards(self.model):
            before = {name: dict(vars(module)) for name, module in self.model.named_modules()}
            self._without_memory()
            self._patch()
            with (
                quiet(),
                torch.enable_grad(),
                torch.random.fork_rng(_gpus(self.device)),
                self.observed.of_autograd_and_checkpoints(lambda: self._clock),
                _OperationMode(self),
            ):
                output = call(self.model, batch)
            self._note_attributes(before)
        for module_call, i, leaf in self._undecided:
            module_call.leaves[i] = _shape(leaf)
        self._undecided.clear()
        self.result = [self._node(t) for t in _tensors_of(output)]

    def _without_memory(self) -> None:
        """Replace parameters by fakes and buffers by copies, until `restored_afterwards` restores them."""
        made: dict[int, Tensor] = {}
        names, buffers = ({id(t): n for n, t in named} for named in (self.model.named_parameters(), self.model.named_buffers()))
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in made:
                    made[id(p)] = fake = self._fake(p)
                    self.parameters[storage := self._storage(fake)] = names[id(p)]
                    self._depends.add(storage)
                module._parameters[name] = None if p is None else made[id(p)]  # type: ignore[assignment]
            for name, b in module._buffers.items():
                if b is not None and id(b) not in made:
                    made[id(b)] = copy_ = self._fake(b) if b.is_meta else b.detach().to(self.device, copy=True)
                    self._buffers[self._storage(copy_)] = buffers[id(b)]
                module._buffers[name] = None if b is None else made[id(b)]
            self._own[module] = dict(module._parameters)

    def _note_attributes(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the tensors that modules kept as attributes, and other state that they keep."""
        for name, module in self.model.named_modules():
            for key, value in vars(module).items():
                old = before[name].get(key)
                if isinstance(value, Tensor) and value is not old and self._storage(value) in self._depends:
                    self.attributes.append(Attribute(name, key, self._node(value), value.requires_grad))
                elif isinstance(value, (list, dict)) and key not in ("_parameters", "_buffers", "_modules"):
                    if any(isinstance(t, Tensor) and self._storage(t) in self._depends for t in tree_leaves(value)):
                        self.observed.keeps.append((name, key))
                elif isinstance(value, (int, float, str)) and value != old:
                    self.observed.changes_attributes = True

    def _patch(self) -> None:
        """Let every module report its calls, until `restored_afterwards` restores it."""
        for name, module in self.model.named_modules():
            module.__dict__["forward"] = partial(self._run_module, name, module, module.forward)
            module.__dict__["_call_impl"] = partial(self._called, module, module._call_impl)

    def _called(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._open[module] += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._open[module] -= 1

    def _run_module(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._watching:
            return forward(*args, **kwargs)
        self._observe(name, module)
        index, call_counts = len(self.module_calls), self._call_counts.copy()
        self._call_counts[name] += 1
        module_call = ModuleCall(name, call_counts[name], self._current, self._tick())
        self.module_calls.append(module_call)
        self._current = index
        self._running[module] += 1
        try:
            output = forward(*args, **kwargs)
        except RuntimeError as error:
            self._stuck = self._stuck or name
            if name in self._whole or not name:
                raise self._looks_at_values(error) from error
            del self.module_calls[index + 1 :]
            self._call_counts = call_counts
            self._call_counts[name] += 1
            self._current = index
            output = self._run_alone(name, module, forward, args, kwargs)
            self._stuck = ""
        finally:
            self._current = module_call.parent
            self._running[module] -= 1
        leaves, module_call.spec = tree_flatten(output)
        module_call.leaves = [_shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        module_call.nodes = [self._node(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        module_call.uses_parameters |= any(node is not None and node[0] in self._depends for node in module_call.nodes)
        # a re-entrant checkpoint may set requires_grad later
        if not torch.is_grad_enabled():
            self._undecided += [(module_call, i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        module_call.leave = self._tick()
        return output

    def _observe(self, name: str, module: nn.Module) -> None:
        if in_transform():
            self.observed.transformed.add(name)
        if any(p is not self._own[module].get(key) for key, p in module._parameters.items()):
            self.observed.substituted.add(name)
        if self._open[module] <= self._running[module]:
            self.observed.direct.add(name)

    def _looks_at_values(self, error: RuntimeError) -> BaseException:
        if isinstance(error, PlanError):
            return error
        first = next(iter(str(error).splitlines()), type(error).__name__)
        kind = type(self.model.get_submodule(self._stuck)).__name__
        where = f"{self._stuck} ({kind})" if self._stuck else f"the model ({kind})"
        return PlanError(
            f"pp: {where} cannot be followed without its weights, as its own code decides by values that depend on them, "
            f"takes something else than tensors, or fails: {first}. Move that decision into a module that takes and returns tensors, "
            "below the blocks, or train without pp."
        )

    def _run_alone(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Output of a module that cannot be followed, computed with random weights and input."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in self._remembered:
            spec, like = self._remembered[name]
            output = tree_unflatten([self._fake(inputs[i]) for i in like], spec)
        else:
            output = self._random_output(module, forward, args, kwargs)
            leaves, spec = tree_flatten(output)
            if strange := _strange(leaves):
                raise PlanError(f"pp: {name} returns a {strange}; what a stage passes on are tensors, alone or in tuples and dictionaries")
            like = [
                next((i for i, t in enumerate(inputs) if t.shape == leaf.shape and t.dtype == leaf.dtype), None)
                if isinstance(leaf, Tensor)
                else None
                for leaf in leaves
            ]
            if None not in like:
                self._remembered[name] = spec, like
            output = tree_map(lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf, output)
        made = [t.requires_grad_(t.is_floating_point()) for t in tree_leaves(output) if isinstance(t, Tensor)]
        self.note(name, [*inputs, *module.parameters()], made, [], random=False)
        return output

    def _random_output(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def real(t: Any) -> Any:
            return _random(t, self.device) if isinstance(t, FakeTensor) else t

        held = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
        self._watching = False
        try:
            for m, parameters, buffers in held:
                m._parameters.update({k: real(p) for k, p in parameters.items()})
                m._buffers.update({k: real(b) for k, b in buffers.items()})
            with torch.no_grad():
                return forward(*tree_map(real, args), **tree_map(real, kwargs))
        finally:
            for m, parameters, buffers in held:
                m._parameters.update(parameters)
                m._buffers.update(buffers)
            self._watching = True

    def note(
        self, name: str, read: Sequence[Tensor], made: Sequence[Tensor], changed: Sequence[Tensor], *, random: bool, looks: bool = False
    ) -> None:
        """Record an operation."""
        reads = [self._node(t) for t in read]
        changes = [self._storage(t) for t in changed]
        self.observed.written |= {self.parameters[s]: name for s in changes if s in self.parameters}
        self.observed.writes_input |= any(s in self._inputs for s in changes)
        # an operation did not make the tensors that it only passes on
        makes = [node for t in made if (node := self._node(t)) not in reads]
        if any(node[0] in self._depends for node in reads):
            self._depends.update([node[0] for node in makes], changes)
            at = self._current
            while at >= 0:
                self.module_calls[at].uses_parameters = True
                at = self.module_calls[at].parent
        self.steps.append(TracedOperation(self._tick(), self._current, reads, makes, changes, random, name, looks))

    @property
    def watching(self) -> bool:
        return self._watching

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _storage(self, t: Tensor) -> int:
        storage = t.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = len(self._kept)
            self._kept.append(storage)
        return self._storages[storage._cdata]

    def _node(self, t: Tensor) -> Node:
        return self._storage(t), tuple(t.shape), tuple(t.stride()), int(t.storage_offset())

    def _fake(self, t: Tensor) -> Tensor:
        with self._fakes:
            made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device)
        return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made


class _OperationMode(TorchDispatchMode):
    """Dispatch mode that reports every operation to the trace."""

    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # the namespace prim asks for devices and sizes only
        if self.trace.watching and func.namespace != "prim":
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            made = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            changed = [
                t
                for i, a in enumerate(func._schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
                for t in tree_leaves(args[i] if i < len(args) else kwargs.get(a.name))
                if isinstance(t, Tensor)
            ]
            looks = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
            self.trace.note(str(func), read, made, changed, random=torch.Tag.nondeterministic_seeded in func.tags, looks=looks)
        return output


def is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _shape(t: Tensor) -> TensorShape:
    return TensorShape(tuple(t.shape), t.dtype, t.requires_grad)


def _real(t: Any, device: torch.device) -> Any:
    """An example's tensor on the device; zeros if only its shape is known."""
    if not isinstance(t, Tensor):
        return t
    return torch.zeros(t.shape, dtype=t.dtype, device=device) if t.is_meta else t.detach().to(device, copy=True)


def _random(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of plausible values for a weight or an activation."""
    if t.is_floating_point():
        return torch.empty(t.shape, dtype=t.dtype, device=device).normal_(std=0.02)
    return (
        torch.zeros(t.shape, dtype=t.dtype, device=device) if t.dtype != torch.bool else torch.ones(t.shape, dtype=t.dtype, device=device)
    )


def _tensors_of(output: Any) -> Iterator[Tensor]:
    """Tensors in a model's output that a loss can use. Caches, which are objects, are skipped."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors_of(item)
    elif hasattr(output, "values") and callable(output.values):
        for item in output.values():
            yield from _tensors_of(item)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's logs and warnings about tensors without values. Failures are reported by our own errors, or tried in another way."""
    logs = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _strange(leaves: Sequence[Any]) -> str | None:
    """Type name of the first leaf of an output that could hide tensors, or None."""
    return next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, TensorShape, int, float, str, type(None)))), None)


def _gpus(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
