"""Slurm: `srun --ntasks-per-node=1 paceline train job.yaml` in an allocation of several nodes."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator

from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.variables import MOST_HOSTS, number_from, place_from
from paceline.errors import LaunchError

_COMMAND = "srun --ntasks-per-node=1 paceline …"
_ADVICE = f"Start one process on every node: {_COMMAND}"
_ENTRY = re.compile(r"((?:[^\[\],\s]|\[[0-9,-]+\])+)(?:,|$)")  # names and brackets; commas outside of them separate
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


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


def expand(text: str) -> list[str]:
    """The names in a list of nodes, in its order.

    `n[01-03,7],m1` is n01, n02, n03, n7, m1.

    Raises:
        LaunchError: it is no such list, or names more than `MOST_HOSTS` nodes.
    """
    names: list[str] = []
    position = 0
    while position < len(text) or not text:
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise _not_a_list(text)
        position = entry.end()
        parts = [list(_part(match, text)) for match in _PART.finditer(entry[1])]
        if len(names) + math.prod(map(len, parts)) > MOST_HOSTS:
            raise LaunchError(f'The node list "{text[:80]}" names more than {MOST_HOSTS} nodes.')
        names += map("".join, itertools.product(*parts))
    if text.endswith(","):
        raise _not_a_list(text)
    return names


def _part(match: re.Match[str], text: str) -> Iterator[str]:
    """The alternatives of one part of a name: a text, or the numbers in brackets."""
    if match[2] is not None:
        yield match[2]
        return
    total = 0
    for word in match[1].split(","):
        numbers = _RANGE.fullmatch(word)
        first, last = (numbers[1], numbers[2] or numbers[1]) if numbers else ("1", "0")
        total += int(last) - int(first) + 1
        if int(last) < int(first) or total > MOST_HOSTS:
            raise _not_a_list(text)
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _not_a_list(text: str) -> LaunchError:
    return LaunchError(f'"{text[:80]}" is no list of nodes such as n[01-03,7],m1, or is too long.')
