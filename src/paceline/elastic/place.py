"""Places and rendezvous of ranks, and the conditions for recovery in place."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import EmulatedHost
from paceline.cluster.network import inside
from paceline.device import CPU
from paceline.errors import LaunchError
from paceline.job.job import Job
from paceline.planning.plan import Plan, cores_of
from paceline.planning.sync_info import RULES, ServerProcesses, SyncSpec
from paceline.rank_environment import RankEnvironment
from paceline.wire.key import RunKey, key_descriptor, name_of, own_key
from paceline.wire.store import StoreServer

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class RankPlace:
    """Place of one rank: its host, its address and its number on the host.

    Attributes:
        local_rank: number of the rank among the ranks of its host.
        local_size: number of ranks on its host.
        address: address at which other ranks reach this rank.
        interface: network interface that has this address.
        host: the emulated host; None without emulation.
        number: number of the host process that starts the rank. Number 0 is this process, even if host 0 is emulated.
        host_name: name of the host, for messages; "" means this machine.
    """

    local_rank: int
    local_size: int
    address: str = ADDRESS
    interface: str = "lo"
    host: EmulatedHost | None = None
    number: int = 0
    host_name: str = ""

    def environment(self, rank: int, world_size: int, master: RankPlace, port: int) -> RankEnvironment:
        """Return the environment of the rank at this place.

        `master` is the place of rank 0, whose host serves torch's own store on `port`. Port 0 means any free port.
        """
        return RankEnvironment(
            rank,
            world_size,
            master.address,
            port,
            self.local_rank,
            self.local_size,
            address=self.address,
            interface=self.interface,
            host=self.host.entry if self.host else None,
        )

    def listen(self, port: int | None, backlog: int) -> socket.socket:
        """Open a listening socket for a store at the address of this place. Port None takes a free port."""
        if self.host is None:
            return listen(port, backlog, self.address)
        return inside(self.host.namespace, lambda: listen(port, backlog, self.address))


def cores_on(cluster: Cluster, plan: Plan) -> list[list[int]] | None:
    """Return the cores of each rank if the plan pins ranks to cores, otherwise None."""
    if not plan.pin:
        return None
    if cluster.emulate is not None:
        return [cores_of(rank, plan.ranks, cluster.hosts[0]) for rank in range(plan.ranks)]
    counts = zip(cluster.hosts, cluster.ranks_per_host(plan.ranks), strict=True)
    return [cores_of(rank, count, host) for host, count in counts for rank in range(count)]


def with_servers(places: list[RankPlace], plan: Plan) -> list[RankPlace]:
    """Return the places of a plan's workers, followed by the places of its servers.

    Servers are assigned to the hosts of the workers in turn. If there are several hosts, a server and its backup are on
    different hosts.
    """
    servers = ServerProcesses.of(plan.sync)
    hosts = list({(place.number, place.address): place for place in places}.values())
    count = servers.processes
    beside = [hosts[sum(divmod(number, servers.each)) % len(hosts)] for number in range(count)]
    return [*places, *beside]


def on_this_machine(ranks: int) -> list[RankPlace]:
    """Return places for all ranks on this machine, which meet on the loopback address."""
    return [RankPlace(rank, ranks) for rank in range(ranks)]


def on_hosts(hosts: Sequence[EmulatedHost], per_host: Sequence[int]) -> list[RankPlace]:
    """Return places for ranks on the emulated hosts, in the order of the hosts."""
    return [
        RankPlace(rank, count, host.address, host.interface, host, number)
        for number, (host, count) in enumerate(zip(hosts, per_host, strict=True))
        for rank in range(count)
    ]


def listen(port: int | None, backlog: int, address: str = ADDRESS) -> socket.socket:
    """Open a listening socket for a store at an address.

    The launcher binds the socket, so that no other process can take the port before rank 0 has started.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _no_port(port, address, error) from error
    return listener


