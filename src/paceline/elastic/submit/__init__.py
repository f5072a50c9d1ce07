"""Submission of runs to a cluster's scheduler (`paceline submit`).

Read `scheduler.py` first, which defines the interface of a scheduler. `slurm.py` is the shortest complete
implementation.
"""

from __future__ import annotations

from paceline.elastic.submit.kubernetes import Kubernetes
from paceline.elastic.submit.ray import Ray
from paceline.elastic.submit.scheduler import Scheduler
from paceline.elastic.submit.sky import Sky
from paceline.elastic.submit.slurm import Slurm
from paceline.errors import LaunchError
from paceline.text import nearest

SCHEDULERS: dict[str, type[Scheduler]] = {kind.name: kind for kind in (Slurm, Ray, Kubernetes, Sky)}


def scheduler_named(name: str) -> Scheduler:
    """Return the scheduler with this name. Raise LaunchError if the name is unknown."""
    if name not in SCHEDULERS:
        raise LaunchError(
            "submit.scheduler_unknown",
            "--on {name}: unknown scheduler. {hint}",
            name=name[:40],
            hint=nearest(name, SCHEDULERS),
        )
    return SCHEDULERS[name]()
