"""Predicted scaling of a job: the best plan and its figures for each device count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.cost.layout import PART_NAMES
from paceline.planning.explain.advice import Case, best_on, with_devices
from paceline.planning.explain.explain import costs_of, interval_s
from paceline.planning.plan import Plan
from paceline.planning.search.result import Candidate
from paceline.stats import Interval
from paceline.text import listed
from paceline.units import count, digits, percent
from paceline_lab.scaling.result import Scaling
from paceline_lab.simulated.measured_here import (
    HIGH,
    Floats,
    Jitter,
    ScaleError,
    drawn_goodput,
    held_against,
    interval_of,
)

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


# Llama 3's pre-training had 419 unexpected interruptions in 54 days on 2,048 hosts (arXiv:2407.21783, section 3.3.4).
PUBLISHED_FAILURES = 419 / 54 / 2048
_STEPS = 40  # number of steps per draw over which the time of the slowest rank is averaged
_LONGEST_S = 30 * 86_400.0  # longest training, in seconds, for which failures are drawn
_NORMAL_HIGH = NormalDist().inv_cdf(HIGH)


@dataclass(frozen=True)
class Chances:
    """Random distributions that a simulation uses.

    Attributes:
        failures_per_host_day: mean number of failures of a host per day; 0 disables failures.
        jitter: distribution of a rank's step times. If None, `scale` covers the effect of slow ranks.
        scale: distribution of the error of predicted scaling.
        seed: seed of the random generator.
        draws: number of random draws for each point.
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
        """Return distributions that are based on published measurements."""
        rate = PUBLISHED_FAILURES if failures_per_host_day is None else failures_per_host_day
        return cls(ScaleError.of(held_against()), rate, jitter, seed)


