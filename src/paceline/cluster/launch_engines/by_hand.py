"""Host processes started by hand, or by a starter of paceline's own: PACELINE_HOSTS, PACELINE_HOST_NUMBER, …"""

from __future__ import annotations

import os

from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.variables import COORDINATOR, ENGINE, HOST_NUMBER, HOSTS, place_from

_ADVICE = (
    f"On every host set {HOSTS} (their number), {HOST_NUMBER} (0, 1, …: its own) and {COORDINATOR} "
    "(ADDRESS:PORT of host 0)."
)


class ByHand(LaunchEngine):
    """PACELINE_ variables, set by a person, by `--hosts` (ssh) or by Ray's actors."""

    def detect(self) -> bool:
        # In an indexed Job of Kubernetes the variables of its manifest are completed by the pod's index.
        return HOST_NUMBER in os.environ or (HOSTS in os.environ and "JOB_COMPLETION_INDEX" not in os.environ)

    def hosts(self) -> HostPlace | None:
        # One default port for all: who starts by hand has no number of the run.
        return place_from(HOST_NUMBER, HOSTS, os.environ.get(ENGINE) or "hosts", _ADVICE, coordinator="", run_name="")
