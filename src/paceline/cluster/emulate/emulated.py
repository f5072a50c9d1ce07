"""The hosts that `emulate` of a cluster stands for: parts of this machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.cluster.discover import discover
from paceline.errors import ClusterError

if TYPE_CHECKING:
    from paceline.cluster.cluster import Emulate, Host


def hosts_of(emulate: Emulate) -> tuple[Host, ...]:
    """Hosts `host-0` and so on, without GPUs.

    Each has the cores of its quota, or else its share of the machine's, and its share of the memory.

    Raises:
        ClusterError: a host is to have more cores than this machine.
    """
    from paceline.cluster.cluster import Link

    machine = discover().hosts[0]
    hosts = []
    for i, (rate_bps, cores) in enumerate(zip(emulate.rates_bps, emulate.cores, strict=True)):
        if cores is not None and cores > machine.cores:
            raise ClusterError(
                f"cpu: host-{i} is to have {cores:g} cores, but this machine leaves only {machine.cores} to use"
            )
        link = Link(name="eth0", kind="ethernet", bandwidth_gbps=None if rate_bps is None else rate_bps / 10**9)
        changes = {
            "name": f"host-{i}",
            "cores": max(1, machine.cores // emulate.hosts) if cores is None else math.ceil(cores),
            "memory_bytes": max(1, machine.memory_bytes // emulate.hosts),
            "gpus": (),
            "links": (link,),
        }
        hosts.append(machine.model_copy(update=changes))
    return tuple(hosts)
