"""Places of ranks and their rendezvous: this machine, or the hosts emulated on it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate.hosts import EmulatedHost, Emulation, LinkBytes
from paceline.cluster.emulate.namespace import inside
from paceline.errors import LaunchError
from paceline.rank_environment import RankEnvironment

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
    """

    local_rank: int
    local_size: int
    address: str = ADDRESS
    interface: str = "lo"
    host: EmulatedHost | None = None

    def environment(self, rank: int, world_size: int, master: RankPlace, port: int) -> RankEnvironment:
        """Environment of the rank in this place.

        `master` is the place of rank 0, which serves the rendezvous at `port`.
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
        """A socket at this place's address, for the rendezvous that its rank serves. None takes a free port."""
        if self.host is None:
            return listen(port, backlog)
        return inside(self.host.namespace, lambda: listen(port, backlog, self.address))


@contextmanager
def places_on(
    cluster: Cluster, ranks: int, on_end: Callable[[dict[str, LinkBytes]], None] | None = None
) -> Iterator[list[RankPlace]]:
    """Places of `ranks` ranks on a cluster; emulated hosts are up within the context.

    Args:
        on_end: called at the end, however it comes, with what the links of emulated hosts have carried, by host.

    Raises:
        ClusterError: the hosts cannot be emulated here.
    """
    if cluster.emulate is None:
        yield on_this_machine(ranks)
        return
    with Emulation(cluster.emulate) as emulation:
        try:
            yield on_hosts(emulation.hosts, cluster.ranks_per_host(ranks))
        finally:
            if on_end:
                on_end(emulation.carried())


def on_this_machine(ranks: int) -> list[RankPlace]:
    """All ranks on this machine, where they meet on loopback."""
    return [RankPlace(rank, ranks) for rank in range(ranks)]


def on_hosts(hosts: Sequence[EmulatedHost], per_host: Sequence[int]) -> list[RankPlace]:
    """Places of ranks on each emulated host, in their order."""
    return [
        RankPlace(rank, count, host.address, host.interface, host)
        for host, count in zip(hosts, per_host, strict=True)
        for rank in range(count)
    ]


def listen(port: int | None, backlog: int, address: str = ADDRESS) -> socket.socket:
    """A socket at one address for the store of the rendezvous.

    Bound here, so no one can take the port before rank 0 is up.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        raise LaunchError(_why_no_port(port, address, error)) from error
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
