"""Cuts of a pipeline that follow the measured times of its stages.

Everything here is a pure function of times that all ranks know alike, so all come to the same decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.partition import contiguous
from paceline.run.recovery.busy_blocks import BusyBlocks, Floats, error_of_slowest, medians

UNEVEN = 1.1  # times the mean of the stages: less is not looked at
LEAST_GAIN = 0.05  # of a step's time
MOST = 2  # times an even part of the model: memory was planned for that one

Lengths = tuple[int, ...]  # segments of each stage


@dataclass(frozen=True)
class Pipe:
    """A pipeline of `ranks` ranks: the schedule, and which of them computes each stage."""

    ranks: int
    stage_ranks: Sequence[int]
    schedule: str
    microbatches: int

    def per_rank(self, costs: Sequence[float], lengths: Lengths) -> Floats:
        """Cost of the segments of each rank."""
        found = np.zeros(self.ranks)
        for rank, cost in zip(self.stage_ranks, self.per_stage(costs, lengths), strict=True):
            found[rank] += cost
        return found

    def per_stage(self, costs: Sequence[float], lengths: Lengths) -> list[float]:
        """Cost of the segments of each stage."""
        ends = [0, *itertools.accumulate(lengths)]
        return [sum(costs[first:last]) for first, last in itertools.pairwise(ends)]

    def step_s(self, busy_s: Floats) -> float:
        """Time of a step: the slowest rank's, and filling and draining the pipeline."""
        chunks = self.microbatches * len(self.stage_ranks) // self.ranks
        return float(busy_s.max() + (busy_s.sum() - busy_s.max()) / chunks)


@dataclass(frozen=True)
class Recut:
    """A better cut of a pipeline.

    Attributes:
        lengths: segments of each stage.
        gain_s: expected seconds less of each step; `gain`: as a part of the step.
        slow: the rank of the pipeline that takes longest, since which step, and its share of the time of all.
    """

    lengths: Lengths
    gain_s: float
    gain: float
    slow: int
    since_step: int
    share: float


class Stages:
    """Watches the compute times of a pipeline's ranks, and finds better cuts."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._since: tuple[int, int] | None = None  # the slowest rank, since which step
        self.forget()

    def forget(self) -> None:
        """Measure anew, as after a pause."""
        self._blocks = BusyBlocks()

    def step(self, step: int, busy_s: Sequence[float]) -> bool:
        """Take in a step; True if it ends a block, all of them uneven.

        Args:
            busy_s: of each rank of the pipeline; where there are several of a stage, the slowest.
        """
        if not self._blocks.add(step, busy_s):
            return False
        times = medians(self._blocks.newest())
        slow = int(times.argmax())
        if any(block[slow] <= UNEVEN * block.mean() for block in self._blocks.medians()):
            self._since = None
            return False
        if self._since is None or self._since[0] != slow:
            self._since = slow, self._blocks.first_step()
        return True

    def better(self, costs: Sequence[float], lengths: Lengths) -> Recut | None:
        """A cut that is better by more than noise, if there is one.

        A rank is expected to take as long for other segments as it takes now, in proportion to their costs.

        Args:
            costs: of the segments in order, between which the model can be cut.
            lengths: segments of each stage now.
        """
        assert self._since is not None, "the stages were uneven"
        rows, work = self._blocks.newest(), self.pipe.per_rank(costs, lengths)
        times = medians(rows)
        found = proposed(self.pipe, costs, lengths, times)
        if found == lengths:
            return None
        ratio = self.pipe.per_rank(costs, found) / work
        needed = max(LEAST_GAIN, 2 * error_of_slowest(rows, times))
        if any(self._gain_s(block, ratio) < needed * self.pipe.step_s(block) for block in self._blocks.medians()):
            return None
        gain_s, (slow, since) = self._gain_s(times, ratio), self._since
        share = float(times[slow] / times.sum())
        return Recut(found, gain_s, gain_s / self.pipe.step_s(times), slow, since, share)

    def _gain_s(self, times: Floats, ratio: Floats) -> float:
        """Seconds less of a step, where each rank has so many times its work."""
        return self.pipe.step_s(times) - self.pipe.step_s(times * ratio)


def proposed(pipe: Pipe, costs: Sequence[float], lengths: Lengths, times: Floats) -> Lengths:
    """Cut with the fastest slowest stage, by the ranks' times under the present cut.

    No stage gets more than `MOST` times an even part, unless it has that already; else the cut stays.
    """
    speeds = pipe.per_rank(costs, lengths) / times
    found = contiguous(costs, len(lengths), [float(speeds[rank]) for rank in pipe.stage_ranks])
    most = MOST * sum(costs) / len(lengths)
    old, new = pipe.per_stage(costs, lengths), pipe.per_stage(costs, found)
    too_much = any(after > max(most, before) for before, after in zip(old, new, strict=True))
    return lengths if too_much else found


def worth(gain_s: float, step: int, total_steps: int | None, cost_s: float, recuts: int) -> bool:
    """True if a cut gains more than it costs in the steps that are left.

    Where their number is not known, as many are expected as there were. Each further cut has to be worth twice as much
    as the one before, so that cuts which do not bring what was expected cost little.
    """
    left = step if total_steps is None else total_steps - step
    return gain_s * left > cost_s * 2.0**recuts
