"""Search for the nearest plan that is predicted to fit, after memory ran out."""

from __future__ import annotations

import time
from contextlib import suppress

from paceline.cluster.cluster import Cluster
from paceline.errors import PacelineError, PlanProblem
from paceline.job.job import Job
from paceline.planning.check.plan_context import Check, PlanContext
from paceline.planning.check.plan_errors import nearest_plan
from paceline.planning.check.split_rules import MEMORY
from paceline.planning.cost.memory import MEASURED_SHARE, by_part, capacity_bytes, memory
from paceline.planning.machines import machines
from paceline.planning.plan import Plan
from paceline.planning.prediction import Layouts

BUDGET_S = 20.0  # maximum seconds of the search
_KEYS = ("microbatches", "remat", "offload_activations", *MEMORY)


def plan_that_fits(
    job: Job, plan: Plan, cluster: Cluster, *, activations_bytes: float, room_bytes: float | None = None
) -> Plan | None:
    """Find the plan nearest to `plan` that fits by prediction.

    The known activations of `plan` correct the predicted activations.

    Args:
        plan: a plan that ran out of memory.
        activations_bytes: smallest possible peak of the activations of `plan`; 0 if unknown.
        room_bytes: bytes of a device for tensors; None means a rank's part of the host's memory.

    Returns:
        The plan; None if none was found in time, or if `plan` cannot be predicted.
    """
    try:
        layouts = Layouts(job, machines(cluster))
        activations, others, room = _predicted(layouts, plan, room_bytes)
    except PacelineError:
        return None
    # `plan` does not fit, although it may fit by prediction
    factor = max(activations_bytes, room - others, activations) / max(activations, 1.0)
    until = time.monotonic() + BUDGET_S

    def too_large(context: PlanContext) -> PlanProblem | None:
        with suppress(PacelineError):  # a plan that cannot be predicted is refused
            activations, others, room = _predicted(layouts, context.plan, room_bytes)
            if time.monotonic() < until and factor * activations + others <= MEASURED_SHARE * room:
                return None
        return PlanProblem("plan.out_of_memory", "plan {plan} needs more memory than is available", plan=context.plan)

    with suppress(PacelineError):
        return nearest_plan(plan, job, cluster, further=(Check(too_large, _KEYS),))
    return None


def _predicted(layouts: Layouts, plan: Plan, room_bytes: float | None) -> tuple[float, float, float]:
    """Return the predicted bytes of activations and of other parts, and a rank's room."""
    layout = layouts.of(plan)
    held = by_part(memory(layout))
    activations, runtime = held.pop("activations"), held.pop("runtime")
    if room_bytes is None:
        return activations, sum(held.values()) + runtime, capacity_bytes(layout)
    return activations, sum(held.values()), room_bytes
