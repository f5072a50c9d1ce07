"""Agreement of an epoch's ranks on their state, and its handover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paceline.comm import Group
from paceline.comm.link_speed import GroupLinks
from paceline.sync.start import broadcast_tensors
from paceline.training.build import seed_all
from paceline.training.checkpoint.shard import DTYPES
from paceline.training.recovery.memory_state import MemoryState

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
        corrupted: see `Corruption.times`.
        last: what is known of the newest step.
        recuts: how often pipelines were cut anew.
    """

    step: int = -1
    acted: int = -1
    stop: dict[str, Any] = field(default_factory=dict)
    evaluated_at: int = -1
    rejected: list[int] = field(default_factory=list)
    items_per_sample: float | None = None
    corrupted: list[int] = field(default_factory=list)
    last: dict[str, Any] | None = None
    recuts: int = 0


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
    Links between hosts that were measured in an epoch before are not measured again.
    """
    told = group.gather_json([asdict(own), group.links and asdict(group.links)])
    # who joins has not measured any: all choose their algorithms by the same numbers
    links = next((links for _, links in told if links), None)
    group.links = links and replace(msgspec.convert(links, GroupLinks), hosts=group.hosts)
    return newest_of([Border(**border) for border, _ in told])


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
    if state is None:
        empty = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in told["shapes"].items()}
        state = MemoryState(told["step"], empty, told["values"])
    broadcast_tensors(group, state.tensors.values(), source)
    if group.rank in behind:
        state.restore(engine)
        seed_all(engine.settings.seed * 1_000_003 + 1 + engine.data_group.rank + 7919 * (engine.step_count + 1))
