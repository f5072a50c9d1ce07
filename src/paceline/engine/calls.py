"""Preparation of a model for its precision, batch norm and memory format."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from paceline.comm import Group
from paceline.device import CPU, DEVICE_VARIABLE, is_accelerator, widest_float
from paceline.errors import JobError, PlanError
from paceline.planning.limits import whole_batch_in_parts
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.state.rank_state import in_order_of
from paceline.sync.batchnorm import has_batch_norm, synchronise

if TYPE_CHECKING:
    from paceline.engine.engine import RankEngine


def made_ready(engine: RankEngine, model: nn.Module, plan: Plan) -> nn.Module:
    """Prepare a model for this rank's device and precision, and check the loader's batches."""
    settings = engine.settings
    if plan.threads:
        torch.set_num_threads(plan.threads)
    use_onednn(plan.onednn)
    if engine.split is None:
        engine.rows = keep_rows(engine, model, plan)
        model = prepared(model, settings.batch_norm, engine.precision, engine.group, engine.rows)
        model.to(engine.device)
    optimizers = getattr(engine.optimizer, "optimizers", [engine.optimizer])
    for optimizer in optimizers:
        _move_state(optimizer)
    refuse_sparse_adam(engine, plan)
    for outside in engine.extra.values():
        wide = torch.float64 if engine.precision == "fp64" and outside.is_floating_point() else None
        outside.data = outside.data.to(engine.device, wide)
    if plan.memory_format == "channels_last":
        to_channels_last(model)
        for optimizer in optimizers:
            _reorder_state(optimizer)
    if settings.batch_norm == "sync" and has_batch_norm(model):
        engine.loader.fill_every_rank("batch_norm: sync")
    if getattr(engine.loss, "whole_batch", False):
        engine.loader.fill_every_rank("a loss over the whole batch")
        if plan.microbatches > 1:
            raise PlanError.of_problems([whole_batch_in_parts("the loss", plan.microbatches).about(plan)])
    return model


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move existing optimizer state to the device of its parameters.

    Adagrad, for example, creates its state in the constructor, before the model is moved.
    """
    for parameter, state in optimizer.state.items():
        if any(isinstance(kept, Tensor) and kept.dim() and kept.device != parameter.device for kept in state.values()):
            # `load_state_dict` knows which state tensors belong on the device
            optimizer.load_state_dict(optimizer.state_dict())
            return


def _reorder_state(optimizer: Optimizer) -> None:
    """Give existing optimizer state the strides of its parameters."""
    for parameter, state in optimizer.state.items():
        for key, kept in state.items():
            if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.stride() != parameter.stride():
                state[key] = in_order_of(parameter, kept)


def prepared(
    model: nn.Module, batch_norm: str, precision: str, data_group: Group, rows: Collection[Tensor] = ()
) -> nn.Module:
    """Convert the model to its precision, and synchronize batch norm if the job requires it.

    Called before the model is split.

    Args:
        rows: tables whose gradients stay sparse.
    """
    if precision == "fp64":
        if widest_float(data_group.device) != torch.float64:
            raise PlanError(
                "plan.no_float64",
                "precision=fp64: devices of type {type} do not support float64. Choose another precision, or set "
                "{variable}={cpu} to compute on the CPU.",
                type=data_group.device.type,
                variable=DEVICE_VARIABLE,
                cpu=CPU,
            )
        model.double()
        choose = getattr(model, "set_experts_implementation", None)
        if choose is not None:
            # the grouped matrix product of transformers' mixture-of-experts layers does not support float64
            choose("eager")
    make_dense(model, set(rows))
    _refuse_frequencies(model, data_group)
    synchronised = next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if batch_norm == "sync" or data_group.size == 1:
        return synchronise(model, data_group)
    if synchronised is not None:
        raise JobError(
            "job.sync_batch_norm_in_model",
            '"{name}" is a SyncBatchNorm, which uses statistics of the global batch, but the job says batch_norm: '
            "local. Set batch_norm: sync, or use BatchNorm in the model.",
            name=synchronised,
        )
    return model


def _refuse_frequencies(model: nn.Module, data_group: Group) -> None:
    """Refuse embeddings with `scale_grad_by_freq`.

    With `scale_grad_by_freq`, an embedding divides gradients by how often a row occurs in the batch. Each rank sees
    only a part of the batch, so the results would differ.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.scale_grad_by_freq and data_group.size > 1:
            raise PlanError(
                "plan.scale_grad_by_freq",
                '"{name}" has scale_grad_by_freq, which divides by how often a rank uses a row, not by how often '
                "the global batch uses it. Use dp=1, or scale_grad_by_freq=False.",
                name=name,
            )


def to_channels_last(model: nn.Module) -> None:
    """Store the weights of convolutions (4-D) in channels-last format."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


LEAST = 2**18  # number of multiplications in a product; below it, the Python call costs more than oneDNN saves
_library: torch.library.Library | None = None


