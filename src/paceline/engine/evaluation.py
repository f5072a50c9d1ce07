"""Measuring a validation set, exactly, however its samples are divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.device import forked_random, widened
from paceline.engine.compute import Compute
from paceline.engine.measured import Measured
from paceline.job.batch import Batch
from paceline.job.loss import Metric
from paceline.job.zoo.metrics import LossMetric
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

    def averaged_buffers(self) -> AbstractContextManager[None]:
        """Within, floating-point buffers hold their mean over the replicas."""
        floating = [b for b in self.compute.model.buffers() if b.is_floating_point()]
        if self.compute.data_group.size == 1 or not floating or not self._statistics:
            return nullcontext()
        return _AveragedBuffers(floating, self.compute.data_group)

    def _measured(self, batch: Batch | None, metrics: list[Metric]) -> list[tuple[Any, Any]]:
        """Compute the values of every metric for a batch; none if another rank measures it."""
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


@dataclass
class _AveragedBuffers(AbstractContextManager[None]):
    """Context in which floating-point buffers hold their mean over the replicas."""

    buffers: list[Tensor]
    group: Group
    own: list[Tensor] = field(default_factory=list)

    def __enter__(self) -> None:
        self.own = [b.clone() for b in self.buffers]
        flat = torch.cat([widened(b.reshape(-1)) for b in self.buffers])
        self.group.all_reduce(flat, "mean")
        for buffer, part in zip(self.buffers, flat.split([b.numel() for b in self.buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))

    def __exit__(self, *error: object) -> None:
        for buffer, own in zip(self.buffers, self.own, strict=True):
            buffer.copy_(own)
