"""Which blocks FSDP2 can gather one by one: those whose parameters are used in their own calls only, as a forward pass shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.split.pipeline.forward_trace import Call, Trace, Visit, is_in
from paceline.split.pipeline.observed import Observed


def watched(model: nn.Module, example: Batch, call: Call, device: torch.device) -> tuple[Trace | None, Observed]:
    """A forward pass on shapes, and what was observed in it; no trace where the model cannot be followed without its weights."""
    observed = Observed()
    names = {name for name, _ in model.named_modules()}
    try:
        return Trace(model, example, call, device, whole=names, observed=observed), observed
    except Exception:  # noqa: BLE001 - whatever a model's code raises on shapes: a faulty one raises it again when it trains
        return None, observed


def refuse_writes(observed: Observed) -> None:
    """Refuse a model whose forward pass changes parameters: the change would be made to what is gathered, and lost.

    Raises:
        PlanError: it does.
    """
    for name, operation in observed.written.items():
        how = "an nn.Embedding with max_norm" if operation.startswith("aten.embedding_renorm_") else operation
        raise PlanError(
            f"fsdp: the model's forward pass changes its parameter {name} ({how}), which fsdp gathers for a pass and then forgets: change "
            "it after the optimizer's step instead, or fsdp=1."
        )


def inseparable(blocks: Sequence[str], trace: Trace | None, observed: Observed) -> dict[str, str]:
    """The blocks that must be gathered together with the rest of the model, each with the reason."""
    if observed.differentiates:
        return dict.fromkeys(blocks, "the forward pass runs autograd itself")
    if observed.transformed:
        return dict.fromkeys(blocks, "it is called within a transform of torch.func")
    found: dict[str, str] = {}
    for block in blocks:
        if any(is_in(name, block) for name in observed.substituted):
            found[block] = "it is called with other tensors in place of its parameters"
        elif block in observed.direct:
            found[block] = "its forward is called past its hooks"
    if trace is not None:
        for visit in trace.visits:
            if visit.name in blocks and any(start < visit.enter < stop for start, stop in observed.functions):
                found.setdefault(visit.name, "it is called within a torch.autograd.Function, whose backward pass is its own")
        for block, reason in _in_operations(blocks, trace):
            found.setdefault(block, reason)
    return found


def _in_operations(blocks: Sequence[str], trace: Trace) -> Iterator[tuple[str, str]]:
    owner = {storage: b for storage, name in trace.parameters.items() for b in blocks if is_in(name, b)}
    made: dict[int, int] = {}  # when the memory of a tensor was first written
    for step in trace.steps:
        for node in step.makes:
            made.setdefault(node[0], step.time)
        around = {visit.name: visit for visit in _around(trace, step.visit)}
        for node in step.reads:
            if (block := owner.get(node[0])) is not None and block not in around:
                yield block, f"{trace.parameters[node[0]]} is used outside of it"
        for storage in step.changes:
            for block in blocks:
                if block in around and storage in made and made[storage] < around[block].enter:
                    yield block, "it changes its input in place"


def _around(trace: Trace, visit: int) -> Iterator[Visit]:
    while visit >= 0:
        yield trace.visits[visit]
        visit = trace.visits[visit].parent
