"""Domains: machines whose devices are joined by the links that others have inside one machine.

The 18 machines of an NVL72 are a domain of 72 devices, those of a TPU pod one of thousands. A plan is made for domains;
machines are what fails and what is rented.
"""

from __future__ import annotations

from paceline.cluster.catalogue.hardware import Accelerator, known
from paceline.cluster.cluster import Cluster


def domains(device: Accelerator, hosts: int, each: int) -> tuple[int, int]:
    """Number of domains of `hosts` hosts of `each` devices, and devices of each domain.

    Domains are as few as the device's allows, and equal. Where none joins hosts, each host is one.
    """
    if not device.machine or hosts == 1 or each >= device.per_host:
        return hosts, each
    devices = hosts * each
    count = -(-devices // device.per_host)
    while devices % count:
        count += 1
    return count, devices // count


def devices_of_a_domain(cluster: Cluster) -> int | None:
    """Devices of each of the cluster's domains; None if no hosts are joined."""
    hosts = cluster.hosts_in_use
    names = {(gpu.name, len(host.gpus)) for host in hosts for gpu in host.gpus}
    if len(names) != 1:
        return None
    [(name, each)] = names
    if (device := known(name)) is None:
        return None
    count, joined = domains(device, len(hosts), each)
    return joined if count < len(hosts) else None
