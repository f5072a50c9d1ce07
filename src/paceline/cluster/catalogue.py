"""Catalogue of hardware: every device by name, with the original figures of its vendor.

Vendors state the bandwidth of a link for both directions together; here, the bandwidth is per direction. A peak that a
data sheet states with sparsity is halved. Memory is in GiB, close to the value that drivers report, even if a data
sheet states GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.device import CPU, GPU
from paceline.errors import ClusterError

TPU = "tpu"
HPU = "hpu"
NEURON = "neuron"
NPU = "npu"
_COMPILED = (TPU, HPU, NEURON)  # whole graphs are compiled for these devices, so the host starts no kernels


@dataclass(frozen=True)
class LinkSpec:
    """Bandwidth (bytes per second and direction) and latency (seconds) of a link.

    The vendor states these figures. A device can send and receive at this rate at the same time.
    """

    name: str
    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Accelerator:
    """Peak capabilities of a device.

    Attributes:
        name: name in the catalogue, such as `H100-SXM`.
        kind: torch's device type, which is `cuda` also for AMD devices, and `cpu` for a core.
        peak_flops: peak without sparsity in FLOP/s, by precision: `fp64`, `fp32`, `tf32`, `bf16`, `fp16`; also `fp8`,
            `fp4` and `int8` if the hardware supports them, for any layout of their scales. 16-bit products are summed
            in fp32. If the hardware does not support one of the first five, the entry is the peak of the precision that
            replaces it.
        memory_bytes: memory of the device in bytes.
        memory_bandwidth: bandwidth of the memory in bytes per second.
        inside: link to the other devices of the host. Devices that are joined by such links form one host, like the 72
            devices of an NVL72.
        launch_s: shortest time between the starts of two kernels, in seconds.
        per_host: number of devices in the usual host of the device.
        network: link of one device to other hosts in the vendor's systems; the default for a cluster without a stated
            rate.
        multiprocessors: number of streaming multiprocessors (compute units), over which the tiles of a matrix product
            are distributed.
        sustained: fraction of `peak_flops` that the device sustains within its power limit; 1 if power is not the
            limit.
        generation: generation of the units for matrix products and attention: `ampere`, `hopper`, `blackwell`, `cdna3`,
            `tpu`, …; "" if unknown.
        power_w: power at full load in watts, including the memory; None if unknown.
        host_link: link to the memory of the host; if several devices share the link, the share of one device.
        host_memory_bytes: memory of the host in bytes, divided by the number of devices.
        machine: number of devices per operating system, if `per_host` counts a domain of several machines; 0 if the
            number equals `per_host`.
        mesh: True if the devices of a host are connected in pairs, without a switch.
        torus: number of dimensions of the torus that connects the devices of a domain; 0 for a switch or links between
            all devices.
        sources: source of the figures, by attribute or under `all`.
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
        """True if the device is one core of a processor."""
        return self.kind == CPU

    @property
    def is_gpu(self) -> bool:
        """True if the host starts the device's kernels one by one.

        This is not the case for a TPU.

        On a GPU, matrix products are divided into tiles, and each multiprocessor computes one tile at a time.
        """
        return self.kind not in (CPU, *_COMPILED)

    def peak(self, precision: str) -> float:
        """Return the peak in FLOP/s, without sparsity.

        Raises:
            ClusterError: the device does not support the precision.
        """
        if precision in self.peak_flops:
            return self.peak_flops[precision]
        raise ClusterError(
            "cluster.precision_unsupported",
            "{device} does not support {precision}; it supports {precisions}",
            device=self.name,
            precision=precision,
            precisions=list(self.peak_flops),
        )


_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
HOP = "latency: NCCL 2.x, src/graph/tuning, hwLat of rings, Simple"

