"""Pieces of the global batches, as servers deal them to workers."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.data.loader import Position
from paceline.job.job import Job
from paceline.job.partition import Partition


class Pieces:
    """Samples of each piece: the share of a replica that waits for all others.

    Args:
        like: the partition of a reader of the whole data.
        pieces: of a global batch.
        data_rank, data_ranks: this rank among those of the worker that compute different samples of a piece.
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
            )
            for number in range(pieces)
        ]
        # of each piece: epoch, the next step, and the samples from there on
        self._at: list[tuple[int, int, Iterator[list[int]]]] = [(-1, 0, iter(())) for _ in self.parts]

    def samples(self, batch: int, piece: int) -> tuple[list[int], Position]:
        """This rank's samples of a piece, and its place.

        Args:
            batch: number of the global batch, from 0 over all epochs.
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
