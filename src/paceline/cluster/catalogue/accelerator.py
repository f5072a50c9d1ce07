"""Entries of the hardware catalogue: devices and links, with their makers' figures, not derated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.device import CPU
from paceline.errors import ClusterError

TPU = "tpu"
HPU = "hpu"
NEURON = "neuron"
_COMPILED = (TPU, HPU, NEURON)  # whole graphs are compiled, no kernel is started by the host


@dataclass(frozen=True)
class LinkSpec:
    """A link's bandwidth (bytes per second and direction) and latency (seconds), as its maker states.

    One device sends at that rate while it receives as much.
    """

    name: str
    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Accelerator:
    """Peak capabilities of a device.

    Attributes:
        name: in the catalogue, such as `H100-SXM`.
        kind: torch's type, `cuda` also for AMD's; `cpu` for a core.
        peak_flops: dense, without sparsity, by precision: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`; where the
            hardware has them `fp8`, `fp4` and `int8`, the same however their scales are laid out. 16-bit products are
            summed in fp32. Of the first five, one that the hardware does not have stands there with the peak of the one
            that it is computed in.
        memory_bytes: memory of the device.
        memory_bandwidth: bytes per second.
        inside: link to the other devices of its host; a host is what such links join, as the 72 of an NVL72.
        launch_s: shortest time from one kernel's start to the next one's.
        per_host: number of devices in its usual host.
        network: link of one device to other hosts in its maker's own systems, the default of a cluster without a stated
            rate.
        multiprocessors: streaming multiprocessors (compute units) among which the tiles of a product are divided.
        sustained: part of `peak_flops` that lasts within its power, where that binds.
        generation: of its units for products and attention: `ampere`, `hopper`, `blackwell`, `cdna3`, `tpu`, …; "" if
            unknown.
        power_w: watts at full load, its memory's included; None if unknown.
        host_link: link to its host's memory, its part of one that devices share.
        host_memory_bytes: memory of its host, for each device.
        machine: devices of one operating system, where `per_host` counts those of a domain of several; 0: `per_host`.
        mesh: True if its host's devices are joined in pairs, without a switch.
        torus: dimensions of the torus that joins its domain; 0: a switch, or links between all.
        sources: for each attribute, or `all`, where the figure is printed.
    """

    name: str
    kind: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    inside: LinkSpec
    launch_s: float = 4e-6
    per_host: int = 8
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    network: LinkSpec = LinkSpec("network, 100 Gbit/s", 12.5e9, 14e-6)
    multiprocessors: int = 128
    sustained: float = 1.0
    generation: str = ""
    power_w: float | None = None
    host_link: LinkSpec = LinkSpec("PCIe 4 x16", 32e9, 5.7e-6)
    host_memory_bytes: int = 128 * 2**30
    machine: int = 0
    torus: int = 0
    mesh: bool = False

    @property
    def is_core(self) -> bool:
        """True if it is a core of a processor."""
        return self.kind == CPU

    @property
    def is_gpu(self) -> bool:
        """True if the host starts its kernels one by one, unlike a TPU's.

        Products are cut into tiles, one for each of its multiprocessors at a time.
        """
        return self.kind not in (CPU, *_COMPILED)

    def peak(self, precision: str) -> float:
        """FLOPs per second, dense.

        Raises:
            ClusterError: the device does not compute in that precision.
        """
        if precision in self.peak_flops:
            return self.peak_flops[precision]
        raise ClusterError(f"{self.name} does not compute in {precision}; it has {', '.join(self.peak_flops)}")


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


# Products of the same chip go with its power to this exponent, rounded from two pairs that are published:
# 0.45: an H100 at 500 W reaches 69 % of its peak in bf16 (torchao, roofline_utils), one at 700 W 80 % (ml-engineering,
# Bekman, MAMF). 0.61 to 0.67: MI300X at 750 W and MI325X at 1000 W, fp16, bf16 and fp8 (ROCm blogs, Measuring
# Max-Achievable FLOPs, part 2).
EXPONENT = 0.5


def at_power(device: Accelerator, watts: float) -> Accelerator:
    """A device built for, or capped at, another power than its data sheet's.

    `sustained` goes with the square root of the power, and is 1 at most; memory and links stay. A device whose power is
    not known stays as it is.

    Raises:
        ClusterError: the power is not above 0.
    """
    if not watts > 0:
        raise ClusterError(f"{device.name} at {watts:g} W computes nothing; a power is a number of watts above 0")
    if device.power_w is None or watts == device.power_w:
        return device
    sustained = min(1.0, device.sustained * (watts / device.power_w) ** EXPONENT)
    sources = {**device.sources, "sustained": f"its data sheet's power, and (W / {device.power_w:g} W)^{EXPONENT:g}"}
    return replace(device, sustained=sustained, power_w=watts, sources=sources)
