"""Strong scaling: the best plan for fewer and more devices of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.cost.prediction import Prediction
from paceline.planning.explain.what_if import Case, Outcome, what_if, with_devices
from paceline.planning.plan import Plan
from paceline.planning.search.result import SearchResult

if TYPE_CHECKING:
    from paceline.planning.adjustment import Basis

_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


@dataclass(frozen=True)
class ScaledPlan:
    """The job, global batch included, on another number of devices (strong scaling).

    Attributes:
        plan, prediction: the best there; None if none fits.
        speedup: relative to the fewest devices on which any plan fits.
        efficiency: speedup over the ratio of devices.
        why: reason why none fits.
    """

    devices: int
    plan: Plan | None = None
    prediction: Prediction | None = None
    speedup: float | None = None
    efficiency: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The point as plain JSON values."""
        return {
            "devices": self.devices,
            "plan": str(self.plan) if self.plan else None,
            "step_time_s": self.prediction.step_time_s if self.prediction else None,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "why": self.why,
        }


def scaling(
    job: Job, cluster: Cluster, found: SearchResult, calibration: Basis | None = None
) -> tuple[ScaledPlan, ...]:
    """Points from an eighth of the devices to eight times as many. Clusters whose links are unknown are left out."""
    points: list[ScaledPlan] = []
    for on, outcome in best_on(Case(job, cluster, calibration), _FACTORS, found):
        best, count = outcome.best, on.devices
        points.append(
            _compared(points, count, best.plan, best.prediction) if best else ScaledPlan(count, why=outcome.why)
        )
    return tuple(points)


def best_on(
    case: Case, factors: Iterable[float], found: SearchResult | None = None
) -> Iterator[tuple[Cluster, Outcome]]:
    """Clusters with so many times the devices, and the best plan on each.

    Factors that make no cluster are left out.

    Args:
        found: result of a search on the cluster itself, where there is one.
    """
    for factor in factors:
        resized = with_devices(case.cluster, factor)
        if factor == 1 and found is not None:
            yield case.cluster, Outcome(found.fastest)
        elif factor == 1 or resized is not None:
            on = case.cluster if factor == 1 or resized is None else resized
            yield on, what_if(case._replace(cluster=on), lambda same: same)


def _compared(before: list[ScaledPlan], devices: int, plan: Plan, prediction: Prediction) -> ScaledPlan:
    first = next((point for point in before if point.prediction is not None), None)
    if first is None or first.prediction is None:
        return ScaledPlan(devices, plan, prediction, 1.0, 1.0)
    speedup = first.prediction.step_time_s / prediction.step_time_s
    return ScaledPlan(devices, plan, prediction, speedup, speedup * first.devices / devices)
