"""Behaviour of simulated clients: speed, drop-outs, deadlines and poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline_federated.order import uniform
from paceline_federated.section import SimulateSpec

_DROP, _SPEED, _ANGLE, _POISON = 31, 32, 33, 34
POISON = -10.0  # times its own update, which is what a poisoner sends


@dataclass(frozen=True)
class Answers:
    """Chosen clients of a round, by how they answer.

    Attributes:
        present: in time.
        dropped: never.
        late: after the deadline.
    """

    present: list[int]
    dropped: list[int]
    late: list[int]


class Behaviour:
    """Draws of simulated clients, which follow from the job's seed.

    Args:
        step_counts: local steps of each client in a round.
    """

    def __init__(self, spec: SimulateSpec, seed: int, step_counts: NDArray[np.int64]) -> None:
        self.spec, self.seed = spec, seed
        clients = np.arange(len(step_counts))
        radius = np.sqrt(-2.0 * np.log1p(-uniform(seed, _SPEED, clients)))
        normal = radius * np.cos(2.0 * np.pi * uniform(seed, _ANGLE, clients))
        trains = step_counts > 0
        usual = float(np.median(step_counts[trains])) if trains.any() else 1.0
        # time of each client's work, in units of the usual one
        self.times = np.exp(spec.spread * normal) * step_counts / usual
        self.poisons = uniform(seed, _POISON, clients) < spec.poisoners

    def drops(self, round: int, client: int) -> bool:
        """True if a client never answers in this round."""
        return bool(self.spec.drop_out) and bool(uniform(self.seed, _DROP, round, client) < self.spec.drop_out)

    def answers(self, round: int, chosen: Sequence[int]) -> Answers:
        """Answers of the chosen clients of a round."""
        if not self.spec.drop_out and self.spec.deadline is None:
            return Answers(list(chosen), [], [])
        numbers = np.asarray(chosen, np.int64)
        dropped = uniform(self.seed, _DROP, round, numbers) < self.spec.drop_out
        late = np.zeros(len(numbers), bool)
        if self.spec.deadline is not None:
            late = ~dropped & (self.times[numbers] > self.spec.deadline)
        return Answers(numbers[~dropped & ~late].tolist(), numbers[dropped].tolist(), numbers[late].tolist())
