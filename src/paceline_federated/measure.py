"""Measurement of a server's weights, on a validation set or a client's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.whole import held_out_batches
from paceline.engine.evaluation import Measured
from paceline.job.batch import place, target_of
from paceline.job.loss import Metric, build_metrics
from paceline.job.loss_items import ModelsOwn, call
from paceline_federated.client import ClientState, LocalTraining


class Measure:
    """The job's metrics of a model that clients and server share."""

    def __init__(self, training: LocalTraining) -> None:
        self.training = training
        self.metrics: list[Metric] = build_metrics(training.job.metrics, training.loss)

    def validation(self, weights: Tensor, dataset: Dataset[Any], state: ClientState | None = None) -> dict[str, float]:
        """Every metric of the weights on a data set.

        Args:
            state: of the client whose own parts of the model are measured with them.
        """
        training = self.training
        model = training.show(weights, state).eval()
        measured = Measured(self.metrics)
        dtype = None if training.layout.dtype is torch.float32 else training.layout.dtype
        with torch.inference_mode():
            for read in held_out_batches(dataset, batch=training.job.global_batch, replica=0, replicas=1):
                batch = place(read, torch.device("cpu"), dtype=dtype, channels_last=False)
                output = call(model, batch, loss=training.loss)
                target: Any = batch if isinstance(training.loss, ModelsOwn) else target_of(batch)
                measured.add([metric(output, target) for metric in self.metrics])
        return measured.results()

    @property
    def of_clients(self) -> str:
        """Metric that clients are compared by: the job's first, or else the loss."""
        return self.metrics[1].name if len(self.metrics) > 1 else self.metrics[0].name


@dataclass(frozen=True)
class Fairness:
    """Distribution of a metric over clients, each measured on samples of its own.

    Attributes:
        metric: its name.
        clients: so many were measured.
        worst, tenth, median, best: of the metric; `worst` is the lowest, `tenth` the tenth percentile.
        variance: of the metric over the clients.
    """

    metric: str
    clients: int
    worst: float
    tenth: float
    median: float
    best: float
    variance: float

    @classmethod
    def of(cls, metric: str, values: Sequence[float]) -> Fairness | None:
        """The figures of finite values; None where there are none.

        Args:
            metric: for `loss`, where less is better, worst and best change places.
        """
        finite = np.array([value for value in values if np.isfinite(value)])
        if not len(finite):
            return None
        worse = -finite if metric == "loss" else finite
        sign = -1.0 if metric == "loss" else 1.0
        worst, tenth, median, best = (sign * float(np.percentile(worse, at)) for at in (0, 10, 50, 100))
        return cls(metric, len(finite), worst, tenth, median, best, float(finite.var()))

    def details(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)

    def sentence(self) -> str:
        """The figures as text."""
        return (
            f"{self.metric} of {self.clients} clients on their own samples: worst {self.worst:.4f}, tenth percentile "
            f"{self.tenth:.4f}, median {self.median:.4f}, best {self.best:.4f}, variance {self.variance:.3g}"
        )
