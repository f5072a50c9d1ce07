"""Reduction of a step over all ranks: gradients, loss, gradient norm and votes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from paceline.comm import Group
from paceline.device import Download, event, is_accelerator, on_accelerator, upload, widest_float
from paceline.engine.compute import LocalLoss
from paceline.engine.guard import LossScale
from paceline.engine.meter import COMM, Meter
from paceline.job.batch import Batch
from paceline.sync import Replica, SyncRule
from paceline.sync.rows import LateNorm, numbers_of
from paceline.wire.status import refuse_aborted

if TYPE_CHECKING:
    from paceline.split.apply import Split

VOTES = ("out_of_time", "interrupted", "checkpoint", "generation", "unreadable", "retried")
LOSS, ITEMS, FIRST_VOTE = 0, 1, 2
FIRST_BUSY = FIRST_VOTE + len(VOTES)


@dataclass(slots=True)
class Reduced:
    """Sums of a step's signals over the replicas.

    Attributes:
        loss: mean loss over the items of the step.
        rescale: factor that turns the summed gradients into gradients of the mean loss.
        votes: number of ranks that asked for each action.
        slowest_busy_s: the longest busy time of any rank before the reduction.
        norm: L2 norm of the whole gradient, before clipping; a `LateNorm` is known to be finite.
        own_loss: loss of this replica if it updates with its own gradient; None if all replicas make the same update.
        everywhere: True if the values cover all replicas; False if they describe only this replica and votes are
            pending.
    """

    loss: float
    rescale: float
    votes: dict[str, int]
    slowest_busy_s: float
    norm: float | LateNorm = 0.0
    own_loss: float | None = None
    everywhere: bool = True

    @property
    def step_loss(self) -> float:
        """Return `own_loss`, or `loss` if all replicas make the same update."""
        return self.loss if self.own_loss is None else self.own_loss


class StepSignals:
    """Scalars that a rule sums with the gradients.

    The scalars are the loss, the number of items, the votes, each rank's busy time and, in pipelines, its waiting time.

    Attributes:
        tensor: tensor with the signals; a rule may provide its own tensor in the dtype of its buffers.
    """

    def __init__(self, group: Group, *, pipelined: bool = False) -> None:
        self.group, self._pipelined = group, pipelined
        self._nothing = [0.0] * (FIRST_BUSY + group.size * (2 if pipelined else 1))
        dtype = widest_float(group.device)
        self.tensor: Tensor = torch.zeros(len(self._nothing), dtype=dtype, device=group.device)
        self._asked: set[str] = set()
        # busy seconds of every rank before the newest reduction, without waits in a pipeline; read by `take_busy`
        self.busy_s: list[float] = []

    def vote(self, what: str) -> None:
        """Request an action in `VOTES`; the ranks decide at the next global reduction."""
        self._asked.add(what)

    def seal(self, meter: Meter, local: LocalLoss) -> float:
        """Write this rank's values before the reduction, and return its busy seconds.

        A single rank writes nothing, and returns 0.
        """
        if self.group.size == 1:
            return 0.0
        busy_s = meter.busy_s()
        staged = self._nothing.copy()
        for what in self._asked:
            staged[FIRST_VOTE + VOTES.index(what)] = 1.0
        staged[FIRST_BUSY + self.group.rank] = busy_s
        if self._pipelined:
            staged[FIRST_BUSY + self.group.size + self.group.rank] = meter.waited_s
        if not isinstance(local.items, Tensor):
            staged[ITEMS] = local.items
        if not on_accelerator(self.tensor):
            staged[LOSS], staged[ITEMS] = float(local.total), float(local.items)
            # the caches are cold here: one more call of torch costs tens of microseconds
            self.tensor.numpy()[:] = staged
        else:
            upload(staged, self.tensor)
            self.tensor[LOSS] = local.total
            if isinstance(local.items, Tensor):
                self.tensor[ITEMS] = local.items
        return busy_s

    def own(self, local: LocalLoss) -> list[float | Tensor]:
        """Return this rank's part of the loss and of the items of the step."""
        return [local.total, local.items]

    def sums(self, local: LocalLoss) -> list[float | Tensor]:
        """Return the reduced signals in the form that `read` expects."""
        return self.own(local) if self.group.size == 1 else [self.tensor]

    def take_busy(self) -> list[float]:
        """Return each rank's busy seconds before the newest reduction; [] at a second call."""
        busy_s, self.busy_s = self.busy_s, []
        return busy_s

    def scaled(self, loss: float, items: float) -> Reduced:
        """Return the result of a step of this replica alone; votes stay pending."""
        rescale = self._rescale(items)
        return Reduced(loss * rescale, rescale, {}, 0.0, own_loss=loss * rescale, everywhere=False)

    def read(self, sums: Sequence[float]) -> Reduced:
        """Return the result of a step from the sums over all replicas."""
        loss, items, size = sums[LOSS], sums[ITEMS], self.group.size
        votes, slowest_s = dict[str, int](), 0.0
        if size == 1:
            votes = dict.fromkeys(self._asked, 1)
        else:
            asked = sums[FIRST_VOTE:FIRST_BUSY]
            if any(asked):
                votes = {what: round(n) for what, n in zip(VOTES, asked, strict=True) if n}
            busy_s, waited_s = [*sums[FIRST_BUSY : FIRST_BUSY + size]], sums[FIRST_BUSY + size :]
            self.busy_s = [s - w for s, w in zip(busy_s, waited_s, strict=True)] if waited_s else busy_s
            slowest_s = max(busy_s)
        self._asked.clear()
        rescale = self._rescale(items)
        return Reduced(loss * rescale, rescale, votes, slowest_s)

    def _rescale(self, items: float) -> float:
        if items == 1.0 or items <= 0.0:
            return 1.0
        return 1.0 if abs(items - 1.0) < self._rounding else 1.0 / items

    def factor(self, items: float | Tensor) -> float | Tensor:
        """Return `Reduced.rescale`; a 0-dimensional tensor if `items` is still on an accelerator."""
        if not isinstance(items, Tensor):
            return self._rescale(items)
        is_one = ((items - 1.0).abs() < self._rounding) | (items <= 0.0)
        return torch.where(is_one, 1.0, 1.0 / items)

    @property
    def _rounding(self) -> float:
        return 16 * torch.finfo(self.tensor.dtype).eps


