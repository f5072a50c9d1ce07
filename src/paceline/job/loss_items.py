"""Functions that count the items in the mean of a loss, and call a model.

A batch is computed in microbatches by several ranks. To combine their losses into the loss of the batch, each loss is
weighted by the number of items in its mean. The items are samples for most losses, and labels that are not ignored for
other losses.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import BatchError, DataError, JobError
from paceline.job.batch import Batch, rows, target_of

if TYPE_CHECKING:
    from paceline.job.loss import Loss

IGNORED = -100  # the label that torch and transformers ignore


class ModelsOwn:
    """Loss that the model computes itself: `output.loss` or `output["loss"]`.

    Attributes:
        terms: the items in the model's mean, one entry for each term of its loss; empty if the items are samples.
            `paceline.engine.model_loss` determines them.
    """

    def __init__(self) -> None:
        self.terms: tuple[Term, ...] = ()

    def items_in(self, batch: Any) -> float | Tensor:
        """Return the number of items in the mean; `batch` is the input or the labels."""
        # the count covers whole sequences, although this rank has only some of their tokens
        if isinstance(batch, Mapping) and "num_items_in_batch" in batch:
            items: Tensor = batch["num_items_in_batch"].sum()
            return items
        if self.terms and isinstance(batch, Mapping):
            return self.terms[0].count(batch)
        if self.terms and self.terms[0].key == "labels" and not self.terms[0].masked:
            return self.terms[0].count({"labels": batch})
        return float(rows(batch) if isinstance(batch, (Mapping, tuple, list)) else len(batch))

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss as a 0-dimensional tensor; raise JobError if the output has none."""
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not output[0].dim():
            loss = output[0]
        if not isinstance(loss, Tensor):
            keys = f" with {', '.join(output)}" if isinstance(output, Mapping) else ""
            raise JobError(
                "loss.model_without_loss",
                "loss model: the model's output is a {class_name}{keys}, without a loss. A Hugging Face model "
                "computes one if the sample has labels. Other models need their own loss, e.g. cross_entropy.",
                class_name=type(output).__name__,
                keys=keys,
            )
        return loss


@dataclass(frozen=True)
class Term:
    """The items of one term of a model's loss: labels that are not ignored.

    The labels are the entry `key` of a batch.

    Attributes:
        shifted: whether each token predicts the next one, so that the first label of a sequence is not used.
        ignored: the label to ignore. None means that labels are positions in the sequence; labels beyond the last token
            of `input_ids` are then ignored.
        masked: whether labels at positions with `attention_mask` 0 are also ignored.
    """

    key: str
    shifted: bool
    ignored: int | None
    masked: bool = False

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the number of items in a batch."""
        labels: Tensor = batch[self.key]
        counted = labels < batch["input_ids"].shape[1] if self.ignored is None else labels != self.ignored
        if self.masked:
            counted = counted & (batch["attention_mask"] == 1)
        return (counted[..., 1:] if self.shifted else counted).sum()


def trimmed(batch: Batch) -> Batch:
    """Return a batch of causal sequences without the positions after the last label that counts.

    These positions change no other output, so the loss and its gradient stay the same. The number of remaining
    positions is rounded up to a multiple of 8. A batch is returned unchanged if a tensor has another shape than the
    labels.

    Args:
        batch: tokens and labels in host memory, each of shape (n, t), or (n, 2, t) for pairs.
    """
    labels = target_of(batch)
    columns = batch.values() if isinstance(batch, Mapping) else batch
    if labels.dim() < 2 or any(column.shape != labels.shape for column in columns):
        return batch
    counted = (labels != IGNORED).flatten(0, -2).any(0).nonzero()
    used = -(-int(counted[-1] + 1) // 8) * 8 if len(counted) else 8
    if isinstance(batch, Mapping):
        return {name: column[..., :used] for name, column in batch.items()}
    return tuple(column[..., :used] for column in batch)


def computed_positions(batch: Batch) -> tuple[int, int]:
    """Count the positions of a trimmed batch, and those after the last labels of sequences."""
    counted = (target_of(batch) != IGNORED).flatten(0, -2)
    after = (counted.flip(-1).cumsum(-1) == 0).sum()
    return counted.numel(), int(after)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its `.logits`.

    Raises:
        JobError: the output is not a tensor, and `.logits` is missing or is not a tensor.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise JobError(
            "loss.no_logits",
            "the loss needs a tensor or an object with .logits, but the model returned a {class_name}",
            class_name=type(output).__name__,
        )
    return logits


def described(tensor: Tensor) -> str:
    """Describe the dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def call(model: Callable[..., Any], batch: Batch, *, loss: Loss) -> Any:
    """Return the model's output for a batch.

    The inputs of a tuple are passed by position, the inputs of a mapping by name. Labels are passed only if the model
    computes the loss. Both sequences of a pair become rows of their own.
    """
    inputs, named = _arguments(batch, loss)
    if "position_ids" in named and getattr(getattr(model, "config", None), "use_cache", False):
        # with a key-value cache, models of transformers do not look for the documents of packed sequences
        named["use_cache"] = False
    return model(*inputs, **named)


