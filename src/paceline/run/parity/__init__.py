"""Parity of a plan with one process: `paceline check`.

This module has the messages between the command and its ranks; it does not import torch. Read `check.py` first (starts
the ranks and compares), then `ranks.py` (what each rank does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.job.job import Job
from paceline.planning.plan import Plan


@dataclass(frozen=True)
class Parts:
    """Division of a batch for one process: the microbatches of data-parallel ranks, in turn.

    With `together`, the first microbatches of all ranks form one part, the second ones the next part, and so on. Layers
    that the ranks share see the batch in this form.
    """

    microbatches: int
    data_ranks: int
    together: bool = False


@dataclass(frozen=True)
class Steps:
    """Steps of a job under a plan.

    Attributes:
        parts: how a single process divides a batch; a plan of several ranks divides the batch itself.
        folder: tensors of the reference, in `reference-STEP/tensors`.
        perturbed: whether to begin with every weight changed by one unit in the last place.
    """

    job: Job
    plan: Plan
    count: int
    folder: Path
    parts: Parts = Parts(1, 1)
    perturbed: bool = False


@dataclass
class Reference:
    """Results of the one process; its tensors are in the folder.

    Attributes:
        outputs: as in `Compared`.
        written: buffers that the forward pass writes.
        random: the module whose forward pass uses random numbers; None if there is none.
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
    """Results of one rank.

    Attributes:
        losses: loss of every step, the same on all ranks.
        steps: per step, the difference of every parameter and buffer of which the rank holds a shard: `gradient`,
            `parameter`, `buffer`.
        outputs: for every module that the rank runs, number, sum and sum of squares of its outputs in the first step.
        report: a description of what the plan divided.
        inputs: as in `Reference`, for the rank's own samples.
    """

    losses: list[float] = field(default_factory=list)
    steps: list[dict[str, dict[str, float]]] = field(default_factory=list)
    outputs: dict[str, list[float]] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    inputs: list[dict[int, int]] = field(default_factory=list)
