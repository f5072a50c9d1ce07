"""Moves of shares of the global batch from slow replicas to fast ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.engine.engine import Engine
from paceline.job.job import Job
from paceline.job.partition import Partition, Shares
from paceline.planning.limits import no_automatic_balance, no_balance
from paceline.planning.plan import Plan
from paceline.run.record.recorder import Callback, Events, StepInfo
from paceline.run.recovery.balance import Balance, Move


class Balancing(Callback):
    """Deals the global batches by the measured speeds of the replicas (`balance=` of the plan).

    All ranks know the busy times of all, so they decide alike and exchange nothing. The global batches stay as they
    are, and gradients are weighed by samples.

    Attributes:
        off: why shares stay as they are; "" where they follow the speeds.
    """

    def __init__(self, engine: Engine, job: Job, events: Events, epoch_steps: int) -> None:
        self.engine, self.events, self.epoch_steps = engine, events, epoch_steps
        self.off = why_off(engine.plan, job)
        partition = engine.loader.partition
        assert isinstance(partition, Partition)
        self.partition, self.replicas = partition, engine.plan.dp
        self.base = partition.shares(0)
        self._ranks = engine.plan.ranks // engine.plan.dp  # of each replica
        self.balance = Balance(self.base, self.replicas, _least(self.base, engine.plan.microbatches))
        self._last = 0  # step
        self._slow: list[int] = []  # replicas

    def after_step(self, info: StepInfo) -> str | None:
        """See `Callback`; decides on the shares of coming steps."""
        step = info.result.step
        if self.off or len(info.busy_s) != self._ranks * self.replicas:
            return None
        if step <= self._last:  # after a rewind
            self.balance.forget()
        self._last = step
        shares, newest = self._in_force(step), self.partition.changes.newest or self.base
        if info.result.samples != self.partition.global_batch or shares != newest:
            return None
        if move := self.balance.step(step, shares, self._by_replica(info.busy_s)):
            self._move(move)
        return None

    def at_even_shares(self, info: StepInfo) -> Sequence[float]:
        """Busy seconds of every rank, as they would be if shares had not been moved."""
        shares = self._in_force(info.result.step)
        if shares == self.base or not info.busy_s:
            return info.busy_s
        scale = [base / own for base, own in zip(self._sums(self.base), self._sums(shares), strict=True)]
        return [busy_s * scale[rank // self._ranks] for rank, busy_s in enumerate(info.busy_s)]

    def _in_force(self, step: int) -> Shares:
        return self.partition.changes.at(divmod(step - 1, self.epoch_steps)) or self.base

    def _by_replica(self, busy_s: Sequence[float]) -> list[float]:
        """The slowest rank's of each replica, whose ranks are neighbours."""
        return [max(busy_s[i : i + self._ranks]) for i in range(0, len(busy_s), self._ranks)]

    def _sums(self, shares: Shares) -> list[int]:
        """Samples of each replica."""
        ranks = len(shares) // self.replicas
        return [sum(shares[i : i + ranks]) for i in range(0, len(shares), ranks)]

    def _move(self, move: Move) -> None:
        epoch, step = self.engine.loader.reshare(move.shares)
        batch, samples, hosts = self.partition.global_batch, self._sums(move.shares), self.engine.group.hosts
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
    """Reason why shares stay as they are; "" if they follow the speeds."""
    if plan.balance == "off":
        return "the plan says balance=off."
    weighted = job.partition.weights is not None
    if plan.balance == "on":
        return no_balance(plan, job.partition.kind) or ""
    return no_automatic_balance(plan, job.partition.kind, weighted) or ""


def _least(shares: Shares, microbatches: int) -> int:
    """Samples that a data-parallel rank keeps.

    Two for each microbatch where it had them, as batch norm needs.
    """
    return microbatches * (2 if min(shares) >= 2 * microbatches else 1)
