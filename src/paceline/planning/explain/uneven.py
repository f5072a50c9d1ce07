"""Machines of unequal speed: parts of the batch, and stages of layers, by speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec
from paceline.partition import contiguous
from paceline.planning.adjustment import factor_of
from paceline.planning.axes import AXES, DATA_AXES
from paceline.planning.check.rules import reasons_against
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.stages import stages
from paceline.planning.explain.what_if import Case, layouts, what_if
from paceline.planning.search.result import Candidate

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
