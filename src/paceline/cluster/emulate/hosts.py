"""Hosts emulated on this machine, with the rates and cores of a real cluster.

A host is a network namespace, for the addresses and the link, and a control group, for the cores; memory and disks are
shared.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.cluster.cluster import Emulate
from paceline.cluster.emulate.cgroup import PREFIX, enter_group, held_group, place_of_group
from paceline.cluster.emulate.keeper import Keeper, end_processes
from paceline.cluster.emulate.network import (
    INTERFACE,
    build,
    carried,
    enter,
    new_namespace,
    path_of,
    plug,
    unplug,
    wires,
)
from paceline.errors import ClusterError
from paceline.rank_environment import HostEntry


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that one host's link has carried, with Ethernet, IP and TCP headers."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class EmulatedHost:
    """One host that is up.

    Attributes:
        namespace: path; `nsenter --net=NAMESPACE command` runs a command inside.
        bridge: path of the namespace with the bridge, to which the host's link goes.
        address: on the network of the emulation.
        interface: of the host's link.
        group: the folder of the control group that limits its cores; None where they are not limited.
    """

    name: str
    namespace: str
    bridge: str
    address: str
    interface: str
    group: Path | None

    @property
    def entry(self) -> HostEntry:
        """Data for a process to enter the host with `enter_host`."""
        return HostEntry(self.name, self.namespace, self.bridge, self.group)


def enter_host(entry: HostEntry | None) -> None:
    """Move this process into an emulated host, if there is one to enter. To be called before any thread is started."""
    if entry is None:
        return
    enter(entry.network_namespace)
    # Stays open until this process ends, which still needs its network if the launcher is killed.
    os.open(entry.bridge, os.O_RDONLY)
    if entry.control_group is not None:
        enter_group(entry.control_group)


class Emulation:
    """Emulated hosts, up from `with` to its end.

    They last as long as this process or one inside; when this process dies, those inside have their time to save.
    """

    def __init__(self, emulate: Emulate) -> None:
        self.emulate = emulate
        self.hosts: tuple[EmulatedHost, ...] = ()
        self._made = ExitStack()

    def __enter__(self) -> Self:
        _must_be_possible()
        with self._made:
            namespaces = [self._made.enter_context(new_namespace()) for _ in range(self.emulate.hosts + 1)]
            self._bridge, *paths = map(path_of, namespaces)
            self._wires = wires(paths, self.emulate.rates_bps)
            build(self._bridge, self._wires, relayed=bool(self.emulate.delay_ms))
            name = f"{PREFIX}{os.getpid()}-{os.fstat(namespaces[0]).st_ino}"
            groups = [
                None if cores is None else self._made.enter_context(held_group(place_of_group(f"{name}-{i}"), cores))
                for i, cores in enumerate(self.emulate.cores)
            ]
            limited = [group for group in groups if group is not None]
            self._keeper = Keeper(namespaces, limited, self.emulate.delay_ms)
            self._made.callback(self._keeper.dismiss)
            self._made.callback(end_processes, namespaces, limited)
            if self.emulate.delay_ms:
                self._keeper.wait_until_carrying()
            self.hosts = tuple(
                EmulatedHost(wire.host, wire.namespace, self._bridge, wire.address, INTERFACE, group)
                for wire, group in zip(self._wires, groups, strict=True)
            )
            self._made = self._made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def carried(self) -> dict[str, LinkBytes]:
        """Bytes that each host's link has carried since the start, by host."""
        counts = carried(self._bridge, self._wires)
        return {host.name: LinkBytes(*count) for host, count in zip(self.hosts, counts, strict=True)}

    def cut(self, host: int) -> None:
        """Make a host's link drop every packet, like a pulled cable or a dead switch."""
        if self.emulate.delay_ms:
            self._keeper.order("cut", host)
        else:
            unplug(self._bridge, self._wires[host])

    def mend(self, host: int) -> None:
        """The link of a host carries packets again."""
        if self.emulate.delay_ms:
            self._keeper.order("mend", host)
        else:
            plug(self._bridge, self._wires[host])


def _must_be_possible() -> None:
    if not sys.platform.startswith("linux"):
        raise ClusterError(
            "hosts can be emulated on Linux only, which has network namespaces. Leave `emulate` out to use "
            "this machine as it is."
        )
    if os.geteuid() != 0:
        raise ClusterError(
            "emulated hosts need root, or a user namespace, which the command `paceline` makes for itself: start a "
            "script with sudo or `unshare --user --map-root-user`, or leave `emulate` out to use this machine as it is."
        )
    missing = [command for command in ("ip", "tc", "bridge") if shutil.which(command) is None]
    if missing:
        raise ClusterError(
            f"emulated hosts need the command {' and '.join(missing)}, of the package iproute2: install it (apt-get "
            "install iproute2), or leave `emulate` out to use this machine as it is."
        )
