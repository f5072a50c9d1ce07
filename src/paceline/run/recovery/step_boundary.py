"""States of ranks at step boundaries, and which of them a generation goes on from.

Without torch, sockets and clocks, so that millions of interleavings can be played (`benchmarks/interleavings.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class StepBoundary:
    """State of a loop at the end of a step, besides tensors. JSON, the same on all ranks of one step.

    Attributes:
        step: optimizer steps taken; -1 on a rank that has no state yet.
        generation: in which the newest step was taken. A step that was broken off may be taken twice, by other ranks.
        ready: the generation in which the next step was broken off on this rank of a divided replica, where it has the
            gradients of all ranks and can take the step by itself; else -1.
        acted: the newest step after which evaluations and checkpoints are done.
        stop: state of the stop rule.
        evaluated_at: the step of the newest evaluation.
        rejected: steps whose batch a rewind left out.
        items_per_sample: see `LossNormalization`.
        corrupted: see `Corruption.times`.
        last: what is known of the newest step.
        before: the same of those before it that each replica took by itself: only one of them has written them down.
        recuts: how often pipelines were cut anew.
        outcome: of the newest step, for ranks that are ready to take it.
        cut: where the stages of a pipeline begin, as `Plan.cut`.
    """

    step: int = -1
    generation: int = -1
    ready: int = -1
    acted: int = -1
    stop: dict[str, Any] = field(default_factory=dict)
    evaluated_at: int = -1
    rejected: list[int] = field(default_factory=list)
    items_per_sample: float | None = None
    corrupted: list[int] = field(default_factory=list)
    last: dict[str, Any] | None = None
    before: list[dict[str, Any]] = field(default_factory=list)
    recuts: int = 0
    outcome: dict[str, Any] | None = None
    cut: str = ""


@dataclass(frozen=True)
class Start:
    """Start of a generation: the state that its ranks go on from.

    Attributes:
        boundary: the newest that the ranks have the whole model of, or an empty one.
        ready: ranks that take the newest step by themselves.
        behind: ranks that take the state over from others.
        new: those of them that have no state yet.
        replica_size: ranks that hold the model together.
        holders: of each rank's copy, where all go back to copies in memory (`Mirror`); else empty.
        lost_steps: steps that are trained again.
    """

    boundary: StepBoundary
    ready: list[int]
    behind: list[int]
    new: list[int]
    replica_size: int = 1
    holders: dict[int, int] = field(default_factory=dict)
    lost_steps: int = 0

    @property
    def begins(self) -> bool:
        """True if the ranks begin, or go on from what is saved."""
        return self.boundary.step < 0

    def holders_of_part(self, rank: int, ranks: int) -> list[int]:
        """Replicas that have the part of `rank` in the newest state, of `ranks` in all."""
        have = set(range(ranks)) - set(self.behind)
        parts = range(rank % self.replica_size, ranks, self.replica_size)
        return [replica for replica, of_part in enumerate(parts) if of_part in have]


def newest_of(boundaries: Sequence[StepBoundary], replica_size: int = 1) -> Start:
    """Start of ranks with these boundaries, of which each `replica_size` ranks hold one model.

    A rank takes a step when all ranks have its gradients, so those that it was broken off on are ready to take it.
    """
    found = {(boundary.generation, boundary.step, boundary.cut) for boundary in boundaries if boundary.step >= 0}
    for generation, step, cut in sorted(found, reverse=True):
        cut_so = [(rank, boundary) for rank, boundary in enumerate(boundaries) if boundary.cut == cut]
        taken = [rank for rank, boundary in cut_so if (boundary.step, boundary.generation) == (step, generation)]
        ready = [rank for rank, boundary in cut_so if (boundary.step + 1, boundary.ready) == (step, generation)]
        if len({rank % replica_size for rank in (*taken, *ready)}) == replica_size:
            source = max(taken, key=lambda rank: (boundaries[rank].acted, -rank))
            behind = [rank for rank in range(len(boundaries)) if rank not in (*taken, *ready)]
            new = [rank for rank in behind if boundaries[rank].step < 0]
            return Start(replace(boundaries[source], ready=-1), ready, behind, new, replica_size)
    ranks = range(len(boundaries))
    return Start(StepBoundary(), [], [*ranks], [*ranks], replica_size)
