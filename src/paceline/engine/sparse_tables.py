"""Tables of embeddings whose gradients stay sparse, and those for which they become dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from paceline.device import is_accelerator
from paceline.errors import JobError
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_MADE_DENSE: WeakSet[nn.Module] = WeakSet()  # were sparse; another generation's plan may keep them so


def sparse_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of embeddings with `sparse=True` by name, without those that other layers use, too."""
    tables = [(name, module) for name, module in model.named_modules() if _is_sparse(module)]
    elsewhere = {p for module in model.modules() if not _is_sparse(module) for p in module.parameters(recurse=False)}
    found = {f"{name}.weight".lstrip("."): module.get_parameter("weight") for name, module in tables}
    return {name: weight for name, weight in found.items() if weight not in elsewhere}


def keep_rows(engine: Engine, model: nn.Module, plan: Plan) -> set[Tensor]:
    """Tables whose sparse gradients rule and optimizer take.

    A fused update of theirs, which takes none, is unfused.
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


def refuse_sparse_adam(engine: Engine, plan: Plan) -> None:
    """Refuse torch's SparseAdam, which steps by sparse gradients alone, where its parameters get dense ones."""
    for optimizer in getattr(engine.optimizer, "optimizers", [engine.optimizer]):
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if isinstance(optimizer, SparseAdam) and not held <= engine.rows:
            raise JobError(
                "SparseAdam takes sparse gradients, which embeddings with sparse=True make, and only on CPUs under "
                f"plans that neither divide nor compile the model; plan {plan} has dense ones for "
                f"{len(held - engine.rows)} of its parameters: use Adagrad or SGD, whose steps leave rows without a "
                "gradient as they are, or Adam"
            )


def make_dense(model: nn.Module, kept: set[Tensor]) -> None:
    """Have embeddings make dense gradients, but for the tables that are kept.

    Every collective takes dense ones, and optimizer steps are the same.
    """
    for module in model.modules():
        if _is_sparse(module):
            module.sparse = module.weight in kept  # type: ignore[assignment]
            if not module.sparse:
                _MADE_DENSE.add(module)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or module in _MADE_DENSE)


def _groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Parameter groups that torch steps by sparse gradients as by dense ones.

    Rows without a gradient stay as they are.
    """
    for group in optimizer.param_groups:
        if type(optimizer) is SparseAdam:
            yield group
        # decay and momentum would be of all rows
        if type(optimizer) in (SGD, Adagrad) and not group["weight_decay"] and not group.get("momentum"):
            yield group
