"""Clusters by name, from the catalogue of hardware, such as `64x8xH100-SXM, 400gbit, 2.5/h`.

Such a cluster can be used for planning, but jobs cannot run on it.

A name has the form hosts × devices per host × device. `8xH100-SXM` is one host, and `H100-SXM` is one device. `400gbit`
is the rate from each device to other hosts per direction, and `3200gbit/host` is the rate of a whole host. `2.5/h` is
the price of a device for an hour, in any currency. `oversubscribed 3:1` means that the total rate of the hosts is three
times the capacity of the switches above them. `oversubscribed 3:1 beyond 32` means that this ratio applies if there are
more than 32 hosts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

from paceline.cluster.catalogue import CATALOGUE, Accelerator, at_power, network
from paceline.cluster.host import Device, Host, Link
from paceline.errors import ClusterError
from paceline.extensions import ExtensionPoint
from paceline.units import size

_SHAPE = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(?![-+.\d]+\s*[x×*])(\S.*)", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(?:bit(?:/s)?|b/s|bps)(?: ?(?:/|per) ?(host|device|gpu))?", re.IGNORECASE)
_PRICE = re.compile(r"[$€]?(\d+(?:\.\d+)?) ?[$€]? ?(?:/ ?|per )h(?:our)?", re.IGNORECASE)
_OVERSUBSCRIBED = re.compile(r"oversubscribed (\d+(?:\.\d+)?)(?: ?: ?1)?(?: beyond (\d+)(?: hosts)?)?", re.IGNORECASE)
_WORDS = {"rate": _RATE, "price": _PRICE, "oversubscription": _OVERSUBSCRIBED}
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_MOST_DEVICES = 10**6
_MOST_ON_A_HOST = 16
_EXAMPLES = "64x8xH100-SXM, 400gbit · 8xA100-SXM-80 · H100-SXM · 4x16xCPU, 10gbit/host"


class NamedCluster(NamedTuple):
    """The parts of a cluster's name.

    `rate_gbps` is the rate of one host. `assumed` is True if the name gives no rate. If there are more than `beyond`
    hosts, the rate between them is divided by `oversubscription`.
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
        """Canonical form of the name, without rate and price."""
        hosts = f"{self.hosts}x" if self.hosts > 1 or self.per_host > _MOST_ON_A_HOST else ""
        per_host = f"{self.per_host}x" if hosts or self.per_host > 1 else ""
        return f"{hosts}{per_host}{self.device.name}"


def cluster_names(text: str) -> list[str]:
    """Split a list such as `512xH100-SXM, 400gbit; 1024xA100` at semicolons or commas.

    A rate, a price or an oversubscription after a comma belongs to the previous name. `1024xH100-SXM` has more devices
    than one host, so it means the number of usual hosts that have 1024 devices together.

    Raises:
        ClusterError: the list is empty, or the devices cannot be divided into usual hosts. `cluster_from` reports other
            mistakes.
    """
    names: list[str] = []
    for part in text.split(";"):
        words = [word for word in map(str.strip, part.split(",")) if word]
        for place, word in enumerate(words):
            if place and any(of.fullmatch(word) for of in _WORDS.values()):
                names[-1] += f", {word}"
            else:
                names.append(word)
    if not names:
        raise ClusterError(
            "cluster.name_invalid",
            '"{text}" is not the name of a cluster such as {examples}',
            text=text,
            examples=_EXAMPLES,
        )
    return [_in_usual_hosts(name) for name in names]


def _in_usual_hosts(name: str) -> str:
    """Add the number of hosts to a name with more devices than one host has."""
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
        raise ClusterError(
            "cluster.hosts_not_filled",
            'cluster "{name}": {count:,} devices cannot be divided into hosts of {each}; use {choices}',
            name=name,
            count=count,
            each=each,
            choices=nearest,
        )
    return f"{count // each}x{each}x{match[3]}{comma}{rest}"