@dataclass(frozen=True)
class Point:
    """Prediction for a job on a given number of devices, with the best plan.

    Each interval contains the true value with a probability of 80 %.

    Attributes:
        candidate: best plan with its prediction; None if no plan fits the memory.
        why: reason why no plan fits; empty if a plan fits.
        step_time_s: seconds per step, without failures.
        throughput: samples per second, without failures.
        speedup: throughput divided by the throughput on the smallest number of devices for which a plan fits.
        efficiency: speedup divided by the factor by which the number of devices grows.
        goodput: fraction of wall-clock time in steps whose result is kept, with failures and the job's checkpoints.
        best_goodput: goodput with the checkpoint interval that loses the least time.
        best_every_steps: checkpoint interval, in steps, that loses the least time.
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
        """True if a plan fits the memory of the devices."""
        return self.candidate is not None

    @property
    def used(self) -> int:
        """Number of devices that the best plan uses; 0 without a plan. On CPUs, every thread uses one core."""
        if self.candidate is None:
            return 0
        layout = self.candidate.layout
        threads = max(layout.threads, 1) if layout.machines.device.is_core else 1
        return min(self.candidate.plan.ranks * threads, self.devices)


@dataclass(frozen=True)
class SimulatedCurve:
    """Points of strong or weak scaling, from the fewest devices to the whole cluster."""

    scaling: Scaling
    points: tuple[Point, ...]

    @property
    def fitting(self) -> list[Point]:
        """Points that have a plan; there is at least one."""
        return [point for point in self.points if point.fits]

    @property
    def base(self) -> Point:
        """Point with the fewest devices that have a plan, the baseline of all speedups."""
        return self.fitting[0]

    @property
    def last(self) -> Point:
        """Point with the most devices that have a plan."""
        return self.fitting[-1]


def simulated_curve(
    job: Job, cluster: Cluster, chances: Chances, calibration: Basis | None = None, *, per_device: float | None = None
) -> SimulatedCurve:
    """Compute the scaling curve of a job, from few devices to a whole cluster.

    Args:
        per_device: samples per device for weak scaling; None for strong scaling.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue.
        PlanError: no plan fits the job on any number of these devices.
    """
    found = _best(job, cluster, calibration, per_device)
    points = [point for _, point in found]
    if not any(point.fits for point in points):
        raise PlanError("bench.no_plan", "{reason}", reason=points[-1].why)
    base = next(point for point in points if point.fits)
    draw = _Draws(chances)
    return SimulatedCurve(
        "strong" if per_device is None else "weak",
        tuple(draw.of(job, on, point, base) if point.fits else point for on, point in found),
    )


def per_device(strong: SimulatedCurve) -> float:
    """Return the batch size per device at the largest point of a strong curve.

    Devices that the best plan does not use are not counted.
    """
    return strong.last.global_batch / strong.last.used


def counts(cluster: Cluster) -> list[int]:
    """List device counts that double from one device to the whole cluster."""
    each, hosts = len(cluster.hosts[0].devices), len(cluster.hosts)
    inside = [2**power for power in range(each.bit_length()) if 2**power < each]
    return [*inside, *(each * 2**power for power in range(hosts.bit_length()) if 2**power < hosts), each * hosts]


def _best(
    job: Job, cluster: Cluster, calibration: Basis | None, per_device: float | None
) -> list[tuple[Cluster, Point]]:
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
    """Find the points of all sizes; skip searches between sizes with equal best plans.

    A plan for fewer devices also runs on more devices, at the same speed. So if two sizes have the same best plan, all
    sizes between them have this plan as well.
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
    """Random draws that all points of a curve share, so that their errors are correlated."""

    def __init__(self, chances: Chances) -> None:
        self.chances, self.random = chances, np.random.default_rng(chances.seed)
        self.model = self.random.standard_normal(chances.draws)  # error of the cost model, which all points share
        self.scale = chances.scale.draw(chances.draws, self.random)
        self.usual = chances.scale.quantile(0.5)
        if chances.jitter is not None:  # the jitter replaces the median loss of published runs
            self.scale, self.usual = self.scale - self.usual, 0.0

    def of(self, job: Job, on: Cluster, point: Point, base: Point) -> Point:
        """Return a point with its predicted figures and their intervals."""
        assert point.candidate is not None
        assert base.candidate is not None
        best, first = point.candidate.prediction, base.candidate.prediction
        grown = math.sqrt(max(math.log2(point.used / base.used), 0.0))
        slow, usual_slow = self._slowest(point.candidate.plan.ranks)
        slow_base, usual_slow_base = self._slowest(base.candidate.plan.ranks)
        ratio, times = best.throughput / first.throughput, point.devices / base.devices
        speedup = ratio * math.exp(self.usual * grown) * usual_slow_base / usual_slow
        # the base point is the reference of all speedups, so its own speedup has no error
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
        """Draw the step time of the slowest rank, relative to the mean. Return the draws and their mean."""
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


PAYS = 0.5  # if the efficiency is lower, more devices are reported as not worthwhile
_WORTH_NAMING = 0.02  # minimum fraction of a step for a part to be named
_LOST = 0.02  # deviations from ideal efficiency up to this fraction are ignored
_FAR_OFF = 0.02  # minimum goodput gain for which another checkpoint interval is reported
_KIND = ("tp", "pp", "cp", "ep", "remat", "offload", "sequence", "schedule")  # plan keys whose changes are reported


def limit_of(point: Point, base: Point) -> str:
    """Name the parts of a step that take longer than ideal, largest excess first.

    The text is empty for the base point. If the plan leaves devices unused, the text explains why.
    """
    if point.candidate is None or base.candidate is None or point is base:
        return ""
    if point.used < point.devices:
        return f"only {_used(point)}: with more a step takes longer, as {_largest_part(point)} does not shrink"
    excess = excess_shares(point, base)
    named = [f"{PART_NAMES[part]} +{percent(share)}" for part, share in excess if share > _WORTH_NAMING]
    return " · ".join(named[:3]) or "no part is, by the cost model"


