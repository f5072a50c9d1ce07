"""Agreement of all ranks on a step: gradients, loss, gradient norm and votes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.device import on_accelerator
from paceline.engine.compute import LocalLoss
from paceline.engine.meter import COMM, Meter
from paceline.sync import Replica, SyncRule

if TYPE_CHECKING:
    from paceline.split.apply import Split

VOTES = ("out_of_time", "interrupted", "checkpoint")
LOSS, ITEMS, FIRST_VOTE = 0, 1, 2
FIRST_BUSY = FIRST_VOTE + len(VOTES)


@dataclass(slots=True)
class Agreed:
    """Sums of a step's signals over the replicas.

    Attributes:
        loss: mean over the items that there were.
        rescale: what makes the gradients those of this mean.
        votes: how many ranks asked for what.
        slowest_busy_s: the longest that any rank was busy before.
        own_loss: that of this replica, where it takes the step of its own gradient; None where all take the same.
        everywhere: whether all this is what every replica knows; if not, it is what this one knows of itself, and votes
            are still asked.
    """

    loss: float
    rescale: float
    votes: dict[str, int]
    slowest_busy_s: float
    own_loss: float | None = None
    everywhere: bool = True


class StepSignals:
    """Scalars that a rule sums with the gradients.

    They are loss, items, votes, then each rank's busy time.

    Attributes:
        tensor: where they are written and read; a rule may give one of its own for it, in the dtype of its buffers.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tensor: Tensor = torch.zeros(FIRST_BUSY + group.size, dtype=torch.float64, device=group.device)
        self._asked: set[str] = set()
        self.busy_s: list[float] = []  # of every rank, before the newest agreement; read by `take_busy`

    def vote(self, what: str) -> None:
        """Ask all ranks for something in `VOTES`; decided when the replicas next agree."""
        self._asked.add(what)

    def seal(self, meter: Meter, local: LocalLoss) -> float:
        """Write what this rank has to say before the agreement; returns the busy seconds noted."""
        busy_s, self._local = meter.busy_s(), local
        if self.group.size == 1:
            return busy_s
        staged = [0.0] * len(self.tensor)
        for i, what in enumerate(VOTES):
            staged[FIRST_VOTE + i] = float(what in self._asked)
        staged[FIRST_BUSY + self.group.rank] = busy_s
        if self.tensor.device.type == "cpu":
            staged[LOSS], staged[ITEMS] = float(local.total), float(local.items)
            self.tensor.numpy()[:] = staged  # the caches are cold here: a call of torch more is tens of microseconds
        else:
            self.tensor.copy_(torch.tensor(staged, dtype=self.tensor.dtype))
            self.tensor[LOSS] = local.total
            self.tensor[ITEMS] = local.items
        return busy_s

    def take_busy(self) -> list[float]:
        """Busy seconds of each rank before the newest agreement; empty if already taken."""
        busy_s, self.busy_s = self.busy_s, []
        return busy_s

    def share(self, local: LocalLoss) -> tuple[float, float]:
        """This rank's part of the loss, and of the items, of the step."""
        return float(local.total), float(local.items)

    def scaled(self, loss: float, items: float) -> Agreed:
        """Result of a step that only this replica knows; votes stay pending."""
        rescale = self._rescale(items)
        return Agreed(loss * rescale, rescale, {}, 0.0, loss * rescale, everywhere=False)

    def read(self) -> Agreed:
        """The sums over all replicas, after the agreement."""
        if self.group.size == 1:
            votes = dict.fromkeys(self._asked, 1)
            loss, items = self.share(self._local)
            slowest_s = 0.0
        else:
            loss, items, *rest = self.tensor.tolist()
            votes = {what: round(n) for what, n in zip(VOTES, rest, strict=False) if n}
            self.busy_s = rest[len(VOTES) :]
            slowest_s = max(self.busy_s)
        self._asked.clear()
        rescale = self._rescale(items)
        return Agreed(loss * rescale, rescale, votes, slowest_s)

    def _rescale(self, items: float) -> float:
        if items == 1.0 or items <= 0.0:
            return 1.0
        rounding = 16 * torch.finfo(self.tensor.dtype).eps
        return 1.0 if abs(items - 1.0) < rounding else 1.0 / items


