"""The built-in losses, and finding a user's own."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from paceline.errors import BatchError, DataError, JobError
from paceline.job.batch import Batch, rows
from paceline.job.loss import Loss, LossSpec
from paceline.job.read.imports import load_object
from paceline.job.zoo.arguments import check_call, checked_args
from paceline.job.zoo.items import reads_models_loss
from paceline.nearest import nearest

IGNORED = -100  # the label that torch and transformers leave out


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
        try:
            mean = F.cross_entropy(
                logits, labels, weight=weight, ignore_index=IGNORED, label_smoothing=self.label_smoothing
            )
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
        """Check `target` by `check_labels` against the output's number of classes.

        Only the output's shape is used.
        """
        logits = logits_of(output)
        if logits.dim() > 1:  # else the loss says that the shapes do not fit
            check_labels(target, logits.shape[2 if logits.dim() == 3 else 1], where, samples)


class Elementwise:
    """Mean of a torch loss between an output and a target of the same shape.

    For `bce` the output are logits, and the target numbers from 0 to 1.
    """

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
        """Raise DataError for a target outside 0 to 1.

        torch's loss has no minimum for such a target.
        """
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


class ModelsOwn:
    """The loss that the model computed itself: `output.loss` or `output["loss"]`.

    Attributes:
        terms: what it is the mean over, by the parts of a batch; none: the samples. The engine finds out
            (`paceline.engine.model_loss`).
    """

    def __init__(self) -> None:
        self.terms: tuple[Term, ...] = ()

    def items_in(self, batch: Any) -> float | Tensor:
        """Number of items in a batch's mean loss; `batch` is the model's input or labels."""
        # whole sequences, of whose tokens this rank has some
        if isinstance(batch, Mapping) and "num_items_in_batch" in batch:
            items: Tensor = batch["num_items_in_batch"].sum()
            return items
        if self.terms and isinstance(batch, Mapping):
            return self.terms[0].count(batch)
        if self.terms and self.terms[0].key == "labels" and not self.terms[0].masked:
            return self.terms[0].count({"labels": batch})
        return float(rows(batch) if isinstance(batch, (Mapping, tuple, list)) else len(batch))

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss as a 0-dimensional tensor. Raises JobError where the output has none."""
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not output[0].dim():
            loss = output[0]
        if not isinstance(loss, Tensor):
            keys = f" with {', '.join(output)}" if isinstance(output, Mapping) else ""
            raise JobError(
                f"loss model: the model's output is a {type(output).__name__}{keys}, without a loss. "
                "A Hugging Face model computes one when the sample has labels; other models need a loss of "
                "their own, e.g. cross_entropy"
            )
        return loss


@dataclass(frozen=True)
class Term:
    """Items of one part of a model's loss: labels under `key` that are not ignored.

    Attributes:
        shifted: each token is to predict the next one, so that the first label of a sequence is for none.
        ignored: this label is left out; None: labels from the number of tokens of `input_ids` on (positions of
            answers).
        masked: labels where the batch's `attention_mask` is 0 are left out as well.
    """

    key: str
    shifted: bool
    ignored: int | None
    masked: bool = False

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """The number of items in a batch."""
        labels: Tensor = batch[self.key]
        counted = labels < batch["input_ids"].shape[1] if self.ignored is None else labels != self.ignored
        if self.masked:
            counted = counted & (batch["attention_mask"] == 1)
        return (counted[..., 1:] if self.shifted else counted).sum()


_LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": CrossEntropy,
    "mse": lambda: Elementwise("mse", F.mse_loss),
    "mae": lambda: Elementwise("mae", F.l1_loss),
    "bce": BinaryCrossEntropy,
    "contrastive": Contrastive,
    "model": ModelsOwn,
}