PCIE_3 = LinkSpec("PCIe 3 x16", 16e9, _PCIE_S)
PCIE_4 = LinkSpec("PCIe 4 x16", 32e9, _PCIE_S)
PCIE_5 = LinkSpec("PCIe 5 x16", 64e9, _PCIE_S)
# two devices behind a switch, which share one slot to the host
PCIE_3_SHARED = LinkSpec("PCIe 3 x16, one for 2 devices", 8e9, _PCIE_S)
PCIE_4_SHARED = LinkSpec("PCIe 4 x16, one for 2 devices", 16e9, _PCIE_S)
C2C = LinkSpec("NVLink-C2C", 450e9, _PCIE_S)


def nvlink(generation: int, bandwidth: float) -> LinkSpec:
    """Return the NVLink of a device: all links together, in bytes per second and direction."""
    return LinkSpec(f"NVLink {generation}", bandwidth, _NVLINK_S)


def fabric(bandwidth: float) -> LinkSpec:
    """Return the Infinity Fabric of a device: all links together."""
    return LinkSpec("Infinity Fabric", bandwidth, _NVLINK_S)


def network(gbps: float) -> LinkSpec:
    """Return the network link of a device with a rate in Gbit/s per direction."""
    return LinkSpec(f"network of {gbps:g} Gbit/s", gbps * 1e9 / 8, _NETWORK_S)


