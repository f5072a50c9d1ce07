"""How a rank computes its part of a step where the model is divided over several ranks: its microbatches, pipeline and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from paceline.data.loader import Loader, Position
from paceline.engine.calls import call, prepared
from paceline.engine.max_norm import has_max_norm
from paceline.errors import PlanError
from paceline.job.batch import Batch, place, split
from paceline.job.loss import Loss
from paceline.job.zoo.losses import CrossEntropy
from paceline.plans.plan import Plan
from paceline.split.apply import Split
from paceline.split.deferred_init.initialise import DeferredModel, deferred_from
from paceline.split.mesh import DATA_AXES, Mesh
from paceline.split.tensor.vocabulary import ParallelLoss
from paceline.sync.batchnorm import is_synchronised

if TYPE_CHECKING:
    from paceline.engine.engine import Engine, Settings


def divide(model: nn.Module | DeferredModel, plan: Plan, mesh: Mesh, loader: Loader, loss: Loss, settings: Settings) -> Split:
    """This rank's part of a model, for the batches that `loader` yields. A model that has its weights loses them to its parts."""
    recorded = deferred_from(model) if isinstance(model, nn.Module) else model
    split = without_memory(recorded, plan, mesh, loader, loss, settings)
    split.allocate(recorded)
    return split


def without_memory(recorded: DeferredModel, plan: Plan, mesh: Mesh, loader: Loader, loss: Loss, settings: Settings) -> Split:
    """The same in shapes only, until `Split.allocate`."""
    precision = plan.precision or settings.precision
    recorded.model = prepared(recorded.model, settings.batch_norm, precision, mesh.group(*DATA_AXES))
    example = loader.example(max(1, loader.smallest_share() // plan.microbatches))
    wide = torch.float64 if precision == "fp64" else None
    example = place(example, torch.device("cpu"), dtype=wide, channels_last=False)
    if limited := next((n for n, m in recorded.model.named_modules() if has_max_norm(m)), None):
        raise PlanError(f'plan {plan} divides the model, and "{limited}" has max_norm, which rewrites rows that it looks up: dp alone.')
    made = Split(recorded, plan, mesh, example, partial(call, loss=loss), precision=precision)
    if made.pipeline is not None and made.pipeline.by_export and is_synchronised(recorded.model):
        raise PlanError(
            f"plan {plan}: the stages of this model are traced by torch.export, which leaves out what replicas tell each other, so "
            "batch_norm: sync would not be over the global batch: pp=1, or batch_norm: local"
        )
    return made


class Divided:
    """The forward and backward passes of one rank of a divided model.

    All ranks that wait for each other in these passes take them equally often: a rank without a sample left in a step computes one that
    it saw before, and counts it as nothing.
    """

    def __init__(self, engine: Engine, split: Split) -> None:
        self.engine, self.split = engine, split
        self._sample = _first(split.example)  # to be computed where there is none
        self._head = split.tensors.vocabulary_head if split.tensors is not None and type(engine.loss) is CrossEntropy else None
        if self._head is not None:
            self._head.gather = False  # the loss needs the sums over the vocabulary only
            engine.step_loss = ParallelLoss(cast(CrossEntropy, engine.loss), split.mesh.group("tp"))

    def backward(self, batch: Batch | None, position: Position) -> None:
        """Accumulate the gradient of this rank's part of the global mean loss, and note its part of the loss."""
        engine, count = self.engine, self.split.microbatches(self.engine.loader.partition.shares(position.step))
        engine.notes.add_loss(0.0, 0.0)
        if batch is None and not self.split.all_must_compute:
            return
        placed = self._placed(batch, count)
        if self.split.pipeline is not None:
            engine.weigh_balance(placed if batch is not None else None, position, alike=True)
            self.split.pipeline.forward_backward(placed, count, lambda output, part, i: self._loss(output, part, batch, position))
            return
        parts = list(split(placed, count))
        for i, part in enumerate(parts):
            engine.replica.last_backward = i == len(parts) - 1
            self.split.begin_microbatch(last=engine.replica.last_backward)
            engine.weigh_balance(part if batch is not None else None, position)
            with engine._autocast():
                loss = self._loss(engine._call(part), part, batch, position)
            loss.backward()

    def output(self, batch: Batch | None) -> tuple[Any, Batch] | None:
        """The model's output for a held-out batch, and the batch as it was computed; None where another rank has it."""
        if batch is None and not self.split.all_must_compute:
            return None
        placed = self._placed(batch, 1)
        pipeline = self.split.pipeline
        if self._head is not None:
            self._head.gather = True
        output = self.engine._call(placed) if pipeline is None else pipeline.forward(placed)
        if self._head is not None:
            self._head.gather = False
        return (output, placed) if batch is not None and self.split.owns_loss else None

    def _loss(self, output: Any, part: Batch, batch: Batch | None, position: Position) -> Tensor:
        """This part's addend of the global mean loss; it is noted where this rank is the one that counts it."""
        if batch is None:
            return self.engine.step_loss(output, self.engine.weighing.target(part)) * 0.0
        loss, items = self.engine.weighed_loss(output, part, batch, position)
        share = 1.0
        if self.split.context is not None and not self.split.context.whole and not self.engine.weighing.counts:
            items = items / self.split.context.group.size  # a sample counts once, and each rank has some of its tokens
            adds_up = self.split.context.own_loss or self.engine.weighing.adds_up
            share = self.split.context.group.size if adds_up else 1.0  # then the ranks' losses add up to the mean
        scaled = loss * (items * share)
        if self.split.owns_loss:
            self.engine.notes.add_loss(scaled.detach(), items)
        return scaled

    def _placed(self, batch: Batch | None, count: int) -> Batch:
        """The tokens of the batch that are this rank's, on its device; those of `count` times one sample where there is no batch."""
        placed = self.engine._place(_repeated(self._sample, count) if batch is None else batch)
        return self.split.context.shard(placed) if self.split.context is not None else placed


def _first(batch: Batch) -> Batch:
    return {k: v[:1] for k, v in batch.items()} if isinstance(batch, Mapping) else tuple(t[:1] for t in batch)


def _repeated(sample: Batch, count: int) -> Batch:
    if isinstance(sample, Mapping):
        return {k: v.repeat_interleave(count, dim=0) for k, v in sample.items()}
    return tuple(t.repeat_interleave(count, dim=0) for t in sample)
