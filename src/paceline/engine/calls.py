"""Calling a model with a batch, and preparing it for its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.comm import Group
from paceline.errors import JobError, PlanError
from paceline.job.batch import Batch
from paceline.job.loss import Loss
from paceline.job.zoo.items import reads_models_loss
from paceline.job.zoo.losses import ModelsOwn
from paceline.sync.batchnorm import synchronise


def call(model: Callable[..., Any], batch: Batch, *, loss: Loss) -> Any:
    """The model's output for a batch.

    A tuple's inputs are passed in order, a mapping's by name; labels only where the model computes the loss.
    """
    if isinstance(batch, (tuple, list)):
        return model(*batch[:-1])
    if isinstance(loss, ModelsOwn) or reads_models_loss(loss):
        return model(**batch)
    return model(**{k: v for k, v in batch.items() if k != "labels"})


def prepared(model: nn.Module, batch_norm: str, precision: str, data_group: Group) -> nn.Module:
    """The model in its precision, with synchronised batch norms where the job asks for them.

    Called before the model is split.
    """
    if precision == "fp64":
        model.double()
        choose = getattr(model, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")  # the grouped matrix product of transformers' mixtures takes no float64
    _prepare_embeddings(model, data_group)
    synchronised = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if batch_norm == "sync" or data_group.size == 1:
        return synchronise(model, data_group)
    if synchronised is not None:
        raise JobError(
            f'"{synchronised}" is a SyncBatchNorm, whose statistics are of the global batch, and the job says batch_norm: local. '
            "Set batch_norm: sync, or use BatchNorm in the model."
        )
    return model


def _prepare_embeddings(model: nn.Module, data_group: Group) -> None:
    """Have embeddings make dense gradients, which every collective takes.

    Optimizer steps are the same.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        module.sparse = False
        if module.scale_grad_by_freq and data_group.size > 1:
            raise PlanError(
                f'"{name}" has scale_grad_by_freq, which divides by how often a rank sees a row, not the global batch: dp=1, or '
                "scale_grad_by_freq=False."
            )


def to_channels_last(model: nn.Module) -> None:
    """Lay the weights of convolutions (4-D) out with channels last."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
