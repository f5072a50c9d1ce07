"""Cross-entropy over many classes: classes divided over ranks, and rows of logits computed in chunks.

Start with `chunked_cross_entropy`, which computes logits and loss together, or with `ParallelLoss`, which gets logits
that are divided over ranks. Both use the same sums over the classes (`_Rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm import Group
from paceline.errors import DataError
from paceline.job.loss import chunk_rows
from paceline.job.loss_items import IGNORED, check_labels, classes_on_dim_1, logits_of


class ClassLoss(Protocol):
    """A loss whose logits may stay divided over classes, or may be computed in chunks.

    Such a loss sets `divides_classes = True`.
    """

    label_smoothing: float
    weight: Tensor | None

    def __call__(self, output: Any, target: Any) -> Tensor: ...

    def items(self, target: Tensor) -> Tensor:
        """Return the number of items in the mean."""


def divides_classes(loss: object) -> TypeGuard[ClassLoss]:
    """Return True if a loss can be computed from logits that are divided over classes."""
    return bool(vars(type(loss)).get("divides_classes", False))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    chunk: int | None = None,
    tp: Group | None = None,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    loss_scale: float = 1.0,
    transposed: bool = False,
    skips: bool = True,
) -> Tensor:
    """Compute the mean cross-entropy of the logits `hidden @ weight.T + bias`, without keeping the logits.

    Only the logits of one chunk of rows are in memory at a time. The forward pass also computes the gradients, so that
    no logits are computed twice (Liger Kernel, arXiv:2410.10989; Cut Cross-Entropy, arXiv:2411.09009). The products
    have the same precision as in a linear layer, and the loss has at least 32 bits. Every tp rank returns the same
    loss, with the shape (1, ..., 1) of as many dimensions as `hidden`. With tp, the gradient of `hidden` is a partial
    sum, which the caller reduces.

    Args:
        hidden: inputs of the output head, shape (..., features).
        weight: weight of the head, shape (classes, features), or (features, classes) if `transposed`. With `tp`, each
            rank has classes / ranks classes.
        target: integer labels of shape (...), or -100 for ignored labels. The caller checks their range.
        chunk: number of rows in a chunk; None chooses it by the number of rows (`chunk_rows`).
        label_smoothing: fraction of each label that is spread over all classes.
        class_weight: weight of each class of all ranks. If given, the mean is weighted by the labels' weights.
        loss_scale: factor on the gradients that the forward pass computes, which the backward pass divides out. The
            loss scale of fp16 keeps small gradients from underflow.
        skips: whether to leave out rows with ignored labels. This reads their number on the host, and so waits for an
            accelerator.
    """
    how = _How(chunk, tp, label_smoothing, class_weight, loss_scale, transposed, skips, torch.is_grad_enabled())
    loss: Tensor = _Chunked.apply(hidden, weight, bias, target, how)
    return loss


@dataclass(frozen=True)
class _How:
    """Options of `chunked_cross_entropy`."""

    chunk: int | None
    tp: Group | None
    label_smoothing: float
    class_weight: Tensor | None
    loss_scale: float
    transposed: bool
    skips: bool
    trains: bool


class _Chunked(torch.autograd.Function):
    """Loss of a head's inputs, whose forward pass also computes the scaled gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: _How) -> Tensor:
        kind = hidden.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        # autocast does not narrow float64
        dtype = hidden.dtype if hidden.dtype == torch.float64 else narrow
        with torch.autocast(kind, enabled=False):
            passes = _Passes(hidden, weight, bias, target, how, dtype)
            ctx.needed = [how.trains and needed for needed in ctx.needs_input_grad[:3]]
            loss = passes.loss(ctx.needed)
        ctx.gradients, ctx.loss_scale = [passes.of_hidden, passes.of_weight, passes.of_bias], how.loss_scale
        ctx.likes = [(t.shape, t.dtype) if t is not None else None for t in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients of a chunked cross-entropy are kept for one backward pass: call backward only once"
            )
        gradients, ctx.gradients = ctx.gradients, None
        ratio = grad.reshape(()) / ctx.loss_scale
        is_one = ratio.device.type == "cpu" and float(ratio) == 1.0
        made: list[Tensor | None] = []
        for gradient, like in zip(gradients, ctx.likes, strict=True):
            if gradient is None or like is None:
                made.append(None)
                continue
            shape, dtype = like
            scaled = gradient if is_one else gradient.mul_(ratio)
            made.append(scaled.to(dtype).view(shape))
        return *made, None, None


