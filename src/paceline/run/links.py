"""Measurement of the links between ranks, with one launch per transport.

Ranks run on this machine, on emulated hosts, or under torchrun.
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
_MOST_RANKS = 8  # maximum number of ranks per CPU host, unless more are requested
_START_S, _CALL_S = 120, 20  # deadlines in seconds: start of the ranks, and each collective at each size


@dataclass(frozen=True)
class Wanted:
    """Requested measurements: transports, collectives, all-reduce algorithms, and sizes in bytes."""

    transports: tuple[str, ...]
    collectives: tuple[str, ...] = COLLECTIVES
    algorithms: tuple[str, ...] = ("flat",)
    sizes: tuple[int, ...] = SIZES


@dataclass
class LinkResults:
    """Measurements of each transport, or the reason why it could not be measured."""

    measured: list[TransportMeasurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def transports_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the transports that a cluster can use.

    CPUs use the transports within a host or between hosts. Accelerators also use torch's library.
    """
    cores = transport_info.carriers(several_hosts=len(cluster.hosts) > 1)
    library = library_of(cluster)
    return (library, *cores) if library is not None and cluster.devices > 1 else cores


def library_of(cluster: Cluster) -> str | None:
    """Return torch's backend name for a cluster's accelerators (`nccl`); None without accelerators."""
    import torch

    return default_backend(torch.device(cluster.kind)) if cluster.has_accelerators else None


def algorithms_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the all-reduce algorithms to measure: on one host, only the transport's own."""
    return tuple(ALGORITHMS) if len(cluster.hosts) > 1 else ("flat",)


def ranks_of(cluster: Cluster) -> int:
    """Return the number of ranks to measure with; 2 to 8 per host on CPUs."""
    if cluster.has_accelerators:
        return max(2, cluster.devices)
    if len(cluster.hosts) == 1:
        return max(2, min(cluster.hosts[0].physical_cores, _MOST_RANKS))
    return max(2, sum(min(devices, _MOST_RANKS) for devices in cluster.devices_per_host))


def measure_links(
    cluster: Cluster, ranks: int, wanted: Wanted, *, say: Callable[[str], None] = lambda _: None
) -> LinkResults:
    """Measure each transport in turn, with a new launch of the ranks.

    `say` is called with the name of each transport before it is measured.

    Raises:
        ClusterError: the hosts cannot be emulated here.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
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
