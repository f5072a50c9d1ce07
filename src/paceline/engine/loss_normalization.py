"""Loss normalization: the weight of each microbatch in the global mean.

A loss is a sum, a mean over samples, or a mean over items such as tokens. The loss declares its items, or torch's
definition of the loss determines them (`paceline.job.zoo.losses`). If a batch is computed in several microbatches, a
user's own loss is compared with its declaration before the first update. The comparison is repeated in steps 2, 4, 8,
…, because early batches may have no ignored label.
"""

from __future__ import annotations

import copy
import dis
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_map

from paceline.comm.gather import gather
from paceline.device import forked_random, on_accelerator, widest_float
from paceline.engine.model_loss import in_float64
from paceline.errors import DataError, JobError, PlanError
from paceline.job.batch import Batch, rows, target_of
from paceline.job.loss import Loss
from paceline.job.loss_items import (
    LossMetric,
    ModelsOwn,
    adds_up,
    declares_mean,
    described,
    first_line,
    is_known,
    items_of,
    reads_models_loss,
)
from paceline.planning.model.recorder import tensors_in

if TYPE_CHECKING:
    from paceline.data.loader import Position
    from paceline.engine.compute import Compute


_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative tolerance, by the dtype of the loss
_LOW_PRECISION = 2e-2
_IGNORED = (-100, -1, 0, 255)  # labels that losses commonly ignore, for the hint


