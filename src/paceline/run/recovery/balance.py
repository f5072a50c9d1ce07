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

from paceline.run.recovery.busy_blocks import BLOCKS, WARM_UP, BusyBlocks, Floats, error_of_slowest, errors, medians
from paceline.run.recovery.fixed_cost import FixedCost, Times

Shares = tuple[int, ...]

SETTLE = 2  # steps left out after each change
LEAST_GAIN, LEAST_GAIN_S = 0.04, 0.002  # of a step's time: less is noise
FURTHER = 0.25  # of that is enough once shares have moved, and to go back to those of equal speeds
BACK_BLOCKS = 2  # are enough to go back
EACH = (1, 2, 4)  # blocks of a part, of which all must agree: in more of them noise hides smaller gains no longer
KEPT = BLOCKS * max(EACH)
EVEN = 0.04  # of the least time: shares of equal speeds that take no more than this longer are as good
MOST = 2  # times the share of equal speeds: memory was planned for that one
SLOW = 0.9  # of the usual speed
POSSIBLE = 9  # fixed costs that are tried


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
    costs apart from samples, is the same for all, and learned from what changes of shares did. Where a fixed cost that
    is possible by what was learned explains all differences, the replicas are equally fast.

    Args:
        base: shares of each data-parallel rank while all are equally fast; those of a replica are neighbours.
        replicas: their number, which divides the data-parallel ranks.
        least: samples that every data-parallel rank keeps.
    """

    def __init__(self, base: Shares, replicas: int, least: int = 1) -> None:
        self.base, self.replicas = base, replicas
        self._ranks = len(base) // replicas  # of each replica
        self._bounds = [(min(least, n), max(MOST * n, least)) for n in base]
        self._fixed = FixedCost(sum(base) / len(base))
        self._slow: dict[int, int] = {}
        self._before: Times | None = None  # a change
        self._shares = base
        self.forget()

    def forget(self) -> None:
        """Measure anew, as after a pause or where other replicas take part."""
        self._blocks, self._before = BusyBlocks(enough=BACK_BLOCKS, kept=KEPT), None

    def step(self, step: int, shares: Shares, busy_s: Sequence[float]) -> Move | None:
        """Take in a step with a full batch; returns a change that is worth it.

        Args:
            shares: those of this step.
            busy_s: of the slowest rank of each replica.
        """
        if shares != self._shares:
            self._changed(shares)
        if not self._blocks.add(step, busy_s):
            return None
        if self._before is not None:
            self._fixed.learn(self._before, self._times())
            self._before = None
        moves = (self._further(each) for each in EACH if self._blocks.count >= BLOCKS * each)
        return self._back() or next(filter(None, moves), None)

    def _changed(self, shares: Shares) -> None:
        known = self._blocks.count >= BACK_BLOCKS
        self._before = self._times() if known else None
        self._blocks = BusyBlocks(SETTLE if known else WARM_UP, BACK_BLOCKS, KEPT)
        self._shares = shares

    def _times(self) -> Times:
        """The newest times."""
        rows = self._blocks.newest(BACK_BLOCKS)
        times = medians(rows)
        return Times(self._samples(self._shares), times, errors(rows, times))

    def _samples(self, shares: Shares) -> Floats:
        """Samples of each replica's rank with the most, for which the others wait."""
        most: Floats = np.asarray(shares, np.float64).reshape(-1, self._ranks).max(axis=1)
        return most

    def _back(self) -> Move | None:
        """To the shares of equal speeds, where the newest blocks say so."""
        if self._shares == self.base:
            return None
        rows = self._blocks.newest(BACK_BLOCKS)
        times = medians(rows)
        uneven = {
            fixed: self._busy_s(times, self.base, fixed) / self._ideal_s(times, fixed)
            for fixed in self._fixed.possible(POSSIBLE)
        }
        fixed = min(uneven, key=uneven.__getitem__)
        if uneven[fixed] > 1 + max(EVEN, 2 * error_of_slowest(rows, times)):
            return None
        least = FURTHER * LEAST_GAIN, FURTHER * LEAST_GAIN_S
        return self._move(self.base, times, (BACK_BLOCKS, 1), least, fixed)

    def _further(self, each: int) -> Move | None:
        """To shares that are faster by more than noise, in parts of so many blocks."""
        rows, fixed, moved = self._blocks.newest(BLOCKS * each), self._fixed.best, self._shares != self.base
        times = medians(rows)
        part = FURTHER if moved else 1.0
        needed = max(part * LEAST_GAIN, 2 * error_of_slowest(rows, times)), part * LEAST_GAIN_S
        # if samples could be divided: most often there is nothing to gain
        if 1 - self._ideal_s(times, fixed) / times.max() < needed[0]:
            return None
        costs = self._costs(times, fixed).repeat(self._ranks).tolist()
        shares = fastest(costs, self._bounds, sum(self.base), fixed)
        return self._move(shares, times, (BLOCKS, each), needed, fixed)

    def _move(
        self, shares: Shares, times: Floats, window: tuple[int, int], needed: tuple[float, float], fixed: float
    ) -> Move | None:
        """A change of shares that each part of the newest times finds worth it.

        Args:
            window: number of parts, and blocks of each.
        """
        gains = [self._gain(of_part, shares, fixed) for of_part in self._blocks.medians(*window)]
        if any(gain < needed[0] or gain_s < needed[1] for gain, gain_s in gains):
            return None
        named = self._named(self._costs(times, fixed), self._blocks.first_step(math.prod(window)))
        return Move(shares, *named, self._gain(times, shares, fixed)[0])

    def _costs(self, times: Floats, fixed: float) -> Floats:
        """Seconds that each replica takes for a sample."""
        return times / (fixed + self._samples(self._shares))

    def _ideal_s(self, times: Floats, fixed: float) -> float:
        """Expected busy time if samples could be divided."""
        each = sum(self.base) / self._ranks + self.replicas * fixed
        return each / math.fsum(1 / self._costs(times, fixed))

    def _busy_s(self, times: Floats, shares: Shares, fixed: float) -> float:
        """Expected busy time of the slowest replica with other shares."""
        return float((self._costs(times, fixed) * (fixed + self._samples(shares))).max())

    def _gain(self, times: Floats, shares: Shares, fixed: float) -> tuple[float, float]:
        """Part of the slowest replica's time, and seconds, that other shares would save."""
        slowest_s = float(times.max())
        saved_s = slowest_s - self._busy_s(times, shares, fixed)
        return saved_s / slowest_s, saved_s

    def _named(self, costs: Floats, since: int) -> tuple[tuple[float, ...], dict[int, int]]:
        """Speeds of the replicas, and which of them are slow since when."""
        usual = statistics.median_low(costs.tolist())
        speeds = tuple((usual / costs).tolist())
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
