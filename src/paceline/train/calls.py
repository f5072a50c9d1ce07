"""How a model is given a batch, and made ready for its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.comm import Group
from paceline.job.batch import Batch
from paceline.job.loss import Loss
from paceline.job.zoo.losses import ModelsOwn
from paceline.sync.batchnorm import has_batch_norm, synchronise


def call(model: Callable[..., Any], batch: Batch, *, loss: Loss) -> Any:
    """The model's output: a tuple's inputs go to it in their order, a mapping's by name, with the labels where it makes the loss itself."""
    if isinstance(batch, (tuple, list)):
        return model(*batch[:-1])
    if isinstance(loss, ModelsOwn):
        return model(**batch)
    return model(**{k: v for k, v in batch.items() if k != "labels"})


def prepared(model: nn.Module, batch_norm: str, precision: str, readers: Group) -> nn.Module:
    """The model in its precision and with its batch norms synchronised where the job asks for that; before it is divided."""
    if precision == "fp64":
        model.double()
        choose = getattr(model, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")  # the grouped matrix product of transformers' mixtures takes no float64
    return synchronise(model, readers) if batch_norm == "sync" and has_batch_norm(model) else model
