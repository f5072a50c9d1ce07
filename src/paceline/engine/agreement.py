"""What the ranks make of their gradients between the backward pass and the update: the loss, the norm and the votes that each step has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.engine.meter import COMM
from paceline.engine.signals import Agreed

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.split.apply import Split


class Together:
    """Gradients, losses and votes are those of all replicas in every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._norm = 0.0  # of the newest gradient, where the model is divided

    def agree(self) -> Agreed:
        """Have the rule agree; the gradients are then of the mean over all items that there were."""
        engine = self.engine
        own_busy_s = engine.notes.seal(engine.meter)
        if engine.split is not None:
            engine.split.after_backward()
        engine.rule.after_backward()
        if engine.split is not None:
            self._sum_over_all(engine.split)
        agreed = engine.notes.read()
        self._scale(agreed.rescale)
        if engine.group.size > 1:
            engine.meter.mark(COMM)
            engine.meter.split_wait(agreed.slowest_busy_s, own_busy_s)
        return agreed

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient of which `agree` was the last to speak."""
        if self.engine.split is not None:
            return self._norm
        gradients = self.engine.replica.gradients
        norms = torch._foreach_norm(gradients) if gradients else ()
        if self.engine.device.type == "cuda" and norms:
            return float(torch.linalg.vector_norm(torch.stack(norms)))  # one wait for the device, not one per tensor
        return math.hypot(*[norm.item() for norm in norms])

    def _scale(self, factor: float) -> None:
        """Fewer or more items than the first batch had per sample: the mean is over the items that there were."""
        if factor != 1.0:
            torch._foreach_mul_(self.engine.replica.gradients, factor)
            self._norm *= factor

    def _sum_over_all(self, split: Split) -> None:
        """Sum the notes and the squares of the gradients over all ranks, in one collective of their own."""
        notes = self.engine.notes
        together = torch.cat([notes.tensor, split.gradient_square()])
        self.engine.group.all_reduce(together)
        notes.tensor.copy_(together[:-1])
        self._norm = math.sqrt(float(together[-1]))


class Apart(Together):
    """Every replica takes the step of its own gradient and loss. What all know is told in the steps in which the rule agrees.

    Within a replica that is divided, its ranks agree in every step.
    """

    def agree(self) -> Agreed:
        engine, notes = self.engine, self.engine.notes
        own_busy_s = notes.seal(engine.meter)
        loss, items = notes.share()
        if engine.split is not None:
            engine.split.after_backward()
        engine.rule.after_backward()
        everywhere = engine.replica.agreed
        if engine.split is not None:
            loss, items = self._sum_over_replica(engine.split, loss, items, everywhere)
        own = notes.scaled(loss, items)
        self._scale(own.rescale)
        engine.meter.mark(COMM)
        if not everywhere:
            return own
        agreed = notes.read()
        engine.meter.split_wait(agreed.slowest_busy_s, own_busy_s)
        return Agreed(agreed.loss, own.rescale, agreed.votes, agreed.slowest_busy_s, own_loss=own.loss)

    def _sum_over_replica(self, split: Split, loss: float, items: float, everywhere: bool) -> tuple[float, float]:
        """The loss and items of this replica, whose norm is noted; with `everywhere`, the notes are summed over all ranks on the way."""
        notes, replicas, place = self.engine.notes.tensor, split.mesh.sizes["dp"], split.mesh.place["dp"]
        own = notes.new_tensor([loss, items, 0.0])
        own[2:] = split.gradient_square() * replicas  # which divides by them
        if not everywhere:
            self.engine.replica.inner.all_reduce(own)
        else:
            by_replica = notes.new_zeros(replicas, len(own))
            by_replica[place] = own
            together = torch.cat([notes, by_replica.view(-1)])
            self.engine.group.all_reduce(together)
            notes.copy_(together[: len(notes)])
            own = together[len(notes) :].view(replicas, -1)[place]
        loss, items, square = own.tolist()
        self._norm = math.sqrt(square)
        return loss, items
