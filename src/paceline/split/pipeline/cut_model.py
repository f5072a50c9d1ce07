"""A model cut into pipeline stages: where it is cut, and what crosses there.

A batch of another shape may take another way through the model's code, so it is traced once per shape.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.partition import contiguous, starts
from paceline.planning.limits import even_cuts, too_many_stages, wrong_cuts
from paceline.planning.model.blocks import find_blocks
from paceline.planning.model.recording.model_state import restored
from paceline.planning.plan import Plan
from paceline.split.pipeline.cuts import costs, named_cuts, possible_cuts
from paceline.split.pipeline.exported import StageGraph, exported
from paceline.split.pipeline.forward_trace import Cut, ForwardTrace
from paceline.split.pipeline.observed import IN_TRANSFORM, Observed, can_be_exported, refuse_unsupported_code
from paceline.split.pipeline.record_forward import Call, trace_forward
from paceline.split.pipeline.stages import StageBounds

_SHAPES_KEPT = 8

T = TypeVar("T")


class CutModel:
    """An undivided model and the modules before which its stages begin.

    Attributes:
        model: the undivided model on the meta device.
        call: runs the model on a batch.
        blocks: names of its repeated blocks.
        names: the modules before which a stage begins, in order.
        by_export: True if `torch.export` has to trace the model.
        lines: report of where it cannot be cut.

    Args:
        stages: the number of stages.
        example: one microbatch.

    Raises:
        PlanError: the model cannot be cut so. The message says where it can.
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
        self._bounds = NewestByShape[Sequence[StageBounds | StageGraph]](device)
        self.by_export, self.names = self._choose(example, plan)

    def bounds(self, batch: Batch, *, training: bool) -> Sequence[StageBounds | StageGraph]:
        """Each stage's bounds for batches of this shape.

        `training`: the mode of the modules; a graph of `torch.export` holds for one.
        """

        def traced() -> Sequence[StageBounds | StageGraph]:
            if self.by_export:
                return self._export(batch, self.names, training)
            trace = self._trace(batch)
            ends = [None, *_cuts(trace, self.names), None]
            return [StageBounds(trace, first, last) for first, last in itertools.pairwise(ends)]

        return self._bounds.of(batch, training and self.by_export, traced)

    def segments(self, example: Batch) -> tuple[list[str], list[float]]:
        """Modules that could begin a stage, in order, and seconds of the segments around them.

        All ranks call this. There are none where `torch.export` traces the model, or the memory left is too little.
        """
        if self.by_export:
            return [], []
        trace = self._trace(example)
        cuts, _ = possible_cuts(trace, self.blocks)
        try:
            own = costs(self.model, trace, cuts, example, self.call, self._device)
        except torch.OutOfMemoryError:
            own = [math.inf] * (len(cuts) + 1)
        found = self._slowest(own)
        return ([cut.before for cut in cuts], found) if math.isfinite(sum(found)) else ([], [])

    def forget(self) -> None:
        """Release the bounds of all shapes."""
        self._bounds.clear()

    def _choose(self, example: Batch, plan: Plan) -> tuple[bool, list[str]]:
        """Choose the modules before which the model is cut.

        The first value is True if `torch.export` has to trace it.
        """
        names = plan.cut.split(",") if plan.cut else []
        modules = [name for name, _ in self.model.named_modules() if name]
        if names and (reason := wrong_cuts(plan, modules, self.blocks)):
            raise PlanError(f"plan {plan} {reason}")
        trace: ForwardTrace | None = None
        try:
            trace = self._trace(example)
        except PlanError as error:
            cuts, reasons = list[Cut](), [IN_TRANSFORM] if self._observed.transformed else str(error).splitlines()
        refuse_unsupported_code(self._observed)
        if trace is not None:
            cuts, reasons = named_cuts(trace, names) if names else possible_cuts(trace, self.blocks)
            if reason := too_many_stages(plan, len(cuts) + 1, f"the model can be cut into {len(cuts) + 1} at most"):
                reasons = [
                    f"plan {plan} {reason} (fsdp and tp divide any model).{f' {reasons[0]}.' if reasons else ''}"
                ]
        # the model cannot be cut between all blocks
        if reasons:
            names = names or even_cuts(self.blocks, self._stages)
            problem = self._why_not_exported(example, names)
            if problem is None:
                return True, names
            if len(cuts) + 1 < self._stages:
                raise PlanError("\n".join([*reasons, problem] if problem else reasons))
            self.lines.append(f"pp: not every block can begin a stage: {reasons[0]}")
        assert trace is not None, "without a trace there are no cuts, and that was raised"
        return False, [cut.before for cut in self._balanced(trace, cuts, example)]

    def _why_not_exported(self, example: Batch, names: Sequence[str]) -> str | None:
        """Reason why `torch.export` cannot trace the model, "" for its code; None if it can."""
        if not names or not can_be_exported(self.model, self._observed):
            return ""
        try:
            self._export(example, names, self.model.training)
        except PlanError as error:
            return str(error)
        return None

    def _balanced(self, trace: ForwardTrace, cuts: list[Cut], example: Batch) -> list[Cut]:
        """Cuts that make the slowest stage as fast as possible."""
        # measured all the same, to find stages that cannot be computed apart
        if len(cuts) + 1 == self._stages:
            costs(self.model, trace, cuts, example, self.call, self._device, runs=1)
            return cuts
        seconds = self._slowest(costs(self.model, trace, cuts, example, self.call, self._device))
        return [cuts[i - 1] for i in starts(contiguous(seconds, self._stages))]

    def _slowest(self, own: list[float]) -> list[float]:
        """Seconds of the segments on the slowest rank, from this rank's own."""
        seconds = torch.tensor(own, dtype=torch.float64, device=self._device)
        # over all ranks, as every replica and every shard of a stage must be cut alike
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found: list[float] = seconds.tolist()
        return found

    def _trace(self, batch: Batch) -> ForwardTrace:
        observed = Observed()
        try:
            return trace_forward(
                self.model,
                batch,
                self.call,
                self._device,
                whole=self._whole,
                remembered=self._remembered,
                observed=observed,
            )
        finally:
            self._observed = observed

    def _export(self, batch: Batch, names: Sequence[str], training: bool) -> list[StageGraph]:
        with restored(self.model):
            # layers that the user keeps in eval mode stay in eval mode
            if self.model.training != training:
                self.model.train(training)
            return exported(self.model, names, batch, self.call, self._device)


class NewestByShape(Generic[T]):
    """Cache of what was made for a shape of batch, for the newest shapes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[Any, T] = OrderedDict()

    def of(self, batch: Batch, further: Hashable, make: Callable[[], T]) -> T:
        """The value for batches of this shape and `further`, made where there is none."""
        key = self._shapes(batch), further
        if key not in self._kept:
            self._kept[key] = make()
            while len(self._kept) > _SHAPES_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def _shapes(self, batch: Batch) -> Hashable:
        """Key that tells batch shapes apart. The width of floats is not in it, since FSDP2 casts a stage's inputs."""
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return autocast, *((key, tuple(t.shape), t.is_floating_point() or t.dtype) for key, t in items)


def _cuts(trace: ForwardTrace, names: Sequence[str]) -> list[Cut]:
    cuts = [trace.cut(name) for name in names]
    if problems := [cut for cut in cuts if isinstance(cut, str)]:
        raise PlanError("pp: for a batch of another shape the model runs otherwise: " + "; ".join(problems))
    return [cut for cut in cuts if isinstance(cut, Cut)]
