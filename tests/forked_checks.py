"""`paceline check` on forked ranks: the same comparison without starting a command for each rank."""

from __future__ import annotations

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.launch.check import Checks, Parity
from paceline.plan.plan import Plan
from paceline.train import parity
from ranks import Ranks


def checked(ranks: Ranks, job: Job, plan: str, *, steps: int = 2) -> Parity:
    """What `paceline check` finds of a plan."""

    def launch(arguments: list[str], job: Job, cluster: Cluster, of: Plan) -> None:
        function = getattr(parity, arguments[0].rpartition(":")[2])
        ranks(of.ranks, function, arguments[1:], deadline_s=100, backend="shm" if of.ranks > 1 else "gloo")

    with Checks(job, steps=steps, launch=launch).opened() as checks:
        return checks.check(Plan.parse(plan))
