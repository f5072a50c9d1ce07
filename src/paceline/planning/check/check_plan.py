"""Check of a plan: every reason against it, and the nearest plan that works."""

from __future__ import annotations

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.check.nearest import nearest_plan
from paceline.planning.check.rules import reasons_against
from paceline.planning.plan import Plan


def check_plan(plan: Plan, job: Job, cluster: Cluster, world: int | None = None) -> list[str]:
    """Every reason why a plan cannot run a job on a cluster.

    Each reason names the value that would work. After the reasons comes the nearest plan that works, if one was found.
    If the plan divides the model, the model is built, without memory for its weights if its code allows that. Problems
    that only the data and a forward pass show are not found: activations, the last batch of an epoch, a loss of the
    user's own.

    Args:
        world: the number of ranks that were started already, as by torchrun; None if the plan says how many to start.

    Raises:
        JobError: the model cannot be built.
    """
    reasons = reasons_against(plan, job, cluster, world)
    if reasons and (nearest := nearest_plan(plan, job, cluster, world)):
        reasons.append(f"Nearest plan that works: {nearest}.")
    return reasons
