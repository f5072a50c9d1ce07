"""Advice on the largest useful global batch and its learning rate; never applied by itself.

The speed of a batch can be computed; how well it learns cannot, since the batch beyond which samples are wasted depends
on the noise of the gradients (McCandlish et al., 2018, arXiv:1812.06162). So the advice is an upper bound, with its
unknowns stated.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cluster.cluster import Cluster
from paceline.errors import PacelineError, PlanError
from paceline.job.job import Job
from paceline.planning.cost.layout import Prediction
from paceline.planning.explain.advice import Case, batch, what_if
from paceline.planning.plan import Plan
from paceline.units import percent

if TYPE_CHECKING:
    from paceline.planning.machines import Basis

# fraction of the best throughput: batches beyond the smallest one that reaches it gain next to nothing
USEFUL = 0.95
# least gain of throughput by a doubling; after two that gain less, no larger batch is tried
_LEAST_GAIN = 1.01
_MOST_DOUBLINGS = 10
_WITH_SQUARE_ROOT = ("adam", "adamw", "lamb")
_LEAST_WARM_UP = 10  # steps
# of an epoch: a batch that leaves fewer steps is not called useful, however fast
_FEWEST_STEPS = 20


@dataclass(frozen=True)
class BatchPoint:
    """A global batch and the best plan for it."""

    global_batch: int
    plan: Plan
    prediction: Prediction

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.prediction.throughput


@dataclass(frozen=True)
class BatchAdvice:
    """Advice on the global batch.

    Attributes:
        points: from small to large, with the job's own.
        now: the job's own.
        useful: the smallest batch with 95 % of the best throughput of all; a larger one is not worth its samples.
        rule: scaling of the learning rate with the batch: `linear` or `square root`.
        lr: learning rate for the useful batch.
        stopped: reason why no larger batch was tried.
        cautions: facts that cannot be known from shapes.
    """

    points: tuple[BatchPoint, ...]
    now: BatchPoint
    useful: BatchPoint
    rule: str
    lr: float
    stopped: str
    cautions: tuple[str, ...]

    @property
    def factor(self) -> float:
        """The useful batch over the job's own."""
        return self.useful.global_batch / self.now.global_batch

    @property
    def gain(self) -> float:
        """Relative gain of throughput by the useful batch over the job's own."""
        return self.useful.throughput / self.now.throughput - 1

    @property
    def keeps(self) -> bool:
        """True if the job's own batch is the useful one already."""
        return self.useful.global_batch == self.now.global_batch

    @property
    def lines(self) -> list[str]:
        """The advice in words."""
        if self.keeps:
            return [
                (
                    f"the global batch of {self.now.global_batch:,} is the useful one already: a larger one is "
                    "less than 5 % faster"
                )
            ]
        if self.factor < 1:
            return [
                f"a global batch of {self.useful.global_batch:,} is within 5 % as fast as the job's "
                f"{self.now.global_batch:,}; it makes "
                "more steps of as many samples, from which a model seldom learns less"
            ]
        return [
            f"a global batch of {self.useful.global_batch:,} instead of {self.now.global_batch:,}: "
            f"+{percent(self.gain)} samples a second, with learning rate {self.lr:.4g} ({self.rule} scaling)"
        ]

    def job(self, job: Job) -> Job:
        """The job with the useful batch, its learning rate, and as many samples as before.

        Values counted in steps are divided by the batch's factor.
        """
        steps = _StepCount(self.factor)
        warm_up = max(steps(job.schedule.warmup_steps) or 0, min(job.schedule.warmup_steps, _LEAST_WARM_UP))
        # keeps the first steps from diverging (Goyal et al., 2017)
        if self.rule == "linear" and self.factor > 1:
            warm_up = max(warm_up, _LEAST_WARM_UP)
        decay = steps(job.schedule.decay_steps)
        stop = job.stop.model_copy(update={"steps": steps(job.stop.steps)})
        schedule = job.schedule.model_copy(
            update={
                "warmup_steps": warm_up,
                "decay_steps": decay and max(decay, warm_up + 1),
                "milestones": tuple(steps(step) or 1 for step in job.schedule.milestones),
            }
        )
        return job.model_copy(
            update={
                "global_batch": self.useful.global_batch,
                "optimizer": job.optimizer.model_copy(update={"lr": self.lr}),
                "schedule": schedule,
                "stop": stop,
                "evaluate": job.evaluate.model_copy(update={"every_steps": steps(job.evaluate.every_steps)}),
                "checkpoint": job.checkpoint.model_copy(update={"every_steps": steps(job.checkpoint.every_steps)}),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The advice as plain JSON values."""
        return {
            "now": self.now.global_batch,
            "useful": self.useful.global_batch,
            "gain": self.gain,
            "lr": self.lr,
            "rule": self.rule,
            "stopped": self.stopped,
            "cautions": list(self.cautions),
            "batches": [
                {
                    "global_batch": point.global_batch,
                    "plan": str(point.plan),
                    "step_time_s": point.prediction.step_time_s,
                    "throughput": point.throughput,
                    "memory_bytes": point.prediction.memory_bytes,
                }
                for point in self.points
            ],
        }


def advise(job: Job, cluster: Cluster, calibration: Basis | None = None) -> BatchAdvice:
    """Find the largest useful global batch.

    The job's own batch, its halves and its doubles are tried with their best plans, as long as those are faster.

    Raises:
        PlanError: no plan can run the job's own batch.
    """
    case = Case(job, cluster, calibration)
    now, samples = _point(case, job.global_batch), _samples(job)
    larger, stopped = _larger(case, now, samples)
    best = max(point.throughput for point in (now, *larger))
    smaller = _smaller(case, now, enough=USEFUL * best)
    points = (*smaller, now, *larger)
    useful = next(point for point in points if point.throughput >= USEFUL * best)
    factor = useful.global_batch / now.global_batch
    rule = "square root" if job.optimizer.name in _WITH_SQUARE_ROOT else "linear"
    lr = job.optimizer.lr * (math.sqrt(factor) if rule == "square root" else factor)
    unknown = (
        ()
        if samples
        else ("how many samples the data has is not known here; a batch beyond a small part of them is too large",)
    )
    return BatchAdvice(points, now, useful, rule, float(f"{lr:.4g}"), stopped, (*unknown, *_cautions(job, factor)))


def _samples(job: Job) -> int | None:
    """Number of training samples; None if the data is not available, or only planned for."""
    if job.model.transformer is not None:
        return job.data.limit
    # the data is elsewhere, or a stream without a length
    with suppress(PacelineError, ImportError, TypeError):
        data: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
        return len(data)
    return job.data.limit


def _point(case: Case, global_batch: int) -> BatchPoint:
    """Best plan for a batch.

    Raises:
        PlanError: no plan can run it.
    """
    best, error = what_if(case, batch(global_batch))
    if error is not None:
        raise error
    assert best is not None
    return BatchPoint(global_batch, best.plan, best.prediction)


def _larger(case: Case, now: BatchPoint, samples: int | None) -> tuple[list[BatchPoint], str]:
    """Doubles of the batch, until two gained next to nothing, and the end's reason."""
    found, idle, best = [now], 0, now.throughput
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        larger = case.job.global_batch * 2**doubling
        if samples is not None and larger * _FEWEST_STEPS > samples:
            return found[1:], f"an epoch of {samples:,} samples would have fewer than {_FEWEST_STEPS} steps"
        try:
            point = _point(case, larger)
        except PlanError as error:
            return found[1:], f"no plan can run {larger:,}: {str(error).splitlines()[0]}"
        found.append(point)
        idle = 0 if point.throughput > _LEAST_GAIN * best else idle + 1
        best = max(best, point.throughput)
        if idle == 2:
            return found[1:], "two more doublings are hardly faster"
    return found[1:], f"{2**_MOST_DOUBLINGS:,} times the job's batch is as far as one looks"


def _smaller(case: Case, now: BatchPoint, enough: float) -> list[BatchPoint]:
    """Halves of the batch with enough throughput, and the first one without."""
    found: list[BatchPoint] = []
    smaller = case.job.global_batch
    while (found[-1] if found else now).throughput >= enough and smaller % 2 == 0:
        smaller //= 2
        try:
            found.append(_point(case, smaller))
        # too few samples for the devices
        except PlanError:
            break
    return found[::-1]


class _StepCount:
    """Conversion of a number of steps to one that sees as many samples. The result is at least 1."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, steps: int | None) -> int | None:
        return steps and max(1, math.ceil(steps / self.factor))


def _cautions(job: Job, factor: float) -> list[str]:
    """Facts that the user must know before accepting the advice."""
    cautions = [
        "how large a batch still learns as much from each sample (the critical batch size) depends on the noise of the "
        "gradients and cannot be known from shapes (McCandlish et al., 2018, arXiv:1812.06162): compare the losses "
        "after equal samples first"
    ]
    if factor == 1:
        return cautions
    if job.optimizer.name not in _WITH_SQUARE_ROOT:
        return [
            "linear scaling of the learning rate holds for SGD with warm-up and up to some batch only, 8,192 images "
            "for ResNet-50 (Goyal et al., 2017, arXiv:1706.02677)",
            *cautions,
        ]
    beta = 1 - factor * (1 - job.optimizer.betas[1])
    moved = (
        f", and beta2 from {job.optimizer.betas[1]:g} to {beta:.4g}"
        if 0 < beta < 1
        else ", and the betas with it, which has no room here"
    )
    return [
        "square-root scaling of the learning rate is for Adam and its like where noise rules the gradients (Malladi et "
        "al., 2022, arXiv:2205.10287), whose rule also moves eps to "
        f"{job.optimizer.eps / math.sqrt(factor):.2g}{moved}: not changed here",
        *cautions,
    ]
