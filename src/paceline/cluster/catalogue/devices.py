"""The catalogue's figures: peak arithmetic, memory and links of devices, each with its source.

Makers print links both ways together; here is one way. A peak that a sheet prints with sparsity is halved. Memory is in
GiB, about what drivers report, whatever a sheet calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from paceline.cluster.catalogue.accelerator import TPU, Accelerator, LinkSpec
from paceline.device import CPU, GPU

_GIB = 2**30
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
_HOP = "latency: NCCL 2.x, src/graph/tuning, hwLat of rings, Simple"
_GCD = "MI250X data sheet, half of a card: torch sees its two dies as two devices"
_MI300X = "MI300X data sheet; 7 Infinity Fabric links"
_CORE = "FLOPs a cycle of the class × 2.5 GHz; a share of DDR4-3200's bandwidth on 8 channels among 20 cores"


def _peaks(
    fp64: float,
    fp32: float,
    half: float,
    *,
    tf32: float | None = None,
    bf16: float | None = None,
    fp8: float | None = None,
) -> Mapping[str, float]:
    """Peak FLOP/s by precision, from TFLOP/s. `half` is fp16's, and bf16's without `bf16`."""
    peaks = {
        "fp64": fp64,
        "fp32": fp32,
        "tf32": tf32 or fp32,
        "bf16": bf16 or half,
        "fp16": half,
        **({"fp8": fp8} if fp8 else {}),
    }
    return {precision: tflops * 1e12 for precision, tflops in peaks.items()}


def _nvlink(generation: int, bandwidth: float) -> LinkSpec:
    return LinkSpec(f"NVLink {generation}", bandwidth, _NVLINK_S)


def _network(gbps: float) -> LinkSpec:
    return LinkSpec(f"network of {gbps:g} Gbit/s", gbps * 1e9 / 8, _NETWORK_S)


class _Host(NamedTuple):
    """Usual host of a device: its inner link, its network in Gbit/s, and their source."""

    inside: LinkSpec
    network_gbps: float
    source: str


_SERVER_3 = _Host(LinkSpec("PCIe 3 x16", 16e9, _PCIE_S), 12.5, "assumed: 100 Gbit/s for a host of 8")
_SERVER_4 = _SERVER_3._replace(inside=LinkSpec("PCIe 4 x16", 32e9, _PCIE_S))
_SERVER_5 = _Host(LinkSpec("PCIe 5 x16", 64e9, _PCIE_S), 50, "assumed: 400 Gbit/s for a host of 8")
_G5 = _SERVER_4._replace(source="AWS: g5.48xlarge")
_G6 = _SERVER_4._replace(source="AWS: g6.48xlarge")
_G6E = _Host(_SERVER_4.inside, 50, "AWS: g6e.48xlarge")
_DGX1 = _Host(_nvlink(2, 150e9), 50, "DGX-1 data sheet")
_DGX_A100 = _Host(_nvlink(3, 300e9), 200, "DGX A100 data sheet")
_DGX_H100 = _Host(_nvlink(4, 450e9), 400, "DGX H100 data sheet")
_DGX_H200 = _DGX_H100._replace(source="DGX H200 data sheet")
_DGX_B200 = _Host(_nvlink(5, 900e9), 400, "DGX B200 data sheet")
_NVL72 = _DGX_B200._replace(source="GB200 NVL72 data sheet")
_FRONTIER = _Host(LinkSpec("Infinity Fabric", 150e9, _NVLINK_S), 100, "Frontier user guide, OLCF")
_OF_8_MI300X = _Host(LinkSpec("Infinity Fabric", 448e9, _NVLINK_S), 400, "assumed, as an H100's")


def _gpu(
    name: str,
    peaks: Mapping[str, float],
    memory_gib: float,
    memory_gbps: float,
    host: _Host,
    source: str,
    *,
    per_host: int = 8,
    multiprocessors: int = 128,
    sustained: float = 1.0,
) -> Accelerator:
    return Accelerator(
        name,
        GPU,
        peaks,
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        host.inside,
        per_host=per_host,
        sources={"all": source, "latency": _HOP, "network": host.source},
        network=_network(host.network_gbps),
        multiprocessors=multiprocessors,
        sustained=sustained,
    )


def _tpu(
    name: str, bf16: float, memory_gib: float, memory_gbps: float, ici_gbps: float, pod: int, network_gbps: float
) -> Accelerator:
    source = f"Cloud {name.replace('-', ' ')} documentation, Google"
    assumed = {"latency": "assumed", "fp32": "assumed: six passes in bf16 (XLA's HIGHEST)"}
    return Accelerator(
        name,
        TPU,
        _peaks(bf16 / 36, bf16 / 6, bf16 / 6, bf16=bf16),
        int(memory_gib * _GIB),
        memory_gbps * 1e9,
        LinkSpec("ICI", ici_gbps * 1e9, 1e-6),
        per_host=pod,
        sources={"all": source, "network": source, **assumed},
        network=_network(network_gbps),
    )


def _core(name: str, fp32_per_cycle: int, bf16_per_cycle: int | None = None) -> Accelerator:
    """One core; a job that runs on CPUs had better be measured."""
    fp32 = fp32_per_cycle * 2.5e-3
    peaks = _peaks(fp32 / 2, fp32, fp32, bf16=(bf16_per_cycle or fp32_per_cycle) * 2.5e-3)
    inside = LinkSpec("shared memory", 5e9, 10e-6)
    network = LinkSpec("network of 10 Gbit/s, over 8 cores", 10e9 / 8 / 8, 50e-6)
    sources = {"all": _CORE, "latency": "measured with paceline links", "network": "assumed"}
    return Accelerator(
        name, CPU, peaks, 4 * _GIB, 10e9, inside, launch_s=5e-6, per_host=8, sources=sources, network=network
    )


def _by_name(devices: Iterable[Accelerator]) -> dict[str, Accelerator]:
    return {device.name: device for device in devices}


_V100 = _peaks(7.8, 15.7, 125, bf16=15.7)
_V100_PCIE = _peaks(7, 14, 112, bf16=14)
_A100 = _peaks(19.5, 19.5, 312, tf32=156)
_H100 = _peaks(67, 67, 989.4, tf32=494.7, fp8=1978.9)
_H100_PCIE = _peaks(51, 51, 756, tf32=378, fp8=1513)
_H100_NVL = _peaks(60, 60, 835.5, tf32=417.5, fp8=1671)
_B200 = _peaks(37, 75, 2250, tf32=1125, fp8=4500)
_GB200 = _peaks(40, 80, 2500, tf32=1250, fp8=5000)
_MI250X = _peaks(47.85, 47.85, 191.5)
_MI300 = _peaks(163.4, 163.4, 1307.4, tf32=653.7, fp8=2614.9)
_A10G = _peaks(0.49, 31.5, 70, tf32=35)
_A10 = _peaks(0.49, 31.2, 125, tf32=62.5)
_L40S = _peaks(1.43, 91.6, 362, tf32=183, fp8=733)
_L4 = _peaks(0.47, 30.3, 121, tf32=60, fp8=242.5)
_A6000 = _peaks(0.6, 38.7, 154.8, tf32=77.4)
_RTX_4090 = _peaks(1.29, 82.6, 165.2, tf32=82.6)
_RTX_3090 = _peaks(0.56, 35.6, 71, tf32=35.6)
_T4 = _peaks(0.25, 8.1, 65, bf16=8.1)

CATALOGUE: Mapping[str, Accelerator] = _by_name(
    (  # of one family the usual one first
        _gpu("GB200", _GB200, 186, 8000, _NVL72, "GB200 NVL72 data sheet", per_host=72, sustained=0.88),
        _gpu("B200", _B200, 180, 8000, _DGX_B200, "HGX B200 data sheet", multiprocessors=148, sustained=0.88),
        _gpu("H200", _H100, 141, 4800, _DGX_H200, "H200 data sheet", multiprocessors=132, sustained=0.88),
        _gpu("H100-SXM", _H100, 80, 3350, _DGX_H100, "H100 data sheet", multiprocessors=132, sustained=0.88),
        _gpu("H100-PCIe", _H100_PCIE, 80, 2000, _SERVER_5, "H100 data sheet", multiprocessors=114, sustained=0.88),
        _gpu("H100-NVL", _H100_NVL, 94, 3900, _SERVER_5, "H100 NVL data sheet", multiprocessors=132, sustained=0.88),
        _gpu("A100-SXM-80", _A100, 80, 2039, _DGX_A100, "A100 data sheet", multiprocessors=108),
        _gpu("A100-SXM-40", _A100, 40, 1555, _DGX_A100, "A100 data sheet", multiprocessors=108),
        _gpu("A100-PCIe-80", _A100, 80, 1935, _SERVER_4, "A100 data sheet", multiprocessors=108),
        _gpu("A100-PCIe-40", _A100, 40, 1555, _SERVER_4, "A100 data sheet", multiprocessors=108),
        _gpu("V100-SXM-32", _V100, 32, 900, _DGX1, "V100 data sheet", multiprocessors=80),
        _gpu("V100-SXM-16", _V100, 16, 900, _DGX1, "V100 data sheet", multiprocessors=80),
        _gpu("V100-PCIe-32", _V100_PCIE, 32, 900, _SERVER_3, "V100 data sheet", multiprocessors=80),
        _gpu("V100-PCIe-16", _V100_PCIE, 16, 900, _SERVER_3, "V100 data sheet", multiprocessors=80),
        _gpu("A10G", _A10G, 22.5, 600, _G5, "A10G data sheet (AWS)"),
        _gpu("A10", _A10, 22.5, 600, _SERVER_4, "A10 data sheet"),
        _gpu("L40S", _L40S, 45, 864, _G6E, "L40S data sheet"),
        _gpu("L4", _L4, 22.5, 300, _G6, "L4 data sheet"),
        _gpu("A6000", _A6000, 48, 768, _SERVER_4, "RTX A6000 data sheet"),
        _gpu("RTX-4090", _RTX_4090, 24, 1008, _SERVER_4, "Ada GPU architecture, NVIDIA, appendix A"),
        _gpu("RTX-3090", _RTX_3090, 24, 936, _SERVER_4, "GA102 GPU architecture, NVIDIA, appendix A"),
        _gpu("T4", _T4, 15, 320, _SERVER_3, "T4 data sheet"),
        _gpu("MI300X", _MI300, 192, 5300, _OF_8_MI300X, _MI300X, multiprocessors=304, sustained=0.65),
        _gpu("MI250X", _MI250X, 64, 1638, _FRONTIER, _GCD),
        _tpu("TPU-v5p", 459, 95, 2765, 600, 8960, 50),
        _tpu("TPU-v5e", 197, 16, 819, 200, 256, 25),
        _core("CPU", 32),
        _core("CPU-AVX2", 32),
        _core("CPU-AVX512", 64),
        _core("CPU-AVX512-BF16", 64, 128),
        _core("CPU-AMX", 64, 2048),
        _core("CPU-NEON", 16),
    )
)
