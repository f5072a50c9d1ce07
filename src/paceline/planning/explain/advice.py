"""Advice: changes that would make the job faster, each by itself.

Other machines and batches are for the user to get; other rules, precisions and orders of ranks alter the training or
are not the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.partition import contiguous
from paceline.planning.axes import AXES, DATA_AXES
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.layout import Layout, Prediction
from paceline.planning.cost.memory import capacity_bytes
from paceline.planning.cost.stages import stages
from paceline.planning.explain.what_if import (
    Case,
    Change,
    batch,
    devices,
    keys,
    layouts,
    links_between,
    links_inside,
    memory,
    what_if,
)
from paceline.planning.machines import factor_of
from paceline.planning.plan import Plan
from paceline.planning.search.result import Candidate, SearchResult
from paceline.units import bandwidth, size

# relative gain below which a change does not help: the model is not more exact
WORTH = 0.005
# fraction of the step that another rule, precision or order must save to be told
_LEAST_SAVED = 0.02
INEXACT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"compress": "bf16"}, "gradients lose digits on their way between replicas: other losses, by little"),
    ({"compress": "int8"}, "gradients are rounded to 8 bits on their way between replicas: other losses"),
    ({"compress": "powersgd:4"}, "replicas agree on an approximation of their gradients: other losses"),
    ({"sync": "local:8"}, "replicas train independently and average every 8 steps: other losses"),
    ({"sync": "server:staleness=4"}, "servers step on gradients up to 4 batches old, nobody waits: other losses"),
    ({"sync": "diloco:30"}, "replicas train independently and agree every 30 steps: other losses"),
)


@dataclass(frozen=True)
class Advice:
    """One possible change, and the prediction with it.

    Attributes:
        what: a phrase, such as `twice the memory`, or the words of a plan, such as `sync=local:8`.
        value: its new value, such as `160 GB`.
        gain: relative gain of throughput; None if it could not be predicted.
        plan: the best plan then.
        prediction: of that plan.
        but: its cost beside money, what it changes, or why nothing is predicted.
    """

    what: str
    value: str = ""
    gain: float | None = None
    plan: Plan | None = None
    prediction: Prediction | None = None
    but: str = ""

    @property
    def helps(self) -> bool:
        """True if the gain is large enough to count."""
        return self.gain is not None and self.gain >= WORTH

    @property
    def saved(self) -> float:
        """Fraction of the step's time that is saved."""
        return 1 - 1 / (1 + self.gain) if self.gain else 0.0

    def to_json(self) -> dict[str, Any]:
        """The advice as plain JSON values."""
        found = self.prediction
        return {
            "what": self.what,
            "value": self.value,
            "gain": self.gain,
            "helps": self.helps,
            "plan": str(self.plan) if self.plan else None,
            "step_time_s": found.step_time_s if found else None,
            "throughput": found.throughput if found else None,
            "but": self.but,
        }


def other_machines(case: Case, found: SearchResult) -> tuple[Advice, ...]:
    """Other machines and batches, the most helpful first, unpredictable ones last."""
    case = case._replace(plans=tuple((candidate.plan, candidate.layout) for candidate in found.best))
    return tuple(
        sorted(_other_machines(case, found.fastest), key=lambda one: -(-1.0 if one.gain is None else one.gain))
    )


