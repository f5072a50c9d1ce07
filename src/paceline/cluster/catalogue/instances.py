"""Machine types of clouds: the device of each, and its network.

Makers' own systems have a network card for each device; many clouds have fewer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from paceline.cluster.catalogue.accelerator import Accelerator
from paceline.cluster.catalogue.devices import CATALOGUE
from paceline.cluster.catalogue.hosts import network


class Instance(NamedTuple):
    """Machine type.

    Attributes:
        device: its entry in the catalogue.
        network_gbps: Gbit/s of one device to other hosts.
        source: who prints it, and of which size.
        spelling: how names spell it.
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
    """Device of the machine type that a text names, with its network.

    None if it names none. The text is in lower case, its words divided by blanks.
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
