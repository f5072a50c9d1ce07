"""The cuts of a model into pipeline stages, and the tensors that cross them.

For a batch of another shape, the model may run other code. The model is therefore traced once per shape.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.device import forked_random, synchronize
from paceline.errors import PlanError
from paceline.job.batch import Batch, place, rows
from paceline.job.loss_items import first_line
from paceline.partition import contiguous, starts
from paceline.planning.limits import even_cuts, too_many_stages, wrong_cuts
from paceline.planning.model.forward_pass import find_blocks
from paceline.planning.model.recorder import restored
from paceline.planning.plan import Plan
from paceline.split.exported_stages import ExportedStage, StageGraph, exported
from paceline.split.forward_trace import (
    IN_TRANSFORM,
    Cut,
    ForwardTrace,
    Observed,
    TensorShape,
    can_be_exported,
    refuse_unsupported_code,
)
from paceline.split.layout import replace_tensors
from paceline.split.record_forward import Call, plausible, trace_forward, values_or_zeros
from paceline.split.stages import Stage, StageBounds, TracedBounds, TracedStage

_SHAPES_KEPT = 8
# The fastest run is used. The first runs have cold caches, and other work on the machine may slow down later runs.
_RUNS = 8
_MEASURED_BYTES = 64 * 2**20  # largest output of a module while segments are measured
Device = torch.device

T = TypeVar("T")


class CutModel:
    """An undivided model, and the modules before which its stages begin.

    Attributes:
        model: the undivided model on the meta device.
        call: function that runs the model on a batch.
        blocks: names of the model's repeated blocks.
        names: names of the modules before which a stage begins, in order.
        by_export: True if `torch.export` must trace the model.
        lines: lines of the report about places where the model cannot be cut.

    Args:
        stages: the number of stages.
        example: one microbatch.

    Raises:
        PlanError: the model cannot be cut into these stages. The message names the possible cuts.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, stages: int, example: Batch, call: Call, device: torch.device
    ) -> None:
        self.model, self.call = model, call
        self.blocks = find_blocks(model)
        self.lines: list[str] = []
        self._stages, self._device = stages, device
        self._whole = {name.rsplit(".", i)[0] for name in self.blocks for i in range(1, name.count(".") + 1)}
        self._remembered: dict[str, Any] = {}
        self._bounds = NewestByShape[Sequence[StageBounds]](device)
        self.by_export, self.names = self._choose(example, plan)

    def bounds(self, batch: Batch, *, training: bool) -> Sequence[StageBounds]:
        """Return the bounds of each stage for batches of this shape.

        `training` selects the mode of the modules, because a graph of `torch.export` is valid for one mode only.
        """

        def traced() -> Sequence[StageBounds]:
            if self.by_export:
                return self._export(batch, self.names, training)
            trace = self._trace(batch)
            return [TracedBounds(trace, *ends) for ends in pairwise([None, *_cuts(trace, self.names), None])]

        return self._bounds.of(batch, training and self.by_export, traced)

    def stage(
        self, i: int, stage_bounds: Sequence[Any], bounds_of: Callable[[Batch], Sequence[Any]], own: set[str]
    ) -> Stage:
        """Create stage `i` with the parameters `own`.

        `bounds_of` returns the bounds of all stages for a batch of any shape.
        """
        if self.by_export:
            return ExportedStage(self.model, i, stage_bounds, lambda b: bounds_of(b)[i], self._device, own)
        return TracedStage(self.model, stage_bounds[i], lambda b: bounds_of(b)[i], self.call, self._device, own)

    def segments(self, example: Batch) -> tuple[list[str], list[float]]:
        """Return the modules that could begin a stage, and the segments' durations in seconds.

        The segments are the parts of the model between these modules. All ranks must call this function together. Both
        lists are empty if `torch.export` traces the model, or if there is too little memory.
        """
        if self.by_export:
            return [], []
        trace = self._trace(example)
        cuts, _ = possible_cuts(trace, self.blocks)
        try:
            own = self._costs(trace, cuts, example)
        except torch.OutOfMemoryError:
            own = [math.inf] * (len(cuts) + 1)
        found = self._slowest(own)
        return ([cut.before for cut in cuts], found) if math.isfinite(sum(found)) else ([], [])

    def forget(self) -> None:
        """Delete the cached bounds of all shapes."""
        self._bounds.clear()

    def _choose(self, example: Batch, plan: Plan) -> tuple[bool, list[str]]:
        """Choose the modules before which the model is cut.

        The first value is True if `torch.export` must trace the model.
        """
        names = plan.cut.split(",") if plan.cut else []
        modules = [name for name, _ in self.model.named_modules() if name]
        if names and (reason := wrong_cuts(plan, modules, self.blocks)):
            raise PlanError.of_problems([reason])
        trace: ForwardTrace | None = None
        try:
            trace = self._trace(example)
        except PlanError as error:
            cuts, reasons = list[Cut](), [IN_TRANSFORM] if self._observed.transformed else str(error).splitlines()
        refuse_unsupported_code(self._observed)
        if trace is not None:
            cuts, reasons = named_cuts(trace, names) if names else possible_cuts(trace, self.blocks)
            if reason := too_many_stages(plan, len(cuts) + 1, f"the model can be cut into {len(cuts) + 1} at most"):
                more = f" {reasons[0]}." if reasons else ""
                reasons = [f"{reason.text.removesuffix('.')} (fsdp and tp divide any model).{more}"]
        # the model cannot be cut at every block
        if reasons:
            names = names or even_cuts(self.blocks, self._stages)
            problem = self._why_not_exported(example, names)
            if problem is None:
                return True, names
            if len(cuts) + 1 < self._stages:
                raise PlanError(
                    "plan.not_cut", "{reasons}", reasons="\n".join([*reasons, problem] if problem else reasons)
                )
            self.lines.append(f"pp: not every block can begin a stage: {reasons[0]}")
        assert trace is not None, "without a trace there are no cuts, and that was raised"
        return False, [cut.before for cut in self._balanced(trace, cuts, example)]

    def _why_not_exported(self, example: Batch, names: Sequence[str]) -> str | None:
        """Return why `torch.export` cannot be used.

        The result is "" if the model's code does not permit the use of `torch.export`, and None if `torch.export`
        works.
        """
        if not names or not can_be_exported(self.model, self._observed):
            return ""
        try:
            self._export(example, names, self.model.training)
        except PlanError as error:
            return str(error)
        return None

    def _balanced(self, trace: ForwardTrace, cuts: list[Cut], example: Batch) -> list[Cut]:
        """Choose the cuts that minimize the time of the slowest stage."""
        # no choice is left, but a run finds stages that cannot be computed separately
        if len(cuts) + 1 == self._stages:
            self._costs(trace, cuts, example, runs=1)
            return cuts
        seconds = self._slowest(self._costs(trace, cuts, example))
        return [cuts[i - 1] for i in starts(contiguous(seconds, self._stages))]

    def _costs(self, trace: ForwardTrace, cuts: Sequence[Cut], example: Batch, *, runs: int = _RUNS) -> list[float]:
        """Measure the segments with so few samples that activations take little memory."""
        samples, few = rows(example), _few_samples(trace, rows(example))
        if few < samples:
            fewer = tree_map(lambda t: t[:few], example)
            with suppress(PlanError):  # the model's code may differ for so few samples
                traced = self._trace(fewer)
                trace, cuts, example = traced, _cuts(traced, [cut.before for cut in cuts]), fewer
        return costs(self.model, trace, cuts, example, self.call, self._device, runs=runs)

    def _slowest(self, own: list[float]) -> list[float]:
        """Return the durations of the segments on the slowest rank, in seconds."""
        seconds = torch.tensor(own, dtype=torch.float64, device=self._device)
        # the maximum over all ranks, because every replica and every shard of a stage must be cut at the same modules
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return list(seconds.tolist())

    def _trace(self, batch: Batch) -> ForwardTrace:
        observed = Observed()
        self._observed = observed
        known = self._whole, self._remembered, observed
        return trace_forward(self.model, batch, self.call, self._device, *known)

    def _export(self, batch: Batch, names: Sequence[str], training: bool) -> list[StageGraph]:
        with restored(self.model):
            # layers that the user keeps in eval mode stay in eval mode
            if self.model.training != training:
                self.model.train(training)
            return exported(self.model, names, batch, self.call, self._device)


