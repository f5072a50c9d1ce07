"""Emulated hosts for tests.

Real ranks in network namespaces that are joined by links of a given rate, which a test can cut and mend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from paceline.cluster.emulate import Emulation, LinkBytes
from paceline.cluster.host import Emulate
from paceline.cluster.network import Wire, plug, unplug, wires
from paceline.elastic.place import on_hosts
from ranks import run_in_places


class EmulatedHosts:
    """Hosts that are up, with a number of ranks on each."""

    def __init__(self, emulation: Emulation, per_host: Sequence[int]) -> None:
        self.emulation = emulation
        self.places = on_hosts(emulation.hosts, per_host)

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
        """Call `function(*args)` on every rank, and return the results in rank order (pickled).

        The function must stand at the top level of its file. It finds the variables that the launcher sets (RANK,
        MASTER_ADDR, PACELINE_ADDRESS …) and joins by itself: `with joined(transport=…) as group`.

        Raises:
            RankError: with the traceback of the rank that failed first, or the stacks of those that were not done at
                the deadline.
        """
        return run_in_places(self.places, function, args, deadline_s)

    def cut(self, host: int) -> None:
        """Have the link of a host drop every packet, both ways, from now on."""
        self.emulation.cut(host)

    def mend(self, host: int) -> None:
        """Have the link of a host carry packets again."""
        self.emulation.mend(host)

    def bytes(self) -> list[LinkBytes]:
        """What the link of each host has carried since it was made, headers included."""
        return list(self.emulation.carried().values())


def cut_of(launcher: int, host: int) -> None:
    """Cut the link of a host that another process keeps.

    Such as a `paceline train` under way (without delay on its links).
    """
    unplug(*_link_of(launcher, host))


def mend_of(launcher: int, host: int) -> None:
    """Mend it."""
    plug(*_link_of(launcher, host))


def namespaces_of(process: int) -> list[str]:
    """Paths of the network namespaces that a process holds open: of a launcher the bridge's, then each host's."""
    held: dict[str, str] = {}
    for entry in sorted(Path(f"/proc/{process}/fd").iterdir(), key=lambda entry: int(entry.name)):
        with suppress(FileNotFoundError):  # just closed
            held.setdefault(os.readlink(entry), str(entry))  # whoever enters one has it open twice for a moment
    return [path for link, path in held.items() if link.startswith("net:[")]


def _link_of(launcher: int, host: int) -> tuple[str, Wire]:
    bridge, *namespaces = namespaces_of(launcher)
    return bridge, wires(namespaces, [None] * len(namespaces))[host]


class Hosts(Protocol):
    """The fixture `hosts`."""

    def __call__(
        self,
        count: int,
        *,
        rate: str | tuple[str, ...] | None = None,
        cpu: float | tuple[float, ...] | None = None,
        delay_ms: float | None = None,
        ranks_per_host: int | Sequence[int] = 1,
    ) -> EmulatedHosts:
        """Emulate hosts until the end of the test.

        Args:
            count: how many.
            rate: of each link, each way: `100mbit`; one for all hosts, or one for each. None does not limit them.
            cpu: cores that each host may keep busy. None does not limit them.
            delay_ms: from any host to any other.
            ranks_per_host: the same for all, or one for each.
        """
        ...


@contextmanager
def emulating() -> Iterator[Hosts]:
    """What makes hosts; they are taken down at the end."""
    with ExitStack() as up:

        def hosts(
            count: int,
            *,
            rate: str | tuple[str, ...] | None = None,
            cpu: float | tuple[float, ...] | None = None,
            delay_ms: float | None = None,
            ranks_per_host: int | Sequence[int] = 1,
        ) -> EmulatedHosts:
            per_host = [ranks_per_host] * count if isinstance(ranks_per_host, int) else ranks_per_host
            emulate = Emulate(hosts=count, rate=rate, cpu=cpu, delay_ms=delay_ms)
            return EmulatedHosts(up.enter_context(Emulation(emulate)), per_host)

        yield hosts