def _other_machines(case: Case, best: Candidate) -> Iterator[Advice]:
    on, batches = best.layout.machines, 2 * case.job.global_batch
    more = _predicted(
        Advice("twice the memory of a device", str(size(2 * capacity_bytes(best.layout)))), case, memory(2), best
    )
    # today's plan could still run, as fast as now
    worse = more.gain is not None and more.gain < 0
    yield replace(more, gain=0.0, plan=best.plan, prediction=best.prediction) if worse else more
    grown = _predicted(
        Advice("twice the devices", f"{2 * on.devices:,}", but="twice the price an hour"), case, devices(2), best
    )
    yield grown if grown.gain is not None else replace(grown, value="")
    yield _predicted(
        Advice("twice the global batch", f"{batches:,}", but="another training: see --batch-advice"),
        case,
        batch(batches),
        best,
    )
    if on.hosts > 1:
        rate = f"{2 * on.between.bandwidth * 8 / 1e9:,.4g} Gbit/s for each device"
        yield _predicted(Advice("links between hosts twice as fast", rate), case, links_between(2), best)
    if on.per_host > 1 and not on.device.is_core:
        rate = str(bandwidth(2 * on.device.inside.bandwidth))
        yield _predicted(Advice("links inside a host twice as fast", rate), case, links_inside(2), best)


def _predicted(advice: Advice, case: Case, change: Change, best: Candidate) -> Advice:
    """The advice with its prediction, compared with the best plan of today."""
    outcome = what_if(case, change)
    then = outcome.best
    if then is None:
        return replace(advice, but=f"not predicted: {outcome.why}")
    gain = then.prediction.throughput / best.prediction.throughput - 1
    return replace(advice, gain=gain, plan=then.plan, prediction=then.prediction)


def other_trainings(case: Case, best: Candidate) -> tuple[Advice, ...]:
    """Faster choices that are reported and never chosen, largest gain first.

    Where the best plan has one replica, since sums over several cost too much, other rules are tried on a replica for
    each device.
    """
    plan, degrees = best.plan, ""
    if plan.dp == 1 and case.cluster.devices > 1:
        plan = Plan(dp=case.cluster.devices, precision=plan.precision)
        degrees = f"dp={plan.dp} "
    changes = [(degrees + what, but, change, plan) for what, but, change in _other_rules(case, plan)]
    changes += [(*change, best.plan) for change in (*_other_precision(case, best), *_other_orders(best))]
    found = [
        _predicted(Advice(what, but=but), case._replace(plans=((changed, best.layout),)), change, best)
        for what, but, change, changed in changes
    ]
    worth = [one for one in found if one.prediction is not None and one.prediction.fits and one.saved >= _LEAST_SAVED]
    return tuple(sorted(worth, key=lambda one: -one.saved))


def _other_rules(case: Case, plan: Plan) -> Iterator[tuple[str, str, Change]]:
    """Other sync rules. Exact rules differ in how they sum, which `allreduce` chooses by itself."""
    if plan.dp == 1 or plan.inexact:
        return
    for values, but in INEXACT:
        if not reasons_against(replace(plan, **values), case.job, case.cluster):
            yield " ".join(f"{key}={value}" for key, value in values.items()), but, keys(**values)


def _other_precision(case: Case, best: Candidate) -> Iterator[tuple[str, str, Change]]:
    peaks = best.layout.machines.device.peak_flops
    slow = any(device.bf16 is False for host in case.cluster.hosts[:1] for device in host.devices)
    if best.plan.precision_for(case.job) == "fp32" and not slow and peaks.get("bf16", 0.0) > peaks.get("fp32", 0.0):
        yield (
            "precision=bf16",
            "products are computed with fewer digits: other losses, by little",
            keys(precision="bf16"),
        )


def _other_orders(best: Candidate) -> Iterator[tuple[str, str, Change]]:
    """Another axis between neighbours.

    A run's mesh has one order, in which the ranks that communicate most are nearest.
    """
    usual = best.layout.order
    if best.layout.machines.hosts == 1:
        return
    for axis in (axis for axis in usual[1:] if getattr(best.layout, axis) > 1):
        order = (axis, *(other for other in usual if other != axis))
        but = "a run's mesh has one order, which would have to change"
        yield f"ranks of {axis} next to each other", but, layouts(_ordered(order))


def _ordered(order: tuple[str, ...]) -> Any:
    return lambda layout: replace(layout, order=order)


# fraction of the step below which a gain is not reported
_LEAST_GAIN = 0.01
# axes of a run's mesh; ranks along the last one are neighbours
Floats = NDArray[np.float64]


