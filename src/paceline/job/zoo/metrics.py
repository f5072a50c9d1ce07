"""Built-in metrics, and the loading of user-defined metrics and metrics of torchmetrics."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import DataError, JobError
from paceline.job.loss_items import IGNORED, check_labels, classes_on_dim_1, described, logits_of, same_shape
from paceline.job.spec import check_call, checked_args, load_object
from paceline.job.stop import HIGHER_IS_BETTER
from paceline.job.zoo.losses import view_similarity
from paceline.job.zoo.outputs import OutputKind, gives_probabilities, kind_of
from paceline.job.zoo.preference_loss import REWARDS, Reward
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.loss import Loss, Metric


def build_metric(name: str, args: Mapping[str, Any] = {}, loss: Loss | None = None) -> Metric:
    """Return the metric with this name, or call the named class or factory.

    Args:
        loss: the job's loss, which determines how outputs are converted to probabilities.

    Raises:
        JobError: the name is unknown (the message names the nearest one), an import fails, or the factory does not
            return a metric.
    """
    if ":" in name:
        return _users_metric(name, args, loss)
    if name in REWARDS:
        if args:
            raise _no_arguments(name, args)
        return Reward(name, loss)
    if name not in _METRICS:
        raise JobError(
            "metric.unknown",
            'unknown metric "{name}". {hint} (Your own metric or one of torchmetrics: pkg.mod:name or file.py:name)',
            name=name,
            hint=nearest(name, [*_METRICS, *REWARDS]),
        )
    build = _METRICS[name]
    if isinstance(build, type):
        made: Metric = build(**checked_args(f"metric {name}", build, args))
        if isinstance(made, _OfClasses):
            made.kind = kind_of(loss)
    elif args:
        raise _no_arguments(name, args)
    else:
        made = BuiltIn(name, *build)
    return OfProbabilities(made) if name in _BY_SIDE_OF_0 and gives_probabilities(loss) else made


def _no_arguments(name: str, args: Mapping[str, Any]) -> JobError:
    return JobError(
        "metric.no_arguments",
        "metric {name} takes no arguments, but the job gives {args}",
        name=name,
        args=list(args),
    )


class BuiltIn:
    """A built-in metric: a ratio of two sums over all batches.

    A function, `result`, converts the ratio to the value of the metric.
    """

    def __init__(
        self, name: str, measure: Callable[[Any, Any], tuple[Any, Any]], result: Callable[[float], float]
    ) -> None:
        self.name, self._measure, self._result = name, measure, result
        self.higher_is_better = HIGHER_IS_BETTER[name]
        # a sum over labels, which may be computed in parts
        self.by_label = name in _BY_LABEL

    @torch.no_grad()
    def __call__(self, output: Any, target: Any) -> tuple[float, float]:
        """Return `(total, count)` of one batch."""
        total, count = self._measure(output, target)
        return float(total), float(count)

    def result(self, total: float, count: float) -> float:
        """Compute the metric from the sums over all batches; NaN if the count is 0."""
        return self._result(total / count) if count else math.nan


class OfProbabilities:
    """Adapter that applies a metric of logits to a model that returns probabilities (`BCELoss`)."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.name = metric, metric.name
        self.gathers, self.higher_is_better = getattr(metric, "gathers", False), True

    def __call__(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Compute the metric from the logits that correspond to the probabilities."""
        return self.metric(torch.logit(logits_of(output)), target)

    def result(self, total: Any, count: Any) -> float:
        """Return the value of the wrapped metric."""
        return self.metric.result(total, count)


class _OfClasses:
    """Base of metrics for classes, binary labels, or several labels per sample.

    Attributes:
        kind: meaning of the model's outputs according to the job's loss; None if unknown.
    """

    name: str
    kind: OutputKind | None = None

    def _read(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return logits (m, classes), labels (m,), and whether samples have several labels.

        If samples have several labels, logits and labels both have the shape (m, labels).
        """
        logits = logits_of(output)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        one_logit = logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1)
        if one_logit and target.numel() == logits.numel():
            yes = logits.flatten()
            return torch.stack([torch.zeros_like(yes), yes], dim=1), self._yes_or_no(target).flatten(), False
        if target.shape == logits.shape and self.kind != "classes":
            if self.kind is None:
                raise DataError(
                    "metric.targets_ambiguous",
                    "{name} cannot tell whether the targets {targets} are one of several classes or several labels "
                    "per sample. Give the class of each sample, or use the loss cross_entropy or bce.",
                    name=self.name,
                    targets=described(target),
                )
            return logits.flatten(0, -2), self._yes_or_no(target).flatten(0, -2), True
        if target.shape == logits.shape:
            target = target.argmax(2 if logits.dim() == 3 else 1)
        logits, labels = _logits_and_labels(self.name, logits, target)
        check_labels(labels, logits.shape[1], "in the validation set")
        counted = labels != IGNORED
        return logits.movedim(1, -1)[counted], labels[counted], False

    def _yes_or_no(self, target: Tensor) -> Tensor:
        if ((target != 0) & (target != 1)).any():
            raise DataError(
                "metric.targets_not_binary",
                "{name} needs targets of 0 and 1 if the model returns one number for each target",
                name=self.name,
            )
        return target.long()


