"""Links of the emulated hosts of a command under way, cut and parted from outside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.emulate.keeper import processes_in as processes_of_hosts
from paceline.cluster.emulate.network import OTHER_SIDE, Wire, move, plug, unplug, wires


@dataclass(frozen=True)
class Links:
    """Links of hosts, by the namespaces that their launcher holds."""

    bridge: str
    wires: Sequence[Wire]

    @classmethod
    def of(cls, launcher: int) -> Links | None:
        """Links of a command's hosts; None where they are not up."""
        held: dict[str, str] = {}
        with suppress(OSError):
            for entry in sorted(Path(f"/proc/{launcher}/fd").iterdir(), key=lambda entry: int(entry.name)):
                with suppress(FileNotFoundError):  # just closed
                    held.setdefault(os.readlink(entry), str(entry))
        namespaces = [path for link, path in held.items() if link.startswith("net:[")]
        if len(namespaces) < 2:
            return None
        bridge, *hosts = namespaces
        return cls(bridge, wires(hosts, [None] * len(hosts)))

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.wires)

    def processes_in(self, host: int) -> set[int]:
        """Process ids of all that runs in a host."""
        return processes_of_hosts([os.stat(self.wires[host].namespace).st_ino], [])

    def cut(self, host: int) -> None:
        """Have the link of a host carry nothing."""
        unplug(self.bridge, self.wires[host])

    def part(self, hosts: Sequence[int]) -> None:
        """Have these hosts reach one another, and no other."""
        move(self.bridge, [self.wires[host] for host in hosts], OTHER_SIDE)

    def mend(self, hosts: Sequence[int]) -> None:
        """Have these hosts reach all others again."""
        for host in hosts:
            plug(self.bridge, self.wires[host])