def weights_by_speed(case: Case, best: Candidate) -> tuple[tuple[float, ...] | None, float]:
    """Weights of a plan's data-parallel ranks by their slowest rank's speed, and the saved fraction.

    None if all are equally fast, if the job has weights already, if stages of a pipeline need equal parts, or if the
    batch is too small for other parts.
    """
    layout = best.layout
    if not layout.machines.speeds or case.job.partition.weights is not None or layout.pp > 1 or layout.data_ranks == 1:
        return None, 0.0
    speeds = _speeds(layout, DATA_AXES)
    weights = tuple(float(round(speed / speeds.mean(), 3)) for speed in speeds)
    shares = _shares(case.job, weights)
    if shares.min() < layout.microbatches:
        return None, 0.0
    # samples that take the slowest device as long as the last data-parallel rank
    slowest = float((shares / speeds).max())
    then, _ = what_if(_of(case, best), layouts(lambda layout: replace(layout, samples=slowest / layout.microbatches)))
    gain = 1 - then.prediction.step_time_s / best.prediction.step_time_s if then else 0.0
    return (weights, gain) if gain >= _LEAST_GAIN else (None, 0.0)


def cut_by_speed(case: Case, best: Candidate) -> tuple[tuple[str, ...], float]:
    """Blocks that begin later pipeline stages, with fewer for slow hosts, and the saved fraction.

    () if the usual cut, which makes all stages equal, is as good.
    """
    layout = best.layout
    if layout.pp == 1 or layout.chunks > 1 or not layout.machines.speeds:
        return (), 0.0
    speeds = _speeds(layout, ("pp",))
    blocks = [
        cost.forward + cost.backward
        for cost in stages(replace(layout, pp=len(layout.trace.blocks), cut=(1,) * len(layout.trace.blocks)))
    ]
    cut = contiguous(blocks, len(speeds), speeds.tolist())
    before = [cost.forward + cost.backward for cost in stages(layout)]
    ends = np.cumsum(cut)
    after = [sum(blocks[end - count : end]) for count, end in zip(cut, ends, strict=True)]
    saved = layout.microbatches * (_slowest(before, speeds) - _slowest(after, speeds))
    gain = saved * factor_of(layout) / (best.prediction.step_time_s * _slowest(before, speeds) / max(before))
    names = tuple(layout.trace.blocks[end].name for end in ends[:-1])
    named = len(set(names)) == len(names) and all(names)
    if (
        gain < _LEAST_GAIN
        or not named
        or reasons_against(replace(best.plan, cut=",".join(names)), case.job, case.cluster)
    ):
        return (), 0.0
    then, _ = what_if(_of(case, best), layouts(lambda layout: replace(layout, cut=cut)))
    return (names, gain) if then and then.prediction.fits else ((), 0.0)


def _of(case: Case, best: Candidate) -> Case:
    return case._replace(plans=((best.plan, best.layout),))


def _speeds(layout: Layout, axes: tuple[str, ...]) -> Floats:
    """Speed of each position along some axes: that of its slowest rank."""
    ranks = np.arange(layout.ranks).reshape([getattr(layout, axis) for axis in AXES])
    hosts = np.minimum(ranks // layout.machines.per_host, len(layout.machines.speeds) - 1)
    of_ranks = np.asarray(layout.machines.speeds, np.float64)[hosts]
    others = tuple(i for i, axis in enumerate(AXES) if axis not in axes)
    return np.asarray(of_ranks.min(axis=others).reshape(-1))


def _shares(job: Job, weights: tuple[float, ...]) -> NDArray[np.int64]:
    spec, batch = PartitionSpec(weights=weights), job.global_batch
    return np.array(
        Partition(spec, samples=batch, global_batch=batch, seed=0, replica=0, replicas=len(weights)).shares(0), np.int64
    )


def _slowest(seconds: list[float], speeds: Floats) -> float:
    return float((np.asarray(seconds) / speeds).max())
