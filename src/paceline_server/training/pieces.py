"""Pieces and rounds of global batches, which servers deal to workers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from paceline.data.loader import Position
from paceline.job.job import Job
from paceline.job.partition import Partition


class Pieces:
    """Samples of each piece, which equals a replica's share in synchronous training.

    Args:
        like: partition of the whole data.
        pieces: number of pieces per global batch.
        data_rank: index of this rank among `data_ranks` ranks.
        data_ranks: number of the worker's ranks that compute different samples of a piece.
    """

    def __init__(self, job: Job, like: Partition, pieces: int, data_rank: int = 0, data_ranks: int = 1) -> None:
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.epoch_steps = like.steps_per_epoch
        self.parts = [
            Partition(
                job.partition,
                samples=like.samples,
                global_batch=job.global_batch,
                seed=job.seed,
                replica=number,
                replicas=pieces,
                drop_last=job.drop_last,
                shards=like.shards,
            )
            for number in range(pieces)
        ]
        # for each piece: epoch, next step, and the remaining samples
        self._at: list[tuple[int, int, Iterator[list[int]]]] = [(-1, 0, iter(())) for _ in self.parts]

    def samples(self, batch: int, piece: int) -> tuple[list[int], Position]:
        """Return this rank's samples of a piece, and the position of the piece.

        Args:
            batch: number of the global batch, counted from 0 over all epochs.
        """
        epoch, step = divmod(batch, self.epoch_steps)
        at_epoch, at_step, samples = self._at[piece]
        if at_epoch != epoch or at_step > step:
            at_step, samples = step, self.parts[piece].batches(epoch, step)
        found = next(samples)
        for _ in range(step - at_step):
            found = next(samples)
        self._at[piece] = epoch, step + 1, samples
        own = found[self.data_rank :: self.data_ranks]
        return own, Position(epoch, step, len(own), len(found))


class Rounds:
    """Rounds of `period` consecutive global batches, or fewer before a boundary.

    Args:
        begin: first global batch of round 0.
        boundary: function that returns the next boundary after a given number of global batches.
    """

    def __init__(self, period: int, begin: int, boundary: Callable[[int], int]) -> None:
        self.period, self._boundary = period, boundary
        self._begins = [begin]  # first batch of each requested round, and of the next round

    def batches(self, number: int) -> range:
        """Return the global batches of a round."""
        if self.period == 1:
            return range(self._begins[0] + number, self._begins[0] + number + 1)
        while len(self._begins) <= number + 1:
            begin = self._begins[-1]
            self._begins.append(min(begin + self.period, self._boundary(begin)))
        return range(self._begins[number], self._begins[number + 1])

    def until(self, batch: int) -> int:
        """Return the number of rounds that begin before a global batch."""
        if self.period == 1:
            return max(0, batch - self._begins[0])
        while self._begins[-1] < batch:
            self.batches(len(self._begins) - 1)
        return bisect_left(self._begins, batch)

    def whole(self, batch: int) -> int:
        """Return the first end of a round at or after this number of global batches."""
        rounds = self.until(batch)
        return self.batches(rounds - 1).stop if rounds else self._begins[0]


def next_boundary(job: Job, epoch_steps: int, total_steps: int | None, step: int) -> int:
    """Return the next step with an evaluation or a checkpoint, or the last step."""
    measured = job.evaluate.every_steps or job.evaluate.every_epochs * epoch_steps
    every = [n for n in (measured, job.checkpoint.every_steps) if n is not None]
    due = [(step // n + 1) * n for n in every]
    return min([*due, total_steps] if total_steps is not None and total_steps > step else due)