def _no_port(port: int | None, address: str, error: OSError | OverflowError) -> LaunchError:
    if isinstance(error, OverflowError):
        return LaunchError(
            "launch.port_out_of_range",
            "port {port} is out of range: ports are numbered from 1 to 65535. Choose another port, or omit "
            "the port to use a free one.",
            port=port,
        )
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            "launch.port_in_use",
            "port {port} on {address} is in use by {process}. End that process, choose another port, or "
            "omit the port to use a free one.",
            port=port,
            address=address,
            process=_listener_of(port),
        )
    return LaunchError(
        "launch.port_unusable",
        "port {port} on {address} cannot be opened: {reason}. Choose another port, or omit the port to use a free one.",
        port=port or "(any)",
        address=address,
        reason=error.strerror,
    )


def _listener_of(port: int | None) -> str:
    import psutil

    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process, which may belong to another user"


@dataclass(frozen=True)
class Rendezvous:
    """Meeting point of the ranks.

    Attributes:
        store: path of the store's Unix socket, or the store's address and port.
        key_fd: descriptor of the run's key, which ranks inherit. None for a Unix socket, which needs no key.
    """

    store: str
    key_fd: int | None = None


@contextmanager
def rendezvous(
    places: Sequence[RankPlace], folder: Path, port: int | None, key: RunKey | None = None
) -> Iterator[Rendezvous]:
    """Serve a store for ranks at these places inside the context.

    Args:
        folder: the launcher's private folder.
        port: port between hosts; None takes a free port.
        key: the run's key; None uses the key of this process, or makes a new key.

    Raises:
        LaunchError: the store cannot be served.
    """
    if on_one_host(places):
        server = StoreServer(None, folder / "store")
        try:
            yield Rendezvous(str(folder / "store"))
        finally:
            server.close()
        return
    key = key or own_key() or RunKey.make()
    server = StoreServer(key, places[0].listen(port, backlog=max(128, 2 * len(places))))
    descriptor = key_descriptor(key)
    try:
        yield Rendezvous(name_of(server.address), descriptor)
    finally:
        os.close(descriptor)
        server.close()


def on_one_host(places: Sequence[RankPlace]) -> bool:
    """True if all ranks are on this machine, without emulated hosts."""
    return all(place.host is None and place.number == 0 for place in places)


RECOVERY = "PACELINE_RECOVERY"  # with the value off, the loss of any rank stops all ranks
# for messages: condition for a plan to recover in place
NEEDS = "dp of at least 2 or copies in memory, no division under a rule with local steps and, on accelerators, \
uncompressed all-reduces"


def recovery_is_on() -> bool:
    """True unless the user has turned recovery off.

    Raises:
        LaunchError: `PACELINE_RECOVERY` is neither on nor off.
    """
    wanted = os.environ.get(RECOVERY, "on")
    if wanted not in ("on", "off"):
        raise LaunchError(
            "launch.recovery_invalid", "{variable} must be on or off, not {wanted}", variable=RECOVERY, wanted=wanted
        )
    return wanted == "on"


def recovers_in_place(job: Job, plan: Plan, cluster: Cluster) -> bool:
    """True if a lost rank is replaced while the others continue.

    There are three conditions. First, the state of a lost rank must exist elsewhere. For this, the plan needs either
    one replica whose parts are copied to other ranks, or several replicas. Several replicas must be equal after every
    step, or be undivided and use one of paceline's sync rules. Second, waits for other ranks must end when a rank is
    lost. Waits in paceline's transports do so, and collectives on accelerators are aborted. Results of aborted
    collectives are undefined, so accelerators need one of paceline's sync rules, which discard such results. Third, the
    samples must be divisible among any number of replicas.

    Raises:
        LaunchError: `PACELINE_RECOVERY` is neither on nor off.
    """
    if not recovery_is_on():
        return False
    sync = SyncSpec.parse(plan.sync)
    built_in = sync.name in RULES.built_in
    alike = not sync.info.local_steps or (built_in and not plan.splits)
    replicas = (plan.dp > 1 or is_mirrored(plan)) and alike
    dealt = job.partition.weights is None and job.partition.kind != "hierarchical"
    waits_end = (
        plan.transport in ("auto", "shm", "tcp") if cluster.kind == CPU else built_in and plan.transport == "auto"
    )
    return replicas and dealt and waits_end


def is_mirrored(plan: Plan) -> bool:
    """Return True if the only replica keeps copies of its ranks' states in other ranks.

    See `Mirror`.
    """
    return plan.dp == plan.cp == plan.ep == 1 and plan.ranks > 1
