"""Recording of one forward pass without computing values that depend on parameters."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from paceline.device import forked_random
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.job.loss_items import first_line
from paceline.planning.model.record import OperationMode
from paceline.planning.model.recorder import restored, tensors_in, without_logs, written_tensors
from paceline.split.forward_trace import (
    Attribute,
    ForwardTrace,
    ModuleCall,
    Node,
    Observed,
    TensorShape,
    TracedOperation,
    strange_type,
)
from paceline.split.layout import KEPT_UP_TO_DATE, replace_tensors

# maps (model, batch) to the model's output
Call = Callable[[Any, Batch], Any]


def trace_forward(
    model: nn.Module,
    batch: Batch,
    call: Call,
    device: torch.device,
    whole: set[str],
    remembered: dict[str, Any] | None = None,
    observed: Observed | None = None,
) -> ForwardTrace:
    """Trace one forward pass.

    Parameters have shapes but no memory (torch's fake tensors). Values that do not depend on a parameter, such as
    positions and masks, are real, so the model's code may read them. A module may also read values that depend on
    parameters, such as the routing of a mixture of experts. Such a module runs separately with random weights to find
    the shape of its output.

    Args:
        model: a model with parameters on the meta device or real parameters, whose values are not read.
        whole: names of modules that must not run with random weights, because they contain nearly all weights of the
            model.
        remembered: for each module that ran separately, the inputs whose shapes its outputs have. The function adds
            entries, which later traces use.
        observed: object that gets all other observations, even if the forward pass fails.

    Raises:
        PlanError: code outside of the modules that can run separately reads values that depend on parameters.
    """
    recorder = _Recorder(
        model, device, whole, {} if remembered is None else remembered, Observed() if observed is None else observed
    )
    recorder.run(batch, call)
    return recorder.trace


_NOT_KEPT = ("_parameters", "_buffers", "_modules", *KEPT_UP_TO_DATE)


class _Recorder:
    def __init__(
        self, model: nn.Module, device: torch.device, whole: set[str], remembered: dict[str, Any], observed: Observed
    ) -> None:
        self.trace = ForwardTrace(model, observed)
        self.trace.hooked = {n for n, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks}
        self.model, self.device, self.observed = model, device, observed
        self._whole, self._remembered = whole, remembered
        self._clock, self._current, self._call_counts = 0, -1, Counter[str]()
        self._watching, self._stuck = True, ""
        self._own: dict[nn.Module, dict[str, Any]] = {}  # each module's fake parameters
        self._inputs: set[int] = set()
        self._open = Counter[nn.Module]()  # active calls of `__call__`
        self._running = Counter[nn.Module]()  # active calls of `forward`, including calls that bypass `__call__`
        self._undecided: list[tuple[ModuleCall, int, Tensor]] = []
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # references to storages, so that no address is reused
        self._depends: set[int] = set()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, batch: Batch, call: Call) -> None:
        batch = tree_map_only(
            Tensor,
            lambda t: values_or_zeros(t, self.device),
            batch if isinstance(batch, dict) else tuple(batch) if isinstance(batch, (tuple, list)) else dict(batch),
        )
        self._inputs = {self._storage(t) for t in tree_leaves(batch) if isinstance(t, Tensor)}
        with restored(self.model):
            before = {name: dict(vars(module)) for name, module in self.model.named_modules()}
            self._without_memory()
            self._patch()
            with (
                quiet(),
                torch.enable_grad(),
                forked_random(self.device),
                self.observed.of_autograd_and_checkpoints(lambda: self._clock),
                OperationMode(self._note_operation),
            ):
                output = call(self.model, batch)
            self._note_attributes(before)
        for module_call, i, leaf in self._undecided:
            module_call.leaves[i] = TensorShape.of(leaf)
        self._undecided.clear()
        self.trace.result = [self._node(t) for t in _tensors_of(output)]
        self.trace.end = self._clock
        self._kept.clear()

    def _without_memory(self) -> None:
        """Replace parameters with fakes and buffers with copies, until `restored` restores them."""
        names = {t: n for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}

        def fake(p: Tensor) -> Tensor:
            made = self._fake(p)
            self.trace.parameters[storage := self._storage(made)] = names[p]
            self._depends.add(storage)
            return made

        def copied(b: Tensor) -> Tensor:
            made = self._fake(b) if b.is_meta else b.detach().to(self.device, copy=True)
            self.trace.buffers[self._storage(made)] = names[b]
            return made

        replace_tensors(self.model, fake, copied)
        self._own = {module: dict(module._parameters) for module in self.model.modules()}

    def _note_attributes(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the tensors and other values that modules stored as attributes."""
        for name, module in self.model.named_modules():
            for key, value in vars(module).items():
                old = before[name].get(key)
                if isinstance(value, Tensor) and value is not old and self._storage(value) in self._depends:
                    self.trace.attributes.append(Attribute(name, key, self._node(value), value.requires_grad))
                elif isinstance(value, (list, dict)) and key not in _NOT_KEPT:
                    if any(isinstance(t, Tensor) and self._storage(t) in self._depends for t in tree_leaves(value)):
                        self.observed.keeps.append((name, key))
                elif isinstance(value, (int, float, str)) and value != old:
                    self.observed.changes_attributes = True

    def _patch(self) -> None:
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
        index, call_counts = len(self.trace.module_calls), self._call_counts.copy()
        self._call_counts[name] += 1
        module_call = ModuleCall(name, call_counts[name], self._current, self._tick())
        self.trace.module_calls.append(module_call)
        self._current = index
        self._running[module] += 1
        try:
            output = forward(*args, **kwargs)
        except RuntimeError as error:
            self._stuck = self._stuck or name
            if name in self._whole or not name:
                raise self._looks_at_values(error) from error
            del self.trace.module_calls[index + 1 :]
            self._call_counts = call_counts
            self._call_counts[name] += 1
            self._current = index
            output = self._run_alone(name, module, forward, args, kwargs)
            self._stuck = ""
        finally:
            self._current = module_call.parent
            self._running[module] -= 1
        leaves, module_call.spec = tree_flatten(output)
        module_call.leaves = [TensorShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        module_call.nodes = [self._node(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        module_call.uses_parameters |= any(node is not None and node[0] in self._depends for node in module_call.nodes)
        # a re-entrant checkpoint may set requires_grad later
        if not torch.is_grad_enabled():
            self._undecided += [(module_call, i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        module_call.leave = self._tick()
        return output

    def _observe(self, name: str, module: nn.Module) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            self.observed.transformed.add(name)
        if any(p is not self._own[module].get(key) for key, p in module._parameters.items()):
            self.observed.substituted.add(name)
        if self._open[module] <= self._running[module]:
            self.observed.direct.add(name)

    def _looks_at_values(self, error: RuntimeError) -> BaseException:
        if isinstance(error, PlanError):
            return error
        kind = type(self.model.get_submodule(self._stuck)).__name__
        where = f"{self._stuck} ({kind})" if self._stuck else f"the model ({kind})"
        return PlanError(
            "plan.not_followed",
            "pp: {where} cannot be traced without its weights: its code depends on values of tensors, has arguments "
            "other than tensors, or fails: {reason}. Move this code into a module below the blocks that takes and "
            "returns tensors, or train without pp.",
            where=where,
            reason=first_line(error),
        )

    def _run_alone(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that cannot be traced, with random weights and inputs."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in self._remembered:
            spec, like = self._remembered[name]
            output = tree_unflatten([self._fake(inputs[i]) for i in like], spec)
        else:
            output = self._random_output(module, forward, args, kwargs)
            leaves, spec = tree_flatten(output)
            if strange := strange_type(leaves):
                raise PlanError(
                    "plan.stage_output",
                    "pp: {name} returns a {type}. Stages can pass on only tensors, or tuples and dictionaries of "
                    "tensors.",
                    name=name,
                    type=strange,
                )
            kinds = {(t.shape, t.dtype): i for i, t in reversed(list(enumerate(inputs)))}
            like = [kinds.get((leaf.shape, leaf.dtype)) if isinstance(leaf, Tensor) else None for leaf in leaves]
            if None not in like:
                self._remembered[name] = spec, like
            output = tree_map(lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf, output)
        made = [t.requires_grad_(t.is_floating_point()) for t in tree_leaves(output) if isinstance(t, Tensor)]
        self._note(name, [*inputs, *module.parameters()], made, [])
        return output

    def _random_output(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def real(t: Any) -> Any:
            return plausible(t, self.device) if isinstance(t, FakeTensor) else t

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

    def _note(
        self, name: str, read: Sequence[Tensor], made: Sequence[Tensor], changed: Sequence[Tensor], *tags: torch.Tag
    ) -> None:
        random = torch.Tag.nondeterministic_seeded in tags
        looks = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        reads = [self._node(t) for t in read]
        changes = [self._storage(t) for t in changed]
        self.observed.written |= {self.trace.parameters[s]: name for s in changes if s in self.trace.parameters}
        self.observed.writes_input |= any(s in self._inputs for s in changes)
        # exclude tensors that the operation only passes on
        makes = [node for t in made if (node := self._node(t)) not in reads]
        if any(node[0] in self._depends for node in reads):
            self._depends.update([node[0] for node in makes], changes)
            at = self._current
            while at >= 0:
                self.trace.module_calls[at].uses_parameters = True
                at = self.trace.module_calls[at].parent
        self.trace.steps.append(
            TracedOperation(self._tick(), self._current, reads, makes, changes, random, name, looks)
        )

    def _note_operation(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # operations in the namespace prim read only devices and sizes
        if not self._watching or func.namespace == "prim":
            return
        changed = written_tensors(func, args, kwargs)
        self._note(str(func), tensors_in((args, kwargs)), tensors_in(output), changed, *func.tags)

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


def values_or_zeros(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; return zeros if only its shape is known."""
    return torch.zeros(t.shape, dtype=t.dtype, device=device) if t.is_meta else t.detach().to(device, copy=True)


def plausible(t: Tensor, device: torch.device) -> Tensor:
    """Return random values in the usual range of weights and activations."""
    if t.is_floating_point():
        return torch.empty(t.shape, dtype=t.dtype, device=device).normal_(std=0.02)
    return torch.full(t.shape, t.dtype == torch.bool, dtype=t.dtype, device=device)


def _tensors_of(output: Any) -> Iterator[Tensor]:
    """List the tensors in a model's output that a loss can use, without caches."""
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
    """Silence torch's logs and warnings about tensors without values.

    paceline reports such problems with its own errors, or tries another method.
    """
    with without_logs(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