def read_name(text: str) -> NamedCluster:
    """Parse a name into its parts, and raise the same errors as `cluster_from`."""
    shape, *words = [word.strip() for word in text.split(",")]
    hosts, per_host, device = _shape(shape, text)
    found: dict[str, re.Match[str]] = {}
    for word in filter(None, words):
        matches = {kind: match for kind, pattern in _WORDS.items() if (match := pattern.fullmatch(word))}
        if not matches:
            raise ClusterError(
                "cluster.word_unknown",
                'cluster "{text}": "{word}" is not a rate such as 400gbit or 3200gbit/host, a price such as 2.5/h, '
                "or an oversubscription such as oversubscribed 3:1 beyond 32",
                text=text,
                word=word,
            )
        if twice := next(iter(matches.keys() & found.keys()), None):
            raise ClusterError(
                "cluster.word_twice",
                'cluster "{text}" gives two values for its {what}. Leave one out.',
                text=text,
                what=twice,
            )
        found |= matches
    rate_gbps = price = None
    oversubscribed: tuple[float, int] | tuple[()] = ()
    if rate := found.get("rate"):
        sharing = 1 if (rate[3] or "").lower() == "host" else per_host
        rate_gbps = float(rate[1]) * _UNITS[rate[2].lower()] / 1e9 * sharing
    if found.get("price"):
        price = float(found["price"][1])
    if times := found.get("oversubscription"):
        oversubscribed = _oversubscribed(float(times[1]), int(times[2] or 1), text)
    if rate_gbps == 0:
        raise ClusterError(
            "cluster.link_rate_zero",
            'cluster "{text}": a link needs a rate above 0 bit/s. Leave the rate out to use the usual rate.',
            text=text,
        )
    usual = device.network.bandwidth * 8 / 1e9 * per_host
    assumed = rate_gbps is None and hosts > 1
    return NamedCluster(hosts, per_host, device, rate_gbps or usual, assumed, price, *oversubscribed)


def _oversubscribed(times: float, beyond: int, text: str) -> tuple[float, int]:
    if times < 1 or beyond < 1:
        raise ClusterError(
            "cluster.oversubscription_invalid",
            'cluster "{text}": the oversubscription ratio must be at least 1:1 and the number of hosts at '
            "least 1, e.g. oversubscribed 3:1 beyond 32",
            text=text,
        )
    return times, beyond


def _shape(shape: str, text: str) -> tuple[int, int, Accelerator]:
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise ClusterError(
            "cluster.name_malformed",
            'cluster "{text}": write HOSTSxDEVICESxDEVICE, e.g. {examples}',
            text=text,
            examples=_EXAMPLES,
        )
    first, second, name = match.groups()
    try:
        device = accelerator(name)
    except ClusterError as error:
        raise ClusterError("cluster.name_wrong", 'cluster "{text}": {error}', text=text, error=error) from None
    hosts, per_host = (int(first), int(second)) if second else (1, int(first or 1))
    if hosts == 0 or per_host == 0:
        raise ClusterError(
            "cluster.name_without_devices",
            'cluster "{text}" has no devices: both numbers must be at least 1, e.g. {hosts}x{per_host}x{device}',
            text=text,
            hosts=max(hosts, 1),
            per_host=per_host or 8,
            device=device.name,
        )
    if hosts * per_host > _MOST_DEVICES:
        raise ClusterError(
            "cluster.too_large",
            'cluster "{text}" has {devices:,} devices. Plans support at most {most:,} devices.',
            text=text,
            devices=hosts * per_host,
            most=_MOST_DEVICES,
        )
    if not second and not device.is_core and per_host > max(_MOST_ON_A_HOST, device.per_host):
        each, rest = divmod(per_host, device.per_host)
        fitting = f"{each + (rest > 0)}x{device.per_host}x{device.name}"
        raise ClusterError(
            "cluster.host_too_large",
            'cluster "{text}" is one host with {per_host} devices, but hosts with such devices usually have {usual}: '
            "{fitting}",
            text=text,
            per_host=per_host,
            usual=device.per_host,
            fitting=fitting,
        )
    return hosts, per_host, device


def hosts_of(named: NamedCluster) -> tuple[Host, ...]:
    """Create identical hosts; values that the catalogue lacks (cores) are set to large numbers."""
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
                index=i,
                kind=device.kind,
                name=device.name,
                memory_bytes=device.memory_bytes,
                bf16=device.peak_flops["bf16"] > device.peak_flops["fp32"],
                fp8="fp8" in device.peak_flops,
            )
            for i in range(named.per_host)
        )
        memory_bytes = device.host_memory_bytes * named.per_host
        alike = Host(name="0", cores=8 * named.per_host, memory_bytes=memory_bytes, cpu="CPU", gpus=gpus, links=(link,))
    return tuple(alike.model_copy(update={"name": f"host-{i}"}) for i in range(named.hosts))


