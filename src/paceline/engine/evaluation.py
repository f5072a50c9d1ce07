"""Exact evaluation on a validation set, for any division of its samples over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.comm import Group
from paceline.data.samples import Retry, held_out_batches, most_batches, padded
from paceline.device import forked_random, widened, widest_float
from paceline.engine.compute import Compute
from paceline.engine.reference import in_eval_mode
from paceline.errors import DataError, JobError, StorageError
from paceline.job.batch import Batch, target_of
from paceline.job.loss import Metric
from paceline.job.loss_items import LossMetric
from paceline.planning.plan import REPLICA
from paceline.sync import SyncRule
from paceline.wire.status import Phase, refuse_aborted


class Evaluation:
    """Evaluation of the model on validation batches, with synchronized parameters.

    Args:
        statistics: True if buffers differ between replicas (local batch norm); the evaluation then uses their mean.
        seed: seed of the random numbers that the model draws during the evaluation.
        on_phase: called before every batch to report that this rank is alive, because an evaluation may take long.
        weights: context in which the model has the weights to evaluate.
        on_end: called on every rank after the last batch, when replicas may change their parameters again.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        statistics: bool,
        seed: int,
        on_phase: Callable[[Phase], None],
        on_end: Callable[[], None],
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.weights = weights
        self.compute, self.seed, self.on_phase, self.on_end = compute, seed, on_phase, on_end
        self._statistics = statistics

    def means(self, batches: Iterable[Batch | None], metrics: list[Metric], rule: SyncRule) -> dict[str, float]:
        """Compute the metrics over the batches of all ranks; every rank must call this.

        Raises:
            UnreadableBatch: a batch cannot be read; raised on all ranks, which can then go on together.
        """
        measured = Measured(metrics)
        unreadable: UnreadableBatch | None = None
        with self.measuring(rule):
            try:
                for i, batch in enumerate(batches):
                    self.begin(i)
                    measured.add(self._measured(batch, metrics))
            except UnreadableBatch as error:
                unreadable = error
        if unreadable is not None:
            raise unreadable
        return measured.results(self.compute.group)

    @contextmanager
    def measuring(self, rule: SyncRule) -> Iterator[None]:
        """Return a context with the model in eval mode and synchronized parameters."""
        compute = self.compute
        compute.normalization.prepare()
        with in_eval_mode(compute.model), self.weights():
            with (
                rule.shared_parameters(),
                self.averaged_buffers(),
                forked_random(compute.device),
                # not inference mode: a model may cache a tensor that it made and train with it later
                torch.no_grad(),
                compute.autocast(),
            ):
                yield
            self.on_end()

    def begin(self, number: int) -> None:
        """Seed the random numbers of a validation batch, and report that this rank is alive."""
        data_group = self.compute.data_group
        torch.manual_seed(self.seed + number * data_group.size + data_group.rank)
        self.on_phase("evaluate")

    @contextmanager
    def averaged_buffers(self) -> Iterator[None]:
        """Replace floating-point buffers by their mean over the replicas within this context."""
        buffers = [b for b in self.compute.model.buffers() if b.is_floating_point()]
        if self.compute.data_group.size == 1 or not buffers or not self._statistics:
            yield
            return
        own = [b.clone() for b in buffers]
        flat = torch.cat([widened(b.reshape(-1)) for b in buffers])
        self.compute.data_group.all_reduce(flat, "mean")
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
        try:
            yield
        finally:
            for buffer, before in zip(buffers, own, strict=True):
                buffer.copy_(before)

    def _measured(self, batch: Batch | None, metrics: list[Metric]) -> list[tuple[Any, Any]]:
        compute, chunks = self.compute, self.compute.chunks
        in_chunks = all(getattr(metric, "by_label", False) for metric in metrics)
        if chunks is not None and batch is not None:
            chunks.check(target_of(batch), "in the validation set")
        against = nullcontext() if compute.reference is None else compute.reference.of_batch(batch)
        found = compute.output(batch, metrics if in_chunks else ())
        if found is None or batch is None:
            return []
        output, placed = found
        if chunks is not None and in_chunks and chunks.taken(output) is not None:
            return list(chunks.totals)
        compute.check_target(output, batch, "in the validation set")
        target: Any = compute.normalization.target(placed)
        with against:
            return [
                compute.normalization.measured(m, output, placed) if isinstance(m, LossMetric) else m(output, target)
                for m in metrics
            ]


class UnreadableBatch(StorageError):
    """Error of every rank if one rank cannot read a batch of an evaluation."""


