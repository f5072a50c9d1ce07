"""Built-in losses, and the loading of a user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from paceline.errors import DataError, JobError
from paceline.job.loss_items import (
    ELEMENTWISE,
    IGNORED,
    OF_CLASSES,
    ModelsOwn,
    check_labels,
    classes_on_dim_1,
    described,
    items_of,
    logits_of,
    same_shape,
)
from paceline.job.spec import check_call, checked_args, load_object
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.loss import Loss, LossSpec


def build_loss(spec: LossSpec) -> Loss:
    """Build the loss that `spec` names.

    Raises:
        JobError: the name is unknown (the message names the nearest), an import fails, or the loss rejects the
            arguments.
    """
    if ":" in spec.name:
        return _users_loss(spec.name, spec.args)
    if spec.name in torch_losses():
        return _users_loss(f"torch.nn:{spec.name}", spec.args)
    if spec.name not in _LOSSES:
        raise JobError(
            "loss.unknown",
            'there is no loss "{name}". {hint} (Your own loss: pkg.mod:name or file.py:name)',
            name=spec.name,
            hint=nearest(spec.name, [*_LOSSES, *torch_losses()]),
        )
    built_in = _LOSSES[spec.name]
    return built_in(**checked_args(f"loss {spec.name}", built_in, spec.args))


@functools.cache
def torch_losses() -> frozenset[str]:
    """Return the names of the loss classes of `torch.nn`."""
    return frozenset(name for name, value in vars(nn).items() if inspect.isclass(value) and name.endswith("Loss"))


class CrossEntropy:
    """Mean cross-entropy over the labels that are not -100; 0 if all labels are -100.

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
        """Return the loss as a 0-dimensional tensor.

        Raises:
            DataError: labels are out of range, not whole numbers, or do not fit the output's shape. On a GPU, labels
                out of range end the process with the device's own assertion; `check` on the host reports them before.
        """
        logits, labels = classes_on_dim_1(logits_of(output), target)
        weight = None
        if self.weight is not None:
            self.weight = self.weight.to(logits.device)
            logits = _widened(logits)
            weight = self.weight.to(logits.dtype)
        options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": self.label_smoothing}
        try:
            mean = F.cross_entropy(logits, labels, weight=weight, **options)
        except (IndexError, RuntimeError, ValueError):
            _explain_failure(logits, labels, weight)
            raise
        # the check is nearly free on a CPU; on an accelerator the host would have to wait
        if mean.device.type == "cpu" and not isnan(mean.item()):
            return mean
        if self._all_counted:
            return mean
        counted = (labels != IGNORED).any() if self.weight is None else self.items(target) > 0
        return torch.where(counted, mean, 0.0)

    @contextmanager
    def knowing(self, target: Tensor) -> Iterator[None]:
        """Return a context in which the loss uses parts of the host's `target`.

        If all labels count, an accelerator need not check for parts without items.
        """
        self._all_counted = self.weight is None and not bool((target == IGNORED).any())
        try:
            yield
        finally:
            self._all_counted = False

    def items(self, target: Tensor) -> Tensor:
        """Return the number of items in the mean.

        Items are labels other than -100, or their weights' sum.
        """
        counted = target != IGNORED
        if self.weight is None:
            return counted.sum()
        # `check` reports labels out of range
        of_each = self.weight.to(target.device)[target.long().clamp(0, len(self.weight) - 1)]
        return (of_each * counted).sum()

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check `target` with `check_labels`; only the shape of the output is used."""
        logits = logits_of(output)
        if logits.dim() > 1:  # otherwise the loss reports that the shapes do not fit
            check_labels(target, logits.shape[2 if logits.dim() == 3 else 1], where, samples)


class Elementwise:
    """Mean of a torch loss between an output and a target of the same shape."""

    known_mean = True

    def __init__(self, name: str, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.name, self.mean = name, mean

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor; raise DataError if the shapes differ."""
        return self.mean(*same_shape(self.name, output, target))


class BinaryCrossEntropy(Elementwise):
    """The loss `bce`: logits, and a target of numbers from 0 to 1.

    `pos_weight` multiplies the loss of positive targets: one number, or one for each output.
    """

    def __init__(self, *, pos_weight: PositiveFloat | list[Annotated[float, Field(ge=0)]] | None = None) -> None:
        mean: Callable[..., Tensor] = F.binary_cross_entropy_with_logits
        if pos_weight is not None:
            mean = partial(_weighted, pos_weight=torch.tensor(pos_weight))
        super().__init__("bce", mean)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        Raises DataError for different shapes, or targets outside 0 to 1.
        """
        # on an accelerator the host would have to wait; there, `check` gets host tensors
        if target.device.type == "cpu":
            self.check(output, target, "in a batch")
        return super().__call__(output, target)

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Raise DataError for targets outside 0 to 1, which have no minimal loss."""
        outside = (target < 0) | (target > 1)
        if outside.any():
            place = outside.nonzero()[0].tolist()
            at = f"sample {samples[place[0]]}" if samples is not None and place else f"at {place}"
            raise DataError(
                "loss.target_out_of_range",
                "loss bce needs targets from 0 to 1, found {target:g} {where} ({at}). For regression use the loss "
                "mse or mae.",
                target=target[tuple(place)].item(),
                where=where,
                at=at,
            )