def described(named: NamedCluster) -> str:
    """Describe the cluster in words.

    An example is `64 hosts of 8 × H100-SXM (80 GiB), 400 Gbit/s from each device to other hosts, 2.5 an hour for each`.
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


# Also has the devices of installed packages, whose names must be exact.
HARDWARE = ExtensionPoint("device", "paceline.hardware", Accelerator, CATALOGUE, ClusterError)

# Families of devices by spelling, in the order in which they are tried. The text after a number must not begin with a
# digit.
_SPELLED_AS_NAMED = (
    "B300 B200 H200 H100 H800 H20 A100 A800 V100 P100 A10G A10 A40 L40S L40 L20 L4 A6000 T4 MI355X "
    "MI350X MI325X MI300X MI250X MI250 MI210 CPU"
)
_FAMILIES = {
    "GB300": r"gb300",
    "GB200": r"gb200",
    "GH200": r"gh200",
    **{name: rf"\b{name.lower()}" for name in _SPELLED_AS_NAMED.split()},
    "RTX-PRO-6000": r"\b(?:rtx ?)?pro 6000",
    "RTX-5090": r"\b(?:rtx ?)?5090",
    "RTX-4090": r"\b(?:rtx ?)?4090",
    "RTX-3090": r"\b(?:rtx ?)?3090",
    "RTX-2080-Ti": r"\b(?:rtx ?)?2080 ?ti",
    "TITAN-RTX": r"\b(?:titan rtx|rtx titan)",
    "TPU-v7x": r"\bironwood|(?:\b|tpu ?)(?:v7x|tpu7x)",
    "TPU-v6e": r"\btrillium|(?:\b|tpu)v6e",
    "TPU-v5p": r"(?:\b|tpu)v5p",
    "TPU-v5e": r"(?:\b|tpu)v5 ?(?:e|litepod|lite)",
    "TPU-v4": r"\btpu ?v4|^v4\b",
    "TPU-v3": r"\btpu ?v3|^v3\b",
    "Gaudi-3": r"\bgaudi ?3|\bhl ?325l?",
    "Gaudi-2": r"\bgaudi ?2|\bhl ?225[a-h]?",
    "Ascend-910B3": r"\b(?:ascend ?)?910 ?b3",
    "Ascend-910B": r"\b(?:ascend ?)?910 ?b2?|\b800t a2",
    "Ascend-910C": r"\b(?:ascend ?)?910 ?c|\bcloudmatrix ?384|\b(?:800t|900) a3",
    "Trainium-2": r"\btrainium ?2|\btrn2u?\b",
    "Trainium-1": r"\btrainium(?: ?1)?|\btrn1n?\b",
}
_FORMS = {"PCIe": r"\bpcie", "NVL": r"\bnvl\b", "SXM-96": r"\bhbm2e", "SXM": r"\b(?:sxm|dgx|hgx|hbm3)"}
_SIZE = re.compile(r"\b(\d{2,3}) ?(?:gi?b?)?\b")
_MEMORY = re.compile(r"\b(\d{2,3}(?:\.\d+)?) ?gi?b?\b(?! ?s\b)")
_BANDWIDTH = re.compile(r"\b(\d+(?:\.\d+)?) ?([gt])b ?(?:s|ps|p s)\b")
_POWER = re.compile(r"\b(\d{2,4}) ?w(?:atts?)?\b")
_MAKERS = re.compile(
    r"\b(nvidia|amd|instinct|geforce|tesla|quadro|google|cloud|intel|habana|aws|huawei|generation)\b ?"
)
# devices whose size or speed differs from the device with a similar name
_OTHERS = re.compile(r"\bmig\b|\blaptop\b|\bmax ?q\b|\b(?:[345]090|2080) ?d\b|\b[345]090 ?(?:ti|super)\b")
# parts of a card or chip, although names state the memory of the whole card or chip
_PARTS = ("MI250X", "MI250", "TPU-v3", "Ascend-910C", "Trainium-1", "Trainium-2")
# smaller differences come from ECC or from units of 1000 or 1024, and do not mean another memory
_ALIKE = 0.1


def accelerator(name: str) -> Accelerator:
    """Return the catalogue's entry for a device, by name or another spelling.

    If there are several sizes of a device and the name gives none, the largest size is used.

    Raises:
        ClusterError: there is no such device; the message shows the nearest names.
    """
    if (found := known(name)) is None:
        raise ClusterError(
            "cluster.device_unknown",
            '"{name}" is not in the catalogue of hardware. {hint} To measure a machine instead, run the command on '
            "it without --cluster.",
            name=name,
            hint=nearest_to(name),
        )
    return found


def known(name: str) -> Accelerator | None:
    """Return the catalogue's entry for a device; None if there is none.

    A memory size, memory bandwidth or power in the name replaces the value of the entry, as in `H100 500W` or
    `A100-SXM-64GB`. A machine type of a cloud, such as `p4d.24xlarge`, replaces the network of the entry. The name of
    the returned device then consists of the entry's name and the differences.
    """
    if name in CATALOGUE or name in HARDWARE.installed:
        return HARDWARE[name]
    text = _words(name)
    if (device := of_an_instance(text)) is not None:
        return device
    family = (
        None
        if _OTHERS.search(text)
        else next((f for f, spelling in _FAMILIES.items() if re.search(rf"(?:{spelling})s?(?![a-z\d])", text)), None)
    )
    if family is None:
        return None
    if family == "CPU":
        return _by_key(text) or CATALOGUE["CPU"]
    members = [device for key, device in CATALOGUE.items() if key == family or key.startswith(f"{family}-")]
    for form in (form for form, spelling in _FORMS.items() if re.search(spelling, text)):
        if of_form := [device for device in members if f"-{form}" in device.name]:
            members = of_form
            break
    sizes = [int(size) for size in _SIZE.findall(text)]
    members = [device for device in members if f"-{max(sizes, default=0)}" in device.name] or members
    return _as_stated(members[0], text)


def _as_stated(device: Accelerator, text: str) -> Accelerator:
    """Return the device with the memory, memory bandwidth and power that a name states."""
    different = []
    gib = max((float(size) for size in _MEMORY.findall(text)), default=0.0)
    own = device.memory_bytes / 2**30
    if device.name not in _PARTS and 0.4 * own <= gib <= 2 * own and abs(gib / own - 1) > _ALIKE:
        device = replace(device, memory_bytes=int(gib * 2**30))
        different.append(f"{gib:g}GB")
    if found := _BANDWIDTH.search(text):
        bandwidth = float(found[1]) * (1e12 if found[2] == "t" else 1e9)
        if abs(bandwidth / device.memory_bandwidth - 1) > _ALIKE / 2:
            device = replace(device, memory_bandwidth=bandwidth)
            different.append(f"{bandwidth / 1e12:g}TB/s")
    if (found := _POWER.search(text)) and float(found[1]) != device.power_w and float(found[1]) > 0:
        device = at_power(device, float(found[1]))
        different.append(f"{float(found[1]):g}W")
    return replace(device, name=" ".join([device.name, *different])) if different else device


def _by_key(text: str) -> Accelerator | None:
    return next((device for key, device in CATALOGUE.items() if _plain(key) == text.replace(" ", "")), None)


def nearest_to(name: str) -> str:
    """Return a hint with the nearest names, and the command that lists all names."""
    by_plain = {_plain(key): key for key in HARDWARE.names}
    text = _MAKERS.sub("", _words(name)).replace(" ", "")
    names = [by_plain[plain] for plain in get_close_matches(text, by_plain, n=3, cutoff=0.5)]
    near = f"Did you mean {' or '.join(names)}? " if names else ""
    return f"{near}`paceline plan cluster --hardware` lists all names."


def _words(name: str) -> str:
    words = re.sub(r"[\s_\-/,()]+", " ", name.lower()).strip()
    return re.sub(r"(\d)(?=sxm|pcie|nvl|hbm)", r"\1 ", words)  # for example in H100PCIe


def _plain(key: str) -> str:
    return key.lower().replace("-", "")


class Instance(NamedTuple):
    """A machine type of a cloud.

    Attributes:
        device: name of the machine's device in the catalogue.
        network_gbps: rate from one device to other hosts, in Gbit/s.
        source: source of the rate, and the machine size to which the rate refers.
        spelling: regular expression for names of the machine type.
    """

    device: str
    network_gbps: float
    source: str
    spelling: str


INSTANCES = {
    "p3dn": Instance("V100-SXM-32", 12.5, "AWS: p3dn.24xlarge, 100 Gbit/s", r"\bp3dn\b"),
    "p3": Instance("V100-SXM-16", 3.125, "AWS: p3.16xlarge, 25 Gbit/s", r"\bp3(?:\.|$)"),
    "p4de": Instance("A100-SXM-80", 50, "AWS: p4de.24xlarge, 400 Gbit/s", r"\bp4de\b"),
    "p4d": Instance("A100-SXM-40", 50, "AWS: p4d.24xlarge, 400 Gbit/s", r"\bp4d\b"),
    "p5en": Instance("H200", 400, "AWS: p5en.48xlarge, 3200 Gbit/s", r"\bp5en\b"),
    "p5e": Instance("H200", 400, "AWS: p5e.48xlarge, 3200 Gbit/s", r"\bp5e\b"),
    "p5": Instance("H100-SXM", 400, "AWS: p5.48xlarge, 3200 Gbit/s", r"\bp5(?:\.|$)"),
    "p6-b200": Instance("B200", 400, "AWS: p6-b200.48xlarge, 3200 Gbit/s", r"\bp6 b200\b"),
    "g4dn": Instance("T4", 12.5, "AWS: g4dn.metal, 100 Gbit/s", r"\bg4dn\b"),
    "g5": Instance("A10G", 12.5, "AWS: g5.48xlarge, 100 Gbit/s", r"\bg5(?:\.|$)"),
    "g6e": Instance("L40S", 50, "AWS: g6e.48xlarge, 400 Gbit/s", r"\bg6e\b"),
    "g6": Instance("L4", 12.5, "AWS: g6.48xlarge, 100 Gbit/s", r"\bg6(?:\.|$)"),
    "trn1n": Instance("Trainium-1", 50, "AWS: trn1n.32xlarge, 1600 Gbit/s", r"\btrn1n\b"),
    "a2-highgpu": Instance("A100-SXM-40", 12.5, "Google Cloud: a2-highgpu-8g, 100 Gbit/s", r"\ba2 highgpu\b"),
    "a2-ultragpu": Instance("A100-SXM-80", 12.5, "Google Cloud: a2-ultragpu-8g, 100 Gbit/s", r"\ba2 ultragpu\b"),
    "a3-highgpu": Instance("H100-SXM", 100, "Google Cloud: a3-highgpu-8g, 4 × 200 Gbit/s", r"\ba3 highgpu\b"),
    "a3-megagpu": Instance("H100-SXM", 200, "Google Cloud: a3-megagpu-8g, 8 × 200 Gbit/s", r"\ba3 megagpu\b"),
    "a3-ultragpu": Instance("H200", 400, "Google Cloud: a3-ultragpu-8g, 8 × 400 Gbit/s", r"\ba3 ultragpu\b"),
    "a4-highgpu": Instance("B200", 400, "Google Cloud: a4-highgpu-8g, 8 × 400 Gbit/s", r"\ba4 highgpu\b"),
    "ND40rs": Instance("V100-SXM-32", 12.5, "Azure: ND40rs_v2, 100 Gbit/s", r"\bnd40rs\b"),
    "ND96asr": Instance("A100-SXM-40", 200, "Azure: ND96asr_v4, 8 × 200 Gbit/s", r"\bnd96asr\b"),
    "ND96amsr": Instance("A100-SXM-80", 200, "Azure: ND96amsr_A100_v4, 8 × 200 Gbit/s", r"\bnd96amsr\b"),
    "ND96isr-H100": Instance("H100-SXM", 400, "Azure: ND96isr_H100_v5, 8 × 400 Gbit/s", r"\bnd96isr h100\b"),
    "ND96isr-H200": Instance("H200", 400, "Azure: ND96isr_H200_v5, 8 × 400 Gbit/s", r"\bnd96isr h200\b"),
    "ND96isr-MI300X": Instance("MI300X", 400, "Azure: ND96isr_MI300X_v5, 8 × 400 Gbit/s", r"\bnd96isr mi300x\b"),
}


def of_an_instance(text: str) -> Accelerator | None:
    """Return the device of a machine type, with the network of the machine.

    The result is None if the text names no machine type. The text must be in lower case, with words separated by
    blanks.
    """
    for name, instance in INSTANCES.items():
        if re.search(instance.spelling, text):
            device = CATALOGUE[instance.device]
            link = network(instance.network_gbps)
            if link == device.network:
                return device
            sources = {**device.sources, "network": instance.source}
            return replace(device, name=f"{device.name} {name}", network=link, sources=sources)
    return None


def domains(device: Accelerator, hosts: int, each: int) -> tuple[int, int]:
    """Return the number of domains, and the number of devices in each domain.

    The cluster has `hosts` hosts with `each` devices. The number of equal domains is the smallest that the device
    allows. If hosts are not joined, each host is a domain.
    """
    if not device.machine or hosts == 1 or each >= device.per_host:
        return hosts, each
    devices = hosts * each
    count = -(-devices // device.per_host)
    while devices % count:
        count += 1
    return count, devices // count
