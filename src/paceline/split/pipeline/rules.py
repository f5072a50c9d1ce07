"""What a pipeline allows: numbers of microbatches, stages and cut points, and habits of a model's code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.errors import PlanError
from paceline.split.pipeline.observed import Observed

IN_TRANSFORM = (
    "pp: the model calls its modules within a transform of torch.func (vmap, grad), whose tensors cannot be sent from stage to stage: "
    "pp=1 (fsdp divides such a model)."
)


def fitting_microbatches(shares: Sequence[int], wanted: int) -> int:
    """The largest number of microbatches up to `wanted` that divides every data-parallel rank's share evenly."""
    some = [n for n in shares if n] or [1]
    return next(m for m in range(wanted, 0, -1) if not any(n % m for n in some))


def reasons_against_cut(names: Sequence[str], stages: int, each: str) -> list[str]:
    """What is wrong with the number of cut points; `each` says how many stages there are."""
    found = []
    if len(names) != stages - 1:
        found.append(f"{each}, so cut names the {stages - 1} modules that begin the second and later ones; it names {len(names)}")
    if twice := sorted({n for n in names if names.count(n) > 1}):
        found.append(f"cut names {', '.join(twice)} twice; every stage begins elsewhere")
    return found


def interleaves(ranks: int, microbatches: int) -> bool:
    """Whether interleaved 1F1B can deal the microbatches into equal rounds of at least one for every rank, or all in one."""
    return microbatches % max(1, microbatches // ranks) == 0


def refuse_habits(observed: Observed) -> None:
    """Refuse a model whose forward pass does what cannot be done in stages, wherever these begin.

    Raises:
        PlanError: it runs autograd itself, or changes parameters.
    """
    if observed.differentiates:
        raise PlanError(
            "pp: the model's forward pass runs autograd itself (torch.autograd.grad or backward), which would have to go back "
            "through other stages: pp=1 (fsdp divides such a model)."
        )
    for name, operation in observed.written.items():
        if not operation.startswith("aten.embedding_renorm_"):  # the backward pass reads no weight of an embedding
            raise PlanError(
                f"pp: the model's forward pass changes its parameter {name} ({operation}), and other microbatches under way still need it "
                "as it was: change it after the optimizer's step instead, or pp=1."
            )


def can_be_exported(model: nn.Module, observed: Observed) -> bool:
    """Whether a graph traced by `torch.export` does all that the model's code does: it has no backward hooks and counts nothing."""
    if observed.transformed or observed.substituted or observed.keeps or observed.counts:
        return False
    return not any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