def _widened(values: Tensor) -> Tensor:
    """Convert half-precision outputs to float32, as autocast does, to keep weights exact."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _weighted(values: Tensor, target: Tensor, *, pos_weight: Tensor, reduction: str = "mean") -> Tensor:
    if pos_weight.dim() and pos_weight.shape != values.shape[-1:]:
        raise JobError(
            "loss.pos_weight_length",
            "loss bce: pos_weight has {pos_weight} numbers, but the model returned {outputs}. Give one number, or "
            "one for each output of a sample.",
            pos_weight=len(pos_weight),
            outputs=described(values),
        )
    values = _widened(values)
    weight = pos_weight.to(values.device, values.dtype)
    return F.binary_cross_entropy_with_logits(values, target, pos_weight=weight, reduction=reduction)


class TorchLoss:
    """A loss of `torch.nn` whose mean is known.

    Its weights move to the device of the output.

    Attributes:
        module: torch's loss module.
        reduction: `sum`, or `mean` over samples or `items`.
        items: function that counts the labels or sums their weights; None for elementwise losses.
    """

    known_mean = True

    def __init__(self, module: nn.Module) -> None:
        self.module, self.__name__ = module, type(module).__name__
        self.reduction = "sum" if module.reduction == "sum" else "mean"
        self.items = items_of(module)

    @property
    def whole_sequences(self) -> bool:
        """True if the mean is over samples and not over tokens, which `cp` cannot divide."""
        return self.module.reduction == "batchmean"

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        Raises DataError if an elementwise loss gets different shapes.
        """
        if type(self.module) in ELEMENTWISE:
            values, wanted = same_shape(self.__name__, output, target)
        else:
            values, wanted = logits_of(output), target
        if any(True for _ in self.module.buffers()):
            values = _widened(values)
        loss: Tensor = self.module.to(values.device, values.dtype)(values, wanted)
        if self.items is None:
            return loss
        return torch.where(torch.as_tensor(self.items(target), device=loss.device) > 0, loss, 0.0)


class Contrastive:
    """NT-Xent loss over two normalized views of each sample, shape (n, 2, d).

    It is described by Chen et al. (2020, arXiv:2002.05709). Each view must find its partner among all other views of
    the batch, so the loss needs the whole batch. The target is ignored.
    """

    whole_batch = True

    def __init__(self, *, temperature: PositiveFloat = 0.5) -> None:
        self.temperature = temperature

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss as a 0-dimensional tensor; raise DataError unless the output is (n, 2, d)."""
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
    """Return the similarities (2n, 2n) of all views, and each view's partner index (2n,).

    A view's similarity to itself is -inf.

    Raises:
        DataError: the shape of the output is not (n, 2, d).
    """
    views = logits_of(output)
    if views.dim() != 3 or views.shape[1] != 2:
        raise DataError(
            "loss.not_two_views",
            "contrastive needs two views of each sample, (n, 2, d), but the model returned {output}. The zoo's "
            "model simclr returns them.",
            output=described(views),
        )
    flat = views.flatten(0, 1)
    similarity = (flat @ flat.T).fill_diagonal_(float("-inf"))
    return similarity, torch.arange(len(flat), device=flat.device) ^ 1  # views 2i and 2i + 1 belong together


def _users_loss(path: str, args: dict[str, Any]) -> Loss:
    """Return a function with `args` bound, or an instance of a class made with `args`."""
    loss = load_object(path)
    if path.startswith("torch."):
        args = {key: torch.tensor(v) if key in _WEIGHTS and v is not None else v for key, v in args.items()}
    if isinstance(loss, type):
        check_call(path, loss, **args)
        try:
            loss = loss(**args)
        except Exception as error:
            what = f"{type(error).__name__}: {error}{_tensors(args)}"
            explained = JobError(
                "loss.args_invalid", "loss {path} cannot be created from its args: {reason}", path=path, reason=what
            )
            explained.from_users_code = not path.startswith("torch.")
            raise explained from error
        args = {}
    if not callable(loss):
        raise JobError(
            "loss.not_callable",
            "{path} is a {class_name} and cannot be called. A loss must be callable as loss(output, target).",
            path=path,
            class_name=type(loss).__name__,
        )
    check_call(path, loss.forward if isinstance(loss, nn.Module) else loss, "output", "target", **args)
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise JobError(
            "loss.with_parameters",
            "loss {path} has trainable parameters, but a job's optimizer trains only those of the model. Make them "
            "a part of the model.",
            path=path,
        )
    if getattr(loss, "reduction", None) == "none" or args.get("reduction") == "none":
        raise JobError(
            "loss.reduction_none",
            "loss {path}: reduction none returns a number for each sample, but training needs one. Use mean.",
            path=path,
        )
    if type(loss) in (*ELEMENTWISE, *OF_CLASSES):
        return TorchLoss(loss)
    # the wrapper has the same attributes
    return functools.update_wrapper(functools.partial(loss, **args), loss) if args else loss


_WEIGHTS = ("weight", "pos_weight")  # lists in a job file, but tensors in torch


def _tensors(args: Mapping[str, Any]) -> str:
    """Explain that a class may need tensors instead of lists; "" if there is no list."""
    if not (lists := [name for name, value in args.items() if isinstance(value, list)]):
        return ""
    return (
        f". In a job file {lists[0]} is a list, no tensor: the built-in cross_entropy takes `weight` as a list, and a "
        "function of your own (file.py:name) can make the tensor"
    )


def _explain_failure(logits: Tensor, labels: Tensor, weight: Tensor | None) -> None:
    """Raise an error that explains torch's, if the user can fix the cause.

    It reads the values, so it is called only after a failure.
    """
    if logits.dim() < 2 or labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise DataError(
            "loss.samples_differ",
            "the model returned logits {logits} for labels {labels}, but one label per sample is needed",
            logits=described(logits),
            labels=described(labels),
        )
    if weight is not None and len(weight) != logits.shape[1]:
        raise JobError(
            "loss.weight_length",
            "loss cross_entropy: weight has {weight} numbers, but the model has {classes} classes",
            weight=len(weight),
            classes=logits.shape[1],
        )
    check_labels(labels, logits.shape[1], "in a batch")
