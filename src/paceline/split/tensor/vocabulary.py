"""Cross-entropy of logits whose classes are sharded: no rank ever holds them all.

The method is Megatron-LM's (arXiv:1909.08053, section 3). PyTorch's own `loss_parallel`
(torch.distributed.tensor.parallel) does the same for DTensors, without label smoothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm import Group
from paceline.errors import DataError
from paceline.job.zoo.losses import IGNORED, CrossEntropy, check_labels, classes_on_dim_1, logits_of


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    tp: Group,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy over all classes, like `F.cross_entropy`, the same on every rank.

    It is 0 if every label is ignored. The gradient of the logits is this rank's own, complete without communication.

    Args:
        logits: (..., classes / ranks), from class rank * classes / ranks on. Types below 32 bits are computed in 32
            bits.
        target: (...), whole numbers below the number of classes, or `ignore_index`.
        tp: the ranks that divide the classes. Sends two numbers for each label and one more, whatever the number of
            classes.
        label_smoothing: the part of a label that is spread over all classes.
        weight: (classes,), one for each class; the mean is then over the weights of the labels.
    """
    loss: Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2), target.flatten(), tp, ignore_index, label_smoothing, weight
    )
    return loss


class ParallelLoss:
    """A job's `cross_entropy` for a model that leaves its logits sharded over `tp`."""

    def __init__(self, loss: CrossEntropy, tp: Group) -> None:
        self.loss, self.tp = loss, tp

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss as a 0-dimensional tensor, of logits (n, classes / ranks) or (n, t, classes / ranks).

        Raises:
            DataError: labels that are not whole numbers, not of the output's shape, or (checked on the CPU only) out of
                range.
        """
        logits, labels = classes_on_dim_1(logits_of(output), target)
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise DataError(
                f"the model returned logits {list(logits.shape)} for labels {list(labels.shape)}; one label "
                "per sample or token"
            )
        # on a GPU this would wait; `check` has looked before
        if labels.device.type == "cpu":
            check_labels(labels, self._classes(logits), "in a batch")
        if self.loss.weight is not None:
            self.loss.weight = self.loss.weight.to(logits.device)
        return parallel_cross_entropy(
            logits, labels, self.tp, label_smoothing=self.loss.label_smoothing, weight=self.loss.weight
        )

    def items(self, target: Tensor) -> Tensor:
        """Number of items that the mean is over, as in `CrossEntropy.items`."""
        return self.loss.items(target)

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check the labels with `check_labels`, for the classes of all ranks."""
        logits = logits_of(output)
        if logits.dim() > 1:
            check_labels(target, self._classes(logits), where, samples)

    def _classes(self, logits: Tensor) -> int:
        return logits.shape[-1] * self.tp.size


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of rows of logits (m, c) and labels (m,).

    Keeps the logits and recomputes the probabilities in the backward pass, since they would be another copy, of 32
    bits.

    With weights w, smoothing e over C classes and the log-sum-exp Z of a row, a label y costs (1 - e) w_y (Z - x_y) + e
    / C sum_c w_c (Z - x_c), and the mean divides the sum of that by the sum of w_y, as torch does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        tp: Group,
        ignore_index: int,
        label_smoothing: float,
        weight: Tensor | None,
    ) -> Tensor:
        rows = logits.to(torch.promote_types(logits.dtype, torch.float32))
        part = rows.shape[1]
        # each label as an index of this rank's classes
        own = target - tp.rank * part
        counted = (target != ignore_index).to(rows.dtype)
        here = counted * ((own >= 0) & (own < part))
        own = own.clamp(0, part - 1).unsqueeze(1)
        weights = None if weight is None else weight.to(rows.dtype)[tp.rank * part : (tp.rank + 1) * part]
        highest = rows.amax(1)
        tp.all_reduce(highest, "max")
        of_label = counted if weight is None else weight.to(rows.dtype)[target.where(counted > 0, 0)] * counted
        sums = torch.stack(
            [
                (rows - highest.unsqueeze(1)).exp_().sum(1),
                rows.gather(1, own).squeeze(1) * here,
                (rows.sum(1) if weights is None else rows @ weights) if label_smoothing else torch.zeros_like(highest),
            ]
        )
        tp.all_reduce(sums)
        log_sum = sums[0].log() + highest
        classes = part * tp.size
        spread = label_smoothing / classes
        every = spread * (classes if weight is None else weight.to(rows.dtype).sum())
        cost = (1 - label_smoothing) * of_label * (log_sum - sums[1])
        if label_smoothing:
            cost += (every * log_sum - spread * sums[2]) * counted
        total = of_label.sum()
        ctx.save_for_backward(logits, log_sum, own, here, of_label, counted, total, weights)
        ctx.label_smoothing, ctx.spread, ctx.every = label_smoothing, spread, every
        return torch.where(total > 0, cost.sum() / total, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, own, here, of_label, counted, total, weights = ctx.saved_tensors
        rows = logits.to(log_sum.dtype)
        from_label = (1 - ctx.label_smoothing) * of_label
        gradient = (rows - log_sum.unsqueeze(1)).exp_().mul_((from_label + ctx.every * counted).unsqueeze(1))
        gradient.scatter_add_(1, own, -(from_label * here).unsqueeze(1))
        if ctx.label_smoothing:
            gradient -= ctx.spread * counted.unsqueeze(1) * (1 if weights is None else weights)
        scale = torch.where(total > 0, grad.to(total.dtype) / total, 0.0)
        return gradient.mul_(scale).to(logits.dtype), None, None, None, None, None
