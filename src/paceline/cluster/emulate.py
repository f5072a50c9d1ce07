"""Hosts emulated on this machine, with the rates and cores of a real cluster.

An emulated host is a network namespace, for its address and its link, and a control group, which limits its cores. All
hosts share memory and disks.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.cluster.cgroup import PREFIX, enter_group, held_group, place_of_group, processes_of, remove_group
from paceline.cluster.host import Emulate
from paceline.cluster.network import (
    INTERFACE,
    Relay,
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
    """Bytes that the link of one host has carried, including Ethernet, IP and TCP headers."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class EmulatedHost:
    """An emulated host that is running.

    Attributes:
        namespace: path of the host's network namespace; `nsenter --net=NAMESPACE command` runs a command in it.
        bridge: path of the namespace with the bridge of the host's link.
        address: address of the host in the network of the emulation.
        interface: network interface of the host's link.
        group: folder of the control group that limits the host's cores; None without a limit.
    """

    name: str
    namespace: str
    bridge: str
    address: str
    interface: str
    group: Path | None

    @property
    def entry(self) -> HostEntry:
        """Data with which a process enters the host, for `enter_host`."""
        return HostEntry(self.name, self.namespace, self.bridge, self.group)


def enter_host(entry: HostEntry | None) -> None:
    """Move this process into an emulated host, if `entry` is given.

    Call this before the process starts any thread.
    """
    if entry is None:
        return
    enter(entry.network_namespace)
    # This file stays open until this process ends, because the process needs its network even if the launcher is
    # killed.
    os.open(entry.bridge, os.O_RDONLY)
    if entry.control_group is not None:
        enter_group(entry.control_group)


class Emulation:
    """Emulated hosts, which exist within the context.

    The hosts continue to exist until this process and all processes inside the hosts have ended. If this process dies,
    the processes inside the hosts get time to save.
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
        """Return the bytes that the link of each host has carried since the start."""
        counts = carried(self._bridge, self._wires)
        return {host.name: LinkBytes(*count) for host, count in zip(self.hosts, counts, strict=True)}

    def cut(self, host: int) -> None:
        """Make a host's link drop every packet, like a disconnected cable or a dead switch."""
        if self.emulate.delay_ms:
            self._keeper.order("cut", host)
        else:
            unplug(self._bridge, self._wires[host])

    def mend(self, host: int) -> None:
        """Make the link of a host carry packets again."""
        if self.emulate.delay_ms:
            self._keeper.order("mend", host)
        else:
            plug(self._bridge, self._wires[host])


def _must_be_possible() -> None:
    if not sys.platform.startswith("linux"):
        raise ClusterError(
            "emulate.linux_only",
            "hosts can be emulated only on Linux, which has network namespaces. Leave `emulate` out to use this "
            "machine as it is.",
        )
    if os.geteuid() != 0:
        raise ClusterError(
            "emulate.needs_root",
            "emulated hosts need root or a user namespace. The command `paceline` creates a user namespace itself. "
            "Start a script with sudo or `unshare --user --map-root-user`, or leave `emulate` out to use this "
            "machine as it is.",
        )
    missing = [command for command in ("ip", "tc", "bridge") if shutil.which(command) is None]
    if missing:
        raise ClusterError(
            "emulate.command_missing",
            "emulated hosts need the command {missing} of the package iproute2. Install it (apt-get install "
            "iproute2), or leave `emulate` out to use this machine as it is.",
            missing=" and ".join(missing),
        )


_GRACE_S = 35.0  # a rank that saves a checkpoint after its launcher's death ends itself after 30 s
_ANSWER_S = 30.0  # longest time that Python needs to start on a busy machine
_TERMINATE_S = 1.0  # time between SIGTERM and SIGKILL
_KILL_S = 10.0  # SIGKILL takes effect immediately, unless a process waits for a failing disk or driver
_TICK_S = 0.02


