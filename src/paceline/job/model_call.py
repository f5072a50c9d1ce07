"""Calling a model with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.job.batch import Batch
from paceline.job.loss import Loss
from paceline.job.zoo.items import reads_models_loss
from paceline.job.zoo.losses import ModelsOwn


def call(model: Callable[..., Any], batch: Batch, *, loss: Loss) -> Any:
    """The model's output for a batch.

    A tuple's inputs are passed in order, a mapping's by name; labels only where the model computes the loss.
    """
    if isinstance(batch, (tuple, list)):
        return model(*batch[:-1])
    if isinstance(loss, ModelsOwn) or reads_models_loss(loss):
        return model(**batch)
    return model(**{k: v for k, v in batch.items() if k != "labels"})
