"""Steps that the host queues on an accelerator before it reads earlier numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.device import Download
from paceline.engine.compute import LocalLoss
from paceline.engine.meter import COMM
from paceline.engine.reduction import ITEMS, GradientReduction, Reduced, StepSignals, in_order
from paceline.job.batch import Batch


@dataclass(slots=True)
class UnreadStep:
    """A queued step whose numbers the host has not read.

    Attributes:
        step, total: number and global batch of the step.
        batch, samples: this rank's share, and its samples' numbers in the data set, for an error.
    """

    step: int
    total: int
    batch: Batch | None
    samples: list[int]
    numbers: Unread


class Unread:
    """Signals and norms of gradients that are still on an accelerator.

    Args:
        parts: in order; floats are known already.
        norms: how many at the end are norms, of gradients that are not rescaled yet.
        own_busy_s: busy seconds of this rank that the signals have.
    """

    def __init__(self, signals: StepSignals, parts: Sequence[float | Tensor], norms: int, own_busy_s: float) -> None:
        self.signals, self.own_busy_s = signals, own_busy_s
        self._parts, self._norms = parts, norms
        self.tensor = torch.cat([part.reshape(-1) for part in parts if isinstance(part, Tensor)])
        self._download: Download | None = None

    def norm(self) -> Tensor:
        """L2 norm of all gradients, a tensor () on the device."""
        norm: Tensor = torch.linalg.vector_norm(self.tensor[len(self.tensor) - self._norms :])
        return norm

    def send(self) -> None:
        """Copy the numbers to the host once the device has done what is queued now."""
        self._download = Download(self.tensor)

    def read(self) -> tuple[Reduced, float]:
        """Result of the reduction, and the gradient's norm; the host waits for them."""
        assert self._download is not None, "nothing was sent"
        found = in_order(self._parts, self._download.numbers())
        sums, norms = found[: len(found) - self._norms], found[len(found) - self._norms :]
        reduced = self.signals.read(sums)
        return reduced, math.hypot(*norms) * reduced.rescale


class ReductionAhead(GradientReduction):
    """Reduction under synchronous rules without a wait; it rescales and clips on the device."""

    def queue(self, local: LocalLoss, step: int, *, by_samples: bool, clip_norm: float | None) -> Unread:
        """Reduce as `reduce` does, and clip the gradients, without a wait for the device.

        Args:
            by_samples: the items of all ranks are known to sum to 1.
            clip_norm: the largest L2 norm of the whole gradient; None for any.
        """
        own_busy_s, alone = self.signals.seal(self.meter, local), self.world.size == 1
        self.apply_rule(step)
        norms: Sequence[Tensor]
        if self.split is None:
            sums, norms = self.signals.sums(local), self._norms()
        else:
            summed = self._sum_over_all(self.split)
            sums, norms = self.signals.own(local) if alone else [summed[:-1]], [summed[-1:].sqrt()]
        unread = Unread(self.signals, [*sums, *norms], len(norms), own_busy_s)
        items = local.items if alone else 1.0 if by_samples else unread.tensor[ITEMS]
        factor = self.signals.factor(items)
        if clip_norm is not None and norms:
            norm = unread.norm() * factor
            factor = factor * torch.where(norm > clip_norm, clip_norm / (norm + 1e-6), 1.0)
        if not isinstance(factor, Tensor):
            self.scale(factor)
        elif self.gradients:
            # a factor in a gradient's own low precision would be off by a hundredth
            wide = torch.promote_types(self.gradients[0].dtype, torch.float32)
            torch._foreach_mul_(self.gradients, factor.to(wide))
        if not alone:
            self.meter.mark(COMM)
        return unread