class F1(_OfClasses):
    """Harmonic mean of precision and recall, as in scikit-learn's `f1_score`.

    Args:
        average: `binary` (class 1 of two), `macro` (mean over the classes that occur among labels or predictions),
            `micro` (over all samples) or `weighted` (mean weighted by the number of samples of each class). None
            selects `binary` for two classes and `macro` otherwise.
    """

    name, higher_is_better = "f1", True

    def __init__(self, *, average: Literal["binary", "macro", "micro", "weighted"] | None = None) -> None:
        self.average = average

    @torch.no_grad()
    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, int]:
        """Count true positives, false positives and false negatives for each class.

        The first three rows have these counts. The fourth row is not 0 if samples have several labels. The second value
        is the number of samples.
        """
        logits, labels, several = self._read(output, target)
        if several:
            found, wanted = logits > 0, labels > 0
            hits, all_found, all_wanted = ((found & wanted).sum(0), found.sum(0), wanted.sum(0))
        else:
            classes, found = logits.shape[1], logits.argmax(1)
            hits, all_found, all_wanted = (
                torch.bincount(part, minlength=classes) for part in (labels[found == labels], found, labels)
            )
        marks = torch.full_like(hits, int(several) * len(labels))
        return torch.stack([hits, all_found - hits, all_wanted - hits, marks]).double().cpu(), len(labels)

    def result(self, total: Tensor, count: float) -> float:
        """Compute F1 from the counts of all batches; return NaN without samples."""
        if not count:
            return math.nan
        hits, wrong, missed, marks = total
        two = len(hits) == 2 and not marks.any()
        average = self.average or ("binary" if two else "macro")
        if average == "binary":
            if not two:
                raise JobError(
                    "metric.f1_binary",
                    "metric f1: average binary needs two classes, but there are {classes}. Use macro, micro or "
                    "weighted.",
                    classes=len(hits),
                )
            hits, wrong, missed = hits[1:], wrong[1:], missed[1:]
        if average == "micro":
            hits, wrong, missed = hits.sum(0, keepdim=True), wrong.sum(0, keepdim=True), missed.sum(0, keepdim=True)
        there = hits + wrong + missed
        each = 2 * hits / (there + hits).clamp(min=1)
        weights = hits + missed if average == "weighted" else (there > 0).double()
        return float((each * weights).sum() / weights.sum()) if weights.any() else 0.0


