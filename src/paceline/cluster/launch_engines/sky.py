"""SkyPilot: the `run` section of a task with `num_nodes`, which it starts on every node."""

from __future__ import annotations

import os

from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.variables import number_from, place_from
from paceline.errors import LaunchError

_RANK, _COUNT, _ADDRESSES = "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"
_ADVICE = "They are set by SkyPilot in the task's `run` section; start paceline there, once."


class Sky(LaunchEngine):
    """Node of a SkyPilot task."""

    def detect(self) -> bool:
        return _RANK in os.environ

    def hosts(self) -> HostPlace | None:
        addresses, count = os.environ.get(_ADDRESSES, "").split(), number_from(_COUNT, _ADVICE)
        if len(addresses) != count:
            raise LaunchError(f"{_ADDRESSES} has {len(addresses)} addresses, but {_COUNT} is {count}. {_ADVICE}")
        run_name = os.environ.get("SKYPILOT_TASK_ID", "")
        return place_from(
            _RANK, _COUNT, "sky", _ADVICE, coordinator=addresses[0] if addresses else "", run_name=run_name
        )
