"""Hints: faster choices that alter the training, or are not the plan's.

They are reported, never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planner.check.rules import reasons_against
from paceline.planner.cost.estimate import estimate
from paceline.planner.cost.layout import Layout
from paceline.planner.predict import Layouts
from paceline.planner.search.result import Candidate, Hint

_LEAST_GAIN = 0.02  # of the step
_INEXACT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"compress": "bf16"}, "gradients lose digits on their way between replicas: other losses, by little"),
    ({"compress": "int8"}, "gradients are rounded to 8 bits on their way between replicas: other losses"),
    ({"compress": "powersgd:4"}, "replicas agree on an approximation of their gradients: other losses"),
    ({"sync": "local:8"}, "replicas train apart and average every 8 steps: other losses"),
    ({"sync": "diloco:30"}, "replicas train apart and agree every 30 steps: other losses"),
)


def hints(job: Job, cluster: Cluster, layouts: Layouts, best: Candidate) -> tuple[Hint, ...]:
    """Hints that save enough to be reported, largest gain first."""
    found = [*_other_rules(job, cluster, layouts, best), *_other_precision(job, cluster, layouts, best), *_other_orders(best)]
    return tuple(sorted((hint for hint in found if hint.gain >= _LEAST_GAIN), key=lambda hint: -hint.gain))


def _other_rules(job: Job, cluster: Cluster, layouts: Layouts, best: Candidate) -> Iterator[Hint]:
    """Hints of other sync rules. Exact rules differ in how they sum, which `allreduce` chooses by itself."""
    if best.plan.dp == 1 or best.plan.inexact:
        return
    for changes, but in _INEXACT:
        plan = replace(best.plan, **changes)
        if not reasons_against(plan, job, cluster):
            yield _hint(" ".join(f"{key}={value}" for key, value in changes.items()), but, layouts.of(plan, best.layout.threads), best)


def _other_precision(job: Job, cluster: Cluster, layouts: Layouts, best: Candidate) -> Iterator[Hint]:
    peaks = best.layout.machines.device.peak_flops
    slow = any(device.bf16 is False for host in cluster.hosts[:1] for device in host.devices)
    if best.plan.precision_for(job) != "fp32" or slow or peaks.get("bf16", 0.0) <= peaks.get("fp32", 0.0):
        return
    plan = replace(best.plan, precision="bf16")
    yield _hint(
        "precision=bf16", "products are computed with fewer digits: other losses, by little", layouts.of(plan, best.layout.threads), best
    )


def _other_orders(best: Candidate) -> Iterator[Hint]:
    """Hints of another axis between neighbours. A run's mesh has one order, in which the ranks that communicate most are nearest."""
    layout = best.layout
    if layout.machines.hosts == 1:
        return
    for axis in (axis for axis in layout.order[1:] if getattr(layout, axis) > 1):
        order = (axis, *(other for other in layout.order if other != axis))
        yield _hint(
            f"ranks of {axis} next to each other",
            "a run's mesh has one order, which would have to change",
            replace(layout, order=order),
            best,
        )


def _hint(change: str, but: str, layout: Layout, best: Candidate) -> Hint:
    prediction = estimate(layout)
    gain = 1 - prediction.step_time_s / best.prediction.step_time_s
    return Hint(change, gain if prediction.fits else 0.0, but, prediction)
