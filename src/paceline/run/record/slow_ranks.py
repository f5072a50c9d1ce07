"""Detection of slow ranks, and the spread of ranks' compute times."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean, stdev
from typing import Any

from paceline.errors import RunError
from paceline.planning.plan import AXES, Plan
from paceline.run.record.run import WARM_UP_STEPS, Run

WINDOW = 20  # number of steps in the median of a rank's busy time
WARM_UP = 5  # first steps to skip, because compilers and allocators are slow on some ranks
# a rank is reported after it was slow for this many seconds of work: on a shared machine, each rank is sometimes slow
# for a moment
PATIENCE_S = 10.0
SLOW, RECOVERED = 1.5, 1.2  # a rank is slow, or has recovered, at these multiples of the other ranks' median
_LEAST_S = 0.002  # minimum difference in seconds; smaller differences are noise


class SlowRanks:
    """Detector of slow ranks and their recovery, over a window of steps.

    A rank is compared with the ranks that do the same work. In a pipeline, these are the ranks of the same stage in
    other replicas. A rank without such peers is not compared.
    """

    def __init__(self, plan: Plan, hosts: Sequence[int]) -> None:
        self.hosts = hosts
        stages = pipeline_ranks(plan)
        self._others = {
            r: [q for q, other in enumerate(stages) if other == stage and q != r] for r, stage in enumerate(stages)
        }
        self._seen = 0
        self._steps: deque[tuple[int, list[float]]] = deque(maxlen=WINDOW)
        self._slow: dict[int, int] = {}  # by rank: first step of the slow period
        # by rank: first step of the slow period, and seconds of work when the rank was first suspected
        self._suspected: dict[int, tuple[int, float]] = {}
        self._worked_s = 0.0
        self._short_steps = 0  # number of consecutive steps that are too short to show a slow rank

    def step(self, step: int, busy_s: Sequence[float]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add every rank's busy time in a step; yield events about slow ranks."""
        if len(busy_s) != len(self._others):
            return
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self._steps.append((step, list(busy_s)))
        self._worked_s += max(busy_s)
        self._short_steps = self._short_steps + 1 if max(busy_s) <= _LEAST_S else 0
        if len(self._steps) < WINDOW:
            return
        if self._short_steps >= WINDOW and not self._slow:
            # medians cannot differ by more than `_LEAST_S`, so they are not computed
            self._suspected.clear()
            return
        medians = [statistics.median(column) for column in zip(*(busy for _, busy in self._steps), strict=True)]
        for rank, others in self._others.items():
            if not others:
                continue
            found = _Compared(medians[rank], statistics.median(medians[r] for r in others))
            if rank not in self._slow and found.is_slow:
                since, at_s = self._suspected.setdefault(rank, (self._since(rank, others), self._worked_s))
                if self._worked_s - at_s < PATIENCE_S:
                    continue
                self._slow[rank] = since
                yield "slow_rank", self._about(rank, found) | {"since_step": since, "step": step}
            elif rank in self._slow and found.is_over:
                since = self._slow.pop(rank)
                yield "slow_rank_over", self._about(rank, found) | {"since_step": since, "step": step}
            if not found.is_slow:
                self._suspected.pop(rank, None)

    def _about(self, rank: int, found: _Compared) -> dict[str, Any]:
        host = self.hosts[rank] if rank < len(self.hosts) else 0
        return {
            "rank": rank,
            "host": host,
            "busy_s": round(found.own_s, 6),
            "others_busy_s": round(found.others_s, 6),
            "ratio": round(found.ratio, 3),
        }

    def _since(self, rank: int, others: Sequence[int]) -> int:
        """Return the first step of the window since which the rank has mostly been slow."""
        slow = [_Compared(busy[rank], statistics.median(busy[r] for r in others)).is_slow for _, busy in self._steps]
        balance, best, at = 0, 0, len(slow) - 1
        for i in reversed(range(len(slow))):
            balance += 1 if slow[i] else -1
            if balance >= best and slow[i]:
                best, at = balance, i
        return self._steps[at][0]


@dataclass(frozen=True)
class _Compared:
    own_s: float
    others_s: float

    @property
    def ratio(self) -> float:
        return self.own_s / self.others_s if self.others_s > 0 else 1.0

    @property
    def is_slow(self) -> bool:
        return self.ratio > SLOW and self.own_s - self.others_s > _LEAST_S

    @property
    def is_over(self) -> bool:
        return self.ratio < RECOVERED or self.own_s - self.others_s < _LEAST_S / 2


def pipeline_ranks(plan: Plan) -> list[int]:
    """Return the position of every rank in its pipeline."""
    after = prod(getattr(plan, axis) for axis in AXES[AXES.index("pp") + 1 :])
    return [rank // after % plan.pp for rank in range(plan.ranks)]


_FEWEST = 10  # minimum number of steps for a meaningful spread


def step_time_sigma(run: Run) -> float:
    """Return the relative standard deviation of the ranks' compute times per step.

    The result is the root mean square over the ranks, without warm-up steps. Compute times end before a rank waits for
    other ranks, so other ranks' delays are not included.

    Raises:
        RunError: no rank has enough steps.
    """
    return math.sqrt(fmean(stdev(ratios) ** 2 for ratios in step_time_ratios(run)))


def step_time_ratios(run: Run) -> list[list[float]]:
    """Return each rank's compute times after the warm-up, relative to their mean.

    Raises:
        RunError: no rank has enough steps.
    """
    found = []
    for rank in range(run.plan.ranks):
        times = [step["compute_s"] for step in run.steps(rank)[WARM_UP_STEPS:] if step.get("compute_s", 0.0) > 0]
        if len(times) >= _FEWEST:
            mean = fmean(times)
            found.append([time / mean for time in times])
    if not found:
        raise RunError(
            "run.too_few_steps",
            "{run}: no rank has {needed} steps with compute times after the first {warm_up}. Pass a number to "
            "--straggler-sigma instead.",
            run=run.path,
            needed=_FEWEST,
            warm_up=WARM_UP_STEPS,
        )
    return found
