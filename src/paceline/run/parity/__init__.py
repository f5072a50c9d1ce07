"""Parity of a plan with one process: `paceline check`.

Here are the messages between the command and its ranks, without torch. Read `check.py` first (starts the ranks and
compares), then `ranks.py` (what each rank does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.job.job import Job
from paceline.planning.plan import Plan


@dataclass(frozen=True)
class Parts:
    """Parts in which one process computes a batch: data-parallel ranks' microbatches, in turn.

    `together`: instead the first microbatches of all ranks as one part, then the second, as layers see them that the
    ranks share.
    """

    microbatches: int
    data_ranks: int
    together: bool = False


@dataclass(frozen=True)
class Steps:
    """Steps of a job under a plan.

    Attributes:
        parts: how a process that computes alone divides a batch; a plan of several ranks divides it by itself.
        folder: tensors of the reference, in `reference-STEP/tensors`.
        perturbed: begin with every weight changed by one unit in the last place.
    """

    job: Job
    plan: Plan
    count: int
    folder: Path
    parts: Parts = Parts(1, 1)
    perturbed: bool = False


@dataclass
class Reference:
    """Findings of the one process. Its tensors are in the folder.

    Attributes:
        outputs: as in `Compared`.
        written: the buffers that the forward pass writes.
        random: the module that draws random numbers when it is called; None if there is none.
        inputs: for every step, digests of its samples by index.
        dataset: the name of the data set.
        collate_draws: whether the collate function draws random numbers.
    """

    losses: list[float]
    outputs: dict[str, list[float]]
    written: list[str]
    random: str | None
    inputs: list[dict[int, int]]
    dataset: str
    collate_draws: bool


@dataclass
class Compared:
    """Findings of one rank.

    Attributes:
        losses: of every step; the same on all ranks.
        steps: per step, how far every parameter and buffer that the rank holds a piece of differs: `gradient`,
            `parameter`, `buffer`.
        outputs: for every module that the rank runs, what it added up of its outputs in the first step: number, sum,
            sum of squares.
        report: what the plan divided, in words.
        inputs: as in `Reference`, of the rank's own samples.
    """

    losses: list[float] = field(default_factory=list)
    steps: list[dict[str, dict[str, float]]] = field(default_factory=list)
    outputs: dict[str, list[float]] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    inputs: list[dict[int, int]] = field(default_factory=list)