def numbers(parts: Sequence[float | Tensor]) -> list[float]:
    """Read floats and tensors into one list; wait for an accelerator at most once."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) > 1 and on_accelerator(tensors[0]):
        return in_order(parts, torch.cat([t.reshape(-1) for t in tensors]).tolist())
    found: list[float] = []
    for part in parts:
        if not isinstance(part, Tensor):
            found.append(part)
        elif part.dim():
            found += part.reshape(-1).tolist()
        else:
            found.append(part.item())
    return found


def in_order(parts: Sequence[float | Tensor], of_tensors: Sequence[float]) -> list[float]:
    """Merge floats with the numbers that were read from tensors, in order."""
    read = iter(of_tensors)
    return [x for part in parts for x in (islice(read, part.numel()) if isinstance(part, Tensor) else (part,))]


# From `_MANY` tensors on, those with up to `_SMALL` elements are joined: a copy is faster than a call for each tensor.
_MANY, _SMALL = 32, 2**10


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return L2 norms that combine to the L2 norm of all tensors.

    The L2 norm of the returned norms is the norm of all tensors together. If there are many tensors on a CPU, small
    tensors share one norm.
    """
    if len(tensors) < _MANY or on_accelerator(tensors[0]):
        return torch._foreach_norm(list(tensors)) if tensors else ()
    large: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            large.append(tensor)
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    joined = [_flatten_dense_tensors(alike) for alike in small.values()]
    return torch._foreach_norm(large + joined)


def clip_elements(gradients: Sequence[Tensor], most: float) -> None:
    """Clip every element of reduced gradients to at most `most` in absolute value, in place."""
    if gradients:
        torch._foreach_clamp_min_(list(gradients), -most)
        torch._foreach_clamp_max_(list(gradients), most)


