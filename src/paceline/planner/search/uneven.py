"""Machines of unequal speed: parts of the batch, and stages of layers, by speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.partition import contiguous
from paceline.planner.cost.estimate import estimate
from paceline.planner.cost.layout import Layout
from paceline.planner.cost.stages import stages
from paceline.planner.search.legal import LegalPlans
from paceline.planner.search.result import Candidate
from paceline.plans.axes import AXES, DATA_AXES

# fraction of the step below which a gain is not reported
_LEAST_GAIN = 0.01
# axes of a run's mesh; ranks along the last one are neighbours
Floats = NDArray[np.float64]


def weights_by_speed(job: Job, best: Candidate) -> tuple[tuple[float, ...] | None, float]:
    """Weights of a plan's data-parallel ranks by their slowest rank's speed, and the saved fraction.

    None if all are equally fast, if the job has weights already, if stages of a pipeline need equal parts, or if the batch
    is too small for other parts.
    """
    layout = best.layout
    if not layout.machines.speeds or job.partition.weights is not None or layout.pp > 1 or layout.data_ranks == 1:
        return None, 0.0
    speeds = _speeds(layout, DATA_AXES)
    weights = tuple(float(round(speed / speeds.mean(), 3)) for speed in speeds)
    shares = _shares(job, weights)
    if shares.min() < layout.microbatches:
        return None, 0.0
    # samples that take the slowest device as long as the last data-parallel rank
    slowest = float((shares / speeds).max())
    then = estimate(replace(layout, samples=slowest / layout.microbatches)).step_time_s
    gain = 1 - then / best.prediction.step_time_s
    return (weights, gain) if gain >= _LEAST_GAIN else (None, 0.0)


def cut_by_speed(best: Candidate, legal: LegalPlans) -> tuple[tuple[str, ...], float]:
    """Blocks that begin later pipeline stages, with fewer for slow hosts, and the saved fraction.

    () if the usual cut, which makes all stages equal, is as good.
    """
    layout = best.layout
    if layout.pp == 1 or layout.chunks > 1 or not layout.machines.speeds:
        return (), 0.0
    speeds = _speeds(layout, ("pp",))
    blocks = [
        cost.forward + cost.backward for cost in stages(replace(layout, pp=len(layout.trace.blocks), cut=(1,) * len(layout.trace.blocks)))
    ]
    cut = contiguous(blocks, len(speeds), speeds.tolist())
    before = [cost.forward + cost.backward for cost in stages(layout)]
    ends = np.cumsum(cut)
    after = [sum(blocks[end - count : end]) for count, end in zip(cut, ends, strict=True)]
    saved = layout.microbatches * (_slowest(before, speeds) - _slowest(after, speeds))
    gain = saved / (best.prediction.step_time_s * _slowest(before, speeds) / max(before))
    names = tuple(layout.trace.blocks[end].name for end in ends[:-1])
    named = len(set(names)) == len(names) and all(names)
    works = named and legal.refusal({**_values(best), "cut": ",".join(names)}) is None
    fits = works and estimate(replace(layout, cut=cut)).fits
    return (names, gain) if fits and gain >= _LEAST_GAIN else ((), 0.0)


def _speeds(layout: Layout, axes: tuple[str, ...]) -> Floats:
    """Speed of each position along some axes: that of its slowest rank."""
    ranks = np.arange(layout.ranks).reshape([getattr(layout, axis) for axis in AXES])
    hosts = np.minimum(ranks // layout.machines.per_host, len(layout.machines.speeds) - 1)
    of_ranks = np.asarray(layout.machines.speeds, np.float64)[hosts]
    others = tuple(i for i, axis in enumerate(AXES) if axis not in axes)
    return np.asarray(of_ranks.min(axis=others).reshape(-1))


def _shares(job: Job, weights: tuple[float, ...]) -> NDArray[np.int64]:
    spec, batch = PartitionSpec(weights=weights), job.global_batch
    return np.array(Partition(spec, samples=batch, global_batch=batch, seed=0, replica=0, replicas=len(weights)).shares(0), np.int64)


def _slowest(seconds: list[float], speeds: Floats) -> float:
    return float((np.asarray(seconds) / speeds).max())


def _values(best: Candidate) -> dict[str, object]:
    return {name: getattr(best.plan, name) for name in best.plan.__dataclass_fields__}
