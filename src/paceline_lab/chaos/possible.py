"""Kinds of faults that can be made on this machine, and why others cannot."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence

from paceline.cluster.emulate.cgroup import place_of_group
from paceline.errors import ClusterError
from paceline.nearest import nearest
from paceline_lab.chaos.groups import memory_groups
from paceline_lab.chaos.schedule import KINDS, OF_HOSTS, Kind


def kinds_in(text: str) -> tuple[Kind, ...]:
    """Kinds of faults from a text such as `kill,stop`.

    Raises:
        ClusterError: one is not known; names the nearest.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            raise ClusterError(f"{name!r} is no kind of fault. {nearest(name, KINDS)}")
    return tuple(kind for kind in KINDS if kind in names)


def possible_kinds(hosts: int) -> tuple[Kind, ...]:
    """Kinds that can be made here."""
    return tuple(kind for kind in KINDS if why_not(kind, hosts) is None)


def refuse_impossible(kinds: Sequence[Kind], hosts: int) -> None:
    """Refuse kinds that cannot be made here.

    Raises:
        ClusterError: names each with its reason.
    """
    reasons = [f"{kind}: {reason}" for kind in kinds if (reason := why_not(kind, hosts))]
    if reasons:
        raise ClusterError("these faults cannot be made here:\n" + "\n".join(reasons))


def why_not(kind: Kind, hosts: int) -> str | None:
    """Reason why a kind of fault cannot be made here, or None."""
    if kind in OF_HOSTS and hosts < 2:
        return "it takes the links of emulated hosts: say --hosts 2 or more"
    return _WHY_NOT.get(kind, lambda: None)()


def _of_group(find: Callable[[], object]) -> str | None:
    try:
        find()
    except ClusterError as error:
        return str(error)
    return None


def _no_small_disk() -> str | None:
    if os.geteuid() == 0 and shutil.which("mount"):
        return None
    return "a small file system for the run takes root and the command mount"


_WHY_NOT: dict[str, Callable[[], str | None]] = {
    "oom": lambda: _of_group(memory_groups),
    "slow": lambda: _of_group(lambda: place_of_group("paceline-x")),
    "disk-full": _no_small_disk,
    "clock": lambda: (
        "Linux has one wall clock for all processes, and stepping it would step this machine's; "
        "what paceline times, it times by the monotonic clock"
    ),
}
