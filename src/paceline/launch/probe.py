"""Launches of ranks that look at something and save nothing; a signal ends the command."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.launch.local import launch
from paceline.launch.place import places_on
from paceline.plans.plan import Plan

Launch = Callable[[list[str], Job, Cluster, Plan], None]  # starts the ranks of a plan and waits for their end, as `launch_to_look` does


def launch_to_look(module_args: list[str], job: Job, cluster: Cluster, plan: Plan, *, on_tick: Callable[[], None] | None = None) -> None:
    """Run the function of `module_args` (see `launch`) on a plan's ranks, and wait.

    Raises:
        LaunchError: a rank raised, hung or was killed.
        ClusterError: the cluster's hosts cannot be emulated here.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
    """
    signals: list[str] = []

    def note(event: str, details: dict[str, Any]) -> None:
        if event == "stop":
            signals.append(details["signal"])

    try:
        with places_on(cluster, plan.ranks) as places:
            launch(
                module_args,
                ranks=plan.ranks,
                threads=plan.threads_for(cluster.hosts[0], plan.ranks),
                pin_cores=None,
                deadline_s=job.deadline_s,
                places=places,
                saves=False,
                on_tick=on_tick,
                on_event=note,
            )
    finally:
        if signals:
            raise SystemExit(128 + signal.Signals[signals[0]])