class AUC(_OfClasses):
    """Area under the ROC curve, as in scikit-learn's `roc_auc_score`.

    This area is the probability that a positive sample has a higher score than a negative sample. For two classes,
    class 1 is positive. For more classes, the result is the mean of each class against all others
    (`multi_class="ovr"`). For several labels per sample, the result is the mean over the labels. Classes without
    positive or without negative samples are skipped.
    """

    name, gathers, higher_is_better = "auc", True, True

    @torch.no_grad()
    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores (m, classes) or (m, 1), and labels (m,) or (m, labels)."""
        logits, labels, several = self._read(output, target)
        if several:
            return logits, labels.to(torch.uint8)
        if logits.shape[1] == 2:
            return logits[:, 1:] - logits[:, :1], labels
        return logits.log_softmax(1), labels

    def result(self, total: Tensor, count: Tensor) -> float:
        """Compute the area; return NaN if no class has both positive and negative samples."""
        scores, labels = total, count
        if labels.dim() == 2:
            of_each = labels.bool()
        else:
            positive = torch.arange(scores.shape[1]) if scores.shape[1] > 1 else torch.ones(1)
            of_each = labels[:, None] == positive
        areas = [_area(scores[:, i], of_each[:, i]) for i in range(scores.shape[1])]
        known = [area for area in areas if not math.isnan(area)]
        return sum(known) / len(known) if known else math.nan


def _area(scores: Tensor, positive: Tensor) -> float:
    """Compute the area from the Mann-Whitney U statistic; return NaN without samples of both classes."""
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[place]
    yes = int(positive.sum())
    no = len(positive) - yes
    if not yes or not no:
        return math.nan
    return (float(ranks[positive].sum()) - yes * (yes + 1) / 2) / (yes * no)


class R2:
    """Coefficient of determination, averaged over the outputs as in scikit-learn's `r2_score`."""

    name, gathers, higher_is_better = "r2", True, True

    @torch.no_grad()
    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets, each of shape (n, outputs per sample)."""
        values, wanted = same_shape("r2", output, target)
        return values.reshape(len(values), -1), wanted.reshape(len(wanted), -1)

    def result(self, total: Tensor, count: Tensor) -> float:
        """Compute R² from all outputs and targets; return NaN for fewer than two samples."""
        values, wanted = total.double(), count.double()
        if len(wanted) < 2:
            return math.nan
        left = (wanted - values).square().sum(0)
        spread = (wanted - wanted.mean(0)).square().sum(0)
        # for a constant target: 1 if the predictions are exact, otherwise 0
        constant = (left > 0).logical_not().double()
        return float(torch.where(spread > 0, 1 - left / spread, constant).mean())


def _accuracy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Count the samples (or tokens, pixels) whose largest logit belongs to their class.

    Return this count and the number of samples.

    Targets are labels (-100 is ignored), one-hot rows or class probabilities. With one logit per sample, the target is
    0, 1 or a probability; a logit above 0 predicts a target above 0.5.
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
                "metric.row_sum",
                "accuracy compares classes, but a row of the targets has the sum {sum:g} instead of 1. If a sample "
                "may have several labels, use the metric multilabel_accuracy. For classes, give labels, one-hot "
                "rows or probabilities.",
                sum=sums.flatten()[(sums - 1).abs().argmax()].item(),
            )
        right = logits.argmax(classes) == target.argmax(classes)
        return right.sum(), torch.tensor(right.numel())
    logits, labels = _logits_and_labels("accuracy", logits, target)
    return (logits.argmax(dim=1) == labels).sum(), (labels != IGNORED).sum()


def _multilabel_accuracy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Count the labels that are predicted correctly.

    A logit above 0 predicts a target above 0.5. Return this count and the number of labels.
    """
    return _right_side_of_0(output, target, "multilabel_accuracy")


def _right_side_of_0(output: Any, target: Tensor, name: str) -> tuple[Tensor, Tensor]:
    logits, target = same_shape(name, output, target)
    _must_be_probabilities(target, name)
    return ((logits > 0) == (target > 0.5)).sum(), torch.tensor(target.numel())


