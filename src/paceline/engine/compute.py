"""Forward and backward passes of one rank: placement, precision, loss and its weight.

`WholeModel` is for a rank that holds the whole model; `split_model.py` has the class for divided models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.comm.gather import gather
from paceline.data.loader import Loader, Position
from paceline.device import is_accelerator, on_accelerator, uploaded, widest_float
from paceline.direct_calls import backward
from paceline.engine.chunked_loss import ChunkedHead, ChunkedLoss, Head, find_head, may_chunk
from paceline.engine.guard import LossScale
from paceline.engine.loss_normalization import LossNormalization
from paceline.engine.packed_check import PackedCheck
from paceline.errors import DataError
from paceline.job.batch import Batch, place, rows, split, target_of
from paceline.job.experts import add_counts, moe_counts, routers_of, weigh_balance
from paceline.job.job import base_precision
from paceline.job.loss import Loss, Metric
from paceline.job.loss_items import (
    IGNORED,
    call,
    computed_positions,
    declares_mean,
    has_pairs,
    is_known,
    refused_batch,
    trimmed,
)
from paceline.planning.cost.layout import BYTES
from paceline.planning.plan import Plan
from paceline.split.cross_entropy import divides_classes
from paceline.split.remat import compiled
from paceline.sync import Replica
from paceline.wire.status import refuse_aborted

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

    from paceline.engine.reference import Reference
    from paceline.engine.split_model import ShardReads
    from paceline.split.apply import Split

_AS_IT_IS = nullcontext()
_NARROW = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


@dataclass
class LocalLoss:
    """This rank's part of the global mean loss of a step.

    Attributes:
        total: weighted sum of the microbatches' mean losses; the weights are the shares of the global batch.
        items: sum of the microbatches' shares of the global batch.
    """

    total: float | Tensor = 0.0
    items: float | Tensor = 0.0

    def add(self, share: float | Tensor, items: float | Tensor) -> None:
        """Add a microbatch's weighted loss and its share of the global batch."""
        self.total = self.total + share if isinstance(self.total, Tensor) else share
        self.items = self.items + items