class _Passes:
    """Forward pass over all chunks, with the gradients of hidden states, weight and bias."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: _How, dtype: torch.dtype
    ) -> None:
        self.how, self.dtype, self.wide = how, dtype, torch.promote_types(dtype, torch.float32)
        self.dims = hidden.dim()
        self.hidden, self.labels = hidden.detach().flatten(0, -2), target.flatten()
        own = weight.detach().to(dtype)
        # shape (classes, features)
        self.weight = own.T if how.transposed else own
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.of_hidden: Tensor | None = None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def loss(self, needed: Sequence[bool]) -> Tensor:
        """Return the mean loss; compute the gradients that are needed."""
        hidden, how, classes = self.hidden, self.how, len(self.weight)
        index = (self.labels != IGNORED).nonzero().squeeze(1) if how.skips else None
        if index is not None and len(index) == len(self.labels):
            index = None
        rows = len(self.labels if index is None else index)
        count = min(how.chunk or chunk_rows(rows, self.dtype.itemsize), max(rows, 1))
        self._allocate(needed, skipping=index is not None, empty=not rows)
        logits = torch.empty(count, classes, dtype=self.dtype, device=hidden.device)
        wide = logits if self.dtype == self.wide else torch.empty_like(logits, dtype=self.wide)
        tail = how.tp, how.label_smoothing, how.class_weight
        total = _label_weights(self.labels, how.class_weight, self.wide).sum()
        scale = torch.where(total > 0, how.loss_scale / total, 0.0)
        # not a view, because FSDP warns about views
        cost = total.new_zeros([1] * self.dims)
        for start in range(0, rows, count):
            stop = min(start + count, rows)
            chosen: Any = slice(start, stop) if index is None else index[start:stop]
            inputs, own = hidden[chosen].to(self.dtype), logits[: stop - start]
            if self.bias is None:
                torch.mm(inputs, self.weight.T, out=own)
            else:
                torch.addmm(self.bias, inputs, self.weight.T, out=own)
            numbers = wide[: stop - start]
            if numbers is not own and wide is not logits:
                numbers.copy_(own)
            found = _Rows(numbers, self.labels[chosen], *tail)
            cost += found.cost().sum()
            if any(needed):
                self._add(found.gradient(found.exponentials, found.scale * scale, scale), own, inputs, chosen, start)
        return torch.where(total > 0, cost / total, 0.0)

    def _allocate(self, needed: Sequence[bool], *, skipping: bool, empty: bool) -> None:
        """Allocate gradients; those of the weight are added up in at least 32 bits."""
        if needed[0]:
            self.of_hidden = (torch.zeros_like if skipping or empty else torch.empty_like)(self.hidden)
        if needed[1]:
            new = torch.zeros if empty else torch.empty
            shape = self.weight.T.shape if self.how.transposed else self.weight.shape
            self.of_weight = new(shape, dtype=self.wide, device=self.hidden.device)
        if needed[2]:
            self.of_bias = torch.zeros(len(self.weight), dtype=self.wide, device=self.hidden.device)

    def _add(self, gradient: Tensor, logits: Tensor, inputs: Tensor, chosen: Any, start: int) -> None:
        """Add the gradients of one chunk; `logits` is memory to overwrite."""
        if self.of_bias is not None:
            self.of_bias += gradient.sum(0)
        narrow = gradient if gradient.dtype == self.dtype else logits.copy_(gradient)
        if self.of_hidden is not None:
            self.of_hidden[chosen] = (narrow @ self.weight).to(self.of_hidden.dtype)
        if self.of_weight is None:
            return
        left, right = (inputs.T, narrow) if self.how.transposed else (narrow.T, inputs)
        if self.dtype != self.wide:
            product = left @ right
            self.of_weight.add_(product) if start else self.of_weight.copy_(product)
        elif start:
            self.of_weight.addmm_(left, right)
        else:
            torch.mm(left, right, out=self.of_weight)


def _label_weights(labels: Tensor, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each label in the mean; 0 for ignored labels."""
    counted = (labels != IGNORED).to(dtype)
    if class_weight is None:
        return counted
    # labels out of range are clamped here; `check` reports them
    return class_weight.to(labels.device, dtype)[labels.clamp(0, len(class_weight) - 1)] * counted


