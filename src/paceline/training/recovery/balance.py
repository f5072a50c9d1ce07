"""Shares of the global batch that follow the measured speeds of the replicas.

Everything here is a pure function of the shares and busy times of past steps, which all ranks know alike, so all come
to the same decision and none asks another. No clock is read, and no sum depends on the processor (numpy's may).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.training.recovery.busy_blocks import WARM_UP, BusyBlocks, Floats, error_of_slowest, medians

Shares = tuple[int, ...]

SETTLE = 2  # steps left out after each change
LEAST_GAIN, LEAST_GAIN_S = 0.04, 0.002  # of a step's time: less is noise
BACK = 0.25  # of that is enough to go back to the shares of equal speeds
EVEN = 1.05  # times the least time: shares of equal speeds are as good
MOST = 2  # times the share of equal speeds: memory was planned for that one
TELLING = 0.1  # of a share: smaller changes tell nothing about the fixed cost
SLOW = 0.9  # of the usual speed


@dataclass(frozen=True)
class Move:
    """A change of shares.

    Attributes:
        shares: samples of each data-parallel rank in a full batch.
        speeds: of each replica, relative to the usual one.
        slow: the slow replicas, and since which step.
        gain: expected, as a part of the step's busy time.
    """

    shares: Shares
    speeds: tuple[float, ...]
    slow: dict[int, int]
    gain: float


class Balance:
    """Decides on the shares of the data-parallel ranks.

    A rank with n samples is busy for cost × (fixed + n) seconds; the cost is its replica's, and `fixed`, what a step
    costs apart from samples, is the same for all, and learned from what a change of shares did.

    Args:
        base: shares of each data-parallel rank while all are equally fast; those of a replica are neighbours.
        replicas: their number, which divides the data-parallel ranks.
        least: samples that every data-parallel rank keeps.
    """

    def __init__(self, base: Shares, replicas: int, least: int = 1) -> None:
        self.base, self.replicas = base, replicas
        self._ranks = len(base) // replicas  # of each replica
        self._bounds = [(min(least, n), max(MOST * n, least)) for n in base]
        self._fixed = 0.0
        self._slow: dict[int, int] = {}
        self._before: tuple[Floats, Floats] | None = None  # samples and times before a change
        self._shares = base
        self.forget()

    def forget(self) -> None:
        """Measure anew, as after a pause or where other replicas take part."""
        self._blocks = BusyBlocks()

    def step(self, step: int, shares: Shares, busy_s: Sequence[float]) -> Move | None:
        """Take in a step with a full batch; returns a change that is worth it.

        Args:
            shares: those of this step.
            busy_s: of the slowest rank of each replica.
        """
        if shares != self._shares:
            self._changed(shares)
        return self._decide() if self._blocks.add(step, busy_s) else None

    def _changed(self, shares: Shares) -> None:
        before = (self._samples(self._shares), medians(self._blocks.rows)) if self._blocks.full else None
        self._blocks = BusyBlocks(left_out=SETTLE if before else WARM_UP)
        self._shares, self._before = shares, before

    def _samples(self, shares: Shares) -> Floats:
        """Samples of each replica's rank with the most, for which the others wait."""
        most: Floats = np.asarray(shares, np.float64).reshape(-1, self._ranks).max(axis=1)
        return most

    def _decide(self) -> Move | None:
        samples, rows = self._samples(self._shares), self._blocks.rows
        times = medians(rows)
        if self._before is not None and (abs(samples - self._before[0]) > TELLING * self._before[0]).any():
            self._fixed = _fixed_cost(*self._before, samples, times, most=sum(self.base) / len(self.base))
        self._before = None
        costs, slowest_s = self._costs(times), times.max()
        # if samples could be divided: most often there is nothing to gain
        ideal_s = (sum(self.base) / self._ranks + self.replicas * self._fixed) / math.fsum(1 / costs)
        needed = max(LEAST_GAIN, 2 * error_of_slowest(rows, times))
        if self._shares == self.base and 1 - ideal_s / slowest_s < needed:
            return None
        shares = fastest(costs.repeat(self._ranks).tolist(), self._bounds, sum(self.base), self._fixed)
        needed_s = LEAST_GAIN_S
        if self._busy_s(costs, self.base) <= EVEN * self._busy_s(costs, shares):
            shares, needed, needed_s = self.base, BACK * LEAST_GAIN, BACK * LEAST_GAIN_S
        if shares == self._shares:
            return None
        gains = [self._gain(times_of_block, shares) for times_of_block in self._blocks.medians()]
        if any(gain < needed or gain_s < needed_s for gain, gain_s in gains):
            return None
        return Move(shares, *self._named(costs), self._gain(times, shares)[0])

    def _costs(self, times: Floats) -> Floats:
        """Seconds that each replica takes for a sample."""
        return times / (self._fixed + self._samples(self._shares))

    def _busy_s(self, costs: Floats, shares: Shares) -> float:
        """Expected busy time of the slowest replica."""
        return float((costs * (self._fixed + self._samples(shares))).max())

    def _gain(self, times: Floats, shares: Shares) -> tuple[float, float]:
        """Part of the slowest replica's time, and seconds, that other shares would save."""
        slowest_s = float(times.max())
        saved_s = slowest_s - self._busy_s(self._costs(times), shares)
        return saved_s / slowest_s, saved_s

    def _named(self, costs: Floats) -> tuple[tuple[float, ...], dict[int, int]]:
        """Speeds of the replicas, and which of them are slow since when."""
        usual = statistics.median_low(costs.tolist())
        speeds = tuple((usual / costs).tolist())
        since = self._blocks.first_step
        self._slow = {i: self._slow.get(i, since) for i, speed in enumerate(speeds) if speed < SLOW}
        return speeds, dict(self._slow)


def fastest(costs: Sequence[float], bounds: Sequence[tuple[int, int]], total: int, fixed: float) -> Shares:
    """Shares of `total` samples with the least time of the slowest.

    A rank takes cost × (fixed + n) for n samples.

    Args:
        bounds: fewest and most samples of each.
    """

    def shares_in(time: float) -> list[int]:
        return [
            min(max(math.floor(time / cost - fixed), low), high)
            for cost, (low, high) in zip(costs, bounds, strict=True)
        ]

    low, high = 0.0, max(cost * (fixed + most) for cost, (_, most) in zip(costs, bounds, strict=True))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares_in(middle)) <= total else (low, middle)
    shares = shares_in(low)
    # what is left goes one by one to whoever would be ready first
    ready = [
        (cost * (fixed + n + 1), i)
        for i, (cost, n, (_, most)) in enumerate(zip(costs, shares, bounds, strict=True))
        if n < most
    ]
    heapq.heapify(ready)
    for _ in range(total - sum(shares)):
        _, i = heapq.heappop(ready)
        shares[i] += 1
        if shares[i] < bounds[i][1]:
            heapq.heappush(ready, (costs[i] * (fixed + shares[i] + 1), i))
    return tuple(shares)


def _fixed_cost(before: Floats, before_s: Floats, after: Floats, after_s: Floats, *, most: float) -> float:
    """Cost of a step apart from samples, in samples, from times around a change.

    With t = cost × (fixed + n) and t' = cost × (fixed + n'), fixed × (t' − t) = t × n' − t' × n: by least squares over
    the replicas, each relative to its time. Between 0 and `most`, as a replica may have changed its speed meanwhile.
    """
    slopes = (after_s - before_s) / before_s
    weight = math.fsum(slopes * slopes)
    found = math.fsum(slopes * (after - after_s / before_s * before))
    return min(max(found / weight, 0.0), most) if weight > 0 else 0.0
