"""Results of metrics over a validation set that ranks measure in parts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.device import widest_float
from paceline.errors import DataError, JobError
from paceline.job.loss import Metric

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
    """Predictions and targets, one row per sample."""

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
        """Gather the rows of all ranks, in rank order; None if there are none."""
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
