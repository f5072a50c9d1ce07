"""Runs that recover in place: their ranks go on when one is lost."""

from __future__ import annotations

import os

from paceline.cluster.cluster import Cluster
from paceline.device import CPU
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.planning.sync_info import RULES, SyncSpec

RECOVERY = "PACELINE_RECOVERY"  # set to off: every loss of a rank stops all of them
# for messages: which plans `recovers_in_place`
NEEDS = "CPUs, dp of at least 2 or copies in memory, and no division under a rule with local steps"


def recovery_is_on() -> bool:
    """True unless the user has turned recovery off.

    Raises:
        LaunchError: `PACELINE_RECOVERY` is neither on nor off.
    """
    wanted = os.environ.get(RECOVERY, "on")
    if wanted not in ("on", "off"):
        raise LaunchError(f"{RECOVERY}={wanted} is neither on nor off")
    return wanted == "on"


def recovers_in_place(job: Job, plan: Plan, cluster: Cluster) -> bool:
    """True if a lost rank is replaced while the others go on.

    That is where there are several replicas, which are the same after every step or undivided under a rule of ours, or
    one whose parts are copied to other ranks, our own transports are used (waits of torch's cannot be broken off), and
    samples can be dealt to any number of replicas.

    Raises:
        LaunchError: `PACELINE_RECOVERY` is neither on nor off.
    """
    if not recovery_is_on():
        return False
    sync = SyncSpec.parse(plan.sync)
    alike = not sync.info.local_steps or (sync.name in RULES.built_in and not plan.splits)
    replicas = (plan.dp > 1 or is_mirrored(plan)) and alike
    dealt = job.partition.weights is None and job.partition.kind != "hierarchical"
    return replicas and dealt and plan.transport in ("auto", "shm", "tcp") and cluster.kind == CPU


def is_mirrored(plan: Plan) -> bool:
    """True if ranks keep copies of each other's state (`Mirror`): no other replica has it."""
    return plan.dp == plan.cp == plan.ep == 1 and plan.ranks > 1