class SynchronousAgreement:
    """Gradients, losses and votes are those of all replicas in every step.

    Args:
        rule: how the replicas agree; attached to `replica` already.
        signals: loss, votes and times, which travel with the gradients.
        world: all ranks.
        split: how the model is divided over the ranks of a replica; None where each holds all of it.

    Attributes:
        gradients: tensors that hold every gradient that was agreed on last once.
    """

    def __init__(
        self,
        rule: SyncRule,
        replica: Replica,
        signals: StepSignals,
        meter: Meter,
        world: Group,
        split: Split | None = None,
    ) -> None:
        self.rule, self.replica, self.signals, self.meter, self.world, self.split = (
            rule,
            replica,
            signals,
            meter,
            world,
            split,
        )
        self.gradients: list[Tensor] = []
        # The ranks of a divided model sum the signals over all of them, so the rule gets none.
        self._nothing = signals.tensor.new_empty(0)
        # of the newest gradient, where the model is divided
        self._norm = 0.0

    def agree(self, local: LocalLoss, step: int) -> Agreed:
        """Average gradients, loss and votes of an optimizer step by the rule.

        From here on gradients are those of the mean over all items of the global batch.
        """
        own_busy_s = self.signals.seal(self.meter, local)
        self.apply_rule(step)
        if self.split is not None:
            self._sum_over_all(self.split)
        agreed = self.signals.read()
        self._scale(agreed.rescale)
        if self.world.size > 1:
            self.meter.mark(COMM)
            self.meter.split_wait(agreed.slowest_busy_s, own_busy_s)
        return agreed

    def apply_rule(self, step: int) -> bool:
        """Have the rule agree on gradients and signals; True if all replicas took part."""
        if self.split is not None:
            self.split.after_backward()
            result = self.rule.after_backward(step, self._nothing)
        else:
            result = self.rule.after_backward(step, self.signals.tensor)
            # The next step's signals are written where the rule sends them from.
            self.signals.tensor = result.scalars
        self.gradients = result.gradients
        return result.everywhere

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient that was agreed on last."""
        if self.split is not None:
            return self._norm
        norms = torch._foreach_norm(self.gradients) if self.gradients else ()
        if norms and on_accelerator(norms[0]):
            # one wait for the device, not one per tensor
            return float(torch.linalg.vector_norm(torch.stack(norms)))
        return math.hypot(*[norm.item() for norm in norms])

    @property
    def deciders(self) -> Group:
        """Ranks that have the same loss and gradient, and so decide alike on the update."""
        return self.world

    def _scale(self, factor: float) -> None:
        """Rescale gradients for batches with fewer or more items per sample than the first one."""
        if factor != 1.0:
            torch._foreach_mul_(self.gradients, factor)
            self._norm *= factor

    def _sum_over_all(self, split: Split) -> None:
        """All-reduce the signals and the squared gradient norm in one collective."""
        tensor = self.signals.tensor
        together = torch.cat([tensor, split.gradient_square()])
        self.world.all_reduce(together)
        tensor.copy_(together[:-1])
        self._norm = math.sqrt(float(together[-1]))


class LocalAgreement(SynchronousAgreement):
    """Agreement of local rules: every replica steps by its own gradient and loss.

    All ranks know of losses and votes in the steps in which the rule agrees.

    Within a replica that is divided, its ranks agree in every step.
    """

    def agree(self, local: LocalLoss, step: int) -> Agreed:
        """See `SynchronousAgreement.agree`; the gradients are those of this replica's own mean."""
        own_busy_s = self.signals.seal(self.meter, local)
        loss, items = self.signals.share(local)
        everywhere = self.apply_rule(step)
        if self.split is not None:
            loss, items = self._sum_over_replica(self.split, loss, items, everywhere)
        own = self.signals.scaled(loss, items)
        self._scale(own.rescale)
        self.meter.mark(COMM)
        if not everywhere:
            return own
        agreed = self.signals.read()
        self.meter.split_wait(agreed.slowest_busy_s, own_busy_s)
        return Agreed(agreed.loss, own.rescale, agreed.votes, agreed.slowest_busy_s, own_loss=own.loss)

    @property
    def deciders(self) -> Group:
        """The ranks of this replica."""
        return self.replica.inner

    def _sum_over_replica(self, split: Split, loss: float, items: float, everywhere: bool) -> tuple[float, float]:
        """Loss and items of this replica; its gradient norm is kept.

        With `everywhere`, signals are summed over all ranks in the same collective.
        """
        tensor, replicas, place = self.signals.tensor, split.mesh.sizes["dp"], split.mesh.place["dp"]
        own = tensor.new_tensor([loss, items, 0.0])
        # `gradient_square` divides by the replicas
        own[2:] = split.gradient_square() * replicas
        if not everywhere:
            self.replica.inner.all_reduce(own)
        else:
            by_replica = tensor.new_zeros(replicas, len(own))
            by_replica[place] = own
            together = torch.cat([tensor, by_replica.view(-1)])
            self.world.all_reduce(together)
            tensor.copy_(together[: len(tensor)])
            own = together[len(tensor) :].view(replicas, -1)[place]
        loss, items, square = own.tolist()
        self._norm = math.sqrt(square)
        return loss, items
