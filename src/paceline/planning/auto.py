"""Default plan of a job, used if the user names none."""

from __future__ import annotations

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.check.check_plan import check_plan
from paceline.planning.plan import Plan

# Further cores become threads of ranks: communication grows with the ranks, and cores of one host share memory.
_MOST_CPU_RANKS = 8


def auto_plan(job: Job, cluster: Cluster) -> Plan:
    """Default plan: one rank per GPU, or on CPUs one per core up to 8.

    Remaining cores become threads of the ranks. Measuring begins with this plan. There are never more replicas than
    devices or samples in the global batch, and exactly as many as the job's partition has weights.

    Raises:
        PlanError: the weights ask for more replicas than there are devices or samples.
    """
    most = cluster.devices if cluster.has_accelerators else min(cluster.devices, _MOST_CPU_RANKS)
    weights = job.partition.weights
    plan = Plan(dp=min(most, job.global_batch) if weights is None else len(weights))
    reasons = check_plan(plan, job, cluster)
    if plan.ranks > cluster.devices and not cluster.has_accelerators:
        reasons.append(
            f"the job's partition has {plan.ranks} weights, one for each rank, and {cluster.name} has "
            f"{cluster.devices} devices. "
            f'Ask for --plan "{plan}" to have ranks share cores, or give the job at most {cluster.devices} weights.'
        )
    if reasons:
        raise PlanError("\n".join(reasons))
    return plan