class _Rows:
    """Cross-entropy of rows of logits (m, c), of which each tp rank has its own classes.

    Let w be the weights of the C classes, e the label smoothing, x a row of logits, and Z its log-sum-exp. The loss of
    label y is (1 - e) w_y (Z - x_y) + e / C sum_c w_c (Z - x_c). As in torch, the mean is the sum of these losses
    divided by the sum of w_y.

    Attributes:
        exponentials: the memory of the logits, which then holds exp(x - max x).
        log_sum: log-sum-exp of each row.
        scale: factor that turns `exponentials` into the first term of the gradient.
    """

    def __init__(
        self, logits: Tensor, labels: Tensor, tp: Group | None, label_smoothing: float, class_weight: Tensor | None
    ) -> None:
        part, rank, size = logits.shape[1], 0 if tp is None else tp.rank, 1 if tp is None else tp.size
        # each label as an index into this rank's classes
        own = labels - rank * part
        self.label_smoothing, classes = label_smoothing, part * size
        self.counted = (labels != IGNORED).to(logits.dtype)
        self.here = self.counted * ((own >= 0) & (own < part))
        self.own = own.clamp(0, part - 1).unsqueeze(1)
        self.of_label = _label_weights(labels, class_weight, logits.dtype)
        weights = None if class_weight is None else class_weight.to(logits.device, logits.dtype)
        self.weights = None if weights is None else weights[rank * part : (rank + 1) * part]
        self.spread = label_smoothing / classes
        self.every: float | Tensor = self.spread * (classes if weights is None else weights.sum())
        highest = logits.amax(1)
        if tp is not None:
            tp.all_reduce(highest, "max")
        picked = logits.gather(1, self.own).squeeze(1) * self.here
        every = torch.zeros_like(highest)
        if label_smoothing:
            every = logits.sum(1) if self.weights is None else logits @ self.weights
        self.exponentials = logits.sub_(highest.unsqueeze(1)).exp_()
        sums = torch.stack([self.exponentials.sum(1), picked, every])
        if tp is not None:
            tp.all_reduce(sums)
        self.log_sum = sums[0].log() + highest
        self._picked, self._sum = sums[1], sums[2]
        self._from_label = (1 - label_smoothing) * self.of_label
        self._first = self._from_label + self.every * self.counted
        self.scale = self._first / sums[0]

    def cost(self) -> Tensor:
        """Return the loss of each row before the division by the sum of w_y, shape (m,)."""
        cost = self._from_label * (self.log_sum - self._picked)
        if self.label_smoothing:
            cost += (self.every * self.log_sum - self.spread * self._sum) * self.counted
        return cost

    def gradient(self, buffer: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient of the costs' sum times `scale`, in `buffer`.

        Args:
            buffer: exp(x - z) for any z of each row, which is multiplied by `rows`.
            rows: factors that turn `buffer` into the softmax times its factor and `scale`.
        """
        gradient = buffer.mul_(rows.unsqueeze(1))
        gradient.scatter_add_(1, self.own, -(self._from_label * self.here * scale).unsqueeze(1))
        if self.label_smoothing:
            gradient -= (self.spread * scale * self.counted).unsqueeze(1) * (
                1 if self.weights is None else self.weights
            )
        return gradient

    def softmax_again(self, logits: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient of the costs' sum times `scale`, from kept logits."""
        return self.gradient((logits - self.log_sum.unsqueeze(1)).exp_(), self._first * scale, scale)


def parallel_cross_entropy(
    logits: Tensor, target: Tensor, tp: Group, *, label_smoothing: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Compute the mean cross-entropy over all classes, like `F.cross_entropy`.

    Every rank returns the same loss, which is 0 if all labels are ignored. In the backward pass, each rank computes the
    gradient of its own logits without communication.

    Args:
        logits: this rank's logits of shape (..., classes / ranks), which begin with class rank * classes / ranks. Types
            with fewer than 32 bits are converted to 32 bits.
        target: integer labels of shape (...), below the number of classes, or -100 for ignored labels.
        tp: the ranks that divide the classes. Whatever the number of classes, each rank sends two numbers per label and
            one further number.
        label_smoothing: fraction of each label that is spread over all classes.
        weight: weight of each class, shape (classes,). If given, the mean is weighted by the labels' weights.
    """
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), target.flatten(), tp, label_smoothing, weight)
    return loss


class ParallelLoss:
    """The loss `cross_entropy` for a model whose logits stay sharded over `tp`."""

    def __init__(self, loss: ClassLoss, tp: Group) -> None:
        self.loss, self.tp = loss, tp

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Compute the loss of logits (n, classes / ranks) or (n, t, classes / ranks).

        Raises:
            DataError: labels are not integers or do not fit the output's shape. On the CPU, labels out of range also
                raise this error.
        """
        logits, labels = classes_on_dim_1(logits_of(output), target)
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            sizes = f"logits {list(logits.shape)} for labels {list(labels.shape)}"
            raise DataError(
                "loss.one_label_each",
                "the model returned {found}, but the loss needs one label per sample or token",
                found=sizes,
            )
        # on a GPU, the test would synchronize; there, `check` tests the labels before
        if labels.device.type == "cpu":
            check_labels(labels, self._classes(logits), "in a batch")
        smoothing, weight = self.loss.label_smoothing, self.loss.weight
        weight = self.loss.weight = None if weight is None else weight.to(logits.device)
        return parallel_cross_entropy(logits, labels, self.tp, label_smoothing=smoothing, weight=weight)

    def items(self, target: Tensor) -> Tensor:
        """Return the number of items in the mean, as in the undivided loss."""
        return self.loss.items(target)

    def check(self, output: Any, target: Tensor, where: str, samples: Sequence[int] | None = None) -> None:
        """Check that the labels are in the range of all ranks' classes (`check_labels`)."""
        logits = logits_of(output)
        if logits.dim() > 1:
            check_labels(target, self._classes(logits), where, samples)

    def _classes(self, logits: Tensor) -> int:
        return logits.shape[-1] * self.tp.size


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of rows of logits (m, c) and labels (m,).

    The backward pass recomputes the probabilities from the logits, because keeping them would take another 32-bit copy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, tp: Group, label_smoothing: float, weight: Tensor | None
    ) -> Tensor:
        # a copy, because the sums overwrite it
        numbers = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        rows = _Rows(numbers, target, tp, label_smoothing, weight)
        total = rows.of_label.sum()
        del rows.exponentials
        ctx.save_for_backward(logits)
        ctx.rows, ctx.total = rows, total
        return torch.where(total > 0, rows.cost().sum() / total, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        total, rows = ctx.total, ctx.rows
        scale = torch.where(total > 0, grad.to(total.dtype) / total, 0.0)
        gradient = rows.softmax_again(logits.to(total.dtype), scale)
        return gradient.to(logits.dtype), None, None, None, None