def _must_be_probabilities(target: Tensor, name: str) -> None:
    outside = ~((target >= 0) & (target <= 1))
    if outside.any():
        raise DataError(
            "metric.target_out_of_range",
            "{name} needs targets from 0 to 1 here, found {target:g}. For regression use the metric mse or mae.",
            name=name,
            target=target[outside][0].item(),
        )


def _logits_and_labels(name: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (m, classes, …) and labels (m, …); raise an error for other shapes.

    Broadcasting other shapes would give a wrong result.
    """
    logits, labels = classes_on_dim_1(logits, target)
    if logits.dim() < 2 or labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise DataError(
            "metric.labels_differ",
            "{name} needs one label for each sample, but the model returned logits {logits!s} for labels {labels!s}",
            name=name,
            logits=list(logits.shape),
            labels=list(labels.shape),
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
    """Count the views whose nearest other view in the batch is their partner.

    Return this count and the number of views.
    """
    similarity, partner = view_similarity(output)
    return (similarity.argmax(dim=1) == partner).sum(), len(partner)


def _exponential(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf  # limited because a float overflows near e^709


def _bits(mean: float) -> float:
    return mean / math.log(2)


_METRICS: dict[str, type[Metric] | tuple[Callable[[Any, Any], tuple[Any, Any]], Callable[[float], float]]] = {
    "accuracy": (_accuracy, float),
    "token_accuracy": (_accuracy, float),  # the same share; tokens with the label -100 do not count
    "multilabel_accuracy": (_multilabel_accuracy, float),
    "top5": (_top5, float),
    "f1": F1,
    "auc": AUC,
    "perplexity": (_cross_entropy, _exponential),
    "bits_per_byte": (_cross_entropy, _bits),
    "mse": (partial(_error, name="mse", of=F.mse_loss), float),
    "mae": (partial(_error, name="mae", of=F.l1_loss), float),
    "r2": R2,
    "contrastive_accuracy": (_partner_found, float),
}
_BY_LABEL = ("accuracy", "token_accuracy", "top5", "perplexity", "bits_per_byte")
_BY_SIDE_OF_0 = ("accuracy", "multilabel_accuracy", "f1", "auc")


def _users_metric(path: str, args: Mapping[str, Any], loss: Loss | None) -> Metric:
    try:
        factory = load_object(path)
    except JobError as error:
        if path.startswith("torchmetrics") and not find_spec("torchmetrics"):
            raise JobError(
                "metric.torchmetrics_missing",
                "metric {path} needs torchmetrics. Run: pip install 'paceline[metrics]'",
                path=path,
            ) from error
        raise
    if not callable(factory):
        raise JobError(
            "metric.not_a_factory",
            "{path} is a {class_name}. Name a function or class that creates the metric.",
            path=path,
            class_name=type(factory).__name__,
        )
    check_call(path, factory, **args)
    try:
        metric: Any = factory(**args)
    except (TypeError, ValueError, RuntimeError) as error:
        explained = JobError(
            "metric.args_invalid",
            "metric {path} cannot be created from its args: {kind}: {error}",
            path=path,
            kind=type(error).__name__,
            error=error,
        )
        explained.from_users_code = True
        raise explained from error
    if "torchmetrics" in sys.modules:
        from paceline.job.zoo.torch_metrics import TorchMetric

        if TorchMetric.takes(metric):
            return TorchMetric(path.rpartition(":")[2].rpartition(".")[2], metric, loss)
    named = isinstance(getattr(metric, "name", None), str)
    if not (named and callable(metric) and callable(getattr(metric, "result", None))):
        raise JobError(
            "metric.not_a_metric",
            "{path} returned a {class_name}, which is not a metric. A metric has a name, can be called with (output, "
            "target), and has a method result(total, count), or result(predictions, targets) with gathers = True. A "
            "Metric of torchmetrics works as well.",
            path=path,
            class_name=type(metric).__name__,
        )
    made: Metric = metric
    return made
