"""Division of the global batch by the replicas' measured speeds (`balance=` of the plan).

`Balancing` connects the training loop with `Balance`, `FixedCost` and `BusyBlocks`. These classes decide only from the
shares and busy times of past steps. All ranks know these numbers, so all make the same decision without communication.
No function reads a clock, and sums use `math.fsum`, because numpy's sums may depend on the processor.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.engine import RankEngine
from paceline.job.job import Job
from paceline.job.partition import Partition, ShareChanges, Shares
from paceline.job.stop import Epochs
from paceline.planning.limits import no_automatic_balance, no_balance
from paceline.planning.plan import Plan
from paceline.run.record.recorder import Events, StepInfo

Floats = NDArray[np.float64]  # one value per replica or pipeline rank

WARM_UP = 5  # first steps to skip, because allocators and caches are slow
BLOCK, BLOCK_S = 5, 0.5  # minimum number of steps, and seconds of work, in a block
APART_S = 0.01  # minimum seconds of work between two examined steps, to limit the overhead for short steps
BLOCKS = 3  # number of consecutive blocks that must all show the gain of a change

SETTLE = 2  # steps to skip after each change
# minimum gain, as a fraction of a step's time and in seconds; smaller gains are noise
LEAST_GAIN, LEAST_GAIN_S = 0.04, 0.002
FURTHER = 0.25  # fraction of the minimum gain that suffices for further changes, and for a return to equal shares
BACK_BLOCKS = 2  # number of blocks that suffice for a return to equal shares
# numbers of blocks per group; each group must show the gain, and larger groups reveal smaller gains
EACH = (1, 2, 4)
KEPT = BLOCKS * max(EACH)
EVEN = 0.04  # equal shares are preferred if they are slower than the best shares by at most this fraction
MOST = 2  # maximum share, as a multiple of the equal share, because memory is limited
SLOW = 0.9  # a replica below this fraction of the usual speed is slow
POSSIBLE = 9  # number of possible fixed costs to consider before a return to equal shares

# Fit of the fixed cost
CHANGES = 8  # number of newest changes in the fit
CANDIDATES = 65  # number of candidates, from zero to an even share of samples
LEAST_ERROR = 0.01  # relative error that is added to a time's measured error
SURPRISE = 9.0  # limit of a squared deviation in the fit; a larger one means that a replica's speed has changed
BELIEVED = 0.5  # expected scale of the fixed cost, as a fraction of an even share; larger costs need evidence
LIKELY = 4.0  # a fixed cost is possible if its squared error exceeds the best by at most this


@dataclass(frozen=True)
class Move:
    """A change of shares.

    Attributes:
        shares: samples of each data-parallel rank in a full batch.
        speeds: speed of each replica, relative to the usual speed.
        slow: first slow step of each slow replica.
        gain: expected gain, as a fraction of the step's busy time.
    """

    shares: Shares
    speeds: tuple[float, ...]
    slow: dict[int, int]
    gain: float


class Balance:
    """Decisions about the data-parallel ranks' shares of the batch.

    In the model, a rank with n samples is busy for cost × (fixed + n) seconds. Each replica has its own `cost`. `fixed`
    is the cost of a step without samples, in units of samples; it is equal on all replicas and learned from earlier
    changes. If a possible `fixed` explains all differences, the replicas count as equally fast.

    Args:
        base: each data-parallel rank's share if all replicas are equally fast; a replica's ranks are adjacent.
        replicas: number of replicas; a divisor of the number of data-parallel ranks.
        least: minimum number of samples of every data-parallel rank.
    """

    def __init__(self, base: Shares, replicas: int, least: int = 1) -> None:
        self.base, self.replicas = base, replicas
        self._ranks = len(base) // replicas  # number of data-parallel ranks per replica
        self._bounds = [(min(least, n), max(MOST * n, least)) for n in base]
        self._fixed = FixedCost(sum(base) / len(base))
        self._slow: dict[int, int] = {}
        self._before: Times | None = None  # times before the newest change
        self._shares = base
        self.forget()

    def forget(self) -> None:
        """Restart the measurement, for example after a rewind."""
        self._blocks, self._before = BusyBlocks(enough=BACK_BLOCKS, kept=KEPT), None

    def step(self, step: int, shares: Shares, busy_s: Sequence[float]) -> Move | None:
        """Add a step with a full batch; return a worthwhile change, or None.

        Args:
            shares: shares in this step.
            busy_s: busy seconds of each replica's slowest rank.
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
        rows = self._blocks.newest(BACK_BLOCKS)
        times = medians(rows)
        return Times(self._samples(self._shares), times, errors(rows, times))

    def _samples(self, shares: Shares) -> Floats:
        """Return the largest number of samples on any rank of each replica."""
        most: Floats = np.asarray(shares, np.float64).reshape(-1, self._ranks).max(axis=1)
        return most

    def _back(self) -> Move | None:
        """Return to equal shares if the newest blocks show that equal shares are as fast."""
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
        """Return faster shares if all groups of `each` blocks show the gain, or None."""
        rows, fixed, moved = self._blocks.newest(BLOCKS * each), self._fixed.best, self._shares != self.base
        times = medians(rows)
        part = FURTHER if moved else 1.0
        needed = max(part * LEAST_GAIN, 2 * error_of_slowest(rows, times)), part * LEAST_GAIN_S
        # first check an upper bound of the gain, which is usually too small
        if 1 - self._ideal_s(times, fixed) / times.max() < needed[0]:
            return None
        costs = self._costs(times, fixed).repeat(self._ranks).tolist()
        shares = fastest(costs, self._bounds, sum(self.base), fixed)
        return self._move(shares, times, (BLOCKS, each), needed, fixed)

    def _move(
        self, shares: Shares, times: Floats, window: tuple[int, int], needed: tuple[float, float], fixed: float
    ) -> Move | None:
        """Return a change to `shares` if every group of the newest blocks shows the gain.

        Args:
            window: number of groups, and number of blocks per group.
            needed: minimum gain as a fraction, and in seconds.
        """
        gains = [self._gain(of_part, shares, fixed) for of_part in self._blocks.medians(*window)]
        if any(gain < needed[0] or gain_s < needed[1] for gain, gain_s in gains):
            return None
        named = self._named(self._costs(times, fixed), self._blocks.first_step(math.prod(window)))
        return Move(shares, *named, self._gain(times, shares, fixed)[0])

    def _costs(self, times: Floats, fixed: float) -> Floats:
        return times / (fixed + self._samples(self._shares))

    def _ideal_s(self, times: Floats, fixed: float) -> float:
        each = sum(self.base) / self._ranks + self.replicas * fixed
        return each / math.fsum(1 / self._costs(times, fixed))

    def _busy_s(self, times: Floats, shares: Shares, fixed: float) -> float:
        return float((self._costs(times, fixed) * (fixed + self._samples(shares))).max())

    def _gain(self, times: Floats, shares: Shares, fixed: float) -> tuple[float, float]:
        """Return the predicted gain, as a fraction of the step's time and in seconds."""
        slowest_s = float(times.max())
        saved_s = slowest_s - self._busy_s(times, shares, fixed)
        return saved_s / slowest_s, saved_s

    def _named(self, costs: Floats, since: int) -> tuple[tuple[float, ...], dict[int, int]]:
        usual = statistics.median_low(costs.tolist())
        speeds = tuple((usual / costs).tolist())
        self._slow = {i: self._slow.get(i, since) for i, speed in enumerate(speeds) if speed < SLOW}
        return speeds, dict(self._slow)