class GradientReduction:
    """Reduction of gradients, losses and votes over all replicas in every step.

    Args:
        rule: the sync rule, already attached to `replica`.
        signals: loss, votes and times, which are reduced together with the gradients.
        world: all ranks.
        split: how the model is divided over the ranks of a replica; None if each rank holds the whole model.
        loss_scale: loss scale of fp16 training; None in other precisions.
        clips: True if the job clips gradients, so that their norm or elements must be known before each update.

    Attributes:
        gradients: tensors with the newest reduced gradients; each gradient is contained once.
        sparse: parameters with sparse gradients, which are not in `gradients` until `sum_rows` adds them.
        reads_all: True if every update needs the elements of all gradients.
        stage: state of the newest gradients: this rank's own, summed over all ranks, or rescaled to the mean.
    """

    def __init__(
        self,
        rule: SyncRule,
        replica: Replica,
        signals: StepSignals,
        meter: Meter,
        world: Group,
        split: Split | None = None,
        loss_scale: LossScale | None = None,
        *,
        clips: bool = False,
    ) -> None:
        self.rule, self.replica, self.signals, self.meter = rule, replica, signals, meter
        self.world, self.split, self.loss_scale = world, split, loss_scale
        self.gradients: list[Tensor] = []
        self.sparse: Sequence[nn.Parameter] = ()
        self.stage: Literal["own", "summed", "mean"] = "own"
        # If the model is divided, the reduction itself sums the signals over all ranks, and the rule gets none.
        self._nothing = signals.tensor.new_empty(0)
        # the norm of the newest gradient, if the same wait reads norm and signals
        self._reads_norm, self._norm = split is not None or is_accelerator(world.device), 0.0
        self.reads_all = clips or self._reads_norm or loss_scale is not None

    def clear(self) -> None:
        """Drop the newest gradients before the next backward pass."""
        self.stage = "own"
        if self.world.interruption is not None:
            self.world.interruption.gradients_arrived = lambda: False
        # otherwise the gradients of two steps would be in memory during the backward pass
        self.take([])

    @property
    def arrived(self) -> bool:
        """True if the newest gradients are complete, even if the reduction was interrupted later."""
        interruption = self.world.interruption
        return self.stage != "own" and (interruption is None or interruption.had_gradients)

    def reduce(self, local: LocalLoss, step: int) -> Reduced:
        """Reduce gradients, loss and votes of an optimizer step with the rule.

        Afterwards, the gradients are gradients of the mean loss over all items of the global batch. On accelerators, a
        step waits for the device only in this method.
        """
        pipeline = None if self.split is None else self.split.pipeline
        if pipeline is None:
            reduced = self._reduce(local, step)
        elif is_accelerator(self.world.device):
            reduced = self._reduce(local, step)
            self.meter.waited_in_pipeline(pipeline.bubble_s)  # the bubble's events are read when the step has ended
        else:
            self.meter.waited_in_pipeline(pipeline.bubble_s)
            reduced = self._reduce(local, step)
        reduced.norm = self._norm if self._reads_norm else self._own_norm()
        return reduced

    def _reduce(self, local: LocalLoss, step: int) -> Reduced:
        own_busy_s = self.signals.seal(self.meter, local)
        self.apply_rule(step)
        if self.world.interruption is not None:
            summed_at = event(self.world.device)
            summed_at.record()
            self.world.interruption.gradients_arrived = summed_at.query
        self.stage = "summed"
        if self.split is not None:
            summed = self._sum_over_all(self.split)
            alone = self.world.size == 1
            *sums, square = numbers([*self.signals.own(local), summed[-1:]] if alone else [summed])
            refuse_aborted()
            self._norm = math.sqrt(square)
        else:
            sums = self._numbers(self.signals.sums(local))
            refuse_aborted()
        reduced = self.signals.read(sums)
        self.scale(reduced.rescale)
        self.stage = "mean"
        if self.world.size > 1:
            self.meter.mark(COMM)
            self.meter.split_wait(reduced.slowest_busy_s, own_busy_s)
        return reduced

    def apply_rule(self, step: int) -> bool:
        """Reduce gradients and signals with the rule; return True if all replicas took part."""
        if self.split is not None:
            self.split.after_backward()
            result = self.rule.after_backward(step, self._nothing)
        else:
            result = self.rule.after_backward(step, self.signals.tensor)
            # The next step's signals are written to the buffer that the rule sends.
            self.signals.tensor = result.scalars
        self.take(result.gradients, result.sparse)
        return result.everywhere

    def take(self, gradients: list[Tensor], sparse: Sequence[nn.Parameter] = ()) -> None:
        """Set the newest gradients; see `gradients` and `sparse`."""
        self.gradients, self.sparse = gradients, sparse
        if self.reads_all:
            self.sum_rows()

    def sum_rows(self) -> None:
        """Sum equal rows of sparse gradients, and add these gradients to `gradients`."""
        if self.sparse:
            self.gradients = [*self.gradients, *numbers_of(self.sparse)]
            self.sparse = ()

    def norm(self) -> float | LateNorm:
        """Return the L2 norm of all gradients; every rank must call this.

        If the model is divided, return the norm of all its gradients.
        """
        if self.split is None:
            return self._own_norm()
        square = self.split.gradient_square()
        self.world.all_reduce(square)
        norm = math.sqrt(float(square))
        refuse_aborted()
        return norm

    def _own_norm(self) -> float | LateNorm:
        """Return the norm of this rank's gradients; a `LateNorm` if sparse gradients cannot overflow."""
        if self.sparse:
            late = LateNorm.if_finite(self.gradients, [p.grad for p in self.sparse if p.grad is not None])
            if late is not None:
                return late
            self.sum_rows()
        return math.hypot(*numbers(norms_of(self.gradients)))

    def _numbers(self, parts: Sequence[float | Tensor]) -> list[float]:
        """Read the parts with `numbers`; on accelerators, also read the gradient norm."""
        if not self._reads_norm:
            return numbers(parts)
        norms = norms_of(self.gradients)
        found = numbers([*parts, *norms])
        self._norm = math.hypot(*found[len(found) - len(norms) :])
        return found[: len(found) - len(norms)]

    @property
    def deciders(self) -> Group:
        """Return the ranks that make the same decision about the update."""
        return self.world

    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`, and divide them by the loss scale of fp16 training."""
        if self.loss_scale is not None:
            factor /= self.loss_scale.value
        if factor != 1.0:
            sparse = [p.grad._values() for p in self.sparse if p.grad is not None]
            if self.gradients or sparse:  # a stage of a pipeline may be frozen
                torch._foreach_mul_([*self.gradients, *sparse], factor)
            self._norm *= factor

    def _sum_over_all(self, split: Split) -> Tensor:
        """Sum the signals and the squared gradient norm over all ranks in one collective."""
        together = torch.cat([self.signals.tensor, split.gradient_square()])
        self.world.all_reduce(together)
        return together


class LocalReduction(GradientReduction):
    """Reduction with local rules: every replica updates with its own gradient.

    All ranks know the losses and votes only in steps that synchronize.

    The ranks of a divided replica reduce their loss and gradient norm in every step.
    """

    def _reduce(self, local: LocalLoss, step: int) -> Reduced:
        own_busy_s = self.signals.seal(self.meter, local)
        everywhere = self.apply_rule(step)
        if self.split is not None:
            loss, items, square, *sums = numbers([self._sum_over_replica(self.split, local, everywhere)])
            self._norm = math.sqrt(square)
            sums = [loss, items] if self.world.size == 1 else sums
        else:
            loss, items, *sums = self._numbers(
                [*self.signals.own(local), *(self.signals.sums(local) if everywhere else [])]
            )
        if everywhere or self.split is not None:  # otherwise no result comes from other ranks
            refuse_aborted()
        own = self.signals.scaled(loss, items)
        self.scale(own.rescale)
        self.meter.mark(COMM)
        if not everywhere:
            return own
        reduced = self.signals.read(sums)
        self.meter.split_wait(reduced.slowest_busy_s, own_busy_s)
        return Reduced(reduced.loss, own.rescale, reduced.votes, reduced.slowest_busy_s, own_loss=own.loss)

    @property
    def deciders(self) -> Group:
        """Return the ranks of this replica."""
        return self.replica.inner

    def _sum_over_replica(self, split: Split, local: LocalLoss, everywhere: bool) -> Tensor:
        """Sum loss, items and squared gradient norm over this replica.

        If `everywhere` is True, the same collective also sums the signals over all ranks.
        """
        tensor, replicas, place = self.signals.tensor, split.mesh.sizes["dp"], split.mesh.place["dp"]
        own = tensor.new_zeros(3)
        own[0], own[1] = local.total, local.items
        # `gradient_square` divides by the number of replicas
        own[2:] = split.gradient_square() * replicas
        if not everywhere:
            self.replica.inner.all_reduce(own)
            return own
        by_replica = tensor.new_zeros(replicas, len(own))
        by_replica[place] = own
        together = torch.cat([tensor, by_replica.view(-1)])
        self.world.all_reduce(together)
        return torch.cat([together[len(tensor) :].view(replicas, -1)[place], together[: len(tensor)]])


class UnreadStep:
    """A queued step whose signals and gradient norms are still on an accelerator.

    Args:
        signals: the signals that the step has reduced; None if the loop computes the loss itself.
        parts: the signals, or the mean loss, followed by the gradient norms; floats are values that the host knows.
        norms: number of gradient norms at the end of `parts`; the norms are computed before gradients are rescaled.
        own_busy_s: this rank's busy seconds, as written to the signals.

    Attributes:
        step: number of the step.
        total: number of samples in the global batch.
        batch: this rank's share of the batch, for error messages.
        samples: indices of the share's samples in the data set, for error messages.
    """

    step: int
    total: int
    batch: Batch | None
    samples: list[int]

    def __init__(
        self, signals: StepSignals | None, parts: Sequence[float | Tensor], norms: int, own_busy_s: float = 0.0
    ) -> None:
        self.signals, self.own_busy_s = signals, own_busy_s
        self._parts, self._norms = parts, norms
        self.tensor = torch.cat([part.reshape(-1) for part in parts if isinstance(part, Tensor)])
        self._download: Download | None = None

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients as a 0-dimensional tensor on the device."""
        norm: Tensor = torch.linalg.vector_norm(self.tensor[len(self.tensor) - self._norms :])
        return norm

    def send(self) -> None:
        """Queue a copy of signals and norms to the host, after the work already queued."""
        self._download = Download(self.tensor)

    def read(self) -> tuple[Reduced, float]:
        """Wait for the result of the reduction and the gradient norm, and return both."""
        assert self._download is not None, "nothing was sent"
        found = in_order(self._parts, self._download.numbers())
        sums, norms = found[: len(found) - self._norms], found[len(found) - self._norms :]
        reduced = Reduced(sums[0], 1.0, {}, 0.0) if self.signals is None else self.signals.read(sums)
        return reduced, math.hypot(*norms) * reduced.rescale


class ReductionAhead(GradientReduction):
    """Reduction with synchronous rules that rescales and clips on the device, without a wait."""

    def queue(
        self,
        local: LocalLoss,
        step: int,
        *,
        by_samples: bool,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> UnreadStep:
        """Reduce like `reduce`, and clip the gradients, without waiting for the device.

        Args:
            by_samples: True if the ranks' shares of the items sum to 1.
            clip_norm: largest L2 norm of the whole gradient; None for no limit.
            clip_value: largest absolute value of an element; None for no limit.
        """
        own_busy_s, alone = self.signals.seal(self.meter, local), self.world.size == 1
        self.apply_rule(step)
        norms: Sequence[Tensor]
        if self.split is None:
            sums, norms = self.signals.sums(local), norms_of(self.gradients)
        else:
            summed = self._sum_over_all(self.split)
            sums, norms = self.signals.own(local) if alone else [summed[:-1]], [summed[-1:].sqrt()]
        unread = UnreadStep(self.signals, [*sums, *norms], len(norms), own_busy_s)
        items = local.items if alone else 1.0 if by_samples else unread.tensor[ITEMS]
        self._scale_and_clip(unread, self.signals.factor(items), clip_norm)
        if clip_value is not None:
            clip_elements(self.gradients, clip_value)
        if not alone:
            self.meter.mark(COMM)
        return unread

    def queue_own(self, loss: Tensor, *, clip_norm: float | None) -> UnreadStep:
        """Clip gradients that need no rescaling, without waiting for the device.

        Used by loops that compute the loss themselves. Their gradients are already gradients of the mean loss.

        Args:
            loss: mean loss over all ranks.
            clip_norm: largest L2 norm of the whole gradient; None for no limit.
        """
        norms: Sequence[Tensor]
        if self.split is None:
            norms = norms_of(self.gradients)
        else:
            square = self.split.gradient_square()
            self.world.all_reduce(square)
            norms = [square.sqrt()]
        unread = UnreadStep(None, [loss, *norms], len(norms))
        self._scale_and_clip(unread, 1.0, clip_norm)
        return unread

    def _scale_and_clip(self, unread: UnreadStep, factor: float | Tensor, clip_norm: float | None) -> None:
        """Multiply the gradients by `factor` and clip their norm to `clip_norm`, in one pass."""
        if clip_norm is not None and self.gradients:
            is_mean = not isinstance(factor, Tensor) and factor == 1.0
            norm = unread.norm() if is_mean else unread.norm() * factor
            clip = torch.where(norm > clip_norm, clip_norm / (norm + 1e-6), 1.0)
            factor = clip if is_mean else factor * clip
        if not isinstance(factor, Tensor):
            self.scale(factor)
        elif self.gradients:
            # a factor in the gradient's own low precision would be inexact by up to 1%
            wide = torch.promote_types(self.gradients[0].dtype, torch.float32)
            torch._foreach_mul_(self.gradients, factor.to(wide))
