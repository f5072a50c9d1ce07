"""Blocks that FSDP2 can gather one by one, found in a forward pass on shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.split.pipeline.forward_trace import ForwardTrace, ModuleCall, Node, is_in
from paceline.split.pipeline.observed import Observed
from paceline.split.pipeline.record_forward import Call, trace_forward


def watched(model: nn.Module, example: Batch, call: Call, device: torch.device) -> tuple[ForwardTrace | None, Observed]:
    """Trace and observations of a forward pass on shapes.

    The trace is None if the model cannot be followed without its weights.
    """
    observed = Observed()
    names = {name for name, _ in model.named_modules()}
    try:
        return trace_forward(model, example, call, device, whole=names, observed=observed), observed
    except Exception:  # noqa: BLE001 - any error of the model's code on shapes; a real fault raises again in training
        return None, observed


def refuse_writes(observed: Observed) -> None:
    """Refuse a model whose forward pass changes parameters; fsdp would lose the change.

    Raises:
        PlanError: it does.
    """
    for name, operation in observed.written.items():
        how = "an nn.Embedding with max_norm" if operation.startswith("aten.embedding_renorm_") else operation
        raise PlanError(
            f"fsdp: the model's forward pass changes its parameter {name} ({how}), which fsdp gathers for a pass and "
            "then forgets: change it after the optimizer's step instead, or fsdp=1."
        )


def inseparable(blocks: Sequence[str], trace: ForwardTrace | None, observed: Observed) -> dict[str, str]:
    """Blocks that must be gathered together with the remainder of the model, with reasons."""
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
        for module_call in trace.module_calls:
            if module_call.name in blocks and any(
                start < module_call.enter < stop for start, stop in observed.functions
            ):
                found.setdefault(
                    module_call.name, "it is called within a torch.autograd.Function, whose backward pass is its own"
                )
        for block, reason in (*_in_operations(blocks, trace), *_changed_views(blocks, trace)):
            found.setdefault(block, reason)
    return found


def _in_operations(blocks: Sequence[str], trace: ForwardTrace) -> Iterator[tuple[str, str]]:
    owner = {storage: b for storage, name in trace.parameters.items() for b in blocks if is_in(name, b)}
    # time at which a storage was first written
    made: dict[int, int] = {}
    for step in trace.steps:
        for node in step.makes:
            made.setdefault(node[0], step.time)
        around = {module_call.name: module_call for module_call in _around(trace, step.module_call)}
        for node in step.reads:
            if (block := owner.get(node[0])) is not None and block not in around:
                yield block, f"{trace.parameters[node[0]]} is used outside of it"
        for storage in step.changes:
            for block in blocks:
                if block in around and storage in made and made[storage] < around[block].enter:
                    yield block, "it changes its input in place"


def _changed_views(blocks: Sequence[str], trace: ForwardTrace) -> Iterator[tuple[str, str]]:
    """Find blocks that return a view which later code changes in place.

    Autograd then runs the backward pass of the view's base, and skips the hook that FSDP2 puts on the view.
    """
    first: dict[int, Node] = {}
    for step in trace.steps:
        for node in step.makes:
            first.setdefault(node[0], node)
    for module_call in trace.module_calls:
        if module_call.name in blocks:
            views = {node[0] for node in module_call.nodes if node is not None and first.get(node[0]) != node}
            if any(step.time > module_call.leave and views.intersection(step.changes) for step in trace.steps):
                yield module_call.name, "it returns a view that is changed in place outside of the block"


def _around(trace: ForwardTrace, module_call: int) -> Iterator[ModuleCall]:
    while module_call >= 0:
        yield trace.module_calls[module_call]
        module_call = trace.module_calls[module_call].parent
