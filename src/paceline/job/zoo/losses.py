"""The built-in losses, and finding a user's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from paceline.errors import DataError, JobError
from paceline.job.loss_items import IGNORED, ModelsOwn, check_labels, classes_on_dim_1, described, logits_of, same_shape
from paceline.job.spec import check_call, checked_args, load_object
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.loss import Loss, LossSpec, Metric


def build_loss(spec: LossSpec) -> Loss:
    """The loss that `spec` names.

    Raises:
        JobError: an unknown name (the nearest is named), an import that fails, or arguments that the loss does not
            take.
    """
    if ":" in spec.name:
        return _users_loss(spec.name, spec.args)
    if spec.name not in _LOSSES:
        raise JobError(
            f'there is no loss "{spec.name}". {nearest(spec.name, _LOSSES)} (A loss of your own: pkg.mod:name '
            "or file.py:name)"
        )
    built_in = _LOSSES[spec.name]
    return built_in(**checked_args(f"loss {spec.name}", built_in, spec.args))


class CrossEntropy:
    """The mean cross-entropy over the labels that are not -100; 0 where all are.

    Output: logits (n, classes), (n, t, classes) for sequences, or (n, classes, h, w); target: whole numbers, the same
    without classes. `weight` is one number per class; the mean is then over the weights of the labels.
    """

    known_mean = divides_classes = True

    def __init__(
        self,
        *,
        label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0,
        weight: list[Annotated[float, Field(ge=0)]] | None = None,
    ) -> None:
        self.label_smoothing, self._all_counted = label_smoothing, False
        self.weight = None if weight is None else torch.tensor(weight)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss as a 0-dimensional tensor.

        Raises:
            DataError: labels that are out of range, no whole numbers, or not of the output's shape. On a GPU, labels
                out of range end the process with the device's own assertion; `check` on the host names them before.
        """
        logits, labels = classes_on_dim_1(logits_of(output), target)
        weight = None
        if self.weight is not None:
            self.weight = self.weight.to(logits.device)
            weight = self.weight.to(logits.dtype)
        options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": self.label_smoothing}
        try:
            mean = F.cross_entropy(logits, labels, weight=weight, **options)
        except (IndexError, RuntimeError, ValueError):
            _explain_failure(logits, labels, weight)
            raise
        # to look is nearly free on a CPU; an accelerator would have to be waited for
        if mean.device.type == "cpu" and not isnan(mean.item()):
            return mean
        if self._all_counted:
            return mean
        counted = (labels != IGNORED).any() if self.weight is None else self.items(target) > 0
        return torch.where(counted, mean, 0.0)

    @contextmanager
    def knowing(self, target: Tensor) -> Iterator[None]:
        """Context in which the loss is of parts of `target`, which is on the host.

        Where all its labels count, an accelerator need not look for parts in which none does.
        """
        self._all_counted = self.weight is None and not bool((target == IGNORED).any())
        try:
            yield
        finally:
            self._all_counted = False

    def items(self, target: Tensor) -> Tensor:
        """Number of items in the mean: labels other than -100, or their weights' sum."""
        counted = target != IGNORED
        if self.weight is None:
            return counted.sum()
        # what is out of range is `check`'s to name
        of_each = self.weight.to(target.device)[target.long().clamp(0, len(self.weight) - 1)]
        return (of_each * counted).sum()

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check `target` by `check_labels`. Only the shape of the output is used."""
        logits = logits_of(output)
        if logits.dim() > 1:  # else the loss says that the shapes do not fit
            check_labels(target, logits.shape[2 if logits.dim() == 3 else 1], where, samples)


class Elementwise:
    """Mean of a torch loss between an output and a target of the same shape."""

    known_mean = True

    def __init__(self, name: str, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.name, self.mean = name, mean

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss as a 0-dimensional tensor. Raises DataError where the shapes differ."""
        return self.mean(*same_shape(self.name, output, target))


class BinaryCrossEntropy(Elementwise):
    """The loss `bce`: logits, and a target of numbers from 0 to 1."""

    def __init__(self) -> None:
        super().__init__("bce", F.binary_cross_entropy_with_logits)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The loss as a 0-dimensional tensor. Raises DataError for other shapes, or targets outside 0 to 1."""
        if target.device.type == "cpu":  # on an accelerator this would be a wait; there `check` gets host tensors
            self.check(output, target, "in a batch")
        return super().__call__(output, target)

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Raise DataError for a target outside 0 to 1, where the loss has no minimum."""
        outside = (target < 0) | (target > 1)
        if outside.any():
            place = outside.nonzero()[0].tolist()
            at = f"sample {samples[place[0]]}" if samples is not None and place else f"at {place}"
            raise DataError(
                f"loss bce needs targets from 0 to 1, found {target[tuple(place)].item():g} {where} ({at}). For "
                "regression use the loss mse or mae"
            )


