"""Failures in the explanation of a plan: goodput, checkpoint interval, recovery in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.cost import constants
from paceline.planning.cost.failures import FailureCosts, failure_costs
from paceline.planning.plan import Plan
from paceline.planning.search.result import Candidate
from paceline.units import bandwidth, count, seconds

_FAR_OFF = 0.02  # of the wall-clock: an interval of checkpoints that loses so much more than the best is told
_WORTH = 0.01  # of the throughput: less is no reason for another plan


@dataclass(frozen=True)
class FailureOutlook:
    """Predicted effect of failures on the best plan.

    Attributes:
        per_host_day: failures of a host in a day.
        hosts: hosts in use.
        costs: of the best plan.
        interval_s: seconds of steps between the job's checkpoints.
        every_steps: the job's own, if its checkpoints are counted in steps.
        better: the plan that trains more samples in the end than the best one, by its goodput; None if that is best.
    """

    per_host_day: float
    hosts: int
    costs: FailureCosts
    interval_s: float
    every_steps: int | None = None
    better: Plan | None = None

    @property
    def goodput(self) -> float:
        """Predicted goodput with the job's checkpoints."""
        return self.costs.goodput(self.interval_s)

    @property
    def best_goodput(self) -> float:
        """Predicted goodput with the best interval."""
        return self.costs.goodput(self.best_s)

    @property
    def best_s(self) -> float:
        """Seconds of steps between checkpoints that lose the least."""
        return self.costs.best_every_steps * self.costs.step_s

    @property
    def rows(self) -> list[tuple[str, float, str]]:
        """Ways to go on after a failure: name, goodput, and its basis."""
        costs, best_s = self.costs, self.best_s
        restart = f"a failure costs {seconds(costs.restart_s)} and the steps since the newest checkpoint"
        rows = [
            ("restart, checkpoints as in the job", costs.restarting(self.interval_s), f"{self._now}; {restart}"),
            (
                "restart, the best interval",
                costs.restarting(best_s),
                f"every {count(costs.best_every_steps, 'step')} ({seconds(best_s)}); a checkpoint is written in "
                f"{seconds(costs.write_s)} and costs {seconds(costs.stall_s)} of training",
            ),
        ]
        if costs.in_place:
            about = f"other hosts hold the same state; a failure costs a step and the gap, {seconds(costs.failure_s)}"
            rows.append(("in place, by the replicas", costs.recovering(self.interval_s), about))
        elif costs.copied_s:
            about = (
                f"other hosts hold copies, {seconds(costs.copied_s)} apart; a failure costs the wait for a host and "
                f"the steps since the newest, {seconds(costs.failure_s)}"
            )
            rows.append(("in place, from copies in memory", costs.recovering(self.interval_s), about))
        return rows

    @property
    def lines(self) -> list[str]:
        """Sentences on what to change, and on what is assumed."""
        costs, told = self.costs, []
        if (lost := self.best_goodput - self.goodput) > _FAR_OFF:
            told.append(
                f"{self._now} loses {100 * lost:.1f} points of goodput to checkpoint.every_steps: "
                f"{costs.best_every_steps}"
            )
        if self.better is not None:
            told.append(f"with these failures {self.better} trains more samples in the end, goodput counted in")
        if not costs.goes_on:
            told.append("nothing recovers in place: the loss of one host takes a part of the state that no other has")
        told.append(
            f"assumed: {bandwidth(constants.STORAGE)} of storage for each host, {constants.RESTART_S:g} s to start "
            f"again, {constants.RECOVERY_S:g} s to go on in place, and a spare host"
        )
        return told

    @property
    def _now(self) -> str:
        if self.every_steps is not None:
            return f"checkpoint.every_steps: {self.every_steps}"
        return f"checkpoint.every_seconds: {self.interval_s:g}"

    def to_json(self) -> dict[str, Any]:
        """The outlook as plain JSON values."""
        return {
            "failures_per_host_day": self.per_host_day,
            "hosts": self.hosts,
            **asdict(self.costs),
            "goodput": self.goodput,
            "goodput_restarting": self.costs.restarting(self.interval_s),
            "goodput_in_place": self.costs.recovering(self.interval_s) if self.costs.goes_on else None,
            "best_goodput": self.best_goodput,
            "best_every_steps": self.costs.best_every_steps,
            "best_interval_s": self.best_s,
            "better_plan": str(self.better) if self.better else None,
        }


def outlook(job: Job, cluster: Cluster, found: Sequence[Candidate]) -> FailureOutlook | None:
    """Failures of the plans found, best first; None where the cluster names no rate."""
    rate = cluster.failures_per_host_day
    if not rate:
        return None

    def effective(candidate: Candidate) -> float:
        costs = costs_of(job, cluster, candidate, rate)
        return candidate.prediction.throughput * costs.goodput(costs.best_interval_s)

    best = found[0]
    costs, most = costs_of(job, cluster, best, rate), max(found, key=effective)
    return FailureOutlook(
        per_host_day=rate,
        hosts=sum(ranks > 0 for ranks in cluster.ranks_per_host(best.plan.ranks)),
        costs=costs,
        interval_s=interval_s(job, costs),
        every_steps=job.checkpoint.every_steps,
        better=most.plan if effective(most) > (1 + _WORTH) * effective(best) else None,
    )


def costs_of(job: Job, cluster: Cluster, candidate: Candidate, rate: float, slowdown: float = 1.0) -> FailureCosts:
    """Costs of failures of a candidate.

    Args:
        rate: failures of a host in a day, above 0.
        slowdown: factor on the predicted step time.
    """
    placed = cluster.ranks_per_host(candidate.plan.ranks)
    copied = "copies" in candidate.prediction.memory
    step_s = slowdown * candidate.prediction.step_time_s
    costs = failure_costs(candidate.layout, step_s, rate, placed, copied=copied)
    copied_s = (job.checkpoint.memory_every_steps or 0) * costs.step_s
    return replace(costs, copied_s=copied_s) if costs.copied_s and copied_s else costs


def interval_s(job: Job, costs: FailureCosts) -> float:
    """Seconds of steps between the job's own checkpoints."""
    every = job.checkpoint.every_steps
    return every * costs.step_s if every is not None else job.checkpoint.every_seconds
