"""The meaning of a model's outputs according to the job's loss: logits, probabilities or values."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import DataError, JobError
from paceline.job.loss_items import IGNORED, ModelsOwn, classes_on_dim_1, described, logits_of, same_shape
from paceline.job.zoo.losses import BinaryCrossEntropy, Contrastive, CrossEntropy, Elementwise, TorchLoss

if TYPE_CHECKING:
    from paceline.job.loss import Loss

# `classes`: one logit per class. `yes_no`: one logit for each independent label. `values`: quantities.
OutputKind = Literal["classes", "yes_no", "values"]

_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, F.cross_entropy, F.nll_loss)
_PROBABILITIES = (nn.BCELoss, F.binary_cross_entropy)
_YES_NO = (
    *_PROBABILITIES,
    nn.BCEWithLogitsLoss,
    nn.MultiLabelSoftMarginLoss,
    F.binary_cross_entropy_with_logits,
)
_SCORES = (nn.MultiMarginLoss,)  # losses of scores that are larger for likelier classes, but are not logits


def kind_of(loss: Loss | None) -> OutputKind | None:
    """Return the kind of outputs that a loss needs; None for an unknown loss."""
    if isinstance(loss, CrossEntropy):
        return "classes"
    if isinstance(loss, BinaryCrossEntropy):
        return "yes_no"
    if isinstance(loss, Elementwise | Contrastive):
        return "values"
    by_torch = _torchs(loss)
    if by_torch in _CLASSES:
        return "classes"
    if by_torch in _YES_NO:
        return "yes_no"
    return "values" if isinstance(loss, TorchLoss) else None


def gives_probabilities(loss: Loss | None) -> bool:
    """Return True if the model returns probabilities of independent labels, as for `BCELoss`."""
    return _torchs(loss) in _PROBABILITIES


def probabilities(loss: Loss | None, output: Any, kind: OutputKind | None) -> Tensor:
    """Convert a model's output to probabilities.

    Classes are on dim 1 or, in sequences, on the last dimension.

    Args:
        kind: kind of the outputs; None if unknown.

    Raises:
        JobError: the conversion for this loss is unknown, so the user must define it.
    """
    own = getattr(loss, "probabilities", None)
    if callable(own):
        made: Tensor = own(output)
        return made
    values = logits_of(output)
    if gives_probabilities(loss):
        return values
    if kind is None or kind == "values" or _torchs(loss) in _SCORES:
        raise JobError(
            "metric.probabilities_unknown",
            "paceline does not know how to turn outputs for the loss {loss} into probabilities. Define a function "
            "`probabilities(output)` on the loss, e.g. lambda output: output.softmax(1)",
            loss=_name(loss),
        )
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if kind == "yes_no":
        return wide.sigmoid()
    if kind_of(loss) is None and not isinstance(loss, ModelsOwn) and _are_probabilities(wide):
        raise JobError(
            "metric.outputs_are_probabilities",
            "the outputs for the loss {loss} seem to be probabilities already. Define a function "
            "`probabilities(output)` on the loss, e.g. lambda output: output",
            loss=_name(loss),
        )
    return wide.softmax(2 if wide.dim() == 3 else 1)


def classified(loss: Loss | None, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (m, classes, …) and labels (m, …).

    For independent labels, both have the shape (m, labels).

    If labels are -100, they are skipped, and each of the remaining labels becomes a row.

    Raises:
        DataError: the targets are not labels that fit the loss.
        JobError: the conversion to probabilities is unknown for this loss.
    """
    kind = kind_of(loss)
    if kind == "yes_no" or (kind is None and target.shape == logits_of(output).shape):
        found, wanted = same_shape("the metric", probabilities(loss, output, "yes_no"), target)
        if ((wanted != 0) & (wanted != 1)).any():
            raise DataError("metric.targets_of_yes_or_no", "a metric of two classes needs targets of 0 and 1")
        return found, wanted.long()
    if kind is None and target.is_floating_point():
        raise DataError(
            "metric.targets_not_labels",
            "targets {targets} are not class labels, but this metric compares classes",
            targets=described(target),
        )
    found = probabilities(loss, output, kind or "classes")
    if target.shape == found.shape:  # the targets are class probabilities
        target = target.argmax(2 if found.dim() == 3 else 1)
    found, labels = classes_on_dim_1(found, target)
    counted = labels != IGNORED
    return (found, labels) if counted.all() else (found.movedim(1, -1)[counted], labels[counted])


def _are_probabilities(values: Tensor) -> bool:
    sums = values.sum(2 if values.dim() == 3 else 1)
    return bool((values >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def _torchs(loss: object) -> object:
    """Return the torch class or function behind a loss, or else the loss itself."""
    if isinstance(loss, TorchLoss):
        return type(loss.module)
    if isinstance(loss, functools.partial):
        return loss.func
    return type(loss) if isinstance(loss, nn.Module) else loss


def _name(loss: object) -> str:
    return str(getattr(loss, "__name__", None) or type(loss).__name__)