def fastest(costs: Sequence[float], bounds: Sequence[tuple[int, int]], total: int, fixed: float) -> Shares:
    """Divide `total` samples so that the slowest rank takes the least time.

    A rank takes cost × (fixed + n) seconds for n samples.

    Args:
        bounds: minimum and maximum number of samples of each rank.
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
    # give each remaining sample to the rank that would finish first
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


class Balancing:
    """Part of the loop that adapts the shares of batches to measured speeds (`balance=`).

    All ranks know all busy times, so all make the same decision without communication. The global batches do not
    change, and gradients are weighted by samples.

    Attributes:
        off: reason why shares are fixed; "" if they follow the speeds.
    """

    def __init__(self, engine: RankEngine, job: Job, events: Events, epochs: Epochs) -> None:
        self.engine, self.events, self.epoch_steps = engine, events, epochs.steps or 1
        self.off = why_off(engine.plan, job)
        partition = engine.loader.partition
        # each rank fills its share of a stream from its own parts
        self.changes = partition.changes if isinstance(partition, Partition) else ShareChanges(1, 1)
        self.replicas, self.global_batch = engine.plan.dp, job.global_batch
        self.base = partition.shares(0)
        self._ranks = engine.plan.ranks // engine.plan.dp  # number of ranks per replica
        self.balance = Balance(self.base, self.replicas, _least(self.base, engine.plan.microbatches))
        self._last = 0  # newest step
        self._slow: list[int] = []  # slow replicas

    def after_step(self, info: StepInfo) -> None:
        """Change the shares of coming steps if worthwhile."""
        step = info.result.step
        if self.off or len(info.busy_s) != self._ranks * self.replicas:
            return
        if step <= self._last:  # the run has rewound
            self.balance.forget()
        self._last = step
        shares, newest = self._in_force(step), self.changes.newest or self.base
        if info.result.samples != self.global_batch or shares != newest:
            return
        if move := self.balance.step(step, shares, self._by_replica(info.busy_s)):
            self._move(move)

    def at_even_shares(self, info: StepInfo) -> Sequence[float]:
        """Return every rank's busy seconds, scaled to equal shares."""
        shares = self._in_force(info.result.step)
        if shares == self.base or not info.busy_s:
            return info.busy_s
        scale = [base / own for base, own in zip(self._sums(self.base), self._sums(shares), strict=True)]
        return [busy_s * scale[rank // self._ranks] for rank, busy_s in enumerate(info.busy_s)]

    def _in_force(self, step: int) -> Shares:
        return self.changes.at(divmod(step - 1, self.epoch_steps)) or self.base

    def _by_replica(self, busy_s: Sequence[float]) -> list[float]:
        """Return the busy time of each replica's slowest rank.

        A replica's ranks are adjacent.
        """
        return [max(busy_s[i : i + self._ranks]) for i in range(0, len(busy_s), self._ranks)]

    def _sums(self, shares: Shares) -> list[int]:
        ranks = len(shares) // self.replicas
        return [sum(shares[i : i + ranks]) for i in range(0, len(shares), ranks)]

    def _move(self, move: Move) -> None:
        epoch, step = self.engine.loader.reshare(move.shares)
        batch, samples, hosts = self.global_batch, self._sums(move.shares), self.engine.group.hosts
        slow: list[dict[str, Any]] = [
            {
                "replica": replica,
                "ranks": [replica * self._ranks, (replica + 1) * self._ranks - 1],
                "host": hosts[replica * self._ranks] if replica * self._ranks < len(hosts) else 0,
                "speed": round(move.speeds[replica], 3),
                "share": round(samples[replica] / batch, 4),
                "since_step": since,
            }
            for replica, since in move.slow.items()
        ]
        self.events(
            "balance",
            {
                "step": epoch * self.epoch_steps + step + 1,
                "shares": list(move.shares),
                "speeds": [round(speed, 3) for speed in move.speeds],
                "gain": round(move.gain, 3),
                "slow": slow,
                "slow_changed": sorted(move.slow) != self._slow,
            },
        )
        self._slow = sorted(move.slow)


def why_off(plan: Plan, job: Job) -> str:
    """Return the reason why shares are fixed; "" if they follow the speeds."""
    if plan.balance == "off":
        return "the plan says balance=off."
    if job.data.kind == "iterable":
        return "each rank fills its share from its own parts of the stream."
    weighted = job.partition.weights is not None
    if plan.balance == "on":
        found = no_balance(plan, job.partition.kind)
        return found.predicate if found else ""
    return no_automatic_balance(plan, job.partition.kind, weighted) or ""


def _least(shares: Shares, microbatches: int) -> int:
    """Return the minimum number of samples of a data-parallel rank.

    If equal shares give every microbatch at least two samples, the minimum is two per microbatch, because batch norm
    needs two.
    """
    return microbatches * (2 if min(shares) >= 2 * microbatches else 1)


@dataclass(frozen=True)
class Times:
    """Samples, busy times, and relative errors of the times, by replica."""

    samples: Floats
    busy_s: Floats
    error: Floats


class FixedCost:
    """Estimate of a step's fixed cost, learned from changes of the shares.

    A replica with n samples takes cost × (fixed + n) seconds. `fixed` is measured in samples. If a replica's speed is
    constant, its times before and after a change of its share determine `fixed`. But the speed may have changed as
    well, and noise hides small changes. The fit therefore uses several changes, weighted by their errors, and limits
    the influence of each change.

    Args:
        most: largest expected fixed cost: the number of samples in an even share.

    Attributes:
        best: best fit; 0 before the first change.
        low, high: range of values that fit nearly as well.
    """

    def __init__(self, most: float) -> None:
        self._candidates = [most * i / (CANDIDATES - 1) for i in range(CANDIDATES)]
        self._changes: deque[tuple[Times, Times]] = deque(maxlen=CHANGES)
        self._fit()

    def learn(self, before: Times, after: Times) -> None:
        """Update the estimate with the times before and after a change."""
        self._changes.append((before, after))
        self._fit()

    def possible(self, count: int) -> list[float]:
        """Return evenly spaced fixed costs from `low` to `high`."""
        return [self.low + (self.high - self.low) * i / (count - 1) for i in range(count)]

    def _fit(self) -> None:
        errors = [self._error(i) for i in range(CANDIDATES)]
        least = min(errors)
        near = [fixed for fixed, error in zip(self._candidates, errors, strict=True) if error <= least + LIKELY]
        self.best, self.low, self.high = self._candidates[errors.index(least)], near[0], near[-1]

    def _error(self, i: int) -> float:
        """Return the sum of squared errors of a candidate.

        The errors are the differences between predicted and measured times after changes.
        """
        fixed, most = self._candidates[i], self._candidates[-1]
        found = [(fixed / (BELIEVED * most)) ** 2]
        for before, after in self._changes:
            expected = before.busy_s * (fixed + after.samples) / (fixed + before.samples)
            variance = before.error**2 + after.error**2 + 2 * LEAST_ERROR**2
            squares = (after.busy_s / expected - 1) ** 2 / variance
            found += np.minimum(squares, SURPRISE).tolist()
        return math.fsum(found)  # equal on all processors, unlike numpy's sum


class BusyBlocks:
    """Busy times of the newest steps, in blocks.

    Decisions need several consecutive blocks. On a shared machine, each rank is sometimes slow for a moment, so a
    single block may be noise.

    Args:
        left_out: number of first steps to skip.
        enough: minimum number of blocks for a decision.
        kept: maximum number of blocks to keep.
    """

    def __init__(self, left_out: int = WARM_UP, enough: int = BLOCKS, kept: int = BLOCKS) -> None:
        self._enough = enough
        self._blocks: deque[tuple[int, list[Floats]]] = deque(maxlen=kept)
        self._rows: list[Floats] = []
        self._first, self._worked_s, self._apart_s, self._left_out = 0, 0.0, 0.0, left_out

    def add(self, step: int, busy_s: Sequence[float]) -> bool:
        """Add a step; return True if it completes a block and there are enough blocks."""
        if self._left_out > 0:
            self._left_out -= 1
            return False
        self._apart_s += max(busy_s)
        if self._apart_s < APART_S:
            return False
        self._first = self._first if self._rows else step
        self._rows.append(np.maximum(busy_s, 1e-9))
        self._worked_s, self._apart_s = self._worked_s + self._apart_s, 0.0
        if len(self._rows) < BLOCK or self._worked_s < BLOCK_S:
            return False
        self._blocks.append((self._first, self._rows))
        self._rows, self._worked_s = [], 0.0
        return len(self._blocks) >= self._enough

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def first_step(self, blocks: int = BLOCKS) -> int:
        """Return the first step of the newest `blocks` blocks."""
        return self._blocks[-blocks][0]

    def newest(self, blocks: int = BLOCKS) -> list[Floats]:
        """Return the busy times of all steps in the newest `blocks` blocks."""
        return [row for _, rows in list(self._blocks)[-blocks:] for row in rows]

    def medians(self, count: int = BLOCKS, each: int = 1) -> list[Floats]:
        """Return the median times of the newest `count` groups of `each` blocks."""
        blocks = [rows for _, rows in self._blocks][-count * each :]
        return [medians([row for rows in blocks[at : at + each] for row in rows]) for at in range(0, len(blocks), each)]


def medians(rows: Sequence[Floats]) -> Floats:
    """Return the median over steps of each item's time."""
    found: Floats = np.median(rows, axis=0)
    return found


def errors(rows: Sequence[Floats], times: Floats) -> Floats:
    """Return the relative standard errors of `times`, the medians of `rows`."""
    # 1.4826 converts a median absolute deviation to a standard deviation; 1.2533 converts the standard error of a mean
    # to that of a median
    found: Floats = 1.4826 * 1.2533 * medians([abs(row - times) for row in rows]) / times / math.sqrt(len(rows))
    return found


def error_of_slowest(rows: Sequence[Floats], times: Floats) -> float:
    """Return the relative standard error of the largest of `times`."""
    return float(errors(rows, times)[int(times.argmax())])
