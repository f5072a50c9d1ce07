"""A cluster as the cost model sees it: equal hosts with two levels of links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from paceline.cluster.catalogue.hardware import CATALOGUE, Accelerator, LinkSpec, known, nearest_to
from paceline.cluster.cluster import Cluster, Host
from paceline.cluster.domains import domains
from paceline.errors import ClusterError
from paceline.planning.adjustment import Adjustment
from paceline.planning.cost.layout import Machines

if TYPE_CHECKING:
    from paceline.planning.adjustment import Basis

# latency of a small message between CPUs of two hosts
_TCP_S = 5e-5
_ARM = ("neoverse", "graviton", "cortex", "ampere", "apple", "arm")
# processors whose every generation on sale has AVX-512
_WIDE = ("xeon", "epyc 9", "epyc-genoa", "epyc-turin", "avx512")


def machines(cluster: Cluster, calibration: Basis | None = None) -> Machines:
    """The cost model's view of a cluster. Devices come from the catalogue by name, links from their rates.

    The slowest device stands for all; `speeds` tell how much faster hosts are. A device of a cluster of CPUs is one
    core. A host's link is shared by its devices. Hosts that are joined to a domain, as those of an NVL72, are one. A
    calibration is passed on, and takes precedence; so are the factors of measured runs.

    Raises:
        ClusterError: a GPU is not in the catalogue; with the nearest names.
    """
    hosts = list(cluster.hosts_in_use)
    alike = {_likeness(host): host for host in hosts}
    found = {likeness: _device(host) for likeness, host in alike.items()}
    quotas = _quotas(cluster, hosts)
    devices = [_slowed(found[_likeness(host)], quota) for host, quota in zip(hosts, quotas, strict=True)]
    slowest = min(devices, key=_speed)
    memory_bytes = min(device.memory_bytes for host in alike.values() for device in host.devices)
    uneven = max(map(_speed, devices)) > 1.01 * _speed(slowest)
    each = _usual(len(host.devices) for host in hosts)
    count, per_host = domains(slowest, len(hosts), each)
    speeds = [_speed(device) / _speed(slowest) for device in devices]
    oversubscription, beyond = _oversubscription(hosts)
    return Machines(
        device=replace(slowest, memory_bytes=memory_bytes),
        hosts=count,
        per_host=per_host,
        between=_between(cluster, hosts, slowest),
        speeds=_of_domains(speeds, count) if uneven else (),
        memory_bytes=memory_bytes,
        price_per_hour=cluster.price_per_hour,
        calibration=None if isinstance(calibration, Adjustment) else calibration,
        adjustment=calibration if isinstance(calibration, Adjustment) else None,
        oversubscription=oversubscription,
        oversubscribed_beyond=max(1, beyond * each // per_host),
    )


def resized(machines: Machines, count: int) -> Machines:
    """Copy with another number of machines of one operating system.

    A cluster grows by these.
    """
    each = _of_a_machine(machines)
    hosts, per_host = domains(machines.device, count, each)
    return replace(machines, hosts=hosts, per_host=per_host, speeds=())


def machine_count(machines: Machines) -> int:
    """Number of machines of one operating system: hosts, unless these are joined to domains."""
    return machines.devices // _of_a_machine(machines)


def shape(machines: Machines) -> str:
    """Name of the cluster without its links, as `--cluster` takes it: `8x8xH100-SXM`."""
    return f"{machine_count(machines)}x{_of_a_machine(machines)}x{machines.device.name}"


def on_other_devices(machines: Machines, device: Accelerator) -> Machines:
    """Copy with as many devices of another kind, with all of its memory.

    Where the old ones are of a domain, in machines as large as the new kind's usual ones.
    """
    changed = replace(machines, device=device, memory_bytes=None)
    if not machines.device.machine:
        return changed
    each = gcd(machines.devices, device.machine or device.per_host)
    hosts, per_host = domains(device, machines.devices // each, each)
    return replace(changed, hosts=hosts, per_host=per_host, speeds=())


def _of_a_machine(machines: Machines) -> int:
    each = machines.device.machine
    return each if each and machines.per_host > each and machines.devices % each == 0 else machines.per_host


def _of_domains(speeds: list[float], count: int) -> tuple[float, ...]:
    """Speed of the slowest host of each domain."""
    hosts = len(speeds)
    return tuple(min(speeds[i * hosts // count : -(-(i + 1) * hosts // count)]) for i in range(count))


def _oversubscription(hosts: list[Host]) -> tuple[float, int]:
    """Oversubscription of the host with the most, and the hosts beyond which it holds."""
    found = [
        (link.oversubscription, link.oversubscribed_beyond)
        for host in hosts
        for link in host.links
        if link.kind in NETWORK and link.oversubscription > 1
    ]
    return max(found, default=(1.0, 1))


def _likeness(host: Host) -> tuple[object, ...]:
    return host.gpus or (host.cpu, host.cpu_bf16, host.cores, host.memory_bytes)


def _device(host: Host) -> Accelerator:
    if not host.gpus:
        return _core(host)
    return min((_accelerator(name) for name in {gpu.name for gpu in host.gpus}), key=_speed)


def _accelerator(name: str) -> Accelerator:
    if (found := known(name)) is None:
        raise ClusterError(
            f'no plan can be predicted for "{name}": its peak FLOP/s, memory bandwidth and links are not known\n'
            f"It is not in the catalogue of hardware. {nearest_to(name)} "
            "An entry of your own gives these figures: docs/extend/hardware.md. `paceline train` and `bench` need none."
        )
    return found


def _speed(device: Accelerator) -> float:
    return device.peak_flops["fp32" if device.is_core else "bf16"]


def _slowed(device: Accelerator, part: float) -> Accelerator:
    if part == 1.0:
        return device
    return replace(device, peak_flops={precision: peak * part for precision, peak in device.peak_flops.items()})


def _usual(counts: Iterable[int]) -> int:
    """The most frequent number; of several, the largest."""
    by_count = Counter(counts)
    return max(by_count, key=lambda count: (by_count[count], count))


def _core(host: Host) -> Accelerator:
    """A core of the host's processor, by the class that its name suggests.

    A hyper-thread counts as a part of a core.
    """
    name = host.cpu.lower()
    if name.startswith("cpu") and host.cpu in CATALOGUE:
        return CATALOGUE[host.cpu]
    if any(word in name for word in _ARM):
        found = CATALOGUE["CPU-NEON"]
    elif host.cpu_bf16:
        found = CATALOGUE["CPU-AVX512-BF16"]
    else:
        found = CATALOGUE["CPU-AVX512" if any(word in name for word in _WIDE) else "CPU-AVX2"]
    return _slowed(found, host.physical_cores / host.cores)


NETWORK = ("ethernet", "measured")  # kinds of links between hosts


def _quotas(cluster: Cluster, hosts: list[Host]) -> list[float]:
    """Fraction of each of its cores that a host may keep busy."""
    limits = cluster.emulate.cores if cluster.emulate else (None,) * len(hosts)
    return [1.0 if limit is None else min(1.0, limit / host.cores) for limit, host in zip(limits, hosts, strict=True)]


def _between(cluster: Cluster, hosts: list[Host], device: Accelerator) -> LinkSpec:
    """Link from a device to other hosts: its part of the slowest host's link.

    The catalogue's link if no rate is known.
    """
    latency_s = _TCP_S if device.is_core else device.network.latency_s
    delay_s = (cluster.emulate.delay_ms or 0.0) / 1000 if cluster.emulate else 0.0
    shares = []
    for host in hosts:
        rates = [link.bandwidth_gbps for link in host.links if link.kind in NETWORK and link.bandwidth_gbps]
        if rates:
            shares.append((max(rates), max(rates) * 1e9 / 8 / len(host.devices)))
    if not shares:
        return replace(device.network, latency_s=latency_s + delay_s)
    gbps, share = min(shares, key=lambda pair: pair[1])
    return LinkSpec(f"network, {gbps:g} Gbit/s a host", share, latency_s + delay_s)