class Compute(ABC):
    """Forward and backward passes of one rank; implemented by `WholeModel` and `SplitModel`.

    Attributes:
        model: the module on this rank; in a pipeline, this rank's stages.
        accelerated: True if the device is an accelerator.
        forward: forward pass of the model, compiled if the plan says so.
        loss: the job's loss function.
        step_loss: loss function of a training step: `loss`, or its vocabulary-parallel form if the logits stay divided.
        loader: this rank's share of every global batch.
        group: all ranks.
        data_group: the ranks that read different samples.
        split: how the model is divided over the ranks of a replica; None if each rank holds the whole model.
        normalization: weights of the microbatches' losses in the global mean.
        packed: check of packed sequences.
        loss_scale: loss scale of fp16 training; None in other precisions.
        replica: the object through which the sync rule accesses this rank.
        casts: True if FSDP2 already casts to the low precision.
        divides_logits: True if each rank keeps only its part of the vocabulary's logits, because the loss can combine
            the parts.
        chunks: this rank's output head, if the head computes the loss in chunks; otherwise None.
        trims: True if positions after the last label that counts are not computed. Microbatches then differ in length,
            so pipelines, divided sequences and compiled models compute all positions.
        reference: log-probabilities under the weights before training; None if the loss has no reference.
        float8: configuration of the layers of a whole model that multiply in float8.
        reads: check that refuses reads of parameter shards outside of the model; None if each rank holds all
            parameters.
    """

    replica: Replica
    reads: ShardReads | None = None
    chunks: ChunkedHead | None = None
    float8: Float8LinearConfig | None = None
    reference: Reference | None = None

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        loader: Loader,
        plan: Plan,
        group: Group,
        data_group: Group,
        precision: str,
        split: Split | None,
    ) -> None:
        self.model, self.loss, self.loader, self.plan = model, loss, loader, plan
        self.group, self.data_group, self.split, self.device = group, data_group, split, group.device
        self.precision, self.step_loss, self.accelerated = precision, loss, is_accelerator(group.device)
        self.forward: Any = model
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.casts = self.divides_logits = False
        self.normalization = LossNormalization(self)
        self.experts = ExpertBalance(self)
        self.trims = self._trims()
        self.packed = PackedCheck(self)

    @abstractmethod
    def forward_backward(self, batch: Batch | None, position: Position, step: int) -> LocalLoss:
        """Compute this rank's part of the global mean loss, and accumulate its gradient.

        Args:
            batch: this rank's share of the global batch; None if it is empty.
            position: position of the batch in the data.
            step: number of the current optimizer step, counted from 1, for error messages.
        """

    @abstractmethod
    def output(self, batch: Batch | None, metrics: Sequence[Metric] = ()) -> tuple[Any, Batch] | None:
        """Return the model's output and the batch on this rank's device; None without an output.

        Args:
            metrics: metrics that the head computes in chunks instead of logits (`ChunkedHead.totals`). They are used
                only on a rank with `chunks`.
        """

    @abstractmethod
    def placed(self, batch: Batch | None, count: int = 1) -> Batch:
        """Return this rank's part of the batch, on its device.

        Without a batch, the result is `count` copies of an example.
        """

    @abstractmethod
    def forward_alone(self, placed: Batch) -> Any:
        """Return the model's output for the result of `placed`, without a backward pass.

        The result is None on ranks without the last stage of a pipeline.
        """

    def against_reference(self, parts: Sequence[Batch]) -> list[AbstractContextManager[None]]:
        """Return a context for each microbatch, in which the loss compares it with the reference."""
        return [_AS_IT_IS] * len(parts) if self.reference is None else self.reference.of(parts)

    def call(self, batch: Batch) -> Any:
        """Return the model's output for a batch that is already on this rank's device."""
        try:
            return call(self.forward, batch, loss=self.loss)
        except (TypeError, RuntimeError) as error:
            # the plan may be the cause, if the undivided model can compute the batch
            refused = (
                refused_batch(self.forward, batch, error, loss=self.loss) if self.split is None else self.split.refused
            )
            if refused is not None:
                raise refused from error
            raise

    def place(self, batch: Batch) -> Batch:
        """Return the batch on this rank's device, in the plan's precision and memory format."""
        wide = torch.float64 if self.precision == "fp64" else None
        return place(batch, self.device, dtype=wide, channels_last=self.plan.memory_format == "channels_last")

    def _trims(self) -> bool:
        cut, plan = self.split, self.plan
        alike = cut is not None and (cut.pipeline is not None or cut.context is not None or plan.sequence)
        ignores = self.normalization.counts and (declares_mean(self.loss) or is_known(self.loss))
        # padding takes part in the balance of experts
        return self.loader.pads_at_end and ignores and not (alike or self.experts.routes or plan.compile != "off")

    def place_parts(self, parts: Iterable[Batch], position: Position) -> list[Batch]:
        """Place microbatches without positions that need no computing, and correct the position's counts."""
        found = [trimmed(part) for part in parts]
        if "positions" in position.counts:
            computed = [computed_positions(part) for part in found]
            position.counts.update(zip(("positions", "padding"), map(sum, zip(*computed, strict=True)), strict=True))
        return [self.place(part) for part in found]

    def place_trimmed(self, part: Batch) -> Batch:
        """Place a part of a batch, without positions that need no computing."""
        return self.place(trimmed(part) if self.trims else part)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for the plan's precision; a null context if FSDP2 casts."""
        narrow = _NARROW.get(self.precision)
        return torch.autocast(self.device.type, narrow) if narrow is not None and not self.casts else _AS_IT_IS

    def prepare(self, batch: Batch | None) -> None:
        """Exchange the number of items that the loss averages over, before the first step.

        This sets `normalization.items_per_sample` to the largest number of items per sample in the first batch of any
        replica. Every replica counts its share of the global batch in this unit.
        """
        self.normalization.prepare()
        if self.normalization.items_per_sample is None:
            local = float(self.normalization.items(batch)) / rows(batch) if batch is not None and rows(batch) else 0.0
            unit = torch.tensor([local], dtype=widest_float(self.device), device=self.device)
            self.group.all_reduce(unit, "max")
            items = float(unit.item())
            refuse_aborted()
            self.normalization.items_per_sample = items or 1.0

    def normalized_loss(
        self, output: Any, part: Batch, batch: Batch, position: Position, step: int, counted: Batch | None = None
    ) -> tuple[Tensor, float | Tensor]:
        """Return the mean loss of a microbatch and its share of the global batch.

        Args:
            counted: copy of the microbatch in which items are counted; None counts them in `part`.

        Raises:
            DataError: the loss cannot compare the target with the output; the message names the sample.
        """
        try:
            return self._loss(output, part, position, step, part if counted is None else counted)
        except DataError:
            # raises an error with a better message if the target is the cause
            self.check_target(output, batch, self.here(step), self.loader.indices, self.step_loss)
            raise

    def check_target(
        self, output: Any, batch: Batch, where: str, samples: list[int] | None = None, loss: Loss | None = None
    ) -> None:
        """Validate the target on the host while an accelerator computes the output."""
        check = getattr(loss or self.loss, "check", None)
        if check is not None and not on_accelerator(target := target_of(batch)):
            check(output, target, where, samples)

    def here(self, step: int) -> str:
        """Return the step and rank as a phrase for error messages."""
        return f"in step {step} on rank {self.group.rank}"

    def chunked(self, head: Head | None, model: nn.Module, tp: Group | None = None) -> None:
        """Let the head of this rank's model compute the loss of training steps in chunks.

        Args:
            head: the result of `find_head`; None changes nothing.
            model: the module of this rank that has the head.
            tp: the ranks that divide the head's classes; None if the head is whole.
        """
        if head is None:
            return
        self.normalization.remarks.append(head.note)
        if head.path is not None and divides_classes(self.loss):
            self.chunks = ChunkedHead(model, head.path, self.loss, tp, self.loss_scale)
            self.step_loss = ChunkedLoss(self.chunks, self.step_loss)

    def measuring(self, placed: Batch, metrics: Sequence[Metric]) -> AbstractContextManager[None]:
        """Return a context in which this rank's `chunks` compute metrics, if any."""
        if self.chunks is None or not metrics:
            return _AS_IT_IS
        return self.chunks.measuring(self.normalization.target(placed), metrics)

    @property
    def is_whole_batch(self) -> bool:
        """Return True if each microbatch is a whole global batch, so no weights are needed."""
        return self.data_group.size == self.plan.microbatches == self.plan.cp == 1

    def _loss(
        self, output: Any, part: Batch, position: Position, step: int, counted: Batch
    ) -> tuple[Tensor, float | Tensor]:
        target = self.normalization.target(part)
        if getattr(self.loss, "whole_batch", False):
            counts = self.loader.partition.shares(position.step, position.epoch)
            outputs = gather(self.data_group, output if isinstance(output, Tensor) else output.logits, counts)
            targets = gather(self.data_group, target, counts)
            # every rank has the same loss
            return self.normalization.of_microbatch(self.step_loss, outputs, targets), 1.0 / self.data_group.size
        loss = self.normalization.of_microbatch(self.step_loss, output, target)
        if self.is_whole_batch:
            return self.normalization.without_empty(loss, output, counted), 1.0
        self.normalization.look(output, target, step, position)
        return self.normalization.normalized(loss, output, counted, position)


