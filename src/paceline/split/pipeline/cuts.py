"""Cuts of a model into stages: the plan's or all possible, and times between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.device import forked_random, synchronize
from paceline.errors import PlanError
from paceline.job.batch import Batch, place
from paceline.planning.model.recording.model_state import restored
from paceline.split.pipeline.forward_trace import Cut, ForwardTrace
from paceline.split.pipeline.record_forward import Call
from paceline.split.pipeline.stages import Stage, StageBounds


def named_cuts(trace: ForwardTrace, names: Sequence[str]) -> tuple[list[Cut], list[str]]:
    """Cuts before the named modules, and reasons why others need torch.export.

    Raises:
        PlanError: a module is no place to cut at all, or the names are not in the order of the calls.
    """
    cuts = [trace.cut(name) for name in names]
    good = [cut for cut in cuts if isinstance(cut, Cut)]
    reasons = [cut for cut in cuts if isinstance(cut, str)]
    places = [trace.enters(name) for name in names]
    problems = [reason for reason, place in zip(cuts, places, strict=True) if isinstance(reason, str) and not place]
    in_order = [name for _, name in sorted(zip(places, names, strict=True))]
    if not problems and in_order != list(names):
        problems.append(f"the modules are called in the order {','.join(in_order)}; name them so")
    if problems:
        raise PlanError("\n".join(f"cut={','.join(names)}: {problem}" for problem in problems))
    return good, reasons


def possible_cuts(trace: ForwardTrace, blocks: Sequence[str]) -> tuple[list[Cut], list[str]]:
    """Possible cuts in order, and reasons why the model cannot be cut before other blocks.

    A model can be cut before blocks, and where one tensor crosses between outermost modules.
    """
    cuts: dict[int, Cut] = {}
    reasons = []
    inside = tuple(f"{name}." for name in blocks)
    seen: set[str] = set()
    for module_call in trace.module_calls:
        if not module_call.name or module_call.name in seen or module_call.name.startswith(inside):
            continue
        seen.add(module_call.name)
        cut = trace.cut(module_call.name)
        if isinstance(cut, str):
            reasons += [cut] if module_call.name in blocks[1:] else []
        elif module_call.name in blocks or len(cut.values) == 1:
            cuts[cut.time] = cut
    found: list[Cut] = []
    for cut in (cuts[at] for at in sorted(cuts)):
        # Two cuts with no computation between them are one; the outer module's name is kept.
        if trace.used(found[-1].time if found else -1, cut.time):
            found.append(cut)
    if found and not trace.used(found[-1].time, ForwardTrace.END):
        found.pop()
    return found, reasons


# The fastest run counts: the first ones have cold caches, others are slowed by other work on the machine.
_RUNS = 8


def costs(
    model: nn.Module,
    trace: ForwardTrace,
    cuts: Sequence[Cut],
    batch: Batch,
    call: Call,
    device: torch.device,
    *,
    runs: int = _RUNS,
) -> list[float]:
    """Seconds of a forward and a backward pass of each segment between two cuts.

    There are `len(cuts) + 1` segments. Each is computed alone, with random weights of its own, as a stage of a pipeline
    would be; equal segments (the same types of modules, parameters and activations) are measured once. At most one
    segment is in memory at a time. The loss is not included in the last one.

    Ranks that split the inside of a segment (tensor parallel) must call this together, for its collectives.

    Raises:
        PlanError: a segment cannot be computed apart from the others.
    """
    ends = [None, *cuts, None]
    measured: dict[Any, float] = {}
    found = []
    for first, last in pairwise(ends):
        bounds = StageBounds(trace, first, last)
        likeness = _likeness(model, bounds)
        if likeness not in measured:
            with restored(model):
                measured[likeness] = _measure(model, bounds, batch, call, device, runs)
        found.append(measured[likeness])
    return found


def _likeness(model: nn.Module, bounds: StageBounds) -> Any:
    parameters = dict(model.named_parameters())
    modules = tuple(
        type(model.get_submodule(v.name)).__qualname__
        for v in bounds.trace.module_calls
        if v.enter >= bounds.start and v.leave <= bounds.stop
    )
    shapes = sorted((tuple(parameters[n].shape), str(parameters[n].dtype)) for n in bounds.parameters())
    return modules, tuple(shapes), tuple(bounds.received), tuple(bounds.sent)


def _measure(model: nn.Module, bounds: StageBounds, batch: Batch, call: Call, device: torch.device, runs: int) -> float:
    seconds = []
    try:
        stage = Stage(model, bounds, lambda _: bounds, call, device, bounds.parameters())
        batch = place(batch, device, dtype=None, channels_last=False)
        _fill(stage.module, device)
        with forked_random(device):
            for _ in range(runs):
                received = _received(bounds, device)
                started = _now(device)
                outputs = [
                    t
                    for t in tree_leaves(stage.module(*received, batch=batch))
                    if isinstance(t, Tensor) and t.requires_grad
                ]
                torch.autograd.backward(list(outputs), [torch.ones_like(t) for t in outputs])
                seconds.append(_now(device) - started)
    except (PlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        where = f"from {bounds.first.before}" if bounds.first else "from the beginning"
        until = f"to before {bounds.last.before}" if bounds.last else "to the end"
        raise PlanError(
            f"pp: the part of the model {where} {until} cannot be computed apart ({type(error).__name__}: "
            f"{first}). Its code may reach "
            "other modules in a way that pp cannot follow: cut= elsewhere, or pp=1 (fsdp divides any model)."
        ) from error
    return min(seconds)


def _received(bounds: StageBounds, device: torch.device) -> list[Tensor]:
    received = [shape.on(device) for shape in bounds.received]
    with torch.no_grad():
        for t in received:
            _ = t.normal_(std=0.02) if t.is_floating_point() else t.zero_()
    return received


def _fill(module: nn.Module, device: torch.device) -> None:
    """Give parameters random values, and buffers without values zeros."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                value = torch.empty(p.shape, dtype=p.dtype, device=device).normal_(std=0.02)
                part._parameters[name] = made.setdefault(id(p), nn.Parameter(value, requires_grad=p.requires_grad))  # type: ignore[assignment]
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = (
                    torch.zeros(b.shape, dtype=b.dtype, device=device)
                    if b.is_meta
                    else b.detach().to(device, copy=True)
                )


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