def _arguments(batch: Batch, loss: Loss) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if has_pairs(loss):
        batch = (
            {name: column.flatten(0, 1) for name, column in batch.items()}
            if isinstance(batch, Mapping)
            else tuple(column.flatten(0, 1) for column in batch)
        )
    if isinstance(batch, (tuple, list)):
        return tuple(batch[:-1]), {}
    if isinstance(loss, ModelsOwn) or reads_models_loss(loss):
        return (), dict(batch)
    return (), {k: v for k, v in batch.items() if k != "labels"}


def refused_batch(model: Callable[..., Any], batch: Batch, error: Exception, *, loss: Loss) -> BatchError | None:
    """Return an error that explains why `call` failed; None if the cause is unknown."""
    inputs, named = _arguments(batch, loss)
    if why := _misfit(model, inputs, named, error):
        return BatchError("model.batch_failed", "{why} ({error})", why=why, error=first_line(error))
    if type(error) is RuntimeError and re.search("shape|size|channels|reduction dim|[0-9]D", str(error)):
        parts = [described(t) for t in (*inputs, *named.values()) if isinstance(t, Tensor)]
        explained = BatchError(
            "model.batch_refused",
            "{model} cannot compute a batch of {parts}: {error}",
            model=_kind(model),
            parts=list(parts),
            error=first_line(error),
        )
        explained.from_users_code = True
        return explained
    return None


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _misfit(
    model: Callable[..., Any], inputs: tuple[Any, ...], named: Mapping[str, Any], failure: Exception
) -> str | None:
    """Explain why a model rejects these inputs; return None if the cause is unknown."""
    forward = model.forward if isinstance(model, nn.Module) else model
    name = _kind(model)
    try:
        inspect.signature(forward).bind(*inputs, **named)
    except TypeError as error:
        if inputs:
            return (
                f"a batch has {len(inputs) + 1} parts, of which {name} gets all but the last, the target: {error}. "
                "Return (input, target) from the data set; a loss that needs more (weights of samples) is computed "
                "in a loop of your own: `for x, y, w in engine.loader: engine.backward(loss_of(model(x), y, w))`"
            )
        return f"a batch has the keys {', '.join(named)}, which {name} gets by name: {error}"
    except ValueError:  # a callable without a signature
        return None
    given = (*inputs, *named.values())
    if any(isinstance(x, (list, tuple)) and x and isinstance(x[0], str) for x in given):
        return f"the batch has text, but {name} needs a tensor: convert the text in the data set or in `collate`"
    of_model = {p.dtype for p in model.parameters() if p.is_floating_point()} if isinstance(model, nn.Module) else set()
    of_data = {t.dtype for t in given if isinstance(t, Tensor)}
    return _other_dtype(of_model.pop(), of_data, failure) if len(of_model) == 1 else None