class UsualHost(NamedTuple):
    """The usual host of a device.

    Attributes:
        inside: link of a device to the other devices of the host, or of a domain of several hosts.
        network_gbps: rate from one device to other hosts, in Gbit/s.
        host_link: link of a device to the host's memory.
        memory_gib: host memory per device, in GiB.
        source: source of these figures.
        per_host: number of devices of the host or the domain.
        machine: number of devices per operating system if this number is smaller than `per_host`; otherwise 0.
        mesh: True if devices are connected in pairs, without a switch.
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

# one NIC of 100 Gbit/s for two devices
DGX1_P100 = UsualHost(nvlink(1, 80e9), 50, PCIE_3_SHARED, 64, "DGX-1 data sheet, P100", mesh=True)
DGX1 = UsualHost(nvlink(2, 150e9), 50, PCIE_3_SHARED, 64, "DGX-1 data sheet", mesh=True)
# one NIC per device
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
# the nodes of Alps and JUPITER have four superchips with one NIC each
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

# 21 of the 24 ports of a device connect to other devices of the host, and 3 connect to other hosts
_GAUDI_MEMORY = "white paper; host memory assumed"
GAUDI_2 = UsualHost(
    LinkSpec("21 ports of 100 Gbit/s", 262.5e9, 5e-6), 300, PCIE_4, 128, f"Gaudi 2 {_GAUDI_MEMORY}", mesh=True
)
GAUDI_3 = UsualHost(
    LinkSpec("21 ports of 200 Gbit/s", 525e9, 5e-6), 600, PCIE_5, 128, f"Gaudi 3 {_GAUDI_MEMORY}", mesh=True
)

# 7 links to the other devices of the host, of 28 GB/s each
ASCEND_A2 = UsualHost(
    LinkSpec("HCCS", 196e9, 5e-6),
    200,
    PCIE_4,
    128,
    "Atlas 800T A2 data sheet: 8 ports of 200 Gbit/s; host's link and memory assumed",
    mesh=True,
)
ASCEND_A3 = UsualHost(
    LinkSpec("Unified Bus", 196e9, 5e-6),
    200,
    PCIE_4,
    96,
    "CloudMatrix384 (arXiv:2506.12708): 400 Gbit/s for two dies; host's link and memory assumed",
    per_host=768,
    machine=16,
)


# The speed of products on the same chip scales with its power to this exponent, rounded from two published pairs:
# 0.45: an H100 at 500 W reaches 69 % of its peak in bf16 (torchao, roofline_utils), one at 700 W 80 % (ml-engineering,
# Bekman, MAMF). 0.61 to 0.67: MI300X at 750 W and MI325X at 1000 W, fp16, bf16 and fp8 (ROCm blogs, Measuring
# Max-Achievable FLOPs, part 2).
EXPONENT = 0.5


def at_power(device: Accelerator, watts: float) -> Accelerator:
    """Derive a device with another power limit.

    `sustained` scales with the square root of the power, up to 1. Memory and links do not change. A device with unknown
    power is returned unchanged.

    Raises:
        ClusterError: the power is not greater than 0.
    """
    if not watts > 0:
        raise ClusterError(
            "cluster.power_not_positive",
            "{device} cannot run at {watts:g} W. The power must be a number of watts above 0.",
            device=device.name,
            watts=watts,
        )
    if device.power_w is None or watts == device.power_w:
        return device
    sustained = min(1.0, device.sustained * (watts / device.power_w) ** EXPONENT)
    sources = {**device.sources, "sustained": f"its data sheet's power, and (W / {device.power_w:g} W)^{EXPONENT:g}"}
    return replace(device, sustained=sustained, power_w=watts, sources=sources)


_GIB = 2**30
_CORE = "FLOPs a cycle of the class × 2.5 GHz; a share of DDR4-3200's bandwidth on 8 channels among 20 cores"


def peaks(
    fp64: float,
    fp32: float,
    half: float,
    *,
    tf32: float | None = None,
    bf16: float | None = None,
    fp8: float | None = None,
    fp4: float | None = None,
    int8: float | None = None,
) -> Mapping[str, float]:
    """Convert peaks in TFLOP/s to FLOP/s by precision.

    `half` is the value for fp16, and for bf16 unless `bf16` is given.
    """
    always = {"fp64": fp64, "fp32": fp32, "tf32": tf32 or fp32, "bf16": bf16 or half, "fp16": half}
    where_there = {"fp8": fp8, "fp4": fp4, "int8": int8}
    found = always | {precision: tflops for precision, tflops in where_there.items() if tflops}
    return {precision: tflops * 1e12 for precision, tflops in found.items()}


class Chip(NamedTuple):
    """A chip that several entries of the catalogue share.

    Attributes:
        generation: generation of the chip, as in `Accelerator`.
        multiprocessors: number of active multiprocessors.
        figures: peaks of the chip in FLOP/s, by precision.
        sustained: fraction of the peaks that the chip sustains within its power limit.
        measured: source of the measurement of `sustained`; "" if power is not the limit or no measurement is known.
    """

    generation: str
    multiprocessors: int
    figures: Mapping[str, float]
    sustained: float = 1.0
    measured: str = ""


def gpu(
    name: str,
    chip: Chip,
    memory_gib: float,
    memory_gbps: float,
    power_w: float | None,
    host: UsualHost,
    source: str,
    kind: str = GPU,
) -> Accelerator:
    """Create the entry of a GPU or another card."""
    measured = {"sustained": chip.measured} if chip.measured else {}
    return Accelerator(
        name,
        kind,
        chip.figures,
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        host.inside,
        per_host=host.per_host,
        mesh=host.mesh,
        sources={"all": source, "latency": HOP, "network": host.source, **measured},
        network=network(host.network_gbps),
        multiprocessors=chip.multiprocessors,
        sustained=chip.sustained,
        generation=chip.generation,
        power_w=power_w,
        host_link=host.host_link,
        host_memory_bytes=int(host.memory_gib * _GIB),
        machine=host.machine,
    )


def tpu(
    name: str,
    bf16: float,
    memory_gib: float,
    memory_gbps: float,
    ici_gbps: float,
    pod: int,
    network_gbps: float,
    *,
    torus: int,
    machine: int,
    host_gib: float,
    fp8: float | None = None,
    int8: float | None = None,
    power_w: float | None = None,
    assumed: Mapping[str, str] | None = None,
) -> Accelerator:
    """Create the entry of a TPU chip, whose pod is a torus of `torus` dimensions.

    `assumed` lists the figures that are assumptions.
    """
    source = f"Cloud {name.replace('-', ' ')} documentation, Google"
    always = {"latency": "assumed", "fp32": "assumed: six passes in bf16 (XLA's HIGHEST)"}
    return Accelerator(
        name,
        TPU,
        peaks(bf16 / 36, bf16 / 6, bf16 / 6, bf16=bf16, fp8=fp8, int8=int8),
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        LinkSpec("ICI", ici_gbps * 1e9, 1e-6),
        per_host=pod,
        sources={"all": source, "network": source, **always, **(assumed or {})},
        network=network(network_gbps),
        generation="tpu",
        power_w=power_w,
        host_link=PCIE_5 if name in ("TPU-v6e", "TPU-v7x") else PCIE_3,
        host_memory_bytes=int(host_gib * _GIB),
        machine=machine,
        torus=torus,
    )


def neuron(
    name: str,
    figures: Mapping[str, float],
    memory_gib: float,
    memory_gbps: float,
    link_gbps: float,
    per_host: int,
    network_gbps: float,
    host_gib: float,
    source: str,
) -> Accelerator:
    """Create the entry of a Trainium core, which is a device in torch.

    The 16 chips of an instance form a 4 × 4 torus.
    """
    return Accelerator(
        name,
        NEURON,
        figures,
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        LinkSpec("NeuronLink", link_gbps * 1e9, 3e-6),
        per_host=per_host,
        sources={"all": source, "network": source, "latency": "assumed", "fp64": "assumed: six products of fp32"},
        network=network(network_gbps),
        generation="trainium",
        host_link=PCIE_4,
        host_memory_bytes=int(host_gib * _GIB),
        torus=2,
    )


def core(name: str, fp32_per_cycle: int, bf16_per_cycle: int | None = None) -> Accelerator:
    """Create the entry of one core of a processor.

    For jobs on CPUs, measurements are more accurate.
    """
    fp32 = fp32_per_cycle * 2.5e-3
    return Accelerator(
        name,
        CPU,
        peaks(fp32 / 2, fp32, fp32, bf16=(bf16_per_cycle or fp32_per_cycle) * 2.5e-3),
        4 * _GIB,
        10e9,
        LinkSpec("shared memory", 5e9, 10e-6),
        launch_s=5e-6,
        per_host=8,
        sources={"all": _CORE, "latency": "measured with paceline links", "network": "assumed"},
        network=LinkSpec("network of 10 Gbit/s, over 8 cores", 10e9 / 8 / 8, 50e-6),
        host_link=LinkSpec("its own memory", 10e9, 0.0),
        host_memory_bytes=4 * _GIB,
    )


_ADA = "Ada GPU architecture, NVIDIA, appendix A"
_GA102 = "GA102 GPU architecture, NVIDIA, appendix A"
_TURING = "Turing GPU architecture, NVIDIA, appendix A"
_RTX_BLACKWELL = "RTX Blackwell GPU architecture, NVIDIA, appendix A"
_PRO_BLACKWELL = "RTX PRO Blackwell GPU architecture, NVIDIA"
_A_DIE = "half of a card: torch sees its two dies as two devices"
_P100_SHEET = "P100 data sheet; its sums in fp32 take an fp32 unit, so that fp16 is no faster"
# Fraction of the peak that the largest matrix products reach, divided by this fraction for an A100, 0.869.
_MAMF = "largest products measured, of an A100's part (ml-engineering, Bekman, MAMF)"
_MAF = "largest products measured, of an A100's part (ROCm blogs, Measuring Max-Achievable FLOPs, part 2)"
_SCALED = "an H100-SXM's, by power for each multiprocessor (catalogue/power.py)"
_BY_POWER = "an MI355X's, by power (catalogue/power.py)"

_P100 = Chip("pascal", 56, peaks(5.3, 10.6, 10.6))
_V100 = Chip("volta", 80, peaks(7.8, 15.7, 125, bf16=15.7))
_V100_PCIE = Chip("volta", 80, peaks(7, 14, 112, bf16=14))
_A100 = Chip("ampere", 108, peaks(19.5, 19.5, 312, tf32=156, int8=624))
_A100_PCIE = _A100._replace(sustained=0.93, measured=_MAMF)
_H100 = Chip("hopper", 132, peaks(67, 67, 989.4, tf32=494.7, fp8=1978.9, int8=1978.9), 0.92, _MAMF)
_H100_PCIE = Chip("hopper", 114, peaks(51, 51, 756, tf32=378, fp8=1513, int8=1513), 0.79, _SCALED)
_H100_NVL = Chip("hopper", 132, peaks(60, 60, 835.5, tf32=417.5, fp8=1671, int8=1671), 0.83, _SCALED)
_H200_NVL = _H100_NVL._replace(sustained=1.0)
_GH200 = _H100._replace(sustained=0.96)
_H800 = _H100._replace(figures={**_H100.figures, "fp64": 1e12}, measured="assumed, as an H100's")
_H800_PCIE = _H100_PCIE._replace(figures={**_H100_PCIE.figures, "fp64": 0.8e12})
_H20 = Chip("hopper", 78, peaks(1, 44, 148, tf32=74, fp8=296, int8=296))
_B200 = Chip("blackwell", 148, peaks(37, 75, 2250, tf32=1125, fp8=4500, fp4=9000, int8=4500), 0.89, _MAMF)
_B300 = Chip("blackwell", 148, peaks(1.25, 75, 2250, tf32=1125, fp8=4500, fp4=13500, int8=125), 0.90, _MAMF)
_GB200 = Chip("blackwell", 152, peaks(40, 80, 2500, tf32=1250, fp8=5000, fp4=10000, int8=5000), 0.84, _MAMF)
_GB300 = Chip("blackwell", 152, peaks(1.39, 80, 2500, tf32=1250, fp8=5000, fp4=15000), 0.84, "assumed, as a GB200's")
_A10G = Chip("ampere", 80, peaks(0.49, 31.5, 70, tf32=35, int8=140))
_A10 = Chip("ampere", 72, peaks(0.49, 31.2, 125, tf32=62.5, int8=250))
_A40 = Chip("ampere", 84, peaks(0.58, 37.4, 149.7, tf32=74.8, int8=299.3))
_A6000 = Chip("ampere", 84, peaks(0.6, 38.7, 154.8, tf32=77.4, int8=309.7))
_L40S = Chip("ada", 142, peaks(1.43, 91.6, 362, tf32=183, fp8=733, int8=733))
_L40 = Chip("ada", 142, peaks(1.41, 90.5, 181, tf32=90.5, fp8=362, int8=362))
_L20 = Chip("ada", 92, peaks(0.93, 59.8, 119.5, tf32=59.8, fp8=239, int8=239))
_L4 = Chip("ada", 58, peaks(0.47, 30.3, 121, tf32=60, fp8=242.5, int8=242.5))
_RTX_3090 = Chip("ampere", 82, peaks(0.56, 35.6, 71, tf32=35.6, int8=284))
_RTX_4090 = Chip("ada", 128, peaks(1.29, 82.6, 165.2, tf32=82.6, fp8=330.3, int8=660.6))
_RTX_5090 = Chip("rtx-blackwell", 170, peaks(1.64, 104.8, 209.5, tf32=104.8, fp8=419, fp4=1676, int8=838))
_PRO_6000 = Chip("rtx-blackwell", 188, peaks(1.97, 126, 503.8, tf32=251.9, fp8=1007.6, fp4=2015.2, int8=1007.6))
_RTX_2080_TI = Chip("turing", 68, peaks(0.42, 13.4, 53.8, bf16=13.4, int8=215.2))
_TITAN_RTX = Chip("turing", 72, peaks(0.51, 16.3, 130.5, bf16=16.3, int8=261))
_T4 = Chip("turing", 40, peaks(0.25, 8.1, 65, bf16=8.1, int8=130))
_MI210 = Chip("cdna2", 104, peaks(45.3, 45.3, 181, int8=181))
_MI250 = Chip("cdna2", 104, peaks(45.25, 45.25, 181.05, int8=181.05))
_MI250X = Chip("cdna2", 110, peaks(47.85, 47.85, 191.5, int8=191.5))
_MI300X = Chip("cdna3", 304, peaks(163.4, 163.4, 1307.4, tf32=653.7, fp8=2614.9, int8=2614.9), 0.62, _MAF)
_MI325X = _MI300X._replace(sustained=0.74)
_MI355X = Chip("cdna4", 256, peaks(78.6, 157.3, 2516.6, fp8=5033.2, fp4=10066.3, int8=5033.2), 0.72, _MAMF)
_MI350X = Chip("cdna4", 256, peaks(72.1, 144.2, 2306.9, fp8=4613.7, fp4=9227.5, int8=4613.7), 0.66, _BY_POWER)


def _of_another_memory(device: Accelerator, name: str, memory_gib: float, memory_gbps: float) -> Accelerator:
    """Return a copy of this entry with different memory chips."""
    return replace(device, name=name, memory_bytes=int(memory_gib * 2**30), memory_bandwidth=memory_gbps * 1e9)


_H100_SXM = gpu("H100-SXM", _H100, 80, 3350, 700, DGX_H100, "H100 data sheet")
_GRAND_TETON = "an H100 with 96 GB of HBM2e at 2.4 TB/s, of 500 W: torchtitan, benchmarks; torchao, roofline_utils"
_H100_HBM2E = at_power(_of_another_memory(_H100_SXM, "H100-SXM-96", 96, 2400), 500)

# in each family, the usual device is the first
GPUS = (
    gpu("GB300", _GB300, 277, 8000, 1400, GB300_NVL72, "GB300 NVL72 data sheet"),
    gpu("GB200", _GB200, 186, 8000, 1200, GB200_NVL72, "GB200 NVL72 data sheet"),
    gpu("B300", _B300, 268, 8000, 1100, DGX_B300, "HGX B300 data sheet"),
    gpu("B200", _B200, 180, 8000, 1000, DGX_B200, "HGX B200 data sheet"),
    gpu("GH200-96", _GH200, 96, 4000, 900, QUAD_GH200, "GH200 data sheet"),
    gpu("GH200-144", _GH200, 141, 4900, 900, QUAD_GH200, "GH200 data sheet, HBM3e"),
    gpu("H200", _H100, 141, 4800, 700, DGX_H200, "H200 data sheet"),
    gpu("H200-NVL", _H200_NVL, 141, 4800, 600, NVL_4, "H200 data sheet"),
    _H100_SXM,
    replace(_H100_HBM2E, sources={**_H100_HBM2E.sources, "all": _GRAND_TETON}),
    gpu("H100-PCIe", _H100_PCIE, 80, 2000, 350, SERVER_5, "H100 data sheet"),
    gpu("H100-NVL", _H100_NVL, 94, 3900, 400, SERVER_5, "H100 NVL data sheet"),
    gpu("H800-SXM", _H800, 80, 3350, 700, HGX_H800, "H800 data sheet"),
    gpu("H800-PCIe", _H800_PCIE, 80, 2000, 350, SERVER_5, "H800 data sheet"),
    gpu("H20", _H20, 96, 4000, 500, HGX_H20, "H20 data sheet; the press prints 400 to 550 W"),
    gpu("A100-SXM-80", _A100, 80, 2039, 400, DGX_A100, "A100 data sheet"),
    gpu("A100-SXM-40", _A100, 40, 1555, 400, DGX_A100_40, "A100 data sheet"),
    gpu("A100-PCIe-80", _A100_PCIE, 80, 1935, 300, SERVER_4, "A100 data sheet"),
    gpu("A100-PCIe-40", _A100_PCIE, 40, 1555, 250, SERVER_4, "A100 data sheet"),
    gpu("A800-SXM-80", _A100, 80, 2039, 400, HGX_A800, "A800 data sheet"),
    gpu("A800-PCIe-80", _A100_PCIE, 80, 1935, 300, SERVER_4, "A800 data sheet"),
    gpu("V100-SXM-32", _V100, 32, 900, 300, DGX1, "V100 data sheet"),
    gpu("V100-SXM-16", _V100, 16, 900, 300, DGX1, "V100 data sheet"),
    gpu("V100-PCIe-32", _V100_PCIE, 32, 900, 250, SERVER_3, "V100 data sheet"),
    gpu("V100-PCIe-16", _V100_PCIE, 16, 900, 250, SERVER_3, "V100 data sheet"),
    gpu("P100", _P100, 16, 732, 300, DGX1_P100, _P100_SHEET),
    gpu("A10G", _A10G, 22.5, 600, 300, G5, "A10G data sheet (AWS)"),
    gpu("A10", _A10, 22.5, 600, 150, SERVER_4, "A10 data sheet"),
    gpu("A40", _A40, 45, 696, 300, SERVER_4, "A40 data sheet"),
    gpu("L40S", _L40S, 45, 864, 350, G6E, "L40S data sheet"),
    gpu("L40", _L40, 45, 864, 300, SERVER_4, "L40 data sheet"),
    gpu("L20", _L20, 45, 864, 275, SERVER_L20, "L20 data sheet"),
    gpu("L4", _L4, 22.5, 300, 72, G6, "L4 data sheet"),
    gpu("A6000", _A6000, 48, 768, 300, SERVER_4, "RTX A6000 data sheet"),
    gpu("RTX-PRO-6000", _PRO_6000, 96, 1792, 600, SERVER_5, _PRO_BLACKWELL),
    gpu("RTX-5090", _RTX_5090, 32, 1792, 575, SERVER_5, _RTX_BLACKWELL),
    gpu("RTX-4090", _RTX_4090, 24, 1008, 450, SERVER_4, _ADA),
    gpu("RTX-3090", _RTX_3090, 24, 936, 350, SERVER_4, _GA102),
    gpu("RTX-2080-Ti", _RTX_2080_TI, 11, 616, 250, SERVER_3, _TURING),
    gpu("TITAN-RTX", _TITAN_RTX, 24, 672, 280, SERVER_3, _TURING),
    gpu("T4", _T4, 15, 320, 70, SERVER_3, "T4 data sheet"),
    gpu("MI355X", _MI355X, 288, 8000, 1400, OF_8_MI355X, "MI355X data sheet; 7 Infinity Fabric links"),
    gpu("MI350X", _MI350X, 288, 8000, 1000, OF_8_MI355X, "MI350X data sheet; 7 Infinity Fabric links"),
    gpu("MI325X", _MI325X, 256, 6000, 1000, OF_8_MI300X, "MI325X data sheet; 7 Infinity Fabric links"),
    gpu("MI300X", _MI300X, 192, 5300, 750, OF_8_MI300X, "MI300X data sheet; 7 Infinity Fabric links"),
    gpu("MI250X", _MI250X, 64, 1638, 280, FRONTIER, f"MI250X data sheet, {_A_DIE}"),
    gpu("MI250", _MI250, 64, 1638, 280, FRONTIER, f"MI250 data sheet, {_A_DIE}; host as an MI250X's"),
    gpu("MI210", _MI210, 64, 1638, 300, MI210_SERVER, "MI210 data sheet"),
)


_HALF = "a core, half of a chip, as frameworks see it; ICI: 4 links of 656 Gbit/s for 2 cores"
_AS_V5P = {"network": "assumed, as a v5p's"}
_V3_ASSUMED = {"device": _HALF, "network": "assumed: 100 Gbit/s for a host of 8", "host": "assumed"}

# fp32 and tf32 have an eighth and a quarter of the peak of bf16, as for Gaudi 3; fp64 is computed in software
_GAUDI_2 = Chip("gaudi", 2, peaks(9, 54, 432, tf32=108, fp8=865))
_GAUDI_3 = Chip("gaudi", 8, peaks(38, 229, 459, tf32=459, bf16=1835, fp8=1835), 0.78, _MAMF)
# fp64 is computed in software; an fp32 product takes a quarter of the cube's rate, and HF32 half
_ASCEND = Chip("ascend", 24, peaks(16, 94, 376, tf32=188, int8=752))
_ASCEND_20 = Chip("ascend", 20, peaks(13, 78, 313, tf32=156, int8=626))
_ASCEND_ASSUMED = "fp64, fp32 and tf32 assumed"
_TRAINIUM_1 = (
    "Trainium documentation, AWS Neuron: a NeuronCore-v2, half of a chip; trn1.32xlarge, links taken as both ways"
)
_TRAINIUM_2 = (
    "Trainium2 documentation, AWS Neuron: two of a chip's eight cores (LNC=2); trn2.48xlarge, links taken as both ways"
)

TPUS = (
    tpu("TPU-v7x", 2307, 192, 7380, 600, 9216, 100, torus=3, machine=4, host_gib=240, fp8=4614),
    tpu("TPU-v6e", 918, 32, 1638, 400, 256, 100, torus=2, machine=8, host_gib=192, fp8=918, int8=1836),
    tpu("TPU-v5p", 459, 95, 2765, 600, 8960, 50, torus=3, machine=4, host_gib=104, fp8=459, int8=918),
    tpu("TPU-v5e", 197, 16, 819, 200, 256, 25, torus=2, machine=8, host_gib=64, int8=393),
    tpu(
        "TPU-v4", 275, 32, 1200, 300, 4096, 50, torus=3, machine=4, host_gib=95, int8=275, power_w=192, assumed=_AS_V5P
    ),
    tpu("TPU-v3", 61.5, 16, 450, 164, 2048, 12.5, torus=2, machine=8, host_gib=40, power_w=131, assumed=_V3_ASSUMED),
)
OTHERS = (
    gpu("Gaudi-3", _GAUDI_3, 128, 3700, 900, GAUDI_3, "Gaudi 3 white paper", HPU),
    gpu("Gaudi-2", _GAUDI_2, 96, 2450, 600, GAUDI_2, "Gaudi 2 white paper; fp32, tf32 assumed", HPU),
    gpu("Ascend-910B", _ASCEND, 64, 1600, 400, ASCEND_A2, f"Ascend 910B2, Atlas 800T A2; {_ASCEND_ASSUMED}", NPU),
    gpu("Ascend-910B3", _ASCEND_20, 64, 1600, 400, ASCEND_A2, f"Atlas 800T A2; {_ASCEND_ASSUMED}", NPU),
    gpu(
        "Ascend-910C",
        _ASCEND,
        64,
        1600,
        None,
        ASCEND_A3,
        f"CloudMatrix384 (arXiv:2506.12708), one of two dies, as torch sees it; {_ASCEND_ASSUMED}",
        NPU,
    ),
    neuron("Trainium-2", peaks(7.5, 45.25, 166.75, tf32=166.75, fp8=324.75), 24, 725, 128, 64, 50, 32, _TRAINIUM_2),
    neuron("Trainium-1", peaks(4, 23.75, 95, tf32=95, fp8=95, int8=190), 16, 410, 96, 32, 25, 16, _TRAINIUM_1),
)
CORES = (
    core("CPU", 32),
    core("CPU-AVX2", 32),
    core("CPU-AVX512", 64),
    core("CPU-AVX512-BF16", 64, 128),
    core("CPU-AMX", 64, 2048),
    core("CPU-NEON", 16),
)

CATALOGUE: Mapping[str, Accelerator] = {device.name: device for device in (*GPUS, *TPUS, *OTHERS, *CORES)}