class ExpertBalance:
    """Weights of the routers' load-balancing loss; unused for models without routers.

    Attributes:
        routes: True if the model has routers.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.routes = any(True for _ in routers_of(compute.model))

    def weigh(self, part: Batch | None, position: Position) -> None:
        """Set the weights of a microbatch in the routers' load-balancing loss.

        Args:
            part: the microbatch; None sets the weights to 0.
        """
        self.weigh_each([part], position)(0)

    def weigh_each(self, parts: Sequence[Batch | None], position: Position) -> Callable[[int], None]:
        """Return a function that sets the weights of the microbatch with the given index."""
        if not self.routes:
            return lambda number: None
        weights = [(0.0, None) if part is None else self._weights(part, position) for part in parts]
        return lambda number: weigh_balance(self.compute.model, *weights[number])

    def _weights(self, part: Batch, position: Position) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the sequences, and of their tokens if they may be packed."""
        compute = self.compute
        normalization, context = compute.normalization, compute.split.context if compute.split is not None else None
        counts = [normalization.items(row) for row in split(part, rows(part))]
        on_host = [count for count in counts if not isinstance(count, Tensor)]
        items = (
            uploaded(on_host, widest_float(compute.device), compute.device)
            if on_host
            else torch.stack(cast(list[Tensor], counts))
        )
        if context is not None and not context.whole and normalization.counts:
            # of the whole sequences
            context.group.all_reduce(items)
        if compute.is_whole_batch:
            total = items.sum()
            weights = items / torch.where(total > 0, total, 1.0)
        else:
            assert normalization.items_per_sample is not None
            weights = items / (position.total * normalization.items_per_sample)
        if has_pairs(compute.loss):
            return weights.repeat_interleave(2) / 2, None
        labels = part.get("labels") if isinstance(part, Mapping) and "position_ids" in part else None
        if labels is None or labels.dim() != 2 or not (context is None or context.whole):
            return weights, None
        counted = (labels != IGNORED).to(weights.dtype)
        return weights, weights.unsqueeze(1) * counted / counted.sum(1, keepdim=True).clamp(min=1)

    def counts(self) -> dict[str, Any]:
        """Return the number of tokens per expert on this rank; {} if another rank reports it."""
        split_ = self.compute.split
        if split_ is None:
            return moe_counts(self.compute.model)
        if split_.mesh.place["tp"]:
            return {}
        return add_counts([moe_counts(module) for module in split_.modules])


