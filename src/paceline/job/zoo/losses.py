"""Built-in losses, and the loading of user-defined losses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from paceline.job.zoo.preference_loss import DPO
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.loss import Loss, LossSpec


def build_loss(spec: LossSpec) -> Loss:
    """Build the loss that `spec` names.

    Raises:
        JobError: the name is unknown (the message names the nearest one), an import fails, or the loss rejects the
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

    The output has logits of shape (n, classes), (n, t, classes) for sequences, or (n, classes, h, w). The target has
    integer labels in the same shape without the dimension of the classes. `weight` has one number per class; the mean
    is then weighted by the labels' weights.

    `chunk` is the number of rows (tokens) of logits that a training step computes at a time, so that whole logits never
    exist. `auto` computes logits whole if those of a microbatch take at most 64 MiB, and `off` always.
    """

    known_mean = divides_classes = True

    def __init__(
        self,
        *,
        label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0,
        weight: list[Annotated[float, Field(ge=0)]] | None = None,
        chunk: Annotated[int, Field(gt=0, strict=True)] | Literal["auto", "off", False] = "auto",
    ) -> None:
        self.label_smoothing, self._all_counted = label_smoothing, False
        # YAML reads `off` as False
        self.chunk = chunk or "off"
        self.weight = None if weight is None else torch.tensor(weight)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        Raises:
            DataError: labels are out of range, are not integers, or do not fit the output's shape. On a GPU, a label
                out of range ends the process with a device-side assertion; `check` reports it on the host first.
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
        # checking for NaN is nearly free on a CPU; with an accelerator, the host would have to wait
        if mean.device.type == "cpu" and not isnan(mean.item()):
            return mean
        if self._all_counted:
            return mean
        counted = (labels != IGNORED).any() if self.weight is None else self.items(target) > 0
        return torch.where(counted, mean, 0.0)

    @contextmanager
    def knowing(self, target: Tensor) -> Iterator[None]:
        """Return a context in which the loss is computed for parts of `target`.

        `target` is in host memory. If no label is ignored, the accelerator need not check for parts without items.
        """
        self._all_counted = self.weight is None and not bool((target == IGNORED).any())
        try:
            yield
        finally:
            self._all_counted = False

    def items(self, target: Tensor) -> Tensor:
        """Return the number of items in the mean.

        This is the number of labels other than -100, or the sum of their weights.
        """
        counted = target != IGNORED
        if self.weight is None:
            return counted.sum()
        # labels out of range are clamped here; `check` reports them
        of_each = self.weight.to(target.device)[target.long().clamp(0, len(self.weight) - 1)]
        return (of_each * counted).sum()

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check `target` with `check_labels`; only the shape of the output is used."""
        logits = logits_of(output)
        if logits.dim() > 1:  # for other shapes, the loss itself reports the error
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
    """The loss `bce` of logits and a target with numbers from 0 to 1.

    `pos_weight` multiplies the loss of positive targets. It is one number, or one number for each output.
    """

    def __init__(self, *, pos_weight: PositiveFloat | list[Annotated[float, Field(ge=0)]] | None = None) -> None:
        mean: Callable[..., Tensor] = F.binary_cross_entropy_with_logits
        if pos_weight is not None:
            mean = partial(_weighted, pos_weight=torch.tensor(pos_weight))
        super().__init__("bce", mean)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        A DataError is raised if the shapes differ or a target is not in the range 0 to 1.
        """
        # with an accelerator the host would have to wait, so the engine calls `check` with host tensors instead
        if target.device.type == "cpu":
            self.check(output, target, "in a batch")
        return super().__call__(output, target)

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Raise a DataError for targets outside the range 0 to 1.

        The loss has no minimum for such targets.
        """
        if target.numel():
            # valid targets need only one pass
            least, most = target.aminmax()
            if least.item() >= 0 and most.item() <= 1:
                return
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
    """Convert half-precision outputs to float32, like autocast, so that weights keep their precision."""
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

    The weights of the loss are moved to the device of the output.

    Attributes:
        module: torch's loss module.
        reduction: `sum`, or `mean` over samples or `items`.
        items: function that counts the labels or sums their weights; None if the items are samples.
    """

    known_mean = True

    def __init__(self, module: nn.Module) -> None:
        self.module, self.__name__ = module, type(module).__name__
        self.reduction = "sum" if module.reduction == "sum" else "mean"
        self.items = items_of(module)

    @property
    def whole_sequences(self) -> bool:
        """True if the mean is over samples instead of tokens.

        Context parallelism (`cp`) cannot divide the sequences for such a loss.
        """
        return self.module.reduction == "batchmean"

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        A DataError is raised if the loss is elementwise and the shapes of output and target differ.
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
    """NT-Xent loss over two normalized views of each sample; the output has the shape (n, 2, d).

    Chen et al. (2020, arXiv:2002.05709) describe this loss. For each view, the task is to find the other view of the
    same sample among all views of the batch. The loss therefore needs the whole batch. The target is ignored.
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
    "dpo": DPO,
    "model": ModelsOwn,
}


def view_similarity(output: Any) -> tuple[Tensor, Tensor]:
    """Return the similarities (2n, 2n) of all views, and the index of each view's partner (2n,).

    The partner of a view is the other view of the same sample. The similarity of a view to itself is -inf.

    Raises:
        DataError: the shape of the output is not (n, 2, d).
    """
    views = logits_of(output)
    if views.dim() != 3 or views.shape[1] != 2:
        raise DataError(
            "loss.not_two_views",
            "contrastive needs two views of each sample, (n, 2, d), but the model returned {output}. The zoo's model "
            "simclr returns two views.",
            output=described(views),
        )
    flat = views.flatten(0, 1)
    similarity = (flat @ flat.T).fill_diagonal_(float("-inf"))
    return similarity, torch.arange(len(flat), device=flat.device) ^ 1  # views 2i and 2i + 1 belong together


def _users_loss(path: str, args: dict[str, Any]) -> Loss:
    """Bind `args` to the user's loss function, or create the user's loss with `args`."""
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
            "loss {path} has trainable parameters, but a job's optimizer trains only the parameters of the model. "
            "Make the parameters of the loss a part of the model.",
            path=path,
        )
    if getattr(loss, "reduction", None) == "none" or args.get("reduction") == "none":
        raise JobError(
            "loss.reduction_none",
            "loss {path}: the reduction none returns a number for each sample, but training needs a single number. "
            "Use reduction=mean.",
            path=path,
        )
    if type(loss) in (*ELEMENTWISE, *OF_CLASSES):
        return TorchLoss(loss)
    # the wrapper has the attributes of the loss
    return functools.update_wrapper(functools.partial(loss, **args), loss) if args else loss


_WEIGHTS = ("weight", "pos_weight")  # lists in a job file, but tensors in torch


def _tensors(args: Mapping[str, Any]) -> str:
    """Explain that a class may need a tensor; return "" if no argument is a list."""
    if not (lists := [name for name, value in args.items() if isinstance(value, list)]):
        return ""
    return (
        f". In a job file {lists[0]} is a list, no tensor: the built-in cross_entropy takes `weight` as a list, and a "
        "function of your own (file.py:name) can make the tensor"
    )


def _explain_failure(logits: Tensor, labels: Tensor, weight: Tensor | None) -> None:
    """Raise an error that explains a failure in torch, if the cause is known.

    The function reads the values of the tensors, so it is called only after a failure.
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
