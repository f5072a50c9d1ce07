"""Items that a loss is the mean over: its own `items`, or torch's definition.

A batch is computed in parts (data-parallel ranks, microbatches). The parts' losses make up the loss of the batch only
when each is weighed by the number of items that it is the mean over: samples for most losses, labels that are not
ignored for others.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Items: TypeAlias = Callable[[Any], Any]  # the target of a batch to the number of items, or the sum of their weights

_WITH_IGNORED = (nn.CrossEntropyLoss, nn.NLLLoss)
_MEANS_OVER_ELEMENTS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
)


def items_of(loss: object) -> Items | None:
    """The function that counts the items of a loss's mean; None if they are samples.

    That is its own `items`, and for torch's cross-entropy and NLL loss the labels that they do not ignore, or the
    weights of these.
    """
    own = getattr(loss, "items", None)
    if callable(own) and not isinstance(loss, (Mapping, nn.ModuleDict)):
        return own  # type: ignore[no-any-return]
    if adds_up(loss):
        return None
    if type(loss) in _WITH_IGNORED:
        return functools.partial(_counted, ignored=loss.ignore_index, weight=loss.weight)  # type: ignore[attr-defined]
    function, given = (
        (loss.func, loss.keywords) if isinstance(loss, functools.partial) and not loss.args else (loss, {})
    )
    if function in (F.cross_entropy, F.nll_loss):
        return functools.partial(_counted, ignored=given.get("ignore_index", -100), weight=given.get("weight"))
    return None


def adds_up(loss: object) -> bool:
    """True if a loss is a sum over the samples (`reduction="sum"`)."""
    if isinstance(loss, functools.partial) and "reduction" in loss.keywords:
        return bool(loss.keywords["reduction"] == "sum")
    return getattr(loss, "reduction", None) == "sum"


def is_known(loss: object) -> bool:
    """True if a loss is torch's own, whose mean is known; derived classes are not."""
    function = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    return type(loss) in (*_WITH_IGNORED, *_MEANS_OVER_ELEMENTS) or function in (
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
    )


def reads_models_loss(loss: object) -> bool:
    """True if a loss reads `output.loss`, so that the model needs the labels.

    An example is `lambda output, _: output.loss`.
    """
    call = (
        loss
        if inspect.isfunction(loss)
        else getattr(type(loss), "forward" if isinstance(loss, nn.Module) else "__call__", None)
    )
    if not inspect.isfunction(call) or call.__code__.co_argcount < 1 + (call is not loss):
        return False
    return _reads_loss_of(call.__code__, int(call is not loss))


@functools.cache
def _reads_loss_of(code: CodeType, argument: int) -> bool:
    output = code.co_varnames[argument]
    for loaded, asked in itertools.pairwise(dis.get_instructions(code)):
        if loaded.opname.startswith("LOAD_FAST") and loaded.argval == output and asked.argval == "loss":
            return True
    return False


def hands_on_models_loss(loss: object) -> bool:
    """True if a function returns the loss that the model computed, and nothing else."""
    if not (inspect.isfunction(loss) and reads_models_loss(loss)):
        return False
    output = _OnlyALoss()
    try:
        return loss(output, None) is output.loss
    except Exception:  # noqa: BLE001 - it asks for more than the model's loss
        return False


class _OnlyALoss:
    """Stands for an output of which only the loss is known."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def __getitem__(self, key: object) -> Tensor:
        if key != "loss":
            raise KeyError(key)
        return self.loss


def _counted(target: Tensor, *, ignored: int, weight: Tensor | None) -> float | Tensor:
    """The labels that are not `ignored`, or the sum of their classes' weights."""
    if target.is_floating_point():  # probabilities of classes: the mean is over the samples
        return float(len(target))
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight.to(target.device)[target.clamp(0, len(weight) - 1)] * counts).sum()
