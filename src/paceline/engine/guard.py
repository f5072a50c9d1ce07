"""Guard before each update: NaN or Inf in loss or gradient stops or skips it."""

from __future__ import annotations

import math

from torch import Tensor, nn

from paceline.comm import Group
from paceline.engine.loss_scale import LossScale
from paceline.engine.nonfinite import PATIENCE, Policy, explain, gave_up, stop
from paceline.job.batch import Batch


class Guard:
    """Decides on each update, and restores buffers where it is left out.

    Args:
        policy: `stop` raises; `skip` and `rewind` leave the update out.
        model: its buffers are put back.
        loss_scale: that of fp16 training, which an overflow shrinks; None in other precisions.
        rank: this rank's number in the run.
    """

    def __init__(self, policy: Policy, model: nn.Module, loss_scale: LossScale | None, rank: int) -> None:
        self.policy, self.model, self.loss_scale, self.rank = policy, model, loss_scale, rank
        self._left_out_in_a_row = 0
        self._saved: list[tuple[Tensor, Tensor]] = []

    def remember(self) -> None:
        """Copy the buffers, before a forward pass whose update may be left out."""
        if self.policy != "stop":
            self._saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def problem(
        self, deciders: Group, batch: Batch | None, samples: list[int], *, step: int, loss: float, norm: float
    ) -> str | None:
        """Reason to leave the update of a step out; None to make it.

        Args:
            deciders: the ranks that have this loss and gradient; all of them call this.
            batch: this rank's, to look for NaN and Inf in it; `samples` are its samples' numbers in the data set.

        Raises:
            NonFiniteError: the policy is to stop, or too many updates in a row were left out.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._left_out_in_a_row = 0
            return None
        if self.loss_scale is not None and math.isfinite(loss):
            return self.loss_scale.shrink()
        problem = explain(deciders, batch, samples, step=step, loss=loss, norm=norm, rank=self.rank)
        self._left_out_in_a_row += 1
        if self.policy == "stop":
            raise stop(problem)
        if self._left_out_in_a_row >= PATIENCE:
            raise gave_up(problem, self._left_out_in_a_row)
        for buffer, saved in self._saved:
            buffer.copy_(saved)
        return problem

    def updated(self) -> None:
        """Note an update that was made."""
        if self.loss_scale is not None:
            self.loss_scale.grow()