def _other_dtype(of_model: torch.dtype, of_data: set[torch.dtype], failure: Exception) -> str | None:
    """Explain a failure that different dtypes cause; return None for other causes."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in (of_model, *of_data)}
    wide = torch.float64 in of_data and of_model != torch.float64
    other = torch.float64 if wide else next((dtype for dtype in of_data if dtype != of_model), None)
    if other is None or not (wide or re.search("dtype|scalar type|[Ii]nput type", str(failure))):
        return None
    if of_model != torch.float32 and other == torch.float32:
        precision = "fp64" if of_model == torch.float64 else "bf16"
        return (
            f"the model is {names[of_model]} and the data float32: do not convert the model (.double(), .half()), "
            f"and train with precision={precision}"
        )
    advice = ", or train with precision=fp64" if wide else ""
    return f"the data is {names[other]} and the model {names[of_model]}: convert it in the data set, x.float(){advice}"


def _kind(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else "the model"


# function that returns the number of items in the target of a batch, or the sum of their weights
Items: TypeAlias = Callable[[Any], Any]


OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # losses averaged over the labels that are not ignored
# losses averaged over the elements of an output and a target of the same shape
ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
    nn.MultiLabelSoftMarginLoss,
)


def items_of(loss: object) -> Items | None:
    """Return the function that counts a loss's items; None if the items are samples.

    The function is the loss's own `items` if the loss has this attribute. For torch's cross-entropy and NLL loss, the
    function counts the labels that are not ignored, or sums their weights.
    """
    own = getattr(loss, "items", None)
    if callable(own) and not isinstance(loss, (Mapping, nn.ModuleDict)):
        return own  # type: ignore[no-any-return]
    if adds_up(loss):
        return None
    if type(loss) in OF_CLASSES:
        return functools.partial(_counted, ignored=loss.ignore_index, weight=loss.weight)  # type: ignore[attr-defined]
    bound = isinstance(loss, functools.partial) and not loss.args
    function, given = (loss.func, loss.keywords) if bound else (loss, {})  # type: ignore[attr-defined]
    if function in (F.cross_entropy, F.nll_loss):
        return functools.partial(_counted, ignored=given.get("ignore_index", -100), weight=given.get("weight"))
    return None


def has_pairs(loss: object) -> bool:
    """Return True if a sample of the loss is a pair of sequences (`has_pairs = True`)."""
    return bool(getattr(loss, "has_pairs", False))


def has_reference(loss: object) -> bool:
    """Return True if a loss compares the model with its initial weights (`has_reference = True`)."""
    return bool(getattr(loss, "has_reference", False))


def loss_before_training(loss: Any, output: Any, target: Any) -> Tensor:
    """Return the loss of a model that is still its own reference."""
    if not has_reference(loss):
        found: Tensor = loss(output, target)
        return found
    with torch.no_grad():
        reference = loss.log_probabilities(output, target)
    with loss.against(reference):
        found = loss(output, target)
    return found


def adds_up(loss: object) -> bool:
    """Return True if a loss is a sum over the samples (`reduction="sum"`)."""
    if isinstance(loss, functools.partial) and "reduction" in loss.keywords:
        return bool(loss.keywords["reduction"] == "sum")
    return getattr(loss, "reduction", None) == "sum"


def declares_mean(loss: object) -> bool:
    """Return True if the class of a loss itself sets `known_mean`.

    The mean of such a loss needs no test. A derived class may compute another loss, so it must set `known_mean` itself.
    """
    return bool(vars(type(loss)).get("known_mean", False))


def is_known(loss: object) -> bool:
    """Return True if a loss is torch's own class, whose mean is known."""
    function = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    known = F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss
    return type(loss) in (*OF_CLASSES, *ELEMENTWISE, nn.MultiMarginLoss, nn.MultiLabelMarginLoss) or function in known


def reads_models_loss(loss: object) -> bool:
    """Return True if a loss reads `output.loss`, so that the model needs the labels."""
    method = "forward" if isinstance(loss, nn.Module) else "__call__"
    call = loss if inspect.isfunction(loss) else getattr(type(loss), method, None)
    if not inspect.isfunction(call) or call.__code__.co_argcount < 1 + (call is not loss):
        return False
    return _reads_loss_of(call.__code__, int(call is not loss))


@functools.cache
def _reads_loss_of(code: CodeType, argument: int) -> bool:
    output = code.co_varnames[argument]
    return any(
        loaded.opname.startswith("LOAD_FAST") and loaded.argval == output and asked.argval == "loss"
        for loaded, asked in itertools.pairwise(dis.get_instructions(code))
    )


def hands_on_models_loss(loss: object) -> bool:
    """Return True if a function only returns the loss that the model computed."""
    if not (inspect.isfunction(loss) and reads_models_loss(loss)):
        return False
    output = _OnlyALoss()
    try:
        return loss(output, None) is output.loss
    except Exception:  # noqa: BLE001 - it asks for more than the model's loss
        return False


