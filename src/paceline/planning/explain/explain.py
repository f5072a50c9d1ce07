"""Explanation of a plan: its time and memory, other plans, and helpful changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.cost import constants
from paceline.planning.cost.estimate import FailureCosts, failure_costs
from paceline.planning.cost.layout import PART_NAMES, PARTS
from paceline.planning.cost.memory import capacity_bytes
from paceline.planning.explain.advice import (
    Advice,
    Case,
    cut_by_speed,
    other_machines,
    other_trainings,
    weights_by_speed,
)
from paceline.planning.machines import Adjustment
from paceline.planning.plan import Plan
from paceline.planning.search.result import Candidate, SearchResult, figures
from paceline.units import bandwidth, count, percent, seconds

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration
    from paceline.planning.explain.questions import Answer
    from paceline.planning.explain.training_run import TrainingRun
    from paceline.planning.machines import Basis


# fraction of a step or of the memory below which a part is not listed
LEAST = 0.005


@dataclass(frozen=True)
class Portion:
    """Part of a step's time or of a rank's memory.

    `value` is in seconds or bytes. `share` is the fraction of the whole.
    """

    name: str
    value: float
    share: float


@dataclass(frozen=True)
class TrainingCost:
    """Cost of an amount of training, in the currency of the user's prices."""

    value: float
    of: str


