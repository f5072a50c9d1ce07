"""Parity of a plan with one process: `paceline check`.

This module has the messages between the command and its ranks, and does not import torch. Read `check.py` first, which
starts the ranks and compares the results. Then read `ranks.py`, which each rank runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.job.job import Job
from paceline.planning.plan import Plan


@dataclass(frozen=True)
class Parts:
    """Parts into which one process divides a batch, as data-parallel ranks would.

    By default, each part is one microbatch of one rank. With `together`, the first microbatches of all ranks form the
    first part, the second microbatches form the second part, and so on. Synchronized batch norm sees such parts.
    """

    microbatches: int
    data_ranks: int
    together: bool = False


@dataclass(frozen=True)
class Steps:
    """Request to train some steps of a job under a plan.

    Attributes:
        count: number of steps.
        folder: folder with the reference's tensors, in `reference-STEP/tensors`.
        parts: parts into which a single process divides a batch; a plan with several ranks ignores them.
        perturbed: whether to change every initial weight by one unit in the last place.
    """

    job: Job
    plan: Plan
    count: int
    folder: Path
    parts: Parts = Parts(1, 1)
    perturbed: bool = False


@dataclass
class Reference:
    """Results of the single process; its tensors are in `Steps.folder`.

    Attributes:
        losses: loss of every step.
        outputs: see `Compared.outputs`.
        written: names of buffers that the forward pass writes.
        random: name of a module whose forward pass draws random numbers; None if there is none.
        inputs: for every step, the digest of each sample by its index.
        dataset: type name of the data set.
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
        steps: for every step and tensor that the rank holds, the differences: `gradient`, `parameter` or `buffer`.
        outputs: for every module that the rank runs, the number, sum and sum of squares of its outputs' elements in
            the first step.
        report: lines that describe what the plan divided.
        inputs: for every step, the digests of the rank's own samples by index.
    """

    losses: list[float] = field(default_factory=list)
    steps: list[dict[str, dict[str, float]]] = field(default_factory=list)
    outputs: dict[str, list[float]] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    inputs: list[dict[int, int]] = field(default_factory=list)
