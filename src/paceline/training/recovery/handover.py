"""Agreement of an epoch's ranks on their state, and its handover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.training.build import seed_all
from paceline.training.checkpoint.shard import DTYPES
from paceline.training.recovery.memory_state import MemoryState

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TOGETHER_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Border:
    """State of a loop at the end of a step, besides tensors. JSON, the same on all ranks of one step.

    Attributes:
        step: optimizer steps taken; -1 on a rank that has no state yet.
        acted: the newest step after which evaluations and checkpoints are done.
        stop: state of the stop rule.
        evaluated_at: the step of the newest evaluation.
        rejected: steps whose batch a rewind left out.
        items_per_sample: see `Weighing`.
        last: what is known of the newest step.
    """

    step: int = -1
    acted: int = -1
    stop: dict[str, Any] = field(default_factory=dict)
    evaluated_at: int = -1
    rejected: list[int] = field(default_factory=list)
    items_per_sample: float | None = None
    last: dict[str, Any] | None = None


@dataclass(frozen=True)
class Start:
    """Start of an epoch: the state that its ranks go on from.

    Attributes:
        border: the newest of all ranks.
        source: the rank that has it.
        behind: ranks that take its state over.
        new: those of them that have no state yet.
    """

    border: Border
    source: int
    behind: list[int]
    new: list[int]


def agree_on_start(group: Group, own: Border) -> Start:
    """Start that all ranks of the group agree on.

    A rank may have taken the step that others broke off: then they take over its result, and no step is taken twice.
    """
    return newest_of([Border(**told) for told in group.gather_json(asdict(own))])


def newest_of(borders: Sequence[Border]) -> Start:
    """Start of ranks with these borders."""
    source = max(range(len(borders)), key=lambda rank: (borders[rank].step, borders[rank].acted, -rank))
    newest = borders[source]
    behind = [rank for rank, border in enumerate(borders) if border.step < newest.step]
    return Start(newest, source, behind, [rank for rank in behind if borders[rank].step < 0])


def hand_over(engine: Engine, group: Group, source: int, behind: list[int]) -> None:
    """Give the state of rank `source` to the ranks that are behind. All ranks of the group call this.

    These then draw random numbers of their own.
    """
    state = MemoryState.of(engine, {}) if group.rank == source else None
    header = None
    if state is not None:
        shapes = {name: [_NAMES[t.dtype], list(t.shape)] for name, t in state.tensors.items()}
        header = {"step": state.step, "values": state.values, "shapes": shapes}
    told = group.gather_json(header)[source]
    tensors = {} if state is None else state.tensors
    received: dict[str, Tensor] = {}
    for names in _in_parts(told["shapes"]):
        dtype = DTYPES[told["shapes"][names[0]][0]]
        sizes = [math.prod(told["shapes"][name][1]) for name in names]
        flat = torch.empty(sum(sizes), dtype=dtype, device=group.device)
        if state is not None:
            torch.cat([tensors[name].reshape(-1) for name in names], out=flat)
        group.broadcast(flat, root=source)
        for name, part in zip(names, flat.cpu().split(sizes), strict=True):
            received[name] = part.view(told["shapes"][name][1])
    if group.rank in behind:
        MemoryState(told["step"], received, told["values"]).restore(engine)
        seed_all(engine.settings.seed * 1_000_003 + 1 + engine.data_group.rank + 7919 * (engine.step_count + 1))


def _in_parts(shapes: dict[str, list[Any]]) -> list[list[str]]:
    """Names of tensors that travel together: of one dtype, some megabytes."""
    parts: list[list[str]] = []
    size, of = 0, ""
    for name in sorted(shapes, key=lambda n: shapes[n][0]):
        dtype, shape = shapes[name]
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if not parts or dtype != of or size + nbytes > _TOGETHER_BYTES:
            parts.append([])
            size, of = 0, dtype
        parts[-1].append(name)
        size += nbytes
    return parts
