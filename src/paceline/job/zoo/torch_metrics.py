"""Metrics of torchmetrics in a job, reduced exactly over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from paceline.device import widest_float
from paceline.errors import DataError, JobError
from paceline.job.loss_items import logits_of
from paceline.job.zoo.outputs import classified

if TYPE_CHECKING:
    from paceline.job.loss import Loss

_EXACT: dict[Any, Callable[..., Tensor]] = {dim_zero_sum: torch.sum, dim_zero_max: torch.amax, dim_zero_min: torch.amin}
_CLASSIFICATION = "torchmetrics.classification"


class TorchMetric:
    """A metric of torchmetrics as a metric of a job.

    If the metric reduces its states only with sums, maxima, minima and concatenations, every rank updates a copy, and
    the states are reduced over the ranks. For other metrics, a mean over ranks would be wrong if their shares differ,
    so all predictions are gathered and evaluated together.

    Metrics of `torchmetrics.classification` get probabilities and labels. Other metrics get the model's output and the
    target.

    Attributes:
        keeps_state: True if states are reduced over the ranks; otherwise `gathers` is True.
    """

    def __init__(self, name: str, metric: Metric, loss: Loss | None) -> None:
        self.name, self.metric, self.loss = name, metric, loss
        self.higher_is_better: bool | None = metric.higher_is_better
        self._classifies = any(cls.__module__.startswith(_CLASSIFICATION) for cls in type(metric).__mro__)
        self._binary = type(metric).__name__.startswith("Binary")
        # this module reduces the states of the ranks, so torchmetrics must not use a process group
        metric.sync_on_compute = metric._to_sync = False
        self.gathers = not _reduces_exactly(metric)
        self.keeps_state = not self.gathers
        self._refuse_several_values()

    @staticmethod
    def takes(metric: object) -> bool:
        """Return True for an instance of `torchmetrics.Metric`."""
        return isinstance(metric, Metric)

    @torch.no_grad()
    def __call__(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return the predictions and targets of a batch in the form that the metric needs."""
        if not self._classifies:
            return logits_of(output).detach(), target
        found, labels = classified(self.loss, output, target)
        if self._binary and found.dim() == 2 and labels.dim() == 1:
            if found.shape[1] > 2:
                raise JobError(
                    "metric.two_classes",
                    "metric {name} needs two classes, but the model has {classes}",
                    name=self.name,
                    classes=found.shape[1],
                )
            found = found[:, -1]
        return found, labels

    def result(self, total: Any, count: Any) -> float:
        """Compute the metric from the predictions and targets of all ranks."""
        states = self.begin()
        states.add(total, count)
        return states.result()

    def begin(self) -> States:
        """Return the states before the first batch."""
        return States(self.name, self.metric.clone())

    def _refuse_several_values(self) -> None:
        shaped = next((v for k in ("average", "multioutput") if (v := getattr(self.metric, k, "")) in _EACH), None)
        try:
            with warnings.catch_warnings(action="ignore"):
                several = isinstance(value := self.metric.clone().compute(), Tensor) and value.numel() > 1
        except Exception:  # noqa: BLE001 - most metrics have no value without a sample
            several = False
        if several or shaped is not None:
            raise JobError(
                "metric.several_values",
                "metric {name} has several values, but a job records one number. Set its average, or name your own "
                "class that returns a single value.",
                name=self.name,
            )


_EACH = (None, "none", "raw_values")


class States:
    """The states of a metric on one rank.

    Attributes:
        metric: copy of the metric that this rank updates.
        batches: number of batches so far.
    """

    def __init__(self, name: str, metric: Metric) -> None:
        self.name, self.metric, self.batches = name, metric, 0

    def add(self, predictions: Any, targets: Any) -> None:
        """Update the metric with a batch.

        Raises:
            DataError: the metric rejects the batch.
        """
        device = predictions.device
        if not self.batches:
            self.metric = self.metric.to(device)
            self.metric.set_dtype(widest_float(device))  # the widest type, because states are sums over many batches
        self.batches += 1
        try:
            with torch.autocast(device.type, enabled=False):
                self.metric.update(predictions, targets)
        except (RuntimeError, TypeError, ValueError) as error:
            explained = DataError(
                "metric.batch_refused",
                "metric {name} rejects a batch: {kind}: {error}",
                name=self.name,
                kind=type(error).__name__,
                error=error,
            )
            explained.from_users_code = True
            raise explained from error

    def result(self, of_all: Callable[[Tensor | None], Tensor | None] | None = None) -> float:
        """Compute the metric over all ranks; return NaN on a rank that had no batch.

        Args:
            of_all: function that concatenates this rank's rows of a state with the rows of all other ranks. The
                function is called for each state; None if there are no other ranks.

        Raises:
            JobError: the value of the metric is not a single number.
        """
        if of_all is not None:
            self._reduce(of_all)
        if not self.batches:
            return float("nan")
        value = self.metric.compute()
        if not isinstance(value, Tensor | float | int) or (isinstance(value, Tensor) and value.numel() != 1):
            shown = f"{list(value.shape)} numbers" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise JobError(
                "metric.value_not_a_number",
                "metric {name} has the value {value}, but a job records one number. Set its average, or name your "
                "own class that returns a single value.",
                name=self.name,
                value=shown,
            )
        return float(value)

    def _reduce(self, of_all: Callable[[Tensor | None], Tensor | None]) -> None:
        metric = self.metric
        for state, reduction in metric._reductions.items():
            own = getattr(metric, state)
            if isinstance(own, list):
                rows = [one if one.dim() else one[None] for one in own]
                whole = of_all(torch.cat(rows) if rows else None)
                if self.batches:
                    setattr(metric, state, [] if whole is None else [whole.to(metric.device)])
            else:
                stacked = of_all(own[None] if self.batches else None)
                if self.batches and stacked is not None:
                    setattr(metric, state, _EXACT[reduction](stacked.to(metric.device), 0))


def _reduces_exactly(metric: Metric) -> bool:
    """Return True if the metric's reductions are exact for every division of the samples."""
    for state, default in metric._defaults.items():
        reduction = metric._reductions[state]
        if isinstance(default, list):
            if reduction is not dim_zero_cat:
                return False
        elif reduction not in _EXACT or (reduction is dim_zero_sum and bool(default.any())):
            return False
    # wrappers hold the states of other metrics
    return bool(metric._defaults) and not any(isinstance(m, Metric) for m in metric.children())
