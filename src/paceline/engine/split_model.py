"""Forward and backward passes of a rank that holds a part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm import Group
from paceline.data.loader import Loader, Position
from paceline.engine.calls import prepared
from paceline.engine.compute import Compute, LocalLoss
from paceline.engine.no_gradient import NoGradient
from paceline.engine.shard_reads import ShardReads
from paceline.errors import BatchError, PlanError
from paceline.job.batch import Batch, place, split
from paceline.job.loss import Loss
from paceline.job.loss_items import call, refused_batch
from paceline.planning.model.recorder import has_max_norm, restored
from paceline.planning.plan import DATA_AXES, Plan
from paceline.split.apply import Split
from paceline.split.deferred_init import DeferredModel, deferred_from
from paceline.split.mesh import Mesh
from paceline.split.tensor_layers import ParallelLoss, divides_classes
from paceline.sync.batchnorm import is_synchronised

if TYPE_CHECKING:
    from paceline.engine.settings import Settings


def divide(
    model: nn.Module | DeferredModel,
    plan: Plan,
    mesh: Mesh,
    loader: Loader,
    loss: Loss,
    settings: Settings,
    *,
    weights: bool = True,
) -> Split:
    """This rank's part of a model, for the batches that `loader` yields.

    A model that has its weights loses them to its parts; `weights=False` leaves those of a `DeferredModel` out.
    """
    recorded = deferred_from(model) if isinstance(model, nn.Module) else model
    split = without_memory(recorded, plan, mesh, loader, loss, settings)
    split.allocate(recorded, weights=weights)
    return split


def without_memory(
    recorded: DeferredModel, plan: Plan, mesh: Mesh, loader: Loader, loss: Loss, settings: Settings
) -> Split:
    """This rank's part of a model in shapes only, until `Split.allocate`."""
    precision = plan.precision or settings.precision
    recorded.model = prepared(recorded.model, settings.batch_norm, precision, mesh.group(*DATA_AXES))
    example = loader.example(max(1, loader.smallest_share() // plan.microbatches))
    wide = torch.float64 if precision == "fp64" else None
    example = place(example, torch.device("cpu"), dtype=wide, channels_last=False)
    if limited := next((n for n, m in recorded.model.named_modules() if has_max_norm(m)), None):
        raise PlanError(
            f'plan {plan} divides the model, and "{limited}" has max_norm, which rewrites rows that it looks '
            "up: dp alone."
        )
    refused = _refused_by_undivided(recorded.model, example, loss)
    try:
        made = Split(recorded, plan, mesh, example, partial(call, loss=loss), precision=precision)
    except Exception as error:
        if refused is not None:
            raise refused from error
        raise
    made.refused = refused
    if made.pipeline is not None and made.pipeline.by_export and is_synchronised(recorded.model):
        raise PlanError(
            f"plan {plan}: the stages of this model are traced by torch.export, which leaves out what replicas tell "
            "each other, so batch_norm: sync would not be over the global batch: pp=1, or batch_norm: local"
        )
    return made


class SplitModel(Compute):
    """A replica over several ranks, each with its part of layers, matrices or tokens.

    All ranks that wait for each other compute equally often: a rank that has no sample left in a step computes one that
    it saw before, and counts it as nothing.
    """

    split: Split
    reads: ShardReads

    def __init__(self, split: Split, loss: Loss, loader: Loader, plan: Plan, group: Group, precision: str) -> None:
        super().__init__(split.model, loss, loader, plan, group, split.mesh.group(*DATA_AXES), precision, split)
        self.casts = split.fully is not None and split.fully.casts
        self.reads = ShardReads(split)
        # computed where there is no sample left
        self._sample = _first(split.example)
        self._head = split.tensors.vocabulary_head if split.tensors is not None and divides_classes(loss) else None
        self.divides_logits = self._head is not None
        if self._head is not None and divides_classes(loss):
            # the loss needs the sums over the vocabulary only
            self._head.gather = False
            self.step_loss = ParallelLoss(loss, split.mesh.group("tp"))

    def forward_backward(self, batch: Batch | None, position: Position, step: int) -> LocalLoss:
        """See `Compute.forward_backward`."""
        local, count = LocalLoss(), self.split.microbatches(self.loader.partition.shares(position.step, position.epoch))
        if batch is None and not self.split.all_must_compute:
            return local
        placed = self._placed(batch, count)
        if self.split.pipeline is not None:
            self.experts.weigh(placed if batch is not None else None, position, alike=True)
            self.split.pipeline.forward_backward(
                placed,
                count,
                lambda output, part, i: self._addend(local, output, part, batch, position, step),
                self.autocast,
            )
            return local
        parts = list(split(placed, count))
        for i, part in enumerate(parts):
            self.replica.backward.last = i == len(parts) - 1
            self.split.begin_microbatch(last=self.replica.backward.last)
            self.experts.weigh(part if batch is not None else None, position)
            with self.autocast():
                loss = self._addend(local, self.call(part), part, batch, position, step)
            if not step & (step - 1):
                self.reads.check(loss, everywhere=True)
            loss.backward()
        return local

    def output(self, batch: Batch | None) -> tuple[Any, Batch] | None:
        """See `Compute.output`."""
        if batch is None and not self.split.all_must_compute:
            return None
        placed = self._placed(batch, 1)
        pipeline = self.split.pipeline
        if self._head is not None:
            self._head.gather = True
        output = self.call(placed) if pipeline is None else pipeline.forward(placed)
        if self._head is not None:
            self._head.gather = False
        return (output, placed) if batch is not None and self.split.owns_loss else None

    def _addend(
        self, local: LocalLoss, output: Any, part: Batch, batch: Batch | None, position: Position, step: int
    ) -> Tensor:
        """This microbatch's weighted loss; added to `local` on the rank that owns the loss."""
        with self.reads:
            if batch is None:
                return NoGradient(self.step_loss(output, self.normalization.target(part))).loss
            loss, items = self.normalized_loss(output, part, batch, position, step)
        context, share = self.split.context, 1.0
        if context is not None and not context.whole and not self.normalization.counts:
            # A sample counts once, and each rank has some of its tokens.
            items = items / context.group.size
            # Where the ranks' losses add up to the mean already:
            share = context.group.size if context.own_loss or self.normalization.adds_up else 1.0
        scaled = loss * (items * share)
        if self.split.owns_loss:
            local.add(scaled.detach(), items)
        return scaled

    def _placed(self, batch: Batch | None, count: int) -> Batch:
        """This rank's tokens of the batch, on its device.

        Without a batch, `count` copies of one sample.
        """
        placed = self.place(_repeated(self._sample, count) if batch is None else batch)
        return self.split.context.shard(placed) if self.split.context is not None else placed


def _refused_by_undivided(model: nn.Module, example: Batch, loss: Loss) -> BatchError | None:
    """Explain why the undivided model cannot compute this batch.

    Returns None if the model can compute the batch, or if a run without weights does not show the mistake.
    """
    try:
        with restored(model), torch.no_grad(), _KernelTypes():
            call(model, place(example, torch.device("meta"), dtype=None, channels_last=False), loss=loss)
    except (TypeError, RuntimeError) as error:
        return refused_batch(model, example, error, loss=loss)
    except Exception:  # noqa: BLE001 - whatever the user's model raises without weights
        return None
    return None


class _KernelTypes(TorchDispatchMode):
    """Refusal of products of two dtypes, which kernels refuse but meta tensors accept."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.dtype for x in args if isinstance(x, Tensor)}
        if function.overloadpacket in _PRODUCTS and len(given) > 1:
            raise RuntimeError(f"a product needs one dtype, but got {' and '.join(sorted(map(str, given)))}")
        return function(*args, **kwargs or {})


_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("linear", "mm", "addmm", "bmm", "baddbmm", "convolution")}


def _first(batch: Batch) -> Batch:
    return {k: v[:1] for k, v in batch.items()} if isinstance(batch, Mapping) else tuple(t[:1] for t in batch)


def _repeated(sample: Batch, count: int) -> Batch:
    if isinstance(sample, Mapping):
        return {k: v.repeat_interleave(count, dim=0) for k, v in sample.items()}
    return tuple(t.repeat_interleave(count, dim=0) for t in sample)
