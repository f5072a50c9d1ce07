"""Measurement of the links between ranks, one launch for each transport.

Ranks are started here, on emulated hosts, or by torchrun.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.cluster import Cluster
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.launch.local import launch
from paceline.launch.place import RankPlace, places_on
from paceline.plans import transport_info

if TYPE_CHECKING:
    from paceline.comm.measure.links import TransportMeasurement

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
SIZES = tuple(2**10 * 4**i for i in range(8))  # 1 KiB to 16 MiB
ALGORITHMS = ("flat", "ring", "tree", "hierarchical", "auto")
TRANSPORTS = (*transport_info.TRANSPORTS.names, "nccl")
_MOST_RANKS = 8  # on the cores of a host, where nobody asks for more
_START_S, _CALL_S = 120, 20  # the longest that ranks may take to start, and for each collective at each size


@dataclass(frozen=True)
class Wanted:
    """Measurements wanted: collectives at sizes in bytes, over transports, all-reduce by each algorithm."""

    transports: Sequence[str]
    collectives: Sequence[str] = COLLECTIVES
    algorithms: Sequence[str] = ("flat",)
    sizes: Sequence[int] = SIZES


@dataclass
class LinkResults:
    """Measurements of each transport, and reasons for transports that could not be measured."""

    measured: list[TransportMeasurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def transports_of(cluster: Cluster) -> tuple[str, ...]:
    """Transports that a cluster can have.

    Shared memory within a host (tcp adds nothing there), tcp between hosts, NCCL between GPUs.
    """
    cores = ("shm", "gloo") if len(cluster.hosts) == 1 else ("gloo", "tcp")
    return ("nccl", *cores) if cluster.kind == "cuda" and cluster.devices > 1 else cores


def algorithms_of(cluster: Cluster) -> tuple[str, ...]:
    """All of them between hosts; on one host the transport's own."""
    return ALGORITHMS[:-1] if len(cluster.hosts) > 1 else ("flat",)


def ranks_of(cluster: Cluster) -> int:
    """Number of ranks: as a plan would have, from 2 to 8 a host."""
    if len(cluster.hosts) == 1:
        return max(2, min(cluster.hosts[0].physical_cores, _MOST_RANKS))
    return max(2, sum(min(devices, _MOST_RANKS) for devices in cluster.devices_per_host))


def measure_links(cluster: Cluster, ranks: int, wanted: Wanted, *, say: Callable[[str], None] = lambda _: None) -> LinkResults:
    """Start the ranks for each transport in turn and measure. `say` is told the transport that comes.

    Raises:
        ClusterError: the hosts cannot be emulated here.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
    """
    found = LinkResults()
    with places_on(cluster, ranks) as places:
        for transport in wanted.transports:
            say(transport)
            try:
                found.measured.append(_launched(places, transport, wanted))
            except LaunchError as error:
                found.failures[transport] = str(error)
    return found


def measure_as_rank(transport: str, wanted: Wanted) -> TransportMeasurement | None:
    """Measure among the ranks of a torchrun; the result on rank 0, else None."""
    from paceline.comm.backend import joined
    from paceline.comm.measure.links import measure

    with joined(deadline_s=60, transport=transport) as group:
        measured = measure(group, **_of_each(wanted))
        group.barrier()
        return measured if group.rank == 0 else None


def _launched(places: Sequence[RankPlace], transport: str, wanted: Wanted) -> TransportMeasurement:
    signals: list[str] = []

    def note(event: str, details: dict[str, Any]) -> None:
        if event == "stop":
            signals.append(details["signal"])

    cells = len(wanted.sizes) * (len(wanted.collectives) + len(wanted.algorithms))
    with scratch_folder() as folder:
        file = Path(folder, "links.json")
        task = json.dumps(_of_each(wanted) | {"transport": "auto" if transport == "nccl" else transport})
        try:
            launch(
                ["paceline.comm.measure.links:run_rank", task, str(file)],
                ranks=len(places),
                places=places,
                threads=1,
                pin_cores=None,
                deadline_s=60,
                start_deadline_s=_START_S + _CALL_S * cells,
                saves=False,
                on_event=note,
                env={} if transport == "nccl" else {"CUDA_VISIBLE_DEVICES": ""},
            )
        finally:
            if signals:
                raise SystemExit(128 + signal.Signals[signals[0]])
        from paceline.comm.measure.links import TransportMeasurement  # with torch, so once the ranks have had the machine to themselves

        return TransportMeasurement.load(file)


def _of_each(wanted: Wanted) -> dict[str, Any]:
    return {name: list(getattr(wanted, name)) for name in ("collectives", "algorithms", "sizes")}