class Keeper:
    """The launcher's handle on the keeper process, which carries packets and cleans up."""

    def __init__(self, namespaces: Sequence[int], groups: Sequence[Path], delay_ms: float | None) -> None:
        """Start the process.

        Args:
            namespaces: descriptors of the network namespaces, first of the bridge, then of each host.
            groups: folders of the control groups of the hosts.
            delay_ms: delay of each packet in milliseconds; if None, the keeper carries no packets.
        """
        launcher = os.pidfd_open(os.getpid())
        told = json.dumps([launcher, list(namespaces), list(map(str, groups)), delay_ms])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cluster.emulate", told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # readers of the launcher's output must not wait for the keeper
                start_new_session=True,
                pass_fds=[launcher, *namespaces],
            )
        finally:
            os.close(launcher)

    def wait_until_carrying(self) -> None:
        """Wait until the keeper carries packets.

        Raises:
            ClusterError: the keeper failed; the message gives the reason.
        """
        if (answer := self._answer()) != "carrying":
            raise ClusterError(
                "emulate.delay_failed",
                "packets between emulated hosts cannot be delayed: {reason}. Leave `delay_ms` out.",
                reason=answer or "the relay died",
            )

    def order(self, verb: str, host: int) -> None:
        """Make the keeper `cut` or `mend` a host's link, and wait for its answer.

        Raises:
            ClusterError: the keeper does not answer.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{verb} {host}\n".encode())
            self._process.stdin.flush()
        if (answer := self._answer()) != verb:
            raise ClusterError(
                "emulate.link_failed",
                "the link of emulated host {host} cannot be {action}: {reason}. Start the emulation again.",
                host=host,
                action="cut" if verb == "cut" else "mended",
                reason=answer or "the relay died",
            )

    def _answer(self) -> str:
        """Read the next line that the keeper prints; return "" if the keeper has died."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        return self._process.stdout.readline().decode().strip() if ready else f"no answer within {_ANSWER_S:g} s"

    def dismiss(self) -> None:
        """End the keeper after the launcher has cleaned up."""
        self._process.kill()
        self._process.communicate()


def end_processes(namespaces: Sequence[int], groups: Sequence[Path], grace_s: float = 0.0) -> None:
    """End all processes in these namespaces and control groups.

    Args:
        grace_s: longest time to wait until the processes end by themselves, in seconds.

    Raises:
        ClusterError: a process cannot be ended.
    """
    for number, patience_s in ((0, grace_s), (signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
        for pid in _processes(namespaces, groups):
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    if pid in _processes(namespaces, groups):  # the id still belongs to the same process
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)
        until = time.monotonic() + patience_s
        while time.monotonic() < until and _processes(namespaces, groups):
            time.sleep(_TICK_S)
    if left := _processes(namespaces, groups):
        raise ClusterError(
            "emulate.processes_left",
            "processes in emulated hosts cannot be ended. Their ids are {pids}.",
            pids=sorted(left),
        )


def _processes(namespaces: Sequence[int], groups: Sequence[Path]) -> set[int]:
    return processes_in([os.fstat(namespace).st_ino for namespace in namespaces], groups)


def processes_in(namespaces: Sequence[int], groups: Sequence[Path]) -> set[int]:
    """Return the ids of all other processes in network namespaces and control groups.

    Namespaces are given by their inodes. This process is not included.
    """
    wanted = set(namespaces)
    found = set().union(*map(processes_of, groups))
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}/ns/net").st_ino in wanted:
                found.add(int(name))
    return found - {os.getpid()}


def main() -> None:
    """Carry packets on request until the launcher dies, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # ignored until everything is cleaned up, which happens after the launcher has ended
        signal.signal(number, signal.SIG_IGN)
    launcher, namespaces, folders, delay_ms = json.loads(sys.argv[1])
    groups = list(map(Path, folders))
    relay: Relay | None = None
    if delay_ms:
        bridge, *hosts = map(path_of, namespaces)
        try:
            relay = Relay(bridge, wires(hosts, [None] * len(hosts)), delay_ms / 1000)
            relay.start()
            print("carrying", flush=True)
        except (OSError, ClusterError) as error:
            print(error, flush=True)
    _obey(launcher, relay)
    end_processes(namespaces, groups, _GRACE_S)
    for group in groups:
        remove_group(group)


def _obey(launcher: int, relay: Relay | None) -> None:
    """Cut and mend links on request, and confirm each request, until the launcher dies."""
    unread = b""
    while True:
        ready, _, _ = select.select([0, launcher], [], [])
        if launcher in ready or not (more := os.read(0, 4096)):
            return
        *lines, unread = (unread + more).split(b"\n")
        for verb, host in map(bytes.split, lines):
            assert relay is not None
            (relay.cut.add if verb == b"cut" else relay.cut.discard)(int(host))
            print(verb.decode(), flush=True)


if __name__ == "__main__":
    main()
