"""Slurm: `srun --ntasks-per-node=1 paceline train job.yaml` in an allocation of several nodes."""

from __future__ import annotations

import os

from paceline.errors import LaunchError
from paceline.launch_engine.engine import HostPlace, LaunchEngine
from paceline.launch_engine.node_list import expand
from paceline.launch_engine.variables import number_from, place_from

_COMMAND = "srun --ntasks-per-node=1 paceline …"
_ADVICE = f"Start one process on every node: {_COMMAND}"


class Slurm(LaunchEngine):
    """A job step of Slurm with one task per node.

    A batch script has the variables of a task as well, so only those of a step count.
    """

    def detect(self) -> bool:
        return "SLURM_JOB_ID" in os.environ and ("SLURM_STEP_ID" in os.environ or _nodes() > 1)

    def hosts(self) -> HostPlace | None:
        if "SLURM_STEP_ID" not in os.environ:
            return None
        nodes, tasks = number_from("SLURM_STEP_NUM_NODES", _ADVICE), number_from("SLURM_STEP_NUM_TASKS", _ADVICE)
        if tasks != nodes:
            raise LaunchError(
                f"Slurm started {tasks} tasks on {nodes} nodes (SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES), but "
                f"paceline is started once per node, and starts the ranks itself. {_ADVICE}"
            )
        names = expand(os.environ.get("SLURM_STEP_NODELIST", ""))
        if len(names) != nodes:
            raise LaunchError(
                f"SLURM_STEP_NODELIST names {len(names)} nodes, but SLURM_STEP_NUM_NODES is {nodes}. {_ADVICE}"
            )
        return place_from(
            "SLURM_NODEID",
            "SLURM_STEP_NUM_NODES",
            "slurm",
            _ADVICE,
            coordinator=names[0],
            run_name=os.environ["SLURM_JOB_ID"],
            name=os.environ.get("SLURMD_NODENAME", ""),
        )

    def note(self) -> str | None:
        if "SLURM_STEP_ID" in os.environ:
            return None
        return f"this allocation of Slurm has {_nodes()} nodes; only this one is used. For all of them: {_COMMAND}"


def _nodes() -> int:
    """Number of nodes of the allocation; 1 where Slurm does not say."""
    text = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isascii() and text.isdecimal() else 1