class Contrastive:
    """NT-Xent loss (Chen et al., 2020, arXiv:2002.05709) over two views of each sample (n, 2, d) of length 1.

    Each view has to find its partner among all other views of the batch, so the loss needs the whole batch. The target
    is ignored.
    """

    whole_batch = True

    def __init__(self, *, temperature: PositiveFloat = 0.5) -> None:
        self.temperature = temperature

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss as a 0-dimensional tensor. Raises DataError where the output is not (n, 2, d)."""
        similarity, partner = view_similarity(output)
        return F.cross_entropy(similarity / self.temperature, partner)


_LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": CrossEntropy,
    "mse": lambda: Elementwise("mse", F.mse_loss),
    "mae": lambda: Elementwise("mae", F.l1_loss),
    "bce": BinaryCrossEntropy,
    "contrastive": Contrastive,
    "model": ModelsOwn,
}


def view_similarity(output: Any) -> tuple[Tensor, Tensor]:
    """The similarities (2n, 2n) of all views, -inf to themselves, and the index of each view's partner (2n,).

    Raises:
        DataError: the output is not (n, 2, d).
    """
    views = logits_of(output)
    if views.dim() != 3 or views.shape[1] != 2:
        raise DataError(
            f"contrastive needs two views of each sample, (n, 2, d), but the model returned {described(views)}; "
            "the zoo's simclr makes them"
        )
    flat = views.flatten(0, 1)
    similarity = (flat @ flat.T).fill_diagonal_(float("-inf"))
    return similarity, torch.arange(len(flat), device=flat.device) ^ 1  # views 2i and 2i + 1 belong together


def _users_loss(path: str, args: dict[str, Any]) -> Loss:
    """A function, with `args` bound; or an instance of a class, made with `args`."""
    loss = load_object(path)
    if isinstance(loss, type):
        check_call(path, loss, **args)
        try:
            loss = loss(**args)
        except Exception as error:
            what = f"{type(error).__name__}: {error}{_tensors(args)}"
            explained = JobError(f"loss {path} cannot be made of its args: {what}")
            explained.from_users_code = not path.startswith("torch.")
            raise explained from error
        args = {}
    if not callable(loss):
        raise JobError(
            f"{path} is a {type(loss).__name__} and cannot be called; a loss is called as loss(output, target)"
        )
    check_call(path, loss, "output", "target", **args)
    # the wrapper has the attributes, too
    return functools.update_wrapper(functools.partial(loss, **args), loss) if args else loss


def _tensors(args: Mapping[str, Any]) -> str:
    """Explain that a class may need tensors instead of lists; "" if there is no list."""
    if not (lists := [name for name, value in args.items() if isinstance(value, list)]):
        return ""
    return (
        f". In a job file {lists[0]} is a list, no tensor: the built-in cross_entropy takes `weight` as a list, and a "
        "function of your own (file.py:name) can make the tensor"
    )


def _explain_failure(logits: Tensor, labels: Tensor, weight: Tensor | None) -> None:
    """Raise an error that says what torch's means, where it is the user's to fix.

    It looks at the values, so it is called only after a failure.
    """
    if logits.dim() < 2 or labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise DataError(
            f"the model returned logits {described(logits)} for labels {described(labels)}; there should be one "
            "label per sample"
        )
    if weight is not None and len(weight) != logits.shape[1]:
        raise JobError(
            f"loss cross_entropy: weight has {len(weight)} numbers, but the model has {logits.shape[1]} classes"
        )
    check_labels(labels, logits.shape[1], "in a batch")


def build_metric(name: str, args: Mapping[str, Any] = {}) -> Metric:
    """Make a metric by its name, or by calling a factory with `args`.

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
    """A metric from a batch's `(total, count)`, summed over all batches. `result` is applied to the ratio."""

    def __init__(
        self, name: str, measure: Callable[[Any, Any], tuple[Any, Any]], result: Callable[[float], float]
    ) -> None:
        self.name, self._measure, self._result = name, measure, result

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
    """Share of views whose nearest other view of the batch is their partner."""
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
    named = isinstance(getattr(metric, "name", None), str)
    if not (named and callable(metric) and callable(getattr(metric, "result", None))):
        raise JobError(
            f"{path} returned a {type(metric).__name__}; a metric has a name, a call (output, target), and "
            "result(total, count), or with gathers = True result(predictions, targets)"
        )
    return metric