class NewestByShape(Generic[T]):
    """Cache of values for the newest batch shapes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[Any, T] = OrderedDict()

    def of(self, batch: Batch, further: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value for this batch shape and `further`, or create the value."""
        key = self._shapes(batch), further
        if key not in self._kept:
            self._kept[key] = make()
            while len(self._kept) > _SHAPES_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def clear(self) -> None:
        """Remove all values."""
        self._kept.clear()

    def _shapes(self, batch: Batch) -> Hashable:
        """Return a cache key for the shapes of a batch.

        The key omits the width of floats, because FSDP2 casts the inputs of a stage.
        """
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return autocast, *((key, tuple(t.shape), t.is_floating_point() or t.dtype) for key, t in items)


def _cuts(trace: ForwardTrace, names: Sequence[str]) -> list[Cut]:
    cuts = [trace.cut(name) for name in names]
    if problems := [cut for cut in cuts if isinstance(cut, str)]:
        raise PlanError(
            "plan.stage_depends_on_shape",
            "pp: with a batch of another shape, the computation of the model differs: {problems}",
            problems="; ".join(problems),
        )
    return [cut for cut in cuts if isinstance(cut, Cut)]


def named_cuts(trace: ForwardTrace, names: Sequence[str]) -> tuple[list[Cut], list[str]]:
    """Return the cuts before named modules, and why other cuts need torch.export.

    Raises:
        PlanError: the model cannot be cut at one of the modules, or the names are not in the order of the calls.
    """
    cuts = [trace.cut(name) for name in names]
    good = [cut for cut in cuts if isinstance(cut, Cut)]
    reasons = [cut for cut in cuts if isinstance(cut, str)]
    places = [trace.enters(name) for name in names]
    problems = [reason for reason, place in zip(cuts, places, strict=True) if isinstance(reason, str) and not place]
    in_order = [name for _, name in sorted(zip(places, names, strict=True))]
    if not problems and in_order != list(names):
        problems.append(f"the modules are called in the order {','.join(in_order)}; name them so")
    if problems:
        raise PlanError(
            "plan.cut_impossible",
            "{problems}",
            problems="\n".join(f"cut={','.join(names)}: {problem}" for problem in problems),
        )
    return good, reasons


