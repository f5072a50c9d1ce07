"""The built-in metrics. Each adds up exactly over batches and replicas, as (total, count)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import DataError, JobError
from paceline.job.loss_items import IGNORED, classes_on_dim_1, logits_of, same_shape
from paceline.job.read.imports import load_object
from paceline.job.zoo.arguments import check_call
from paceline.job.zoo.losses import view_similarity
from paceline.nearest import nearest

if TYPE_CHECKING:
    from paceline.job.loss import Metric


def build_metric(name: str, args: Mapping[str, Any] = {}) -> Metric:
    """Make a metric by its name: a built-in one, or a factory by import path.

    The factory is called with `args`.

    Raises:
        JobError: an unknown name (the nearest is named), an import that fails, or a factory whose result is not a
            metric.
    """
    if ":" in name:
        return _users_metric(name, args)
    if name not in _METRICS:
        raise JobError(
            f'there is no metric "{name}". {nearest(name, _METRICS)} (A metric of your own: pkg.mod:factory or '
            "file.py:factory)"
        )
    if args:
        raise JobError(f"metric {name} takes no arguments, but the job gives {', '.join(args)}")
    measure, result = _METRICS[name]
    return BuiltIn(name, measure, result)


class BuiltIn:
    """A metric from a batch's `(total, count)`, tensors or numbers, summed over all batches.

    `result` turns the summed ratio into the metric.
    """

    def __init__(
        self, name: str, measure: Callable[[Any, Any], tuple[Any, Any]], result: Callable[[float], float]
    ) -> None:
        self.name = name
        self._measure = measure
        self._result = result

    @torch.no_grad()
    def __call__(self, output: Any, target: Any) -> tuple[float, float]:
        """`(total, count)` of one batch."""
        total, count = self._measure(output, target)
        return float(total), float(count)

    def result(self, total: float, count: float) -> float:
        """The value from the sums over all batches and replicas; NaN where nothing was counted."""
        return self._result(total / count) if count else math.nan


def _accuracy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Share of samples (or tokens, pixels) whose largest logit belongs to their class.

    Targets are labels (-100 is left out), one-hot rows or class probabilities. With one logit per sample, the target is
    0 or 1 (or a probability), and the logit should be above 0 if the target is above 0.5.
    """
    logits = logits_of(output)
    one_logit = logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1)
    if one_logit and target.numel() == logits.numel():
        return _right_side_of_0(logits, target, "accuracy")
    if target.shape == logits.shape:
        classes = 2 if logits.dim() == 3 else 1
        _must_be_probabilities(target, "accuracy")
        sums = target.double().sum(classes)
        if not torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
            raise DataError(
                "accuracy compares classes, but a row of the targets adds up to "
                f"{sums.flatten()[(sums - 1).abs().argmax()].item():g} instead of 1. If a sample may have several "
                "labels, use the metric multilabel_accuracy; for classes, give labels, one-hot rows or probabilities"
            )
        right = logits.argmax(classes) == target.argmax(classes)
        return right.sum(), torch.tensor(right.numel())
    logits, labels = _logits_and_labels("accuracy", logits, target)
    return (logits.argmax(dim=1) == labels).sum(), (labels != IGNORED).sum()


def _multilabel_accuracy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Share of logits that are above 0 exactly if their target is above 0.5."""
    return _right_side_of_0(output, target, "multilabel_accuracy")


def _right_side_of_0(output: Any, target: Tensor, name: str) -> tuple[Tensor, Tensor]:
    logits, target = same_shape(name, output, target)
    _must_be_probabilities(target, name)
    return ((logits > 0) == (target > 0.5)).sum(), torch.tensor(target.numel())


def _must_be_probabilities(target: Tensor, name: str) -> None:
    outside = ~((target >= 0) & (target <= 1))
    if outside.any():
        raise DataError(
            f"{name} needs targets from 0 to 1 here, found {target[outside][0].item():g}. For regression use the "
            "metric mse or mae"
        )


def _logits_and_labels(name: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (m, classes, …) and labels (m, …); other shapes would be broadcast into a wrong result."""
    logits, labels = classes_on_dim_1(logits, target)
    if logits.dim() < 2 or labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise DataError(
            f"{name} needs one label for each sample; the model returned logits {list(logits.shape)}, and the labels "
            f"are {list(labels.shape)}"
        )
    return logits, labels


def _top5(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    logits, labels = _logits_and_labels("top5", logits_of(output), target)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).sum(), (labels != IGNORED).sum()


def _cross_entropy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    logits, labels = _logits_and_labels("the metric", logits_of(output), target)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def _error(output: Any, target: Tensor, *, name: str, of: Callable[..., Tensor]) -> tuple[Tensor, int]:
    values, target = same_shape(name, output, target)
    return of(values, target, reduction="sum"), target.numel()


def _partner_found(output: Any, target: Any) -> tuple[Tensor, int]:
    """Share of views whose nearest other view of the batch is their partner.

    The larger the batch, the harder.
    """
    similarity, partner = view_similarity(output)
    return (similarity.argmax(dim=1) == partner).sum(), len(partner)


def _exponential(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf  # a float ends near e^709


def _bits(mean: float) -> float:
    return mean / math.log(2)


_METRICS: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], Callable[[float], float]]] = {
    "accuracy": (_accuracy, float),
    "multilabel_accuracy": (_multilabel_accuracy, float),
    "top5": (_top5, float),
    "perplexity": (_cross_entropy, _exponential),
    "bits_per_byte": (_cross_entropy, _bits),
    "mse": (partial(_error, name="mse", of=F.mse_loss), float),
    "mae": (partial(_error, name="mae", of=F.l1_loss), float),
    "contrastive_accuracy": (_partner_found, float),
}


def _users_metric(path: str, args: Mapping[str, Any]) -> Metric:
    factory = load_object(path)
    if not callable(factory):
        raise JobError(f"{path} is a {type(factory).__name__}; name a function or class that makes the metric")
    check_call(path, factory, **args)
    metric: Metric = factory(**args)
    if not (
        callable(metric)
        and isinstance(getattr(metric, "name", None), str)
        and callable(getattr(metric, "result", None))
    ):
        raise JobError(
            f"{path} returned a {type(metric).__name__}; a metric has a name, a call (output, target), and "
            "result(total, count), or with gathers = True result(predictions, targets)"
        )
    return metric