class LossNormalization:
    """Weights of the microbatches of a step in its loss.

    Attributes:
        remarks: messages to the user about the normalization of the loss.
        prepared: True once `prepare` has searched for the items of a model's own loss.
        items_per_sample: the unit in which every replica counts its items; None before the first step.
        warns: True if remarks are also issued as Python warnings (on the first rank, in users' own loops).
    """

    def __init__(self, compute: Compute) -> None:
        self.compute, self.loss = compute, compute.loss
        self.items_per_sample: float | None = None
        self.warns = False
        self.remarks: list[str] = []
        self._read = 0  # number of remarks that `news` has returned
        self.by_model = isinstance(self.loss, ModelsOwn) or reads_models_loss(self.loss)
        self.adds_up = adds_up(self.loss)
        # a sum is weighted by its samples; its items only show which microbatches are empty
        self._counted = items_of(self.loss)
        self._count = None if self.adds_up else self._counted
        self._trial: Callable[..., Any] | None = None  # a copy of the loss, because it may have state
        self._earlier: tuple[Any, Tensor] | None = None  # a microbatch of one sample
        self._examines = not (self.by_model or declares_mean(self.loss) or is_known(self.loss))
        self._examines &= not getattr(self.loss, "whole_batch", False)
        self.prepared = False

    @property
    def counts(self) -> bool:
        """Return True if the loss averages over items other than samples, such as tokens."""
        return self._count is not None

    @property
    def is_count(self) -> bool:
        """Return True if the items are labels of a known loss without class weights."""
        known = declares_mean(self.loss) or is_known(self.loss)
        keywords = getattr(self.loss, "keywords", {})
        return self.counts and known and getattr(self.loss, "weight", keywords.get("weight")) is None

    @property
    def by_samples(self) -> bool:
        """Return True if items are samples, so the ranks' shares sum to 1."""
        return self._count is None and not isinstance(self.loss, ModelsOwn)

    def examines(self, step: int) -> bool:
        """Return True if a step verifies a user's own loss on parts of a microbatch."""
        return self._examines and not step & (step - 1)

    def prepare(self) -> None:
        """Find the items of a model's own loss; every rank must call this first."""
        if self.prepared or active_fake_mode() is not None:
            return
        self.prepared = True
        if self.by_model:
            from paceline.engine.model_loss import examine  # only where it is needed

            for text in examine(self.compute):
                self._remark(text)

    def news(self) -> list[str]:
        """Return the remarks made since the last call."""
        told, self._read = self._read, len(self.remarks)
        return self.remarks[told:]

    def target(self, batch: Batch) -> Any:
        """Return the target of a batch.

        Models that compute their loss without `labels` get the batch itself.
        """
        return batch if self.by_model and isinstance(batch, Mapping) and "labels" not in batch else target_of(batch)

    def items(self, batch: Batch) -> float | Tensor:
        """Return the number of items in a batch that the loss averages over (default: samples)."""
        if isinstance(self.loss, ModelsOwn):
            items = self.loss.items_in(batch)
        elif self._count is None:
            return float(rows(batch))
        else:
            items = self._count(target_of(batch))
        return self._number(items)

    @staticmethod
    def _number(items: float | Tensor) -> float | Tensor:
        if isinstance(items, Tensor) and on_accelerator(items):
            return items.to(widest_float(items.device))
        return float(items)

    def one_number(self, loss: Any) -> Tensor:
        """Return the loss as a 0-dimensional tensor.

        Raises:
            JobError: the loss is not a single number with a gradient; the message says what to return instead.
        """
        if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
            return loss
        trains = torch.is_grad_enabled() and active_fake_mode() is None
        if not isinstance(loss, Tensor):
            kind = type(loss).__name__
            how = "return the tensor itself, without .item()" if isinstance(loss, (int, float)) else "return it alone"
            more = "; put what else you measure into metrics" if isinstance(loss, (tuple, list, Mapping)) else ""
            raise JobError(
                "loss.not_a_tensor",
                "the loss {loss} returned a {class_name}, but training needs one tensor: {how}{more}",
                loss=self._name,
                class_name=kind,
                how=how,
                more=more,
            )
        if loss.numel() != 1:
            raise JobError(
                "loss.not_a_number",
                "the loss {loss} returned {shape!s} numbers for a batch, but training needs a single number. "
                "Return the mean of these numbers (for losses of torch: reduction='mean').",
                loss=self._name,
                shape=list(loss.shape),
            )
        if trains and not loss.requires_grad:
            raise JobError(
                "loss.no_gradient",
                "the loss {loss} has no gradient. Compute it from the model's output without detach() or "
                "no_grad(), and let at least one parameter of the model require a gradient.",
                loss=self._name,
            )
        return loss.reshape(())

    def of_microbatch(self, loss: Loss, output: Any, target: Any) -> Tensor:
        """Compute the loss of one microbatch.

        Raises:
            DataError: the loss cannot compare this target with this output.
            JobError: the loss is not a single number with a gradient.
        """
        try:
            made = loss(output, target)
        except (RuntimeError, ValueError, IndexError) as error:
            known = type(error) in (RuntimeError, ValueError, IndexError) and not _raised_by_the_user(error)
            if not known or not isinstance(target, Tensor):
                raise
            shown = f" with an output {described(output)}" if isinstance(output, Tensor) else ""
            explained = DataError(
                "loss.target_unusable",
                "the loss {loss} cannot be computed for a target {target}{values}: {reason}",
                loss=self._name,
                target=described(target),
                values=shown,
                reason=first_line(error),
            )
            explained.from_users_code = True
            raise explained from error
        return self.one_number(made)

    def normalized(self, loss: Tensor, output: Any, batch: Batch, position: Position) -> tuple[Tensor, float | Tensor]:
        """Return the mean loss of a microbatch, and its weight in the global mean.

        A microbatch without items has the loss 0 and a zero gradient.
        """
        assert self.items_per_sample is not None
        items = self.items(batch)
        share = items / (position.total * self.items_per_sample)
        if self.adds_up:
            return self.without_empty(loss / share, output, batch), share
        return self._unless_empty(loss, output, items), share

    def without_empty(self, loss: Tensor, output: Any, batch: Batch) -> Tensor:
        """Return the loss, or 0 with a zero gradient if the batch has no items."""
        by_model = isinstance(self.loss, ModelsOwn)
        if declares_mean(self.loss) or (self._counted is None and not by_model):
            return loss
        # reading the value is nearly free on a CPU; on an accelerator the host would have to wait
        if loss.device.type == "cpu" and not math.isnan(loss.item()):
            return loss
        items = (
            self.items(batch) if by_model or self._counted is None else self._number(self._counted(target_of(batch)))
        )
        return self._unless_empty(loss, output, items)

    def _unless_empty(self, loss: Tensor, output: Any, items: float | Tensor) -> Tensor:
        if isinstance(items, Tensor):
            stop_gradient_unless(items > 0, output)
            return torch.where(items > 0, loss, 0.0)
        return loss if items else NoGradient(loss).loss

    def measured(self, metric: LossMetric, output: Any, batch: Batch) -> tuple[float, float]:
        """Return this rank's part of the loss total and item count of a validation batch."""
        total, count = metric(output, batch if isinstance(self.loss, ModelsOwn) else self.target(batch))
        context = self.compute.split.context if self.compute.split is not None else None
        if context is not None and context.own_loss:  # the ranks' losses add up to the mean over the whole sequences
            count /= context.group.size
        return total, count

    # Verify the declared reduction

    def look(self, output: Any, target: Any, step: int, position: Position) -> None:
        """Compare a microbatch's loss with the losses of its parts, in steps 1, 2, 4, …

        Raises:
            PlanError: the loss is not the declared mean or sum; the message says what to write instead.
        """
        if not self.examines(step) or active_fake_mode() is not None:
            return
        pair = self._two_samples(output, target, position)
        if pair is not None:
            self.hold(*pair)

    def hold(self, output: Any, target: Tensor) -> None:
        """Compare a user's own loss of a batch with the losses of the batch's parts.

        Raises:
            PlanError: the loss is not the declared mean or sum; the message says what to write instead.
        """
        if not self._examines:
            return
        on_host = widest_float(target.device) != torch.float64
        if self._trial is None:
            copied = _copied(self.loss)
            self._trial = in_float64(copied.cpu() if on_host and isinstance(copied, nn.Module) else copied)
        if on_host:
            output, target = tree_map(lambda t: t.cpu() if isinstance(t, Tensor) else t, (output, target))
            try:
                self._trial(output, target)
            except Exception:  # noqa: BLE001 - the user's code, with tensors that it keeps on the device
                self._remark(
                    f"the loss {self._name} cannot be tried in float64, so what it is the mean over is unknown"
                )
                return
        with torch.no_grad(), forked_random(target.device), torch.autocast(target.device.type, enabled=False):
            self._examine(output, target)

    def _two_samples(self, output: Any, target: Any, position: Position) -> tuple[Any, Tensor] | None:
        """Return output and target of two or more samples, or None.

        A microbatch of one sample is joined with an earlier microbatch, or with the microbatches of other ranks.
        """
        compute, output = self.compute, tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, output)
        if len(target) > 1:
            return output, target
        shares = compute.loader.partition.shares(position.step, position.epoch)
        # the same condition holds on all ranks
        if max(shares) == min(shares) == 1 and compute.data_group.size > 1 and isinstance(output, Tensor):
            return gather(compute.data_group, output, shares), gather(compute.data_group, target, shares)
        earlier, self._earlier = self._earlier, (output, target)
        if not isinstance(output, Tensor):
            self._remark(
                f"the loss {self._name} gets single samples, whose outputs are not tensors, so what it is the "
                "mean over is unknown"
            )
            return None
        if earlier is None:
            return None
        return torch.cat([earlier[0], output]), torch.cat([earlier[1], target])

    def _examine(self, output: Any, target: Tensor) -> None:
        output, target, whole = self._widest(output, target)
        # NaN is reported by the step; a loss that uses random numbers cannot be compared
        if not math.isfinite(whole) or whole != self._value(output, target):
            if math.isfinite(whole):
                self._remark(
                    f"the loss {self._name} draws random numbers, so whether it is the mean over the samples "
                    "cannot be told from its values"
                )
            return
        self._hold(whole, output, target, dim=0)
        context = self.compute.split.context if self.compute.split is not None else None
        if context is not None and target.dim() > 1 and target.shape[1] > 1:
            self._hold(whole, output, target, dim=1)

    def _hold(self, whole: float, output: Any, target: Tensor, dim: int) -> None:
        size = target.shape[dim]
        first = size // 2 if size < 6 else size // 3  # one sample could be too small for the loss
        parts = []
        for start, length in ((0, first), (first, size - first)):
            cut = _cut(output, size, dim, start, length)
            if cut is None:
                self._remark(
                    f"the loss {self._name} gets outputs that cannot be cut into samples, so what it is the "
                    "mean over is unknown"
                )
                return
            part = target.narrow(dim, start, length)
            try:
                parts.append((self._value(cut, part), self._items_of(part, dim)))
            except Exception as error:  # noqa: BLE001 - the user's code, with fewer samples than it was made for
                why = f"fails for {length} of {size} samples ({type(error).__name__}: {error})"
                self._remark(f"the loss {self._name} {why}, so what it is the mean over is unknown")
                return
        items = sum(n for _, n in parts)
        if not all(math.isfinite(value) for value, n in parts if n) or not items:
            return
        total = sum(value if self.adds_up else value * n / items for value, n in parts if n)
        scale = max(abs(whole), sum(abs(v) for v, n in parts if n))
        if abs(total - whole) > (self._tolerance * scale):
            raise PlanError(
                "plan.loss_not_the_mean",
                "{explanation}",
                explanation=self._explained(whole, total, parts, output, target, dim),
            )

    def _items_of(self, target: Tensor, dim: int) -> float:
        return float(self._count(target)) if self._count is not None else float(target.shape[dim])

    def _value(self, output: Any, target: Tensor) -> float:
        assert self._trial is not None
        with torch.no_grad():
            value = self.one_number(self._trial(output, target))
        self._tolerance = _TOLERANCES.get(value.dtype, _LOW_PRECISION)
        return float(value)

    def _widest(self, output: Any, target: Tensor) -> tuple[Any, Tensor, float]:
        wide = tree_map(_double, output), _double(target)
        try:
            return *wide, self._value(*wide)
        except Exception:  # noqa: BLE001 - a loss with float32 tensors of its own
            return output, target, self._value(output, target)

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)
            if self.warns:
                warnings.warn(text, stacklevel=2)

    @property
    def _name(self) -> str:
        return str(getattr(self.loss, "__name__", None) or type(self.loss).__name__)

    def _explained(
        self, whole: float, total: float, parts: list[tuple[float, float]], output: Any, target: Tensor, dim: int
    ) -> str:
        what = "samples" if dim == 0 else "tokens"
        first, second = (
            (target.shape[dim] - parts[1][1], parts[1][1]) if self._count is None else (parts[0][1], parts[1][1])
        )
        kind = "sum" if self.adds_up else f"mean over its {'items' if self._count is not None else what}"
        head = (
            f"the loss {self._name} is not the {kind}: for a batch it is {whole:.6g}, but for its parts (of "
            f"{first:g} and {second:g}) it is {total:.6g}. Plan {self.compute.plan} computes a batch in parts, so "
            "training would minimize another loss. "
        )
        if self.adds_up or self._count is not None:
            return head + (
                "Correct its `reduction` or `items`. If the loss compares samples with each other, set "
                "`whole_batch = True` on it."
            )
        if abs(sum(value for value, _ in parts) - whole) <= self._tolerance * abs(whole):
            return (
                head + "The loss is a sum: divide it by the number of samples, or declare it: `loss.reduction = 'sum'`."
            )
        if dim:
            return head + (
                "Under cp, a rank has only some of the tokens: shift the labels in the data set, and ignore "
                "no labels; or use cp=1."
            )
        for ignored in _IGNORED:
            counts = [(t != ignored).sum().item() for t in target.split([int(parts[0][1]), int(parts[1][1])])]
            mean = sum(value * n for (value, _), n in zip(parts, counts, strict=True) if n) / (sum(counts) or 1)
            if abs(mean - whole) <= self._tolerance * abs(whole):
                return head + (
                    f"The loss is the mean over the labels that are not {ignored}; declare it: "
                    f"`loss.items = lambda target: (target != {ignored}).sum()`."
                )
        return head + (
            "Declare what the loss is the mean over (labels that are not ignored, or their class weights): "
            "`loss.items = lambda target: ...`; "
            "if the loss compares samples with each other, set `loss.whole_batch = True`. "
            "See docs/reference/job.md#a-loss-of-your-own."
        )


