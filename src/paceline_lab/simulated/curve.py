"""Predicted scaling of a job: the best plan for each number of devices, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.explain.explain import costs_of, interval_s
from paceline.planning.explain.what_if import Case, best_on, with_devices
from paceline.planning.search.result import Candidate
from paceline.stats import Interval
from paceline_lab.scaling.result import Scaling
from paceline_lab.simulated.chance import HIGH, Floats, Jitter, ScaleError, drawn_goodput, interval_of
from paceline_lab.simulated.published import held_against

if TYPE_CHECKING:
    from paceline.planning.machines import Basis

# Unexpected interruptions of Llama 3's pre-training: 419 in 54 days on 2,048 hosts (arXiv:2407.21783, section 3.3.4)
PUBLISHED_FAILURES = 419 / 54 / 2048
_STEPS = 40  # of which a draw takes the slowest ranks' mean
_LONGEST_S = 30 * 86_400.0  # of a training whose failures are drawn
_NORMAL_HIGH = NormalDist().inv_cdf(HIGH)


@dataclass(frozen=True)
class Chances:
    """Distributions of all that is drawn at random.

    Attributes:
        failures_per_host_day: of each host; 0 for none.
        jitter: of a rank's step times; None where nothing is known, and published runs stand for it.
        scale: error of predicted scaling.
        seed, draws: of the generator.
    """

    scale: ScaleError
    failures_per_host_day: float = PUBLISHED_FAILURES
    jitter: Jitter | None = None
    seed: int = 0
    draws: int = 1000

    @classmethod
    def published(
        cls, failures_per_host_day: float | None = None, jitter: Jitter | None = None, seed: int = 0
    ) -> Chances:
        """Chances by what is published."""
        rate = PUBLISHED_FAILURES if failures_per_host_day is None else failures_per_host_day
        return cls(ScaleError.of(held_against()), rate, jitter, seed)


@dataclass(frozen=True)
class Point:
    """The job on one number of devices, with its best plan there. Intervals are of 80 %.

    Attributes:
        candidate: the best plan; None if none fits, and `why` says why.
        step_time_s, throughput: while nothing fails.
        speedup: of the throughput, relative to the fewest devices that fit.
        efficiency: speedup over how many times the devices are.
        goodput: share of the wall-clock in steps that count, with failures and the job's own checkpoints.
        best_goodput: the same with checkpoints as often as loses the least, which is every `best_every_steps`.
    """

    devices: int
    hosts: int
    global_batch: int
    candidate: Candidate | None = None
    why: str = ""
    step_time_s: Interval | None = None
    throughput: Interval | None = None
    speedup: Interval | None = None
    efficiency: Interval | None = None
    goodput: Interval | None = None
    best_goodput: float | None = None
    best_every_steps: int | None = None

    @property
    def fits(self) -> bool:
        """True if a plan fits."""
        return self.candidate is not None

    @property
    def used(self) -> int:
        """Devices that the best plan uses, on CPUs with its threads; 0 without one."""
        if self.candidate is None:
            return 0
        layout = self.candidate.layout
        threads = max(layout.threads, 1) if layout.machines.device.is_core else 1
        return min(self.candidate.plan.ranks * threads, self.devices)


@dataclass(frozen=True)
class SimulatedCurve:
    """Points of one kind of scaling, from the fewest devices to all of the cluster."""

    scaling: Scaling
    points: tuple[Point, ...]

    @property
    def fitting(self) -> list[Point]:
        """The points with a plan; never empty."""
        return [point for point in self.points if point.fits]

    @property
    def base(self) -> Point:
        """The fewest devices that fit, which speedups are against."""
        return self.fitting[0]

    @property
    def last(self) -> Point:
        """The most devices with a plan."""
        return self.fitting[-1]


def simulated_curve(
    job: Job,
    cluster: Cluster,
    chances: Chances,
    calibration: Basis | None = None,
    *,
    per_device: float | None = None,
) -> SimulatedCurve:
    """Curve of a job up to a cluster; weak scaling if `per_device` (samples) is given.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue.
        PlanError: the job fits on no number of these devices.
    """
    found = _best(job, cluster, calibration, per_device)
    points = [point for _, point in found]
    if not any(point.fits for point in points):
        raise PlanError(points[-1].why)
    base = next(point for point in points if point.fits)
    draw = _Draws(chances)
    return SimulatedCurve(
        "strong" if per_device is None else "weak",
        tuple(draw.of(job, on, point, base) if point.fits else point for on, point in found),
    )


def per_device(strong: SimulatedCurve) -> float:
    """Samples of each device in the best plan on the whole cluster, for weak scaling.

    Devices that the plan leaves unused do not count.
    """
    return strong.last.global_batch / strong.last.used


def counts(cluster: Cluster) -> list[int]:
    """Numbers of devices that double up to all of the cluster."""
    each, hosts = len(cluster.hosts[0].devices), len(cluster.hosts)
    inside = [2**power for power in range(each.bit_length()) if 2**power < each]
    return [*inside, *(each * 2**power for power in range(hosts.bit_length()) if 2**power < hosts), each * hosts]


def _best(
    job: Job, cluster: Cluster, calibration: Basis | None, per_device: float | None
) -> list[tuple[Cluster, Point]]:
    """The best plan for each number of devices."""
    sizes = counts(cluster)
    batches = [job.global_batch if per_device is None else max(1, round(per_device * count)) for count in sizes]

    def searched(at: int) -> tuple[Cluster, Point]:
        case = Case(job.model_copy(update={"global_batch": batches[at]}), cluster, calibration)
        [(on, outcome)] = best_on(case, [sizes[at] / sizes[-1]])
        return on, Point(sizes[at], len(on.hosts), batches[at], outcome.best, outcome.why)

    if per_device is None and cluster.has_accelerators:
        return _squeezed(cluster, sizes, searched)
    return [searched(at) for at in range(len(sizes))]


def _squeezed(
    cluster: Cluster, sizes: list[int], searched: Callable[[int], tuple[Cluster, Point]]
) -> list[tuple[Cluster, Point]]:
    """All sizes, without a search between two that have the same best plan.

    What can run on fewer devices can run as fast on more, so the best plan never gets slower; where it is the same on
    few and on many, it is the same between them.
    """
    found = {at: searched(at) for at in (0, len(sizes) - 1)}

    def fill(low: int, high: int) -> None:
        if high - low < 2:
            return
        few, many = found[low][1], found[high][1]
        if few.candidate and many.candidate and few.candidate.plan == many.candidate.plan:
            for at in range(low + 1, high):
                on = with_devices(cluster, sizes[at] / sizes[-1])
                assert on is not None
                found[at] = on, replace(few, devices=sizes[at], hosts=len(on.hosts))
            return
        middle = (low + high) // 2
        found[middle] = searched(middle)
        fill(low, middle)
        fill(middle, high)

    fill(0, len(sizes) - 1)
    return [found[at] for at in range(len(sizes))]


class _Draws:
    """Draws that all points of a curve share, so that their errors go together."""

    def __init__(self, chances: Chances) -> None:
        self.chances, self.random = chances, np.random.default_rng(chances.seed)
        self.model = self.random.standard_normal(chances.draws)  # error of the cost model, common to all points
        self.scale = chances.scale.draw(chances.draws, self.random)
        self.usual = chances.scale.quantile(0.5)
        if chances.jitter is not None:  # which stands for what published runs lose in the middle
            self.scale, self.usual = self.scale - self.usual, 0.0

    def of(self, job: Job, on: Cluster, point: Point, base: Point) -> Point:
        """A point with its figures."""
        assert point.candidate is not None
        assert base.candidate is not None
        best, first = point.candidate.prediction, base.candidate.prediction
        grown = math.sqrt(max(math.log2(point.used / base.used), 0.0))
        slow, usual_slow = self._slowest(point.candidate.plan.ranks)
        slow_base, usual_slow_base = self._slowest(base.candidate.plan.ranks)
        ratio, times = best.throughput / first.throughput, point.devices / base.devices
        speedup = ratio * math.exp(self.usual * grown) * usual_slow_base / usual_slow
        # the base is what the others are relative to, and has no error of its own
        speedups = ratio * np.exp(self.scale * grown) * (slow_base / slow if point is not base else 1.0)
        rate = best.throughput * math.exp(self.usual * grown) / usual_slow
        wide = math.log(point.candidate.interval.high_s / point.candidate.interval.low_s) / 2 / _NORMAL_HIGH
        rates = best.throughput * np.exp(self.scale * grown - wide * self.model) / slow
        step_s = point.global_batch / rate
        return replace(
            self._with_failures(job, on, point, step_s),
            step_time_s=interval_of(point.global_batch / rates, step_s),
            throughput=interval_of(rates, rate),
            speedup=interval_of(speedups, speedup),
            efficiency=interval_of(speedups / times, speedup / times),
        )

    def _slowest(self, ranks: int) -> tuple[Floats, float]:
        """Draws of the slowest rank's time over the mean, and their mean."""
        jitter = self.chances.jitter or Jitter()
        drawn = jitter.slowest(ranks, (self.chances.draws, _STEPS), np.random.default_rng(self.chances.seed))
        return drawn.mean(axis=1), float(drawn.mean())

    def _with_failures(self, job: Job, on: Cluster, point: Point, step_s: float) -> Point:
        rate, candidate = self.chances.failures_per_host_day, point.candidate
        if not rate or candidate is None:
            return point
        costs = costs_of(job, on, candidate, rate, step_s / candidate.prediction.step_time_s)
        wall_s = _LONGEST_S if job.stop.steps is None else min(job.stop.steps * step_s, _LONGEST_S)
        own = interval_s(job, costs)
        drawn = drawn_goodput(costs, own, wall_s, self.chances.draws, np.random.default_rng(self.chances.seed))
        best, every = costs.goodput(costs.best_every_steps * step_s), costs.best_every_steps
        return replace(
            point, goodput=interval_of(drawn, float(drawn.mean())), best_goodput=best, best_every_steps=every
        )
