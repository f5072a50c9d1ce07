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
from paceline.cluster.emulate.cgroup import enter_group, make_group, place_of_group
from paceline.cluster.emulate.keeper import Keeper
from paceline.cluster.emulate.namespace import enter
from paceline.cluster.emulate.network import INTERFACE, Wire, build, carried, plug, unplug, wires
from paceline.cluster.emulate.record import Owner, Record, remove_abandoned
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
        namespace: `ip netns exec NAMESPACE command` runs a command inside.
        address: on the network of the emulation.
        interface: of the host's link.
        group: the folder of the control group that limits its cores; None where they are not limited.
    """

    name: str
    namespace: str
    address: str
    interface: str
    group: Path | None

    @property
    def entry(self) -> HostEntry:
        """Data for a process to enter the host with `enter_host`."""
        return HostEntry(self.name, self.namespace, self.group)


def enter_host(entry: HostEntry | None) -> None:
    """Move this process into an emulated host, if there is one to enter. To be called before any thread is started."""
    if entry is None:
        return
    enter(entry.network_namespace)
    if entry.control_group is not None:
        enter_group(entry.control_group)


class Emulation:
    """Emulated hosts, up from `with` to its end.

    They are also taken down when this process dies, however that happens: by a keeper process, once the processes
    inside have ended or had their time to save, or if that is killed too, at the next start of any emulation.
    """

    def __init__(self, emulate: Emulate) -> None:
        self.emulate = emulate
        self.hosts: tuple[EmulatedHost, ...] = ()
        self._made = ExitStack()

    def __enter__(self) -> Self:
        _must_be_possible()
        for record in remove_abandoned():
            print(
                (
                    f"paceline: removed the emulated hosts {record.name}-*, which process "
                    f"{record.launcher.pid} left behind"
                ),
                file=sys.stderr,
            )
        with self._made:
            self._keeper = Keeper()
            self._made.callback(self._keeper.dismiss)
            record = self._record(f"paceline-{self._keeper.pid}", self._keeper.pid)
            record.write()
            self._made.callback(record.take_down)
            self._keeper.watch(record)
            self._build(record)
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
            self._keeper.cut(host)
        else:
            unplug(self._bridge, self._wires[host])

    def mend(self, host: int) -> None:
        """The link of a host carries packets again."""
        if self.emulate.delay_ms:
            self._keeper.mend(host)
        else:
            plug(self._bridge, self._wires[host])

    def _record(self, name: str, keeper: int) -> Record:
        namespaces = (f"{name}-bridge", *(f"{name}-{i}" for i in range(self.emulate.hosts)))
        groups = [place_of_group(f"{name}-{i}") for i, cores in enumerate(self.emulate.cores) if cores is not None]
        return Record(name, Owner.of(os.getpid()), Owner.of(keeper), namespaces, tuple(groups))

    def _build(self, record: Record) -> None:
        self._bridge, *namespaces = record.namespaces
        self._wires: list[Wire] = wires(namespaces, self.emulate.rates_bps)
        build(self._bridge, self._wires, relayed=bool(self.emulate.delay_ms))
        if self.emulate.delay_ms:
            self._keeper.relay(self.emulate.delay_ms / 1000)
        groups = iter(record.groups)
        self.hosts = tuple(
            EmulatedHost(
                wire.host,
                wire.namespace,
                wire.address,
                INTERFACE,
                None if cores is None else make_group(next(groups), cores),
            )
            for wire, cores in zip(self._wires, self.emulate.cores, strict=True)
        )


def _must_be_possible() -> None:
    if not sys.platform.startswith("linux"):
        raise ClusterError(
            "hosts can be emulated on Linux only, which has network namespaces. Leave `emulate` out to use "
            "this machine as it is."
        )
    if os.geteuid() != 0:
        raise ClusterError(
            "emulated hosts need root, for network namespaces and control groups: start the command with sudo, "
            "or leave `emulate` out to use this machine as it is."
        )
    missing = [command for command in ("ip", "tc", "bridge") if shutil.which(command) is None]
    if missing:
        raise ClusterError(
            f"emulated hosts need the command {' and '.join(missing)}, of the package iproute2: install it "
            "(apt-get install iproute2), "
            "or leave `emulate` out to use this machine as it is."
        )
