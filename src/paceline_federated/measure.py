"""Measurement of a server's weights, on a validation set or a client's own samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.held_out import held_out_batches
from paceline.engine.measured import Measured
from paceline.job.batch import place, target_of
from paceline.job.loss import Metric, build_metrics
from paceline.job.zoo.losses import ModelsOwn, call
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
