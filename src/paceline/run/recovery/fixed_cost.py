"""Cost of a step apart from samples, learned from changes of the shares.

A replica with n samples takes cost × (fixed + n). Around one change the cost of a replica is taken to be the same, so
its two times tell `fixed`; but a replica may have changed its speed as well, and small changes drown in noise. So all
changes count, each replica's by its error, and none of them for more than a limit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from paceline.run.recovery.busy_blocks import Floats

CHANGES = 8  # the newest ones count
CANDIDATES = 65  # from none to the samples of an even share
LEAST_ERROR = 0.01  # of a time, beside what its scatter tells
SURPRISE = 9.0  # squared errors: a replica that is off by more has changed its speed
BELIEVED = 0.5  # of an even share: fixed costs beyond it need evidence
LIKELY = 4.0  # squared errors beyond the best, up to which a fixed cost is possible


@dataclass(frozen=True)
class Times:
    """Samples and busy times of the replicas, and the relative errors of the times."""

    samples: Floats
    busy_s: Floats
    error: Floats


class FixedCost:
    """The fixed cost in samples, and the range in which it lies.

    Args:
        most: the largest one to expect, as an even share has samples.

    Attributes:
        best: what fits best; 0 before a change tells more.
        low, high: the range of what fits nearly as well.
    """

    def __init__(self, most: float) -> None:
        self._candidates = [most * i / (CANDIDATES - 1) for i in range(CANDIDATES)]
        self._changes: deque[tuple[Times, Times]] = deque(maxlen=CHANGES)
        self._fit()

    def learn(self, before: Times, after: Times) -> None:
        """Take in a change of shares."""
        self._changes.append((before, after))
        self._fit()

    def possible(self, count: int) -> list[float]:
        """Evenly spaced fixed costs from `low` to `high`."""
        return [self.low + (self.high - self.low) * i / (count - 1) for i in range(count)]

    def _fit(self) -> None:
        errors = [self._error(i) for i in range(CANDIDATES)]
        least = min(errors)
        near = [fixed for fixed, error in zip(self._candidates, errors, strict=True) if error <= least + LIKELY]
        self.best, self.low, self.high = self._candidates[errors.index(least)], near[0], near[-1]

    def _error(self, i: int) -> float:
        """Squared errors of a candidate.

        They tell how far the times after the changes are from what it expects.
        """
        fixed, most = self._candidates[i], self._candidates[-1]
        found = [(fixed / (BELIEVED * most)) ** 2]
        for before, after in self._changes:
            expected = before.busy_s * (fixed + after.samples) / (fixed + before.samples)
            variance = before.error**2 + after.error**2 + 2 * LEAST_ERROR**2
            squares = (after.busy_s / expected - 1) ** 2 / variance
            found += np.minimum(squares, SURPRISE).tolist()
        return math.fsum(found)  # which is alike on all processors; numpy's sum may differ