def possible_cuts(trace: ForwardTrace, blocks: Sequence[str]) -> tuple[list[Cut], list[str]]:
    """Return the possible cuts in order, and why there is no cut at other blocks.

    A model can be cut before its blocks, and between outermost modules if a single tensor crosses the cut.
    """
    cuts: dict[int, Cut] = {}
    reasons = []
    inside = tuple(f"{name}." for name in blocks)
    seen: set[str] = set()
    for module_call in trace.module_calls:
        if not module_call.name or module_call.name in seen or module_call.name.startswith(inside):
            continue
        seen.add(module_call.name)
        cut = trace.cut(module_call.name)
        if isinstance(cut, str):
            reasons += [cut] if module_call.name in blocks[1:] else []
        elif module_call.name in blocks or len(cut.values) == 1:
            cuts[cut.time] = cut
    found: list[Cut] = []
    for cut in (cuts[at] for at in sorted(cuts)):
        # Two cuts without computation between them are a single cut, which has the name of the outer module.
        if trace.used(found[-1].time if found else -1, cut.time):
            found.append(cut)
    if found and not trace.used(found[-1].time, ForwardTrace.END):
        found.pop()
    return found, reasons


def _few_samples(trace: ForwardTrace, samples: int) -> int:
    """Return the number of samples for a measurement, which is at least 2.

    The largest output of a module has at most `_MEASURED_BYTES` for this number.
    """
    shapes = [leaf for call in trace.module_calls for leaf in call.leaves if isinstance(leaf, TensorShape)]
    largest = max((math.prod(shape.size) * shape.dtype.itemsize for shape in shapes), default=0)
    return min(samples, max(2, samples * _MEASURED_BYTES // max(1, largest)))  # a batch norm needs 2 samples


def costs(
    model: nn.Module,
    trace: ForwardTrace,
    cuts: Sequence[Cut],
    batch: Batch,
    call: Call,
    device: torch.device,
    *,
    runs: int = _RUNS,
) -> list[float]:
    """Measure the time of a forward and a backward pass for each segment.

    Return `len(cuts) + 1` durations in seconds.

    Each segment runs separately with random weights, like a stage of a pipeline. Segments with the same types of
    modules, parameters and activations are measured only once. The last segment does not include the loss.

    Ranks that share a segment with tensor parallelism must call this function together, because the segment runs
    collectives.

    Raises:
        PlanError: a segment cannot be computed separately from the others.
    """
    measured: dict[Any, float] = {}
    found = []
    for first, last in pairwise([None, *cuts, None]):
        bounds = TracedBounds(trace, first, last)
        likeness = _likeness(model, bounds)
        if likeness not in measured:
            with restored(model):
                measured[likeness] = _measure(model, bounds, batch, call, device, runs)
        found.append(measured[likeness])
    return found


def _likeness(model: nn.Module, bounds: TracedBounds) -> Any:
    parameters = dict(model.named_parameters())
    modules = tuple(
        type(model.get_submodule(v.name)).__qualname__
        for v in bounds.trace.module_calls
        if v.enter >= bounds.start and v.leave <= bounds.stop
    )
    shapes = sorted((tuple(parameters[n].shape), str(parameters[n].dtype)) for n in bounds.parameters())
    return modules, tuple(shapes), tuple(bounds.received), tuple(bounds.sent)


def _measure(
    model: nn.Module, bounds: TracedBounds, batch: Batch, call: Call, device: torch.device, runs: int
) -> float:
    try:
        stage = TracedStage(model, bounds, lambda _: bounds, call, device, bounds.parameters())
        return min(_times(stage, bounds, place(batch, device, dtype=None, channels_last=False), device, runs))
    except (PlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        where = f"from {bounds.first.before}" if bounds.first else "from the beginning"
        until = f"to before {bounds.last.before}" if bounds.last else "to the end"
        raise PlanError(
            "plan.stage_not_separable",
            "pp: the part of the model {where} {to} cannot be computed separately ({reason}). Its code may use other "
            "modules in a way that pp cannot trace. Set cut= to other modules, or use pp=1 (fsdp divides any model).",
            where=where,
            to=until,
            reason=first_line(error),
        ) from error


def _times(stage: TracedStage, bounds: TracedBounds, batch: Batch, device: torch.device, runs: int) -> list[float]:
    seconds = []
    try:
        _fill(stage.module, device)
        with forked_random(device):
            for _ in range(runs):
                stage.module.zero_grad()  # otherwise each parameter would have two gradients in memory
                received = [plausible(s.on("meta"), device).requires_grad_(s.requires_grad) for s in bounds.received]
                started = _now(device)
                leaves = tree_leaves(stage.module(*received, batch=batch))
                outputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
                seconds.append(_now(device) - started)
    finally:
        # a stage is part of a cycle of references, so its memory would stay until the next garbage collection
        replace_tensors(stage.module, lambda p: nn.Parameter(p.to("meta"), requires_grad=p.requires_grad), None)
    return seconds


def _fill(module: nn.Module, device: torch.device) -> None:
    replace_tensors(
        module,
        lambda p: nn.Parameter(plausible(p, device), requires_grad=p.requires_grad),
        lambda b: values_or_zeros(b, device),
    )


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