def check_labels(target: Tensor, classes: int, where: str, samples: Sequence[int] | None = None) -> None:
    """Check that labels lie in 0..classes-1 or are -100.

    `where` says which labels these are, e.g. `in batch 37`.

    `samples` are the indices in the data set of the rows of `target`, to be named. Costs a pass over the labels: for a
    whole data set's labels once, or a batch on the host on its way to a GPU.

    Raises:
        DataError: a label out of range; names it, its place and the range.
    """
    wrong = ((target < 0) & (target != IGNORED)) | (target >= classes)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        label = target[tuple(place)].item()
        at = f"at {place[0] if len(place) == 1 else tuple(place)}"
        if samples is not None:
            at = f"sample {samples[place[0]]}" + "".join(f", position {p}" for p in place[1:])
        raise DataError(
            f"expected labels in 0..{classes - 1}, found {label} {where} ({at}, {int(wrong.sum())} of "
            f"{target.numel()} labels)"
        )


def logits_of(output: Any) -> Tensor:
    """The tensor of a model's output: the output itself, or its `.logits`.

    Raises:
        JobError: the output is or has none.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise JobError(
            f"the loss needs a tensor or an object with .logits, but the model returned a {type(output).__name__}"
        )
    return logits


def classes_on_dim_1(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (m, classes, …) and int64 labels (m, …) from those of a batch.

    Sequences (n, t, classes) become one row per token.

    Raises:
        DataError: labels that are not whole numbers, or not one per sample or token.
    """
    if target.is_floating_point():
        raise DataError(
            f"labels should be whole numbers, got {described(target)}; if the targets are not classes, use the loss "
            "mse, mae or bce"
        )
    if logits.dim() == 3:
        if target.shape != logits.shape[:2]:
            raise DataError(
                f"the model returned logits {described(logits)} for labels {described(target)}; there should be one "
                "label per token"
            )
        return logits.flatten(0, 1), target.flatten().long()
    return logits, target.long()


def same_shape(name: str, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Output and target in one shape and one dtype of at least 32 bits.

    A last dimension of size 1 may be left out.

    Raises:
        DataError: other differences in shape, which torch would broadcast into a wrong result.
    """
    values = logits_of(output)
    if values.shape != target.shape:
        if values.shape != (*target.shape, 1) and target.shape != (*values.shape, 1):
            raise DataError(
                f"{name} needs an output and a target of the same shape; the model returned {described(values)}, "
                f"the target is {described(target)}"
            )
        target = target.reshape(values.shape)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.to(dtype), target.to(dtype)


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
            explained = JobError(
                f"loss {path} cannot be made of its args: {type(error).__name__}: {error}{_tensors(args)}"
            )
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


def described(tensor: Tensor) -> str:
    """Describe the dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def call(model: Callable[..., Any], batch: Batch, *, loss: Loss) -> Any:
    """The model's output for a batch.

    A tuple's inputs are passed in order, a mapping's by name; labels only where the model computes the loss.
    """
    inputs, named = _arguments(batch, loss)
    return model(*inputs, **named)


def _arguments(batch: Batch, loss: Loss) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, (tuple, list)):
        return tuple(batch[:-1]), {}
    if isinstance(loss, ModelsOwn) or reads_models_loss(loss):
        return (), dict(batch)
    return (), {k: v for k, v in batch.items() if k != "labels"}


def refused_batch(model: Callable[..., Any], batch: Batch, error: Exception, *, loss: Loss) -> BatchError | None:
    """Explain why `call` failed on this batch, as an error; None if unknown."""
    inputs, named = _arguments(batch, loss)
    if why := _misfit(model, inputs, named, error):
        return BatchError(f"{why} ({first_line(error)})")
    if type(error) is RuntimeError and re.search("shape|size|channels|reduction dim|[0-9]D", str(error)):
        parts = [described(t) for t in (*inputs, *named.values()) if isinstance(t, Tensor)]
        explained = BatchError(f"{_kind(model)} cannot compute a batch of {', '.join(parts)}: {first_line(error)}")
        explained.from_users_code = True
        return explained
    return None


def first_line(error: BaseException) -> str:
    """Return the class of an error, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _misfit(
    model: Callable[..., Any], inputs: tuple[Any, ...], named: Mapping[str, Any], failure: Exception
) -> str | None:
    """Explain why a model cannot take these inputs; None if unknown."""
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
    """Explain a failure by different dtypes of model and data; None for other causes."""
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
