"""Model code that no pipeline supports. Limits on numbers and names are in `plans/limits.py`."""

from __future__ import annotations

from torch import nn

from paceline.errors import PlanError
from paceline.split.pipeline.observed import Observed

IN_TRANSFORM = (
    "pp: the model calls its modules within a transform of torch.func (vmap, grad), whose tensors cannot be "
    "sent from stage to stage: "
    "pp=1 (fsdp divides such a model)."
)


def refuse_unsupported_code(observed: Observed) -> None:
    """Refuse a model whose forward pass cannot be computed in stages, wherever they begin.

    Raises:
        PlanError: it runs autograd itself, or changes parameters.
    """
    if observed.differentiates:
        raise PlanError(
            "pp: the model's forward pass runs autograd itself (torch.autograd.grad or backward), which would "
            "have to go back "
            "through other stages: pp=1 (fsdp divides such a model)."
        )
    for name, operation in observed.written.items():
        # the backward pass reads no weight of an embedding
        if not operation.startswith("aten.embedding_renorm_"):
            raise PlanError(
                f"pp: the model's forward pass changes its parameter {name} ({operation}), and other "
                "microbatches in flight still need it "
                "as it was: change it after the optimizer's step instead, or pp=1."
            )


def can_be_exported(model: nn.Module, observed: Observed) -> bool:
    """True if a `torch.export` graph can replace the model's code.

    Such a graph has no backward hooks and changes no module attributes.
    """
    if observed.transformed or observed.substituted or observed.keeps or observed.changes_attributes:
        return False
    return not any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
