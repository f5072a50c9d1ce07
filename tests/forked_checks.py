"""`paceline check` on forked ranks: the same comparison without starting a command for each rank."""

from __future__ import annotations

import importlib

from paceline.cluster.cluster import Cluster
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.parity.check import Checks, Parity
from paceline.plans.plan import Plan
from ranks import RankError, Ranks, run_processes


def checked(ranks: Ranks, job: Job, plan: str, *, steps: int = 2) -> Parity:
    """What `paceline check` finds of a plan."""

    def launch(arguments: list[str], job: Job, cluster: Cluster, of: Plan) -> None:
        module, _, name = arguments[0].partition(":")
        function = getattr(importlib.import_module(module), name)
        try:
            if name == "run_plan":
                ranks(of.ranks, function, arguments[1:], deadline_s=100, backend="shm" if of.ranks > 1 else "gloo")
            else:  # one process, in no group
                run_processes([{"RANK": "0", "WORLD_SIZE": "1"}], function, [arguments[1:]], 100.0)
        except RankError as error:
            raise LaunchError(str(error)) from error

    with Checks(job, steps=steps, launch=launch).opened() as checks:
        return checks.check(Plan.parse(plan))
