"""Rounds of a run with servers: the global batches that a ticket covers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from paceline.job.job import Job


class Rounds:
    """Consecutive global batches, `period` to a round, or fewer before a boundary.

    Args:
        begin: the global batch with which round 0 begins.
        boundary: the next boundary behind a number of batches.
    """

    def __init__(self, period: int, begin: int, boundary: Callable[[int], int]) -> None:
        self.period, self._boundary = period, boundary
        self._begins = [begin]  # of each round that was asked for

    def batches(self, number: int) -> range:
        """Global batches of a round."""
        if self.period == 1:
            return range(self._begins[0] + number, self._begins[0] + number + 1)
        while len(self._begins) <= number + 1:
            begin = self._begins[-1]
            self._begins.append(min(begin + self.period, self._boundary(begin)))
        return range(self._begins[number], self._begins[number + 1])

    def until(self, batch: int) -> int:
        """Number of rounds that begin before a global batch."""
        if self.period == 1:
            return max(0, batch - self._begins[0])
        while self._begins[-1] < batch:
            self.batches(len(self._begins) - 1)
        return bisect_left(self._begins, batch)

    def whole(self, batch: int) -> int:
        """The end of a round at or behind so many global batches."""
        rounds = self.until(batch)
        return self.batches(rounds - 1).stop if rounds else self._begins[0]


def next_boundary(job: Job, epoch_steps: int, total_steps: int | None, step: int) -> int:
    """The step after which something is due: an evaluation, a checkpoint, the end."""
    measured = job.evaluate.every_steps or job.evaluate.every_epochs * epoch_steps
    every = [n for n in (measured, job.checkpoint.every_steps) if n is not None]
    due = [(step // n + 1) * n for n in every]
    return min([*due, total_steps] if total_steps is not None and total_steps > step else due)
