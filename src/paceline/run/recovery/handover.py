"""Agreement of a generation's ranks on their state, and its handover."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import msgspec

from paceline.comm import Group
from paceline.comm.links import GroupLinks
from paceline.elastic.membership import Start, StepBoundary, newest_of
from paceline.run.build import seed_all
from paceline.state.rank_state import RankState
from paceline.sync.rule import broadcast_tensors

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def agree_on_start(group: Group, own: StepBoundary, replica_size: int) -> Start:
    """Start that all ranks of the group agree on.

    A rank may have taken the step that others broke off: then they take over its result, and no step is taken twice.
    Links between hosts that were measured in a generation before are not measured again.
    """
    told = group.gather_json([asdict(own), group.links and asdict(group.links)])
    # who joins has not measured any: all choose their algorithms by the same numbers
    links = next((links for _, links in told if links), None)
    group.links = links and replace(msgspec.convert(links, GroupLinks), hosts=group.hosts)
    return newest_of([StepBoundary(**boundary) for boundary, _ in told], replica_size)


def hand_over(engine: Engine, group: Group, source: int, behind: Collection[int]) -> None:
    """Give the state of rank `source` to the ranks that are behind. All ranks of the group call this.

    These then draw random numbers of their own.
    """
    state = RankState.of(engine).copied() if group.rank == source else None
    header = group.gather_json(None if state is None else state.header)[source]
    if state is None:
        state = RankState.empty(header)
    broadcast_tensors(group, state.tensors.values(), source)
    if group.rank in behind:
        state.restore(engine)
        draw_anew(engine)


def draw_anew(engine: Engine) -> None:
    """Seed random numbers by this rank's place in the data and the step."""
    seed_all(engine.settings.seed * 1_000_003 + 1 + engine.data_group.rank + 7919 * (engine.step_count + 1))