class _OnlyALoss:
    """Stand-in for a model's output that has only a loss."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def __getitem__(self, key: object) -> Tensor:
        if key != "loss":
            raise KeyError(key)
        return self.loss


def _counted(target: Tensor, *, ignored: int, weight: Tensor | None) -> float | Tensor:
    """Count the labels that are not `ignored`, or sum the weights of their classes."""
    if target.is_floating_point():  # class probabilities: the mean is over all dimensions except dim 1
        return float(target.numel() // target.shape[1] if target.dim() > 1 else 1)
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight.to(target.device)[target.clamp(0, len(weight) - 1)] * counts).sum()


class LossMetric:
    """The metric `loss`: the job's loss on validation data, weighted as in training.

    Attributes:
        by_label: True if the sums of a batch's parts are the sums of the batch, however its labels are divided.
    """

    name = "loss"

    def __init__(self, loss: Loss) -> None:
        self._loss, self.by_label = loss, bool(vars(type(loss)).get("divides_classes", False))

    @torch.no_grad()
    def __call__(self, output: Any, target: Any) -> tuple[float, float]:
        """Return `(total, count)` of one batch; the count is the number of items."""
        if isinstance(self._loss, ModelsOwn):
            count = float(self._loss.items_in(target))
        else:
            items = items_of(self._loss)
            count = float(items(target) if items else len(target if isinstance(target, Tensor) else logits_of(output)))
        if not count:
            return 0.0, 0.0
        loss = float(self._loss(output, target))
        return (loss if adds_up(self._loss) else loss * count), count

    def result(self, total: float, count: float) -> float:
        """Return the mean loss; NaN if nothing was counted."""
        return total / count if count else math.nan


def check_labels(target: Tensor, classes: int, where: str, samples: Sequence[int] | None = None) -> None:
    """Check that every label is -100 or in the range 0 to classes - 1.

    Args:
        where: position of the labels for the message, e.g. `in batch 37`.
        samples: for each row of `target`, the index of its sample in the data set, for the message.

    Raises:
        DataError: a label is out of range; the message names the label, its position and the range.
    """
    wrong = ((target < 0) & (target != IGNORED)) | (target >= classes)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        label = target[tuple(place)].item()
        at = f"at {place[0] if len(place) == 1 else tuple(place)}"
        if samples is not None:
            at = f"sample {samples[place[0]]}" + "".join(f", position {p}" for p in place[1:])
        raise DataError(
            "loss.label_out_of_range",
            "expected labels in 0..{largest}, found {label} {where} ({at}; {wrong} of {labels} labels are out of "
            "range)",
            largest=classes - 1,
            label=label,
            where=where,
            at=at,
            wrong=int(wrong.sum()),
            labels=target.numel(),
        )


def classes_on_dim_1(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Convert the logits and labels of a batch to the shapes (m, classes, …) and (m, …).

    For sequences (n, t, classes), each token becomes a row.

    Raises:
        DataError: the labels are not integers, or there is not exactly one label for each sample or token.
    """
    if target.is_floating_point():
        raise DataError(
            "loss.labels_not_integers",
            "labels should be whole numbers, got {target}. If the targets are not classes, use the loss mse, mae "
            "or bce.",
            target=described(target),
        )
    if logits.dim() == 3:
        if target.shape != logits.shape[:2]:
            raise DataError(
                "loss.tokens_differ",
                "the model returned logits {logits} for labels {labels}, but one label per token is needed",
                logits=described(logits),
                labels=described(target),
            )
        return logits.flatten(0, 1), target.flatten().long()
    return logits, target.long()


def same_shape(name: str, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and target with equal shapes and dtypes (at least 32 bits).

    One of them may lack a last dimension of size 1.

    Raises:
        DataError: the shapes differ in another way; torch would broadcast them and return a wrong result.
    """
    values = logits_of(output)
    if values.shape != target.shape:
        if values.shape != (*target.shape, 1) and target.shape != (*values.shape, 1):
            raise DataError(
                "loss.shapes_differ",
                "{name} needs an output and a target of the same shape; the model returned {output}, but the "
                "target is {target}",
                name=name,
                output=described(values),
                target=described(target),
            )
        target = target.reshape(values.shape)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.to(dtype), target.to(dtype)
