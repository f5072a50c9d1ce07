"""One plan on other numbers of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.planning.axes import DEGREES
from paceline.planning.plan import Plan

# means nothing without a split
_WHOLE: dict[str, Any] = {"zero": 3, "offload": False, "sequence": False, "schedule": "1f1b", "cut": ""}


def on_devices(base: Plan, devices: int, cluster: Cluster) -> Plan:
    """The base plan on `devices` devices; without GPUs, with one thread each.

    So N devices are N cores. Where its replicas take several devices and these are not a whole number of replicas,
    every device is a replica.
    """
    threads = base.threads if cluster.has_accelerators else 1
    if devices % (base.ranks // base.dp) == 0:
        return replace(base, dp=devices // (base.ranks // base.dp), threads=threads)
    parts = 1 if base.pp > 1 else base.microbatches  # those of a pipeline keep its stages busy
    return replace(
        base, **(dict.fromkeys(DEGREES, 1) | _WHOLE | {"dp": devices, "threads": threads, "microbatches": parts})
    )


def spelled_out(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan as `paceline train` runs it, with explicit threads on CPUs."""
    if cluster.has_accelerators:
        return plan
    return replace(plan, threads=plan.threads_for(cluster.hosts[0], plan.ranks))