@dataclass(frozen=True)
class Explanation:
    """All results that `paceline plan` reports on screen, in the HTML page and in JSON.

    Attributes:
        found: result of the search; `found.best[0]` is the recommended plan.
        changes: advice on other machines and batches, the largest gain first.
        trainings: advice on faster alternatives that change the training.
        weights: recommended `job.partition.weights`, which follow the speeds of the data-parallel ranks; None for equal
            shares.
        weights_gain: fraction of the step time that `weights` save.
        cut: recommended `Plan.cut`, the first block of every stage but the first; () if the default cut is as good.
        cut_gain: fraction of the step time that `cut` saves.
        notes: sentences that state what the prediction does not include.
        measured: True if the machines were measured; False if their figures come from the catalogue.
        run: prediction for a whole training of the requested amount; None if no amount was requested.
        answers: answers to the what-if questions, in the order of the questions.
    """

    job: Job
    cluster: Cluster
    found: SearchResult
    changes: tuple[Advice, ...] = ()
    trainings: tuple[Advice, ...] = ()
    weights: tuple[float, ...] | None = None
    weights_gain: float = 0.0
    cut: tuple[str, ...] = ()
    cut_gain: float = 0.0
    notes: tuple[str, ...] = ()
    measured: bool = False
    run: TrainingRun | None = None
    answers: tuple[Answer, ...] = ()

    @property
    def winner(self) -> Candidate:
        """The recommended plan."""
        return self.found.best[0]

    @property
    def time(self) -> tuple[Portion, ...]:
        """Parts of the recommended plan's step, in the order of `PARTS`."""
        return shares_of_time(self.winner)

    @property
    def memory(self) -> tuple[Portion, ...]:
        """Peak memory of the recommended plan for each of `HOLDERS`, the largest first."""
        return shares_of_memory(self.winner)

    @cached_property
    def failures(self) -> FailureOutlook | None:
        """Goodput under failures; None if the cluster states no failure rate."""
        return outlook(self.job, self.cluster, self.found.best)

    @property
    def tokens(self) -> int:
        """Number of tokens of one sample; 1 if a sample is not a sequence."""
        return self.winner.layout.trace.tokens

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device in bytes; on CPUs, each rank's share of the host memory."""
        return int(capacity_bytes(self.winner.layout))

    def cost(self, candidate: Candidate) -> TrainingCost | None:
        """Return the cost of training with a candidate, or None without prices.

        The cost is that of the whole run if the number of steps is known. Otherwise it is the cost of 1 billion tokens
        or 1 million samples.
        """
        if self.cluster.price_per_hour is None:
            return None
        of_step = candidate.prediction.step_time_s / 3600 * candidate.plan.ranks * self.cluster.price_per_hour
        of_sample = of_step / self.job.global_batch
        if self.job.stop.steps is not None:
            return TrainingCost(of_step * self.job.stop.steps, f"the run of {self.job.stop.steps:,} steps")
        if self.tokens > 1:
            return TrainingCost(of_sample / self.tokens * 1e9, "1 billion tokens")
        return TrainingCost(of_sample * 1e6, "1 million samples")

    @property
    def helps(self) -> list[Advice]:
        """All advice, the largest gain first.

        The list includes other machines and batches, other trainings, weights and cuts.
        """
        rows = [*self.changes, *(replace(one, best=None) for one in self.trainings)]
        if self.weights:
            weights = ", ".join(f"{weight:.3g}" for weight in self.weights)
            but = f"in the job: partition: {{weights: [{weights}]}}"
            rows.append(Advice("shares of the batch by speed", gain=_grown(self.weights_gain), but=but))
        if self.cut:
            but = f"in the plan: cut={','.join(self.cut)}"
            rows.append(Advice("stages cut by speed", gain=_grown(self.cut_gain), but=but))
        return sorted(rows, key=lambda row: -2.0 if row.gain is None else row.gain, reverse=True)

    @property
    def limit(self) -> str:
        """One sentence that names the largest parts of the recommended plan's step."""
        useful = sum(part.value for part in self.time if part.name == "compute")
        others = sorted(
            (part for part in self.time if part.name != "compute" and part.share >= LEAST), key=lambda part: -part.share
        )
        if not others:
            return "the step consists of computation only: only faster devices or more devices help"
        lost = " and ".join(f"{PART_NAMES[part.name]} ({percent(part.share)})" for part in others[:2])
        return (
            f"computing is {percent(useful / self.winner.prediction.step_time_s)} of the step; the "
            f"largest other parts: {lost}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the whole explanation as a dictionary for JSON."""
        found = self.found
        return {
            "job": self.job.name,
            "global_batch": self.job.global_batch,
            "cluster": self.cluster.describe(),
            "devices": self.winner.layout.machines.devices,
            "price_per_device_hour": self.cluster.price_per_hour,
            "measured": self.measured,
            "parameters": self.winner.layout.trace.parameters,
            "tokens_per_sample": self.tokens,
            "plan": str(self.winner.plan),
            "candidates": [self._candidate(candidate) for candidate in found.best],
            "excluded": [{"what": e.what, "reason": e.reason, "plans": e.plans} for e in found.excluded],
            "search": {
                "considered": found.considered,
                "evaluated": found.evaluated,
                "pruned": found.pruned,
                "gap": found.gap,
                "seconds": found.seconds,
            },
            "partition_weights": list(self.weights) if self.weights else None,
            "partition_weights_gain": self.weights_gain,
            "cut": ",".join(self.cut) or None,
            "cut_gain": self.cut_gain,
            "what_would_help": [change.to_json() for change in self.changes],
            "faster_but": [{"change": one.what, "gain": one.saved, "but": one.but} for one in self.trainings],
            "failures": self.failures.to_json() if self.failures else None,
            "training": self.run.to_json() if self.run else None,
            "what_if": [answer.to_json() for answer in self.answers],
            "notes": list(self.notes),
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        prediction, cost = candidate.prediction, self.cost(candidate)
        return figures(candidate) | {
            "why": candidate.why,
            "interval_rests_on": candidate.interval.rests_on,
            "tokens_per_s": prediction.throughput * self.tokens if self.tokens > 1 else None,
            "cost": None if cost is None else cost.value,
            "cost_of": None if cost is None else cost.of,
            "fits": prediction.fits,
            "breakdown_s": dict(prediction.breakdown),
            "memory_by_holder_bytes": dict(prediction.memory),
            "notes": list(prediction.notes),
        }


def explain(
    job: Job, cluster: Cluster, found: SearchResult, calibration: Basis | None = None, *, what_would_help: bool = True
) -> Explanation:
    """Explain the result of a search.

    Args:
        what_would_help: True also predicts the gain of other machines, batches and trainings. This takes several times
            as long as the search.

    Raises:
        PlanError: no plan was found.
    """
    if not found.best:
        reasons = "\n".join(f"{excluded.what}: {excluded.reason}" for excluded in found.excluded)
        raise PlanError(
            "plan.none_can_run",
            "no plan can run {job} on {cluster}{reasons}",
            job=job.name,
            cluster=cluster.name,
            reasons=f":\n{reasons}" if reasons else "",
        )
    best, case = found.best[0], Case(job, cluster, calibration)
    calibrated = None if isinstance(calibration, Adjustment) else calibration
    weights, weights_gain = weights_by_speed(case, best) if what_would_help else (None, 0.0)
    cut, cut_gain = cut_by_speed(case, best) if what_would_help else ((), 0.0)
    return Explanation(
        job=job,
        cluster=cluster,
        found=found,
        changes=other_machines(case, found) if what_would_help else (),
        trainings=other_trainings(case, best) if what_would_help else (),
        weights=weights,
        weights_gain=weights_gain,
        cut=cut,
        cut_gain=cut_gain,
        notes=_notes(best, calibrated),
        measured=calibrated is not None,
    )


def shares_of_time(candidate: Candidate) -> tuple[Portion, ...]:
    """Return the parts of a candidate's step that take time, in the order of `PARTS`.

    Measurements can make a part negative. Such a part is subtracted from `compute`, so the parts sum to the step time.
    """
    prediction = candidate.prediction
    parts = {part: prediction.breakdown.get(part, 0.0) for part in PARTS}
    parts["compute"] += sum(seconds for seconds in parts.values() if seconds < 0)
    return tuple(
        Portion(part, seconds, seconds / prediction.step_time_s) for part, seconds in parts.items() if seconds > 0
    )


def shares_of_memory(candidate: Candidate) -> tuple[Portion, ...]:
    """Return the peak memory of a candidate for each of `HOLDERS`, the largest first."""
    prediction = candidate.prediction
    held = sorted(prediction.memory.items(), key=lambda entry: -entry[1])
    return tuple(Portion(name, size, size / (prediction.memory_bytes or 1)) for name, size in held if size > 0)


def _notes(best: Candidate, calibration: Calibration | None) -> tuple[str, ...]:
    basis = "measured on these machines" if calibration else "from the catalogue, not measured"
    always = (
        f"every figure is predicted; the speeds of devices and links are {basis}",
        "the step does not include waiting for data, evaluations or checkpoints",
    )
    return tuple(
        dict.fromkeys(
            (*best.layout.trace.notes, *best.prediction.notes, *(calibration.notes if calibration else ()), *always)
        )
    )


def _grown(saved: float) -> float:
    """Convert a saved fraction of the step time to the relative gain in throughput."""
    return saved / (1 - saved)


# share of wall-clock time lost to the checkpoint interval, beyond the best interval, that is worth a remark
_FAR_OFF = 0.02
_WORTH = 0.01  # of the throughput; a smaller gain is no reason for another plan


@dataclass(frozen=True)
class FailureOutlook:
    """Predicted effect of failures on the best plan.

    Attributes:
        per_host_day: number of failures of one host per day.
        hosts: number of hosts in use.
        costs: costs of failures under the best plan.
        interval_s: checkpoint interval of the job, in seconds.
        every_steps: checkpoint interval of the job in steps; None if the job states it in seconds.
        better: plan that trains clearly more samples than the best plan if goodput is taken into account; None if there
            is no such plan.
    """

    per_host_day: float
    hosts: int
    costs: FailureCosts
    interval_s: float
    every_steps: int | None = None
    better: Plan | None = None

    @property
    def goodput(self) -> float:
        """Predicted goodput with the checkpoint interval of the job."""
        return self.costs.goodput(self.interval_s)

    @property
    def best_goodput(self) -> float:
        """Predicted goodput with the best checkpoint interval."""
        return self.costs.goodput(self.best_s)

    @property
    def best_s(self) -> float:
        """Checkpoint interval with the highest goodput, in seconds."""
        return self.costs.best_every_steps * self.costs.step_s

    @property
    def rows(self) -> list[tuple[str, float, str]]:
        """Table of the ways to continue after a failure.

        Each row has a name, the goodput, and the basis of the goodput.
        """
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
        """Sentences that recommend changes and state the assumptions."""
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
        """Return the outlook as a dictionary for JSON."""
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
    """Predict the effect of failures on the plans found by a search.

    The result is None if the cluster has no failure rate.
    """
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
    """Return the costs of failures under the plan of a candidate.

    Args:
        rate: number of failures of one host per day, above 0.
        slowdown: factor by which the predicted step time is multiplied.
    """
    placed = cluster.ranks_per_host(candidate.plan.ranks)
    copied = "copies" in candidate.prediction.memory
    step_s = slowdown * candidate.prediction.step_time_s
    costs = failure_costs(candidate.layout, step_s, rate, placed, copied=copied)
    copied_s = (job.checkpoint.memory_every_steps or 0) * costs.step_s
    return replace(costs, copied_s=copied_s) if costs.copied_s and copied_s else costs


def interval_s(job: Job, costs: FailureCosts) -> float:
    """Return the checkpoint interval of the job, in seconds."""
    every = job.checkpoint.every_steps
    return every * costs.step_s if every is not None else job.checkpoint.every_seconds
