"""Free memory of machines, as all their ranks see it together."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from paceline.cluster.cgroup import memory_limit_bytes
from paceline.comm import Group


@dataclass(frozen=True)
class Need:
    """Memory that a rank wants, and what it sees of its machine's.

    Attributes:
        machine: the same for all ranks of one machine, also on emulated hosts and in containers.
        wanted_bytes: beside what it has taken at the most until now.
        own_bytes: what it has taken, shared memory excluded.
        free_bytes: of the machine.
        limit_bytes: that its control group may take; None without a limit.
    """

    machine: str
    wanted_bytes: int
    own_bytes: int
    free_bytes: int
    limit_bytes: int | None

    @classmethod
    def of_this_rank(cls, wanted_bytes: int) -> Need:
        """The need of this rank. Memory that it will take again, in its next step, is not free."""
        memory, most_bytes = psutil.Process().memory_info(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        machine = ""
        with suppress(OSError):
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        return cls(
            machine,
            wanted_bytes + max(most_bytes - memory.rss, 0),
            memory.rss - getattr(memory, "shared", 0),
            psutil.virtual_memory().available,
            memory_limit_bytes(),
        )


def lack(group: Group, wanted_bytes: int) -> tuple[int, int] | None:
    """Bytes that the ranks of a machine want, and those that it has free.

    None where all machines have enough. All ranks of the group call this.
    """
    return lack_of([Need(**told) for told in group.gather_json(asdict(Need.of_this_rank(wanted_bytes)))])


def lack_of(needs: Sequence[Need]) -> tuple[int, int] | None:
    """See `lack`."""
    for machine in sorted({need.machine for need in needs}):
        there = [need for need in needs if need.machine == machine]
        free = min(need.free_bytes for need in there)
        limits = [need.limit_bytes for need in there if need.limit_bytes is not None]
        if limits:
            free = min(free, min(limits) - sum(need.own_bytes for need in there))
        wanted = sum(need.wanted_bytes for need in there)
        if wanted > free:
            return wanted, max(free, 0)
    return None