def limits(curve: SimulatedCurve) -> list[tuple[str, str]]:
    """List device counts with the text of `limit_of`, grouped if consecutive texts are equal."""
    grouped: list[tuple[list[Point], str]] = []
    for point in curve.fitting[1:]:
        words = limit_of(point, curve.base)
        if grouped and grouped[-1][1] == words:
            grouped[-1][0].append(point)
        else:
            grouped.append(([point], words))
    return [
        (f"{points[0].devices:,}" + (f" to {points[-1].devices:,}" if len(points) > 1 else ""), words)
        for points, words in grouped
    ]


def excess_shares(point: Point, base: Point) -> list[tuple[str, float]]:
    """Return how much longer than ideal each part of a step takes, largest first.

    Values are fractions of the step time. The ideal is the time of the part on the base point, scaled to the same
    number of samples per device.
    """
    assert point.candidate is not None
    assert base.candidate is not None
    now, before = point.candidate.prediction, base.candidate.prediction
    work = (point.global_batch / point.devices) / (base.global_batch / base.devices)
    shares = {part: (s - work * before.breakdown[part]) / now.step_time_s for part, s in now.breakdown.items()}
    return sorted(shares.items(), key=lambda one: -one[1])


def sentences(curve: SimulatedCurve) -> list[str]:
    """Describe a curve in sentences, most important first."""
    return [*_fits_from(curve), _headline(curve), *_pays(curve), *_limits(curve), *_changes(curve), *_failures(curve)]


def _fits_from(curve: SimulatedCurve) -> list[str]:
    too_few = [point for point in curve.points if point.devices < curve.base.devices]
    if not too_few:
        return []
    fits = f"It fits from {count(curve.base.devices, 'device')} on, which speedups are against."
    # the weak curve has the same reason, so only the strong curve states it
    return (
        [f"{fits} {'. '.join(too_few[-1].why.split('. ')[:2]).rstrip('.')}."] if curve.scaling == "strong" else [fits]
    )


def _headline(curve: SimulatedCurve) -> str:
    last, base = curve.last, curve.base
    if last is base:
        return f"It is predicted on {count(base.devices, 'device')} alone, so there is no curve."
    if last.used == base.used and curve.scaling == "strong":
        return f"More than {count(base.devices, 'device')} make it no faster, up to {last.devices:,}."
    assert last.speedup is not None
    assert last.efficiency is not None
    gain, share = last.speedup, last.efficiency
    than = "1 device" if base.devices == 1 else f"{base.devices:,}"
    samples = last.global_batch / last.devices
    each = f"{count(round(samples), 'sample') if samples >= 1 else f'{samples:.2g} samples'} per device"
    work = "" if curve.scaling == "strong" else f", at {each}"
    return (
        f"{last.devices:,} devices are predicted to be {digits(gain.middle)}× as fast as {than} "
        f"({digits(gain.low)} to {digits(gain.high)} with a probability of 80 %){work}: an efficiency of "
        f"{percent(share.middle, 0)} ({percent(share.low, 0)} to {percent(share.high, 0)})."
    )


def _pays(curve: SimulatedCurve) -> list[str]:
    known = [(point.devices, point.efficiency) for point in curve.fitting if point.efficiency is not None]
    paying = [devices for devices, share in known if share.middle >= PAYS]
    surely = [devices for devices, share in known if share.low >= PAYS]
    if len(known) < 2:
        return []
    if len(paying) == len(known):
        sure = "" if len(surely) == len(known) else f", by the low end of its interval up to {max(surely):,}"
        return [f"The efficiency is above 50 % on all of them{sure}."]
    return [f"It pays up to {count(max(paying), 'device')}: with more, the efficiency is below 50 %."]


