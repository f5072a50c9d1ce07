"""Usual hosts of accelerators: links between their devices, to host memory and to other hosts.

Makers print links both ways together; here is one way. PCIe is what a slot of 16 lanes carries.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.cluster.catalogue.accelerator import LinkSpec

_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
HOP = "latency: NCCL 2.x, src/graph/tuning, hwLat of rings, Simple"

PCIE_3 = LinkSpec("PCIe 3 x16", 16e9, _PCIE_S)
PCIE_4 = LinkSpec("PCIe 4 x16", 32e9, _PCIE_S)
PCIE_5 = LinkSpec("PCIe 5 x16", 64e9, _PCIE_S)
# two devices behind a switch whose way to the host is one slot wide
PCIE_3_SHARED = LinkSpec("PCIe 3 x16, one for 2 devices", 8e9, _PCIE_S)
PCIE_4_SHARED = LinkSpec("PCIe 4 x16, one for 2 devices", 16e9, _PCIE_S)
C2C = LinkSpec("NVLink-C2C", 450e9, _PCIE_S)


def nvlink(generation: int, bandwidth: float) -> LinkSpec:
    """NVLink of a device: all of its links together, in bytes per second each way."""
    return LinkSpec(f"NVLink {generation}", bandwidth, _NVLINK_S)


def fabric(bandwidth: float) -> LinkSpec:
    """Infinity Fabric of a device: all of its links together."""
    return LinkSpec("Infinity Fabric", bandwidth, _NVLINK_S)


def network(gbps: float) -> LinkSpec:
    """Network of a device, in Gbit/s each way."""
    return LinkSpec(f"network of {gbps:g} Gbit/s", gbps * 1e9 / 8, _NETWORK_S)


class UsualHost(NamedTuple):
    """Usual host of a device.

    Attributes:
        inside: link of a device to the others of the host, or of the domain of several.
        network_gbps: Gbit/s of one device to other hosts.
        host_link: link of a device to the host's memory.
        memory_gib: GiB of the host's memory for each device.
        source: of these figures.
        per_host: devices of the host or the domain.
        machine: devices of one operating system, where they are fewer; else 0.
        mesh: True if devices are joined in pairs, without a switch.
    """

    inside: LinkSpec
    network_gbps: float
    host_link: LinkSpec
    memory_gib: float
    source: str
    per_host: int = 8
    machine: int = 0
    mesh: bool = False


_ASSUMED_100 = "assumed: 100 Gbit/s and 512 GiB for a host of 8"
_ASSUMED_400 = "assumed: 400 Gbit/s and 1 TiB for a host of 8"
SERVER_3 = UsualHost(PCIE_3, 12.5, PCIE_3, 64, _ASSUMED_100)
SERVER_4 = UsualHost(PCIE_4, 12.5, PCIE_4, 64, _ASSUMED_100)
SERVER_5 = UsualHost(PCIE_5, 50, PCIE_5, 128, _ASSUMED_400)
SERVER_L20 = UsualHost(PCIE_4, 50, PCIE_4, 128, _ASSUMED_400)

G5 = UsualHost(PCIE_4, 12.5, PCIE_4, 96, "AWS: g5.48xlarge")
G6 = UsualHost(PCIE_4, 12.5, PCIE_4, 96, "AWS: g6.48xlarge")
G6E = UsualHost(PCIE_4, 50, PCIE_4, 192, "AWS: g6e.48xlarge")

# an NIC of 100 Gbit/s for two devices
DGX1_P100 = UsualHost(nvlink(1, 80e9), 50, PCIE_3_SHARED, 64, "DGX-1 data sheet, P100", mesh=True)
DGX1 = UsualHost(nvlink(2, 150e9), 50, PCIE_3_SHARED, 64, "DGX-1 data sheet", mesh=True)
# an NIC for each device
DGX_A100 = UsualHost(nvlink(3, 300e9), 200, PCIE_4_SHARED, 256, "DGX A100 data sheet, 640 GB")
DGX_A100_40 = DGX_A100._replace(memory_gib=128, source="DGX A100 data sheet, 320 GB")
HGX_A800 = UsualHost(nvlink(3, 200e9), 200, PCIE_4_SHARED, 128, "A800 data sheet: NVLink 400 GB/s; others as an A100's")
DGX_H100 = UsualHost(nvlink(4, 450e9), 400, PCIE_5, 256, "DGX H100 data sheet")
DGX_H200 = DGX_H100._replace(source="DGX H200 data sheet")
HGX_H800 = DGX_H100._replace(inside=nvlink(4, 200e9), source="H800 data sheet: NVLink 400 GB/s; others as an H100's")
HGX_H20 = DGX_H100._replace(source="H20 data sheet: NVLink 900 GB/s; others assumed, as an H100's")
NVL_4 = UsualHost(nvlink(4, 450e9), 100, PCIE_5, 128, "H200 NVL data sheet: bridges of 4; others assumed", per_host=4)
DGX_B200 = UsualHost(nvlink(5, 900e9), 400, PCIE_5, 256, "DGX B200 data sheet")
DGX_B300 = UsualHost(nvlink(5, 900e9), 800, PCIE_5, 256, "DGX B300 data sheet: a ConnectX-8 for each device")
GB200_NVL72 = UsualHost(nvlink(5, 900e9), 400, C2C, 240, "GB200 NVL72 data sheet", per_host=72, machine=4)
GB300_NVL72 = GB200_NVL72._replace(network_gbps=800, source="GB300 NVL72 data sheet: a ConnectX-8 for each device")
# the nodes of Alps and JUPITER: four superchips, an NIC for each
QUAD_GH200 = UsualHost(nvlink(4, 450e9), 200, C2C, 120, "Alps user documentation, CSCS: 4 to a node", per_host=4)

FRONTIER = UsualHost(
    fabric(150e9), 100, LinkSpec("Infinity Fabric", 36e9, _PCIE_S), 64, "Frontier user guide, OLCF", mesh=True
)
MI210_SERVER = UsualHost(
    fabric(150e9), 50, PCIE_4, 64, "MI210 data sheet: bridges of 4; others assumed", per_host=4, mesh=True
)
OF_8_MI300X = UsualHost(
    fabric(448e9), 400, PCIE_5, 192, "network assumed, as an H100's; memory: MLPerf 4.1, 8xMI300X", mesh=True
)
OF_8_MI355X = UsualHost(
    fabric(537.6e9), 400, PCIE_5, 384, "network assumed, as an H100's; memory: MLPerf 6.0, MI355X", mesh=True
)

# 21 of the 24 ports of a device go to the others of the host, 3 leave it
_GAUDI_MEMORY = "white paper; host memory assumed"
GAUDI_2 = UsualHost(
    LinkSpec("21 ports of 100 Gbit/s", 262.5e9, 5e-6), 300, PCIE_4, 128, f"Gaudi 2 {_GAUDI_MEMORY}", mesh=True
)
GAUDI_3 = UsualHost(
    LinkSpec("21 ports of 200 Gbit/s", 525e9, 5e-6), 600, PCIE_5, 128, f"Gaudi 3 {_GAUDI_MEMORY}", mesh=True
)