def use_onednn(on: bool) -> None:
    """Switch the matrix products of this process to oneDNN, or back to torch.

    Raises:
        PlanError: this build of torch has no oneDNN.
    """
    global _library
    if on == (_library is not None):
        return
    if _library is not None:
        _library._destroy()
        _library = None
        return
    if not has_onednn():
        raise PlanError(
            "plan.no_onednn",
            "onednn=on: this build of torch ({version}) does not include oneDNN. Use onednn=off.",
            version=torch.__version__,
        )
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that kernels are replaced
        _library.impl("mm", _mm, "CPU", allow_override=True)
        _library.impl("addmm", _addmm, "CPU", allow_override=True)


def has_onednn() -> bool:
    """Return True if this build of torch has oneDNN's linear layer."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if _is_for_onednn(a, b):
        return _linear(a, b.t(), None)
    product: Tensor = torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return product


def _addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    is_bias = c.dim() == 1 and c.dtype is torch.float32 and c.shape[0] == b.shape[1] and c.is_contiguous()
    if beta == 1 and alpha == 1 and is_bias and _is_for_onednn(a, b):
        return _linear(a, b.t(), c)
    out = a.new_empty(a.shape[0], b.shape[1])
    product: Tensor = torch.ops.aten.addmm.out(c, a, b, beta=beta, alpha=alpha, out=out)
    return product


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, bias, "none", [], "")
    return product


def _is_for_onednn(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype is torch.float32
        and b.dtype is torch.float32
        and a.dim() == 2 == b.dim()
        and a.shape[1] == b.shape[0]  # otherwise torch raises its own error
        and a.shape[0] * a.shape[1] * b.shape[1] >= LEAST
        and _is_plain(a)
        and _is_plain(b)
    )


def _is_plain(matrix: Tensor) -> bool:
    """Return True if rows or columns are contiguous and do not overlap."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


_MADE_DENSE: WeakSet[nn.Module] = WeakSet()  # these were sparse; the plan of another generation may keep them sparse


def sparse_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of embeddings with `sparse=True` by name, except shared weights."""
    tables = [(name, module) for name, module in model.named_modules() if _is_sparse(module)]
    elsewhere = {p for module in model.modules() if not _is_sparse(module) for p in module.parameters(recurse=False)}
    found = {f"{name}.weight".lstrip("."): module.get_parameter("weight") for name, module in tables}
    return {name: weight for name, weight in found.items() if weight not in elsewhere}


def keep_rows(engine: RankEngine, model: nn.Module, plan: Plan) -> set[Tensor]:
    """Return the tables whose sparse gradients both the sync rule and the optimizer support.

    Fused optimizer updates do not support sparse gradients, so this function disables fusion for these tables.
    """
    info = sync_info(plan.sync)
    tables: set[Tensor] = set(sparse_tables(model).values())
    if info.served:
        return tables if info.sends == "gradients" else set()
    if not info.takes_rows or is_accelerator(engine.device) or plan.compile != "off" or engine.group.is_fake:
        return set()
    kept: set[Tensor] = set()
    for optimizer in getattr(engine.optimizer, "optimizers", [engine.optimizer]):
        for group in _groups(optimizer):
            if own := tables.intersection(group["params"]):
                kept |= own
                if "fused" in group:
                    group["fused"] = None
    return kept


def refuse_sparse_adam(engine: RankEngine, plan: Plan) -> None:
    """Refuse torch's SparseAdam for parameters that get dense gradients."""
    for optimizer in getattr(engine.optimizer, "optimizers", [engine.optimizer]):
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if isinstance(optimizer, SparseAdam) and not held <= engine.rows:
            raise JobError(
                "optimizer.no_sparse_gradients",
                "SparseAdam needs sparse gradients. Only embeddings with sparse=True have sparse gradients, and only "
                "on CPUs under plans that neither divide nor compile the model. Under plan {plan}, {parameters} of the "
                "optimizer's parameters have dense gradients. Use Adagrad or SGD, which do not change rows without a "
                "gradient, or Adam.",
                plan=plan,
                parameters=len(held - engine.rows),
            )


def make_dense(model: nn.Module, kept: set[Tensor]) -> None:
    """Make embeddings produce dense gradients, except for the tables in `kept`.

    Every collective supports dense gradients, and the results of the optimizer steps stay the same.
    """
    for module in model.modules():
        if _is_sparse(module):
            module.sparse = module.weight in kept  # type: ignore[assignment]
            if not module.sparse:
                _MADE_DENSE.add(module)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or module in _MADE_DENSE)


def _groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Return parameter groups for which torch's sparse and dense steps are the same.

    In these groups, rows without a gradient do not change.
    """
    for group in optimizer.param_groups:
        if type(optimizer) is SparseAdam:
            yield group
        # decay and momentum would also change rows without a gradient
        if type(optimizer) in (SGD, Adagrad) and not group["weight_decay"] and not group.get("momentum"):
            yield group