class WholeModel(Compute):
    """A replica on one rank, which computes its share of the batch in successive microbatches."""

    def __init__(self, model: nn.Module, loss: Loss, loader: Loader, plan: Plan, group: Group, precision: str) -> None:
        super().__init__(model, loss, loader, plan, group, group, precision, None)
        # the host has the labels before the device, and counting them on the host launches no kernels
        self.counts_on_host = is_accelerator(self.device) and self.normalization.is_count
        self.chunked(head_in(model, loader, loss, plan, precision), model)
        if precision == "fp8":
            from paceline.split import float8  # imports torchao

            self.normalization.remarks.append(float8.mark(model, self.device))
            self.float8 = float8.convert([model], self.device)
        if plan.compile != "off":
            self.forward = compiled(model, plan.compile, self.device, "the model")

    def forward_backward(self, batch: Batch | None, position: Position, step: int) -> LocalLoss:
        """See `Compute.forward_backward`."""
        local = LocalLoss()
        if position.local == 0 or batch is None:
            return local
        if self.trims:
            parts = self.place_parts(self.microbatches(batch), position)
        else:
            parts = self.microbatches(self.place(batch))
        if (chunks := self.chunks) is not None:
            chunks.check(target_of(batch), self.here(step), self.loader.indices)
        against = self.against_reference(parts)
        counted = list(self.microbatches(batch)) if self.counts_on_host else parts
        for i, part in enumerate(parts):
            self.replica.backward.last = i == len(parts) - 1
            if self.experts.routes:
                self.experts.weigh(part, position)
            with self.autocast(), self._knowing(batch), against[i]:
                with _AS_IT_IS if chunks is None else chunks.training(self.normalization.target(part)):
                    output = self.call(part)
                if self.accelerated and i == 0 and chunks is None:
                    self.check_target(output, batch, self.here(step), self.loader.indices)
                loss, items = self.normalized_loss(output, part, batch, position, step, counted[i])
            scaled = loss if isinstance(items, float) and items == 1.0 else loss * items
            backward(scaled if self.loss_scale is None else self.loss_scale.scale(scaled))
            local.add(scaled.detach(), items)
        return local

    def _knowing(self, batch: Batch) -> AbstractContextManager[None]:
        """Return a context in which the loss reads labels from their copy on the host."""
        if not self.accelerated:
            return _AS_IT_IS
        knowing = getattr(self.step_loss, "knowing", None)
        if knowing is None or on_accelerator(target := target_of(batch)):
            return _AS_IT_IS
        return cast(AbstractContextManager[None], knowing(target))

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Split this rank's share of the batch into microbatches."""
        return list(split(batch, self.plan.microbatches))

    def output(self, batch: Batch | None, metrics: Sequence[Metric] = ()) -> tuple[Any, Batch] | None:
        """See `Compute.output`."""
        placed = self.placed(batch)
        with self.measuring(placed, metrics):
            return self.call(placed), placed

    def placed(self, batch: Batch | None, count: int = 1) -> Batch:
        """See `Compute.placed`."""
        assert batch is not None, "only the ranks of one replica wait for each other"
        return self.place_trimmed(batch)

    def forward_alone(self, placed: Batch) -> Any:
        """See `Compute.forward_alone`."""
        return self.call(placed)


def head_in(
    model: nn.Module, loader: Loader, loss: Loss, plan: Plan, precision: str, example: Batch | None = None
) -> Head | None:
    """Find the output head that can compute the loss in chunks (`find_head`).

    Args:
        model: the undivided model.
        example: a microbatch in the model's input format; by default, the loader's.
    """
    if not may_chunk(model, loss):
        return None
    if example is None:
        wide = torch.float64 if precision == "fp64" else None
        example = place(loader.example(1), torch.device("cpu"), dtype=wide, channels_last=False)
    target = target_of(example)
    if not isinstance(target, Tensor):
        return None
    samples = -(-loader.largest_share() // plan.microbatches)
    labels = target[:1].numel() * samples // plan.cp
    number_bytes = BYTES.get(base_precision(precision), 4)
    return find_head(
        model, loss, example, partial(call, loss=loss), labels=labels, number_bytes=number_bytes, tp=plan.tp
    )