def _limits(curve: SimulatedCurve) -> list[str]:
    last, base = curve.last, curve.base
    if last is base or last.efficiency is None:
        return []
    if last.used < last.devices:
        return [f"On {last.devices:,} devices {limit_of(last, base)}."]
    parts = [(PART_NAMES[part], share) for part, share in excess_shares(last, base) if share > _WORTH_NAMING]
    told = []
    if parts:
        named = listed([f"{name} ({percent(share)} of a step)" for name, share in parts[:3]])
        told.append(f"On {last.devices:,} devices what is more than ideal is {named}.")
    elif last.efficiency.middle < 1 - _LOST:
        told.append("What is lost is none of the parts that the cost model knows, but what published runs lose beside.")
    if last.efficiency.middle > 1 + _LOST:
        best = max(curve.fitting, key=lambda point: point.efficiency.middle if point.efficiency else 0.0)
        assert best.efficiency is not None
        share = last.efficiency.middle / best.efficiency.middle
        told.append(
            f"More than 100 % is no mistake: {_sacrifice(curve)} on {count(base.devices, 'device')}, and less or none "
            f"of that on more. Each device is fastest on {best.devices:,}; against these, {last.devices:,} reach "
            f"{percent(share, 0)}."
        )
    return told


def _sacrifice(curve: SimulatedCurve) -> str:
    """Name the parts whose fraction of a step is larger on the fewest devices."""
    assert curve.base.candidate is not None
    assert curve.last.candidate is not None
    before, now = curve.base.candidate.prediction, curve.last.candidate.prediction
    more = {
        PART_NAMES[part]: seconds / before.step_time_s - now.breakdown[part] / now.step_time_s
        for part, seconds in before.breakdown.items()
    }
    named = [name for name, share in sorted(more.items(), key=lambda one: -one[1]) if share > _WORTH_NAMING]
    return f"a step has {listed(named[:3])}" if named else "a step is slower"


def _changes(curve: SimulatedCurve) -> list[str]:
    kinds = [(point.devices, kind_of_plan(point.candidate.plan)) for point in curve.fitting if point.candidate]
    told = [f"from {devices:,} on {kind}" for (_, before), (devices, kind) in pairwise(kinds) if kind != before]
    return [f"The best plan changes: {kinds[0][1]} on {kinds[0][0]:,}, {listed(told)}."] if told else []


def kind_of_plan(plan: Plan) -> str:
    """Describe a plan without its numbers of data-parallel ranks and microbatches."""
    default = Plan()
    parts = ["fsdp"] if plan.fsdp > 1 else []
    parts += ["dp"] if plan.dp > 1 else []
    for key in _KIND:
        value = getattr(plan, key)
        if value != getattr(default, key) and not (key == "schedule" and plan.pp == 1):
            parts.append(f"{key}={'on' if value is True else value}")
    return " + ".join(parts[:2]) + (" " + " ".join(parts[2:]) if parts[2:] else "") if parts else "one rank"


def _failures(curve: SimulatedCurve) -> list[str]:
    last = curve.last
    if last.goodput is None:
        return []
    low, high = percent(last.goodput.low, 1), percent(last.goodput.high, 1)
    between = f"{low} to {high}" if str(low) != str(high) else str(low)
    told = f"With failures and checkpoints {between} of the time on {last.devices:,} devices is useful (goodput)."
    worst = max(curve.fitting, key=_gain_by_checkpoints)
    if _gain_by_checkpoints(worst) < _FAR_OFF or worst.goodput is None or worst.best_goodput is None:
        return [told]
    return [
        told,
        f"On {count(worst.devices, 'device')} the job's own checkpoints are far from the best: "
        f"{percent(worst.goodput.middle, 0)} is useful, and with checkpoint.every_steps: {worst.best_every_steps} it "
        f"would be {percent(worst.best_goodput, 0)}.",
    ]


def _gain_by_checkpoints(point: Point) -> float:
    """Return the goodput that the best checkpoint interval would gain."""
    if point.goodput is None or point.best_goodput is None:
        return 0.0
    return point.best_goodput - point.goodput.middle


def _used(point: Point) -> str:
    return "1 device is used" if point.used == 1 else f"{point.used:,} devices are used"


def _largest_part(point: Point) -> str:
    assert point.candidate is not None
    breakdown = point.candidate.prediction.breakdown
    return PART_NAMES[max(breakdown, key=lambda part: breakdown[part])]
