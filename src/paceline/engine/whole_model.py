"""Forward and backward passes of a rank that holds the whole model."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.comm import Group
from paceline.data.loader import Loader, Position
from paceline.engine.compile import compiled
from paceline.engine.compute import Compute, LocalLoss
from paceline.job.batch import Batch, split
from paceline.job.loss import Loss
from paceline.plans.plan import Plan


class WholeModel(Compute):
    """A replica on one rank: computes its share of the batch in microbatches, in turn."""

    def __init__(self, model: nn.Module, loss: Loss, loader: Loader, plan: Plan, group: Group, precision: str) -> None:
        super().__init__(model, loss, loader, plan, group, group, precision, None)
        self.forward = compiled(model, plan.compile, self.device)

    def forward_backward(self, batch: Batch | None, position: Position, step: int) -> LocalLoss:
        """See `Compute.forward_backward`."""
        local = LocalLoss()
        if position.local == 0 or batch is None:
            return local
        parts = self.microbatches(self.place(batch))
        for i, part in enumerate(parts):
            self.replica.backward.last = i == len(parts) - 1
            self.experts.weigh(part, position)
            with self.autocast():
                output = self.call(part)
                if i == 0 and self.device.type == "cuda":
                    self.check_target(output, batch, self.here(step), self.loader.indices)
                loss, items = self.weighed_loss(output, part, batch, position, step)
            scaled = loss if isinstance(items, float) and items == 1.0 else loss * items
            (scaled if self.loss_scale is None else self.loss_scale.scale(scaled)).backward()
            local.add(scaled.detach(), items)
        return local

    def microbatches(self, placed: Batch) -> list[Batch]:
        """The parts of this rank's share that it computes one after the other."""
        return list(split(placed, self.plan.microbatches))

    def output(self, batch: Batch | None) -> tuple[Any, Batch] | None:
        """See `Compute.output`."""
        assert batch is not None, "only the ranks of one replica wait for each other"
        placed = self.place(batch)
        return self.call(placed), placed
