"""A cluster by name, from the catalogue of hardware: `64x8xH100-SXM, 400gbit, 2.5/h`.

It can be planned for; nothing can run on it.

Hosts × devices of each × device; `8xH100-SXM` is one host, `H100-SXM` one device. `400gbit` is the rate of each device
to other hosts, each way, `3200gbit/host` that of all of a host together. `2.5/h` is the price of a device for an hour,
in whatever currency. `oversubscribed 3:1` says that hosts together send three times what the switches above them carry,
`oversubscribed 3:1 beyond 32` that this is so among more than 32 hosts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from paceline.cluster.catalogue.hardware import Accelerator, accelerator
from paceline.cluster.cluster import Cluster, Device, Host, Link
from paceline.cluster.domains import domains
from paceline.errors import ClusterError
from paceline.units import size

_SHAPE = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(?![-+.\d]+\s*[x×*])(\S.*)", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(?:bit(?:/s)?|b/s|bps)(?: ?(?:/|per) ?(host|device|gpu))?", re.IGNORECASE)
_PRICE = re.compile(r"[$€]?(\d+(?:\.\d+)?) ?[$€]? ?(?:/ ?|per )h(?:our)?", re.IGNORECASE)
_OVERSUBSCRIBED = re.compile(r"oversubscribed (\d+(?:\.\d+)?)(?: ?: ?1)?(?: beyond (\d+)(?: hosts)?)?", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_MOST_DEVICES = 10**6
_MOST_ON_A_HOST = 16
_FILES = (".yaml", ".yml", ".json")
_EXAMPLES = "64x8xH100-SXM, 400gbit · 8xA100-SXM-80 · H100-SXM · 4x16xCPU, 10gbit/host"


class NamedCluster(NamedTuple):
    """The parts of a cluster's name.

    `rate_gbps` is of one host, and `assumed` if the name gives none. It is divided by `oversubscription` among more
    than `beyond` hosts.
    """

    hosts: int
    per_host: int
    device: Accelerator
    rate_gbps: float
    assumed: bool
    price_per_hour: float | None
    oversubscription: float = 1.0
    beyond: int = 1

    @property
    def shape(self) -> str:
        """The canonical form, without rate and price."""
        hosts = f"{self.hosts}x" if self.hosts > 1 or self.per_host > _MOST_ON_A_HOST else ""
        per_host = f"{self.per_host}x" if hosts or self.per_host > 1 else ""
        return f"{hosts}{per_host}{self.device.name}"


def cluster_from(text: str | Path) -> Cluster:
    """The cluster of a YAML file, or of a name if no such file exists.

    `--cluster` takes either.

    Raises:
        ClusterError: the file cannot be read, or the name is none.
    """
    path = Path(text)
    if isinstance(text, Path) or path.suffix.lower() in _FILES or path.is_file():
        return Cluster.load(path)
    return named_cluster(text)


def named_cluster(text: str) -> Cluster:
    """The cluster of a name such as `64x8xH100-SXM, 400gbit`.

    Raises:
        ClusterError: the shape is impossible, a device is not in the catalogue (with the nearest names), or a
            word is neither rate nor price.
    """
    return Cluster(catalogue=text)


def cluster_names(text: str) -> list[str]:
    """Names of a list such as `512xH100-SXM, 400gbit; 1024xA100`, parted by semicolons or commas.

    After a comma a rate, a price or an oversubscription belongs to the name before it. `1024xH100-SXM`, more devices
    than a host has, is as many usual hosts.

    Raises:
        ClusterError: the list is empty, or the devices do not fill usual hosts. Other mistakes are `named_cluster`'s.
    """
    names: list[str] = []
    for part in text.split(";"):
        words = [word for word in map(str.strip, part.split(",")) if word]
        for place, word in enumerate(words):
            if place and any(of.fullmatch(word) for of in (_RATE, _PRICE, _OVERSUBSCRIBED)):
                names[-1] += f", {word}"
            else:
                names.append(word)
    if not names:
        raise ClusterError(f'"{text}" names no cluster, e.g. {_EXAMPLES}')
    return [_in_usual_hosts(name) for name in names]


def _in_usual_hosts(name: str) -> str:
    """The name, with hosts where it has more devices than one host holds."""
    shape, comma, rest = name.partition(",")
    match = _SHAPE.fullmatch(shape.strip())
    if match is None or match[2] or not match[1]:
        return name
    count, device = int(match[1]), accelerator(match[3])
    each = device.machine or device.per_host
    if device.is_core or count <= max(_MOST_ON_A_HOST, each):
        return name
    if count % each:
        nearest = f"{max(count // each, 1) * each}x{device.name} or {-(-count // each) * each}x{device.name}"
        raise ClusterError(f'cluster "{name}": {count:,} devices do not fill hosts of {each}; name {nearest}')
    return f"{count // each}x{each}x{match[3]}{comma}{rest}"


def read_name(text: str) -> NamedCluster:
    """The parts of a name. Raises as `named_cluster` does."""
    shape, *words = [word.strip() for word in text.split(",")]
    hosts, per_host, device = _shape(shape, text)
    rate_gbps: float | None = None
    price: float | None = None
    oversubscribed: tuple[float, int] | None = None
    for word in filter(None, words):
        if match := _RATE.fullmatch(word):
            if rate_gbps is not None:
                raise ClusterError(f'cluster "{text}" has two rates; leave one out')
            rate_gbps = (
                float(match[1])
                * _UNITS[match[2].lower()]
                / 1e9
                * (1 if (match[3] or "").lower() == "host" else per_host)
            )
        elif match := _PRICE.fullmatch(word):
            if price is not None:
                raise ClusterError(f'cluster "{text}" has two prices; leave one out')
            price = float(match[1])
        elif match := _OVERSUBSCRIBED.fullmatch(word):
            if oversubscribed is not None:
                raise ClusterError(f'cluster "{text}" is oversubscribed twice; leave one out')
            oversubscribed = _oversubscribed(float(match[1]), int(match[2] or 1), text)
        else:
            raise ClusterError(
                f'cluster "{text}": "{word}" is not a rate such as 400gbit or 3200gbit/host, and no price such as 2.5/h'
                ", nor oversubscribed 3:1"
            )
    if rate_gbps == 0:
        raise ClusterError(f'cluster "{text}": a link of 0 bit/s carries nothing; leave the rate out for the usual one')
    usual = device.network.bandwidth * 8 / 1e9 * per_host
    assumed = rate_gbps is None and hosts > 1
    return NamedCluster(hosts, per_host, device, rate_gbps or usual, assumed, price, *(oversubscribed or ()))


def _oversubscribed(times: float, beyond: int, text: str) -> tuple[float, int]:
    if times < 1 or beyond < 1:
        raise ClusterError(
            f'cluster "{text}": a network is oversubscribed 1:1 or more, beyond 1 host or more, '
            "e.g. oversubscribed 3:1 beyond 32"
        )
    return times, beyond


def _shape(shape: str, text: str) -> tuple[int, int, Accelerator]:
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise ClusterError(f'cluster "{text}": a name is hosts x devices of each x device, e.g. {_EXAMPLES}')
    first, second, name = match.groups()
    try:
        device = accelerator(name)
    except ClusterError as error:
        raise ClusterError(f'cluster "{text}": {error}') from None
    hosts, per_host = (int(first), int(second)) if second else (1, int(first or 1))
    if hosts == 0 or per_host == 0:
        raise ClusterError(
            f'cluster "{text}" has no device: both numbers are at least 1, e.g. '
            f"{max(hosts, 1)}x{per_host or 8}x{device.name}"
        )
    if hosts * per_host > _MOST_DEVICES:
        raise ClusterError(
            f'cluster "{text}" has {hosts * per_host:,} devices; {_MOST_DEVICES:,} is the most that can be planned for'
        )
    if not second and not device.is_core and per_host > max(_MOST_ON_A_HOST, device.per_host):
        each, rest = divmod(per_host, device.per_host)
        fitting = f"{each + (rest > 0)}x{device.per_host}x{device.name}"
        raise ClusterError(
            f'cluster "{text}" is one host with {per_host} devices; a usual one has {device.per_host}: {fitting}'
        )
    return hosts, per_host, device


def hosts_of(named: NamedCluster) -> tuple[Host, ...]:
    """Hosts that are alike; what the catalogue does not know of them (cores) is ample."""
    device = named.device
    link = Link(
        name="network",
        kind="ethernet",
        bandwidth_gbps=named.rate_gbps,
        oversubscription=named.oversubscription,
        oversubscribed_beyond=named.beyond,
    )
    if device.is_core:
        alike = Host(
            name="0",
            cores=named.per_host,
            memory_bytes=device.memory_bytes * named.per_host,
            cpu=device.name,
            links=(link,),
        )
    else:
        gpus = tuple(
            Device(
                index=i, kind=device.kind, name=device.name, memory_bytes=device.memory_bytes, bf16=_has_bf16(device)
            )
            for i in range(named.per_host)
        )
        memory_bytes = device.host_memory_bytes * named.per_host
        alike = Host(name="0", cores=8 * named.per_host, memory_bytes=memory_bytes, cpu="CPU", gpus=gpus, links=(link,))
    return tuple(alike.model_copy(update={"name": f"host-{i}"}) for i in range(named.hosts))


def _has_bf16(device: Accelerator) -> bool:
    return device.peak_flops["bf16"] > device.peak_flops["fp32"]


def described(named: NamedCluster) -> str:
    """The cluster in words.

    For example `64 hosts of 8 × H100-SXM (80 GiB), 400 Gbit/s from each device to other hosts, 2.5 an hour
    for each`.
    """
    memory = size(named.device.memory_bytes)
    cores = "cores of " if named.device.is_core else ""
    hosts = "1 host" if named.hosts == 1 else f"{named.hosts:,} hosts"
    parts = [f"{hosts} of {named.per_host} × {cores}{named.device.name} ({memory}{' each' if cores else ''})"]
    count, joined = domains(named.device, named.hosts, named.per_host)
    if count < named.hosts:
        several = "one domain" if count == 1 else f"{count:,} domains"
        parts.append(f"joined to {several} of {joined:,} by {named.device.inside.name}")
    if named.hosts > 1:
        assumed = ", assumed since the name gives no rate" if named.assumed else ""
        parts.append(f"{named.rate_gbps / named.per_host:g} Gbit/s from each device to other hosts{assumed}")
    if named.oversubscription > 1:
        beyond = f" beyond {named.beyond} hosts" if named.beyond > 1 else ""
        parts.append(f"oversubscribed {named.oversubscription:g}:1{beyond}")
    if named.price_per_hour is not None:
        parts.append(f"{named.price_per_hour:g} an hour for each")
    return ", ".join(parts)
