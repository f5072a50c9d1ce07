"""Losses and metrics of preference pairs: direct preference optimization."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from paceline.errors import DataError, JobError
from paceline.job.loss_items import IGNORED, check_labels, described, logits_of
from paceline.job.stop import HIGHER_IS_BETTER

REWARDS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")


class DPO:
    """Mean over pairs of the loss of direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290).

    A pair is two sequences, a chosen and a rejected one. The model computes both in one forward pass: the output has
    logits of shape (2 n, t, vocabulary), and the target has labels of shape (n, 2, t), which are the next tokens or
    -100. The log-probability of a completion is the sum over its labels. The engine computes the log-probabilities of
    the reference, which is the model before training.

    Args:
        beta: weight of the difference from the reference; with a smaller value, the model may differ more.
        label_smoothing: probability that the preference of a pair is wrong (Mitchell, 2023, "conservative DPO").
        type: `sigmoid`, or `ipo` (Azar et al., 2023, arXiv:2310.12036). As in TRL, `ipo` uses means over the labels.
    """

    known_mean = whole_sequences = has_pairs = has_reference = True

    def __init__(
        self,
        *,
        beta: PositiveFloat = 0.1,
        label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
        type: Literal["sigmoid", "ipo"] = "sigmoid",
    ) -> None:
        if type == "ipo" and label_smoothing:
            raise JobError(
                "loss.smoothed_ipo", "loss dpo: ipo has no label_smoothing. Remove it, or use type: sigmoid."
            )
        self.beta, self.label_smoothing, self.type = beta, label_smoothing, type
        self._reference: Tensor | None = None

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        Raises:
            DataError: the output and the target do not have the shapes of pairs.
            JobError: the loss is not computed by an engine, so the reference is missing.
        """
        ratios = self._ratios(output, target)
        margins = ratios[:, 0] - ratios[:, 1]
        if self.type == "ipo":
            return (margins - 1 / (2 * self.beta)).square().mean()
        right, wrong = F.logsigmoid(self.beta * margins), F.logsigmoid(-self.beta * margins)
        return -(right * (1 - self.label_smoothing) + wrong * self.label_smoothing).mean()

    def log_probabilities(self, output: Any, target: Tensor) -> Tensor:
        """Return the log-probability of each completion, shape (n, 2); with `ipo`, its mean over the labels."""
        logits = logits_of(output)
        if target.dim() != 3 or target.shape[1] != 2 or logits.shape[:2] != target.flatten(0, 1).shape:
            raise DataError(
                "loss.not_pairs",
                "loss dpo needs labels (n, 2, t) of pairs, and logits (2 n, t, vocabulary), but got labels {target} "
                "and logits {logits}. Use data of kind: preferences.",
                target=described(target),
                logits=described(logits),
            )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lost = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
        found = -lost.view(target.shape).sum(-1)
        return found / (target != IGNORED).sum(-1).clamp(min=1) if self.type == "ipo" else found

    def rewards(self, output: Any, target: Tensor) -> Tensor:
        """Return the implicit rewards of the chosen and the rejected completions, shape (n, 2)."""
        return self.beta * self._ratios(output, target)

    @contextmanager
    def against(self, reference: Tensor) -> Iterator[None]:
        """Return a context in which the reference has these log-probabilities."""
        self._reference = reference
        try:
            yield
        finally:
            self._reference = None

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check `target` with `check_labels`; only the shape of the output is used."""
        check_labels(target, logits_of(output).shape[-1], where, samples)

    def _ratios(self, output: Any, target: Tensor) -> Tensor:
        own = self.log_probabilities(output, target)
        if self._reference is not None:
            return own - self._reference
        raise JobError(
            "loss.without_reference",
            "loss dpo compares the model with its initial weights, of which only a paceline job keeps a copy. Train "
            "with `paceline train`.",
        )


class Reward:
    """Metric of a preference loss, measured over pairs.

    `reward_accuracy` is the share of pairs whose chosen completion has the larger reward. `reward_margin` is the mean
    difference of the two rewards, and `reward_chosen` and `reward_rejected` are their means.
    """

    def __init__(self, name: str, loss: Any) -> None:
        if loss is not None and not hasattr(loss, "rewards"):
            raise JobError(
                "metric.without_rewards",
                "metric {name} needs the rewards of preference pairs. Use loss: dpo, or remove the metric.",
                name=name,
            )
        self.name, self._loss, self.higher_is_better = name, loss, HIGHER_IS_BETTER[name]

    @torch.no_grad()
    def __call__(self, output: Any, target: Any) -> tuple[float, float]:
        """Return the sum over the pairs of a batch, and their number."""
        chosen, rejected = self._loss.rewards(output, target).double().unbind(1)
        values = {
            "reward_accuracy": (chosen > rejected).double(),
            "reward_margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }[self.name]
        return float(values.sum()), float(len(values))

    def result(self, total: float, count: float) -> float:
        """Return the mean; NaN without pairs."""
        return total / count if count else math.nan
