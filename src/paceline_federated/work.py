"""Amount of a client's work in a round: its batches, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.job.job import Job
from paceline_federated.order import order
from paceline_federated.section import federate_spec

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """Local work of a job's clients.

    Attributes:
        batch: samples of a step; the last one of an epoch has what remains.
        epochs: passes over the samples in a round, where `steps` is None.
        steps: optimizer steps in a round.
        seed: of the order of samples.
    """

    batch: int
    epochs: int
    steps: int | None
    seed: int

    @classmethod
    def of(cls, job: Job) -> Work:
        """The work that a job asks for."""
        spec = federate_spec(job)
        return cls(spec.batch or job.global_batch, spec.epochs, spec.local_steps, job.seed)

    def step_count(self, samples: int) -> int:
        """Optimizer steps of a client with so many samples."""
        if not samples:
            return 0
        return self.steps or self.epochs * -(-samples // self.batch)

    def step_counts(self, samples: Ints) -> Ints:
        """Optimizer steps of several clients."""
        steps = self.epochs * -(-samples // self.batch) if self.steps is None else np.full_like(samples, self.steps)
        return np.where(samples > 0, steps, 0)

    def batches(self, client: int, round: int, samples: int) -> Iterator[Ints]:
        """Indices of a client's own samples (0, 1, …) in each step of a round."""
        left, epoch = self.step_count(samples), 0
        while left:
            indices = order(self.seed, client, round, epoch, samples)
            for start in range(0, samples, self.batch):
                yield indices[start : start + self.batch]
                left -= 1
                if not left:
                    return
            epoch += 1
