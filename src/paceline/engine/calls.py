"""Preparing a model for its precision, its batch norms and its memory format."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.comm import Group
from paceline.device import CPU, DEVICE_VARIABLE, widest_float
from paceline.engine.onednn import use_onednn
from paceline.engine.sparse_tables import keep_rows, make_dense, refuse_sparse_adam
from paceline.errors import JobError, PlanError
from paceline.planning.limits import whole_batch_in_parts
from paceline.planning.plan import Plan
from paceline.sync.batchnorm import has_batch_norm, synchronise

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def made_ready(engine: Engine, model: nn.Module, plan: Plan) -> nn.Module:
    """The model on this rank's device, in its precision; checks the loader's batches."""
    settings = engine.settings
    if plan.threads:
        torch.set_num_threads(plan.threads)
    use_onednn(plan.onednn)
    if engine.split is None:
        engine.rows = keep_rows(engine, model, plan)
        model = prepared(model, settings.batch_norm, engine.precision, engine.group, engine.rows)
        model.to(engine.device)
    refuse_sparse_adam(engine, plan)
    for outside in engine.extra.values():
        wide = torch.float64 if engine.precision == "fp64" and outside.is_floating_point() else None
        outside.data = outside.data.to(engine.device, wide)
    if plan.memory_format == "channels_last":
        to_channels_last(model)
    if settings.batch_norm == "sync" and has_batch_norm(model):
        engine.loader.fill_every_rank("batch_norm: sync")
    if getattr(engine.loss, "whole_batch", False):
        engine.loader.fill_every_rank("a loss over the whole batch")
        if plan.microbatches > 1:
            raise PlanError(f"plan {plan} {whole_batch_in_parts('the loss', plan.microbatches)}")
    return model


def prepared(
    model: nn.Module, batch_norm: str, precision: str, data_group: Group, rows: Collection[Tensor] = ()
) -> nn.Module:
    """The model in its precision, with synchronised batch norms where the job asks for them.

    Called before the model is split.

    Args:
        rows: tables whose gradients stay sparse.
    """
    if precision == "fp64":
        if widest_float(data_group.device) != torch.float64:
            raise PlanError(
                f"precision=fp64: devices of type {data_group.device.type} have no float64. Choose another precision, "
                f"or set {DEVICE_VARIABLE}={CPU} to compute on the CPU."
            )
        model.double()
        choose = getattr(model, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")  # the grouped matrix product of transformers' mixtures takes no float64
    make_dense(model, set(rows))
    _refuse_frequencies(model, data_group)
    synchronised = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if batch_norm == "sync" or data_group.size == 1:
        return synchronise(model, data_group)
    if synchronised is not None:
        raise JobError(
            f'"{synchronised}" is a SyncBatchNorm, whose statistics are of the global batch, and the job says '
            "batch_norm: local. "
            "Set batch_norm: sync, or use BatchNorm in the model."
        )
    return model


def _refuse_frequencies(model: nn.Module, data_group: Group) -> None:
    """Refuse embeddings that divide by how often a row is in the batch.

    A rank sees a part of it.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.scale_grad_by_freq and data_group.size > 1:
            raise PlanError(
                f'"{name}" has scale_grad_by_freq, which divides by how often a rank sees a row, not the '
                "global batch: dp=1, or "
                "scale_grad_by_freq=False."
            )


def to_channels_last(model: nn.Module) -> None:
    """Lay the weights of convolutions (4-D) out with channels last."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
