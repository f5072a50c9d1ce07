"""Weights of sequences in the load-balance loss of mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.data.loader import Position
from paceline.job.batch import Batch, rows, split
from paceline.job.zoo.models.moe import Router, add_counts, moe_counts, weigh_balance

if TYPE_CHECKING:
    from paceline.engine.compute import Compute


class ExpertBalance:
    """Weighs the balance loss of a model's routers; nothing to do for models without any."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self._routes = any(isinstance(module, Router) for module in compute.model.modules())

    def weigh(self, part: Batch | None, position: Position, *, alike: bool = False) -> None:
        """Tell the routers what the sequences of a microbatch count for; None counts for nothing.

        Args:
            alike: one number for all sequences, as the stages of a pipeline need it.
        """
        if not self._routes:
            return
        compute = self.compute
        if part is None:
            weigh_balance(compute.model, 0.0)
            return
        weighing, context = compute.weighing, compute.split.context if compute.split is not None else None
        items = torch.tensor(
            [float(weighing.items(row)) for row in split(part, rows(part))], dtype=torch.float64, device=compute.device
        )
        if context is not None and weighing.counts:
            # of the whole sequences
            context.group.all_reduce(items)
        if compute.is_whole_batch:
            weights = items / items.sum().clamp(min=1)
        else:
            assert weighing.items_per_sample is not None
            weights = items / (position.total * weighing.items_per_sample)
        weigh_balance(compute.model, weights.mean() if alike else weights)

    def counts(self) -> dict[str, Any]:
        """Tokens of this rank by expert so far (`moe_counts`); {} where other ranks tell it."""
        split_ = self.compute.split
        if split_ is None:
            return moe_counts(self.compute.model)
        if split_.mesh.place["tp"]:
            return {}
        return add_counts([moe_counts(module) for module in split_.modules])