def batches_of(
    compute: Compute,
    dataset: Dataset[Any],
    global_batch: int,
    *,
    retry_s: float = 0.0,
    on_retry: Callable[[Retry], object] = lambda retry: None,
) -> Iterable[Batch | None]:
    """Return this rank's batches of a data set for evaluation.

    If ranks wait for each other in every batch, every rank gets the same number of batches, with None for a missing
    batch. If a store cannot be reached, reading a batch is retried for `retry_s` seconds; see `held_out_batches`.
    """
    # a metric of a whole batch depends on which samples are in it
    whole = getattr(compute.loss, "whole_batch", False)
    rank, size = compute.data_group.rank, compute.data_group.size
    batch = global_batch if whole else max(1, global_batch // size)
    batches = held_out_batches(
        dataset, batch=batch, replica=rank, replicas=size, in_turn=whole, retry_s=retry_s, on_retry=on_retry
    )
    if compute.split is None or not compute.split.all_must_compute:
        return batches
    samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
    return padded(batches, most_batches(samples, batch=batch, replicas=size, in_turn=whole))


def until_unreadable(compute: Compute, batches: Iterable[Batch | None]) -> Iterator[Batch | None]:
    """Yield the batches; if a rank cannot read one, raise an error on every rank.

    Every rank must iterate to the end. The ranks of a replica wait for each other in every batch, so they first compare
    whether they have the batch. All ranks compare after their last batch.

    Raises:
        UnreadableBatch: a rank cannot read a batch.
    """
    mesh = compute.split.mesh if compute.split is not None else None
    groups = [] if mesh is None else [mesh.group(axis) for axis in REPLICA if mesh.sizes[axis] > 1]
    found, over, waiting = None, False, iter(batches)
    while not over:
        batch = None
        try:
            batch = next(waiting)
        except StopIteration:
            over = True
        except StorageError as error:
            found, over = str(error), True
        if groups:
            ended = torch.tensor([float(over)], device=compute.device)
            for group in groups:
                group.all_reduce(ended, "max")
            over = bool(ended.item())
            refuse_aborted()
        if not over:
            yield batch
    reasons = [reason for reason in compute.group.gather_json(found) if reason is not None]
    if reasons:
        raise UnreadableBatch("storage.evaluation_unreadable", "{reason}", reason=reasons[0], may_pass=True)


LIMIT_BYTES = 2**30  # upper limit for the rows of one metric, from all ranks together


class Measured:
    """Values of metrics for this rank's batches: sums, rows, or states."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics
        self._kept: list[_Sums | _Rows | _States] = [_kept_of(metric) for metric in metrics]

    def add(self, values: list[tuple[Any, Any]]) -> None:
        """Add each metric's values for one batch (empty if another rank has the values)."""
        for kept, (first, second) in zip(self._kept, values, strict=False):
            kept.add(first, second)

    def results(self, group: Group | None = None) -> dict[str, float]:
        """Compute each metric over the batches of all ranks; every rank must call this."""
        sums = [kept for kept in self._kept if isinstance(kept, _Sums)]
        add_up(sums, group)
        return {metric.name: kept.result(group) for metric, kept in zip(self.metrics, self._kept, strict=True)}


def _kept_of(metric: Metric) -> _Sums | _Rows | _States:
    if getattr(metric, "keeps_state", False):
        return _States(metric)
    return _Rows(metric) if getattr(metric, "gathers", False) else _Sums(metric)


class _Sums:
    """The total (possibly a tensor) and the count from which a metric is computed."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.total: Tensor | None = None
        self.count = 0.0

    def add(self, total: Any, count: Any) -> None:
        total = torch.as_tensor(total, dtype=torch.float64, device="cpu")
        self.total = total if self.total is None else self.total + total
        self.count += float(count)

    def result(self, group: Group | None) -> float:
        total = torch.zeros((), dtype=torch.float64) if self.total is None else self.total
        return self.metric.result(total if total.dim() else total.item(), self.count)


def add_up(sums: list[_Sums], group: Group | None) -> None:
    """Add up the sums of all ranks in one all-reduce."""
    if group is None or group.size == 1:
        return
    # a rank without a batch does not know the number of values
    found = group.gather_json([None if kept.total is None else list(kept.total.shape) for kept in sums])
    for i, kept in enumerate(sums):
        shape: list[int] = next((of_rank[i] for of_rank in found if of_rank[i] is not None), [])
        if any(of_rank[i] not in (None, shape) for of_rank in found):
            raise DataError(
                "metric.totals_differ",
                "the totals of metric {metric} differ in shape between ranks. The call of the metric must return "
                "the same shape for every batch.",
                metric=kept.metric.name,
            )
        if kept.total is None:
            kept.total = torch.zeros(shape, dtype=torch.float64)
    numbers = [part for kept in sums for part in (kept.total.reshape(-1), torch.tensor([kept.count]).double())]  # type: ignore[union-attr]
    if not numbers:
        return
    flat = torch.cat(numbers).to(group.device, widest_float(group.device))
    group.all_reduce(flat)
    summed = flat.cpu().double()
    refuse_aborted()
    parts = iter(summed.split([len(part) for part in numbers]))
    for kept in sums:
        kept.total, kept.count = next(parts).reshape(kept.total.shape), next(parts).item()  # type: ignore[union-attr]


class _States:
    """States of a torchmetrics metric on this rank (see `paceline.job.zoo.torch_metrics`)."""

    def __init__(self, metric: Any) -> None:
        self.name, self._states = metric.name, metric.begin()

    def add(self, predictions: Any, targets: Any) -> None:
        self._states.add(predictions, targets)

    def result(self, group: Group | None) -> float:
        if group is None or group.size == 1:
            value: float = self._states.result()
            return value
        value = self._states.result(lambda own: gathered(own, group, self.name))
        told = group.gather_json(value if self._states.batches else None)
        return next((one for one in told if one is not None), math.nan)


class _Rows:
    """Predictions and targets of all samples."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.name, self._bytes = metric, metric.name, 0
        self._kept: tuple[list[Tensor], list[Tensor]] = ([], [])

    def add(self, predictions: Any, targets: Any) -> None:
        """Keep the rows of a batch on the host.

        Raises:
            JobError: the values are not two tensors with the same number of rows.
            DataError: the rows exceed `LIMIT_BYTES`.
        """
        pair = (predictions, targets)
        if not all(isinstance(one, Tensor) and one.dim() for one in pair) or len(predictions) != len(targets):
            shown = ", ".join(str(list(one.shape)) if isinstance(one, Tensor) else type(one).__name__ for one in pair)
            raise JobError(
                "metric.gathers_invalid",
                "metric {metric} gathers rows, so its call must return two tensors (predictions, targets) with one row "
                "per sample, but it returned {found}",
                metric=self.name,
                found=shown,
            )
        for kept, one in zip(self._kept, pair, strict=True):
            kept.append(one.detach().to("cpu", copy=True))  # a view would keep the whole output in memory
            self._bytes += one.nbytes
        self._check(self._bytes)

    def result(self, group: Group | None) -> float:
        first, second = (torch.cat(kept) if kept else None for kept in self._kept)
        if group is not None and group.size > 1:
            first, second = (gathered(one, group, self.name) for one in (first, second))
        return math.nan if first is None or second is None else float(self.metric.result(first, second))

    def _check(self, size: int) -> None:
        if size > LIMIT_BYTES:
            raise _too_large(self.name)


def gathered(own: Tensor | None, group: Group, name: str) -> Tensor | None:
    """Gather the rows of all ranks on the host, in rank order.

    The result is None if no rank has rows.

    Args:
        own: this rank's rows; None if this rank has no rows.
        name: name of the metric, for error messages.

    Raises:
        DataError: the rows differ in type or shape between ranks, or exceed `LIMIT_BYTES`.
    """
    sorts = group.gather_json(
        None if own is None else [str(own.dtype).removeprefix("torch."), len(own), *own.shape[1:]]
    )
    filled = [one for one in sorts if one is not None]
    if not filled:
        return None
    if any((one[0], one[2:]) != (filled[0][0], filled[0][2:]) for one in filled):
        shown = ", ".join(sorted({f"{one[0]} {one[2:]}" for one in filled}))
        raise DataError(
            "metric.rows_differ",
            "the rows of metric {metric} differ in type or shape between ranks: {found}. The call of the metric "
            "must return the same type and shape for every batch.",
            metric=name,
            found=shown,
        )
    dtype, shape = getattr(torch, filled[0][0]), filled[0][2:]
    row_bytes = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    counts = [0 if one is None else int(one[1]) for one in sorts]
    if sum(counts) * row_bytes > LIMIT_BYTES:
        raise _too_large(name)
    mine = torch.empty((0, *shape), dtype=dtype) if own is None else own
    # as bytes, because every transport can send them
    packed = mine.contiguous().reshape(-1).view(torch.uint8).reshape(len(mine), row_bytes).to(group.device)
    together = torch.cat([part.cpu() for part in group.gather_rows(packed, counts)])
    return together.reshape(-1).view(dtype).reshape(sum(counts), *shape)


def _too_large(name: str) -> DataError:
    return DataError(
        "metric.too_large",
        "the predictions and targets of metric {metric} exceed {limit_gib:g} GiB. Change its call so that it "
        "returns less for each sample (such as the predicted class), or hold out fewer samples.",
        metric=name,
        limit_gib=LIMIT_BYTES / 2**30,
    )
