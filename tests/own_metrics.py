"""Metrics that need every prediction, compared with scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class F1:
    """The F1 score over classes, averaged as `average` says."""

    gathers = True

    def __init__(self, average: str = "macro") -> None:
        self.name, self.average = f"f1_{average}", average

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.argmax(1), target

    def result(self, predictions: Tensor, targets: Tensor) -> float:
        from sklearn.metrics import f1_score  # imports scipy, so only where it is used

        return float(f1_score(targets, predictions, average=self.average))


class AUC:
    """The area under the ROC curve of one class against the others."""

    name, gathers = "auc", True

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.double().softmax(1)[:, 0], target == 0

    def result(self, predictions: Tensor, targets: Tensor) -> float:
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(targets, predictions))


class R2:
    """R² of the first logit as a prediction of the label."""

    name, gathers = "r2", True

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        return output[:, 0].float(), target.float()

    def result(self, predictions: Tensor, targets: Tensor) -> float:
        from sklearn.metrics import r2_score

        return float(r2_score(targets, predictions))


class Uneven(F1):
    """A metric that returns fewer targets than predictions."""

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        return output, target[:0]


def network() -> nn.Sequential:
    """A model with known weights."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + 1.0).reshape(parameter.shape))
    return model
