"""Figures over clients: the worst served, the median, and how much they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fairness:
    """Distribution of a metric over clients, each measured on samples of its own.

    Attributes:
        metric: its name.
        clients: so many were measured.
        worst, tenth, median, best: of the metric; `worst` is the lowest, `tenth` the tenth percentile.
        variance: of the metric over the clients.
    """

    metric: str
    clients: int
    worst: float
    tenth: float
    median: float
    best: float
    variance: float

    @classmethod
    def of(cls, metric: str, values: Sequence[float]) -> Fairness | None:
        """The figures of finite values; None where there are none.

        Args:
            metric: for `loss`, where less is better, worst and best change places.
        """
        finite = np.array([value for value in values if np.isfinite(value)])
        if not len(finite):
            return None
        worse = -finite if metric == "loss" else finite
        sign = -1.0 if metric == "loss" else 1.0
        worst, tenth, median, best = (sign * float(np.percentile(worse, at)) for at in (0, 10, 50, 100))
        return cls(metric, len(finite), worst, tenth, median, best, float(finite.var()))

    def details(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)

    def sentence(self) -> str:
        """The figures as text."""
        return (
            f"{self.metric} of {self.clients} clients on their own samples: worst {self.worst:.4f}, tenth percentile "
            f"{self.tenth:.4f}, median {self.median:.4f}, best {self.best:.4f}, variance {self.variance:.3g}"
        )
