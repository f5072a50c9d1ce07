"""Measurement of the links between ranks, one launch for each transport.

Ranks are started here, on emulated hosts, or by torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.device import ON_CPU, default_backend
from paceline.elastic.attempt import places_on
from paceline.elastic.forkserver import warm_up
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.errors import LaunchError
from paceline.planning import sync_info as transport_info
from paceline.planning.sync_info import ALGORITHMS

if TYPE_CHECKING:
    from paceline.comm.measure.links import TransportMeasurement

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
SIZES = tuple(2**10 * 4**i for i in range(8))  # 1 KiB to 16 MiB
_MOST_RANKS = 8  # on the cores of a host, where nobody asks for more
_START_S, _CALL_S = 120, 20  # the longest that ranks may take to start, and for each collective at each size


@dataclass(frozen=True)
class Wanted:
    """Measurements wanted: collectives at sizes in bytes, over transports, all-reduce by each algorithm."""

    transports: tuple[str, ...]
    collectives: tuple[str, ...] = COLLECTIVES
    algorithms: tuple[str, ...] = ("flat",)
    sizes: tuple[int, ...] = SIZES


@dataclass
class LinkResults:
    """Measurements of each transport, and reasons for transports that could not be measured."""

    measured: list[TransportMeasurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def transports_of(cluster: Cluster) -> tuple[str, ...]:
    """Transports that a cluster can have.

    Between CPUs those that carry messages within a host, or between hosts; between accelerators torch's library.
    """
    cores = transport_info.carriers(several_hosts=len(cluster.hosts) > 1)
    library = library_of(cluster)
    return (library, *cores) if library is not None and cluster.devices > 1 else cores


def library_of(cluster: Cluster) -> str | None:
    """Torch's name of the library between a cluster's accelerators (`nccl`); None without any."""
    import torch

    return default_backend(torch.device(cluster.kind)) if cluster.has_accelerators else None


def algorithms_of(cluster: Cluster) -> tuple[str, ...]:
    """All of them between hosts; on one host the transport's own."""
    return tuple(ALGORITHMS) if len(cluster.hosts) > 1 else ("flat",)


def ranks_of(cluster: Cluster) -> int:
    """Number of ranks of a plan; on cores from 2 to 8 a host."""
    if cluster.has_accelerators:
        return max(2, cluster.devices)
    if len(cluster.hosts) == 1:
        return max(2, min(cluster.hosts[0].physical_cores, _MOST_RANKS))
    return max(2, sum(min(devices, _MOST_RANKS) for devices in cluster.devices_per_host))


def measure_links(
    cluster: Cluster, ranks: int, wanted: Wanted, *, say: Callable[[str], None] = lambda _: None
) -> LinkResults:
    """Start the ranks for each transport in turn and measure. `say` is told the transport that comes.

    Raises:
        ClusterError: the hosts cannot be emulated here.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
    """
    warm_up()
    from paceline.comm.measure.links import LinksRequest, measure_on_rank

    found, library = LinkResults(), library_of(cluster)
    cells = len(wanted.sizes) * (len(wanted.collectives) + len(wanted.algorithms))
    with places_on(cluster, ranks) as places:
        for transport in wanted.transports:
            say(transport)
            over = "auto" if transport == library else transport
            try:
                found.measured += run_on_ranks(
                    measure_on_rank,
                    LinksRequest(over, wanted.collectives, wanted.algorithms, wanted.sizes),
                    places=places,
                    start_deadline_s=_START_S + _CALL_S * cells,
                    env={} if transport == library else ON_CPU,
                )[:1]
            except LaunchError as error:
                found.failures[transport] = str(error)
    return found
