"""Places of ranks and their rendezvous, and which runs recover in place."""

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
    """One rank's.

    Attributes:
        local_rank: its number among the ranks of its host.
        local_size: how many these are.
        address: at which the other ranks reach it.
        interface: of that address.
        host: the emulated host, or None on this machine as it is.
        number: of the host process that starts it; 0 is this one, for host 0 of an emulation as well.
        host_name: of the host, for messages; "" is this machine's own.
    """

    local_rank: int
    local_size: int
    address: str = ADDRESS
    interface: str = "lo"
    host: EmulatedHost | None = None
    number: int = 0
    host_name: str = ""

    def environment(self, rank: int, world_size: int, master: RankPlace, port: int) -> RankEnvironment:
        """Environment of the rank in this place.

        `master` is the place of rank 0, whose host serves torch's own store at `port`, 0 for a free one.
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
        """A socket at this place's address, for a store. None takes a free port."""
        if self.host is None:
            return listen(port, backlog, self.address)
        return inside(self.host.namespace, lambda: listen(port, backlog, self.address))


def cores_on(cluster: Cluster, plan: Plan) -> list[list[int]] | None:
    """Cores of each rank of a plan that pins them; None for another."""
    if not plan.pin:
        return None
    if cluster.emulate is not None:
        return [cores_of(rank, plan.ranks, cluster.hosts[0]) for rank in range(plan.ranks)]
    counts = zip(cluster.hosts, cluster.ranks_per_host(plan.ranks), strict=True)
    return [cores_of(rank, count, host) for host, count in counts for rank in range(count)]


def with_servers(places: list[RankPlace], plan: Plan) -> list[RankPlace]:
    """Places of a plan's workers, and behind them those of its servers.

    Servers are on the workers' hosts, in turn. A server and its backup are on different hosts, where there are several.
    """
    servers = ServerProcesses.of(plan.sync)
    hosts = list({(place.number, place.address): place for place in places}.values())
    count = servers.processes
    beside = [hosts[sum(divmod(number, servers.each)) % len(hosts)] for number in range(count)]
    return [*places, *beside]


def on_this_machine(ranks: int) -> list[RankPlace]:
    """All ranks on this machine, where they meet on loopback."""
    return [RankPlace(rank, ranks) for rank in range(ranks)]


def on_hosts(hosts: Sequence[EmulatedHost], per_host: Sequence[int]) -> list[RankPlace]:
    """Places of ranks on each emulated host, in their order."""
    return [
        RankPlace(rank, count, host.address, host.interface, host, number)
        for number, (host, count) in enumerate(zip(hosts, per_host, strict=True))
        for rank in range(count)
    ]


def listen(port: int | None, backlog: int, address: str = ADDRESS) -> socket.socket:
    """A socket at one address, for a store.

    Bound here, so no one can take the port before rank 0 is up.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        raise LaunchError("launch.port_unusable", "{reason}", reason=_why_no_port(port, address, error)) from error
    return listener


def _why_no_port(port: int | None, address: str, error: OSError | OverflowError) -> str:
    advice = "Give another port, or none for a free one"
    if isinstance(error, OverflowError):
        return f"port {port} does not exist: ports go from 1 to 65535. {advice}."
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {address} is in use by {_listener_of(port)}. {advice}, or end that process."
    return f"port {port or '(any)'} on {address} cannot be opened: {error.strerror}. {advice}."


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
    return "another process (of another user, or it could not be told)"


@dataclass(frozen=True)
class Rendezvous:
    """The place where ranks meet.

    Attributes:
        store: the store's Unix socket, or its address and port.
        key_fd: descriptor of the run's key, for ranks to inherit; None where a Unix socket does without.
    """

    store: str
    key_fd: int | None = None


@contextmanager
def rendezvous(
    places: Sequence[RankPlace], folder: Path, port: int | None, key: RunKey | None = None
) -> Iterator[Rendezvous]:
    """A store for ranks in these places, up within the context.

    Args:
        folder: the launcher's private one.
        port: between hosts; None takes a free one.
        key: of the run; None takes this process's own, or makes one.

    Raises:
        LaunchError: it cannot be served.
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
    """True if all ranks are on this machine as it is."""
    return all(place.host is None and place.number == 0 for place in places)


RECOVERY = "PACELINE_RECOVERY"  # set to off: every loss of a rank stops all of them
# for messages: which plans `recovers_in_place`
NEEDS = "CPUs, dp of at least 2 or copies in memory, and no division under a rule with local steps"


def recovery_is_on() -> bool:
    """True unless the user has turned recovery off.

    Raises:
        LaunchError: `PACELINE_RECOVERY` is neither on nor off.
    """
    wanted = os.environ.get(RECOVERY, "on")
    if wanted not in ("on", "off"):
        raise LaunchError(
            "launch.recovery_invalid", "{variable}={wanted} is neither on nor off", variable=RECOVERY, wanted=wanted
        )
    return wanted == "on"


def recovers_in_place(job: Job, plan: Plan, cluster: Cluster) -> bool:
    """True if a lost rank is replaced while the others go on.

    That is where there are several replicas, which are the same after every step or undivided under a rule of ours, or
    one whose parts are copied to other ranks, our own transports are used (waits of torch's cannot be broken off), and
    samples can be dealt to any number of replicas.

    Raises:
        LaunchError: `PACELINE_RECOVERY` is neither on nor off.
    """
    if not recovery_is_on():
        return False
    sync = SyncSpec.parse(plan.sync)
    alike = not sync.info.local_steps or (sync.name in RULES.built_in and not plan.splits)
    replicas = (plan.dp > 1 or is_mirrored(plan)) and alike
    dealt = job.partition.weights is None and job.partition.kind != "hierarchical"
    return replicas and dealt and plan.transport in ("auto", "shm", "tcp") and cluster.kind == CPU


def is_mirrored(plan: Plan) -> bool:
    """True if ranks keep copies of each other's state (`Mirror`): no other replica has it."""
    return plan.dp == plan.cp == plan.ep == 1 and plan.ranks > 1
