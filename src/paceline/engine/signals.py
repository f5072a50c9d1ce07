"""Scalars of a step that travel with the gradients, without a collective of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.engine.compute import LocalLoss
from paceline.engine.meter import Meter

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
