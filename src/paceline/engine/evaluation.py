"""Measuring a validation set, exactly, however its samples are divided over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.device import forked_random, widened, widest_float
from paceline.engine.compute import Compute
from paceline.errors import DataError, JobError
from paceline.job.batch import Batch
from paceline.job.loss import Metric
from paceline.job.loss_items import LossMetric
from paceline.sync import SyncRule
from paceline.wire.status import Phase


class Evaluation:
    """Runs the model over validation batches, with parameters that all replicas agree on.

    Args:
        statistics: whether buffers differ between replicas, so that their mean is measured (local batch norm).
        seed: of random numbers that the model draws meanwhile.
        on_phase: told that this rank lives, as a set may be long.
        on_end: called by every rank after its last batch, when replicas may write into their parameters again.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        statistics: bool,
        seed: int,
        on_phase: Callable[[Phase], None],
        on_end: Callable[[], None],
    ) -> None:
        self.compute, self.seed, self.on_phase, self.on_end = compute, seed, on_phase, on_end
        self._statistics = statistics

    def means(self, batches: Iterable[Batch | None], metrics: list[Metric], rule: SyncRule) -> dict[str, float]:
        """The metrics over the batches of all ranks. Every rank calls this."""
        measured = Measured(metrics)
        with self.measuring(rule):
            for i, batch in enumerate(batches):
                self.begin(i)
                measured.add(self._measured(batch, metrics))
        return measured.results(self.compute.group)

    @contextmanager
    def measuring(self, rule: SyncRule) -> Iterator[None]:
        """Context in which the model is in eval mode, with parameters all replicas agree on."""
        compute = self.compute
        compute.normalization.prepare()
        # A user may keep some layers in eval mode.
        training = [module for module in compute.model.modules() if module.training]
        compute.model.eval()
        try:
            with (
                rule.in_agreement(),
                self.averaged_buffers(),
                forked_random(compute.device),
                torch.no_grad(),  # not inference mode: a model may keep a tensor that it made, and train with it later
                compute.autocast(),
            ):
                yield
        finally:
            for module in training:
                module.training = True
        self.on_end()

    def begin(self, number: int) -> None:
        """Seed the random numbers of a validation batch, and show that this rank lives."""
        data_group = self.compute.data_group
        torch.manual_seed(self.seed + number * data_group.size + data_group.rank)
        self.on_phase("evaluate")

    @contextmanager
    def averaged_buffers(self) -> Iterator[None]:
        """Within, floating-point buffers hold their mean over the replicas."""
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
        compute = self.compute
        found = compute.output(batch)
        if found is None or batch is None:
            return []
        output, placed = found
        compute.check_target(output, batch, "in the validation set")
        target: Any = compute.normalization.target(placed)
        return [
            compute.normalization.measured(m, output, placed) if isinstance(m, LossMetric) else m(output, target)
            for m in metrics
        ]


LIMIT_BYTES = 2**30  # largest size of the rows of one metric, from all ranks together


class Measured:
    """Values of metrics for this rank's batches: two sums each, or rows of all samples."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics
        self._sums = torch.zeros(len(metrics), 2, dtype=torch.float64)
        self._rows = {i: _Rows(m.name) for i, m in enumerate(metrics) if getattr(m, "gathers", False)}

    def add(self, values: list[tuple[Any, Any]]) -> None:
        """Add the values of each metric for one batch; none if another rank measures it."""
        for i, (first, second) in enumerate(values):
            if i in self._rows:
                self._rows[i].add(first, second)
            else:
                self._sums[i] += torch.tensor([float(first), float(second)], dtype=torch.float64)

    def results(self, group: Group | None = None) -> dict[str, float]:
        """Compute each metric over the batches of all ranks of `group`; every rank calls this."""
        sums = self._sums
        if group is not None:
            sums = sums.to(group.device, widest_float(group.device))
            group.all_reduce(sums)
        found: dict[str, float] = {}
        for i, (metric, (total, count)) in enumerate(zip(self.metrics, sums.tolist(), strict=True)):
            if i in self._rows:
                whole = self._rows[i].whole(group)
                found[metric.name] = math.nan if whole is None else float(metric.result(*whole))
            else:
                found[metric.name] = metric.result(total, count)
        return found


class _Rows:
    def __init__(self, name: str) -> None:
        self.name, self._bytes = name, 0
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
                f"metric {self.name} gathers, so its call should return two tensors (predictions, targets) with one "
                f"row per sample; it returned {shown}"
            )
        for kept, one in zip(self._kept, pair, strict=True):
            kept.append(one.detach().to("cpu", copy=True))  # a view would keep the whole output alive
            self._bytes += one.nbytes
        self._check(self._bytes)

    def whole(self, group: Group | None) -> tuple[Tensor, Tensor] | None:
        own = [torch.cat(kept) if kept else None for kept in self._kept]
        if group is None or group.size == 1:
            return None if own[0] is None or own[1] is None else (own[0], own[1])
        first, second = (self._gathered(one, group) for one in own)
        return None if first is None or second is None else (first, second)

    def _gathered(self, own: Tensor | None, group: Group) -> Tensor | None:
        sorts = group.gather_json(
            None if own is None else [str(own.dtype).removeprefix("torch."), len(own), *own.shape[1:]]
        )
        filled = [one for one in sorts if one is not None]
        if not filled:
            return None
        if any((one[0], one[2:]) != (filled[0][0], filled[0][2:]) for one in filled):
            shown = ", ".join(sorted({f"{one[0]} {one[2:]}" for one in filled}))
            raise DataError(
                f"the rows of metric {self.name} differ in type or shape between ranks: {shown}. Let its call return "
                "the same type and shape for every batch"
            )
        dtype, shape = getattr(torch, filled[0][0]), filled[0][2:]
        row_bytes = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
        counts = [0 if one is None else int(one[1]) for one in sorts]
        self._check(sum(counts) * row_bytes)
        mine = torch.empty((0, *shape), dtype=dtype) if own is None else own
        # as bytes, because every transport can send them
        packed = mine.contiguous().reshape(-1).view(torch.uint8).reshape(len(mine), row_bytes).to(group.device)
        together = torch.cat([part.cpu() for part in group.gather_rows(packed, counts)])
        return together.reshape(-1).view(dtype).reshape(sum(counts), *shape)

    def _check(self, size: int) -> None:
        if size > LIMIT_BYTES:
            raise DataError(
                f"the predictions and targets of metric {self.name} have more than {LIMIT_BYTES / 2**30:g} GiB. Let "
                "its call return less for each sample (such as the predicted class), or hold out fewer samples"
            )