def _raised_by_the_user(error: BaseException) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or str(last.tb_frame.f_globals.get("__name__")).startswith("torch."):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _copied(loss: Loss) -> Loss:
    try:
        return copy.deepcopy(loss)
    except Exception:  # noqa: BLE001 - it holds what cannot be copied, and is used itself
        return loss


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _cut(output: Any, size: int, dim: int, start: int, length: int) -> Any:
    """Slice all tensors of an output that have length `size` along `dim`; None without any."""
    found = []

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size:
            found.append(leaf)
            return leaf.narrow(dim, start, length)
        return leaf

    if not isinstance(output, (Tensor, tuple, list, Mapping)) and hasattr(output, "__dict__"):
        part = copy.copy(output)
        part.__dict__.update({name: tree_map(cut, value) for name, value in vars(output).items()})
    else:
        part = tree_map(cut, output)
    return part if found else None


class NoGradient:
    """A loss whose value is 0 and whose gradient is exactly zero everywhere.

    Attributes:
        loss: replacement for the original loss, on which to call `backward`.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        # AccumulateGrad nodes (those with a `variable`) belong to parameters, which other losses use too
        self._hooks = [n.register_prehook(_zeros) for n in graph_nodes(loss) if not hasattr(n, "variable")]

    def release(self) -> None:
        """Let gradients of other losses pass through the graph again (for `retain_graph`)."""
        for hook in self._hooks:
            hook.remove()


def stop_gradient_unless(counts: Tensor, output: Any) -> None:
    """Zero the gradients of a model's output, unless `counts` (0-dimensional, on its device) is true.

    The value stays on the device, so the host does not wait for it.
    """
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: torch.where(counts, gradient, 0.0))


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)


def graph_nodes(loss: Tensor, descends: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Iterate over the nodes of the autograd graph of a loss.

    Nodes below a node for which `descends` returns False are skipped.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if descends(node):
                waiting += [below for below, _ in node.next_functions]
