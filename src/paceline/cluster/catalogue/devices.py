"""The catalogue's figures: peak arithmetic, memory and links of devices, each with its source.

Makers print links both ways together; here is one way. A peak that a sheet prints with sparsity is halved. Memory is in
GiB, about what drivers report, whatever a sheet calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.cluster.catalogue.accelerator import TPU, Accelerator, LinkSpec
from paceline.device import CPU, GPU

_GIB = 2**30
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
_HOP = "latency: NCCL 2.x, src/graph/tuning, hwLat of rings, Simple"
_PCIE3 = LinkSpec("PCIe 3 x16", 16e9, _PCIE_S)
_PCIE4 = LinkSpec("PCIe 4 x16", 32e9, _PCIE_S)
_PCIE5 = LinkSpec("PCIe 5 x16", 64e9, _PCIE_S)
_ASSUMED = "assumed: 100 Gbit/s for a host of 8"
_DGX1, _DGX_A100, _DGX_H100 = "DGX-1 data sheet", "DGX A100 data sheet", "DGX H100 data sheet"
_HGX = "HGX B200 data sheet"
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


def _gpu(
    name: str,
    peaks: Mapping[str, float],
    memory_gib: float,
    memory_gbps: float,
    inside: LinkSpec,
    network_gbps: float,
    source: str,
    network_source: str,
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
        inside,
        per_host=per_host,
        sources={"all": source, "latency": _HOP, "network": network_source},
        network=_network(network_gbps),
        multiprocessors=multiprocessors,
        sustained=sustained,
    )


def _tpu(
    name: str,
    bf16: float,
    memory_gib: float,
    memory_gbps: float,
    ici_gbps: float,
    pod: int,
    network_gbps: float,
    source: str,
) -> Accelerator:
    inside, rest = (
        LinkSpec("ICI", ici_gbps * 1e9, 1e-6),
        {"latency": "assumed", "fp32": "assumed: six passes in bf16 (XLA's HIGHEST)"},
    )
    peaks = _peaks(bf16 / 36, bf16 / 6, bf16 / 6, bf16=bf16)
    sources = {"all": source, "network": source, **rest}
    memory_bytes = int(memory_gib * _GIB)
    return Accelerator(
        name,
        TPU,
        peaks,
        memory_bytes,
        memory_gbps * 1e9,
        inside,
        per_host=pod,
        sources=sources,
        network=_network(network_gbps),
    )


def _core(name: str, fp32_per_cycle: int, bf16_per_cycle: int | None = None) -> Accelerator:
    """One core; a job that runs on CPUs had better be measured."""
    fp32 = fp32_per_cycle * 2.5e-3
    peaks = _peaks(fp32 / 2, fp32, fp32, bf16=(bf16_per_cycle or fp32_per_cycle) * 2.5e-3)
    inside, network = (
        LinkSpec("shared memory", 5e9, 10e-6),
        LinkSpec("network of 10 Gbit/s, over 8 cores", 10e9 / 8 / 8, 50e-6),
    )
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

CATALOGUE: Mapping[str, Accelerator] = _by_name(
    (  # of one family the usual one first
        _gpu(
            "GB200",
            _GB200,
            186,
            8000,
            _nvlink(5, 900e9),
            400,
            "GB200 NVL72 data sheet",
            "GB200 NVL72 data sheet",
            per_host=72,
            sustained=0.88,
        ),
        _gpu(
            "B200",
            _B200,
            180,
            8000,
            _nvlink(5, 900e9),
            400,
            _HGX,
            "DGX B200 data sheet",
            multiprocessors=148,
            sustained=0.88,
        ),
        _gpu(
            "H200",
            _H100,
            141,
            4800,
            _nvlink(4, 450e9),
            400,
            "H200 data sheet",
            "DGX H200 data sheet",
            multiprocessors=132,
            sustained=0.88,
        ),
        _gpu(
            "H100-SXM",
            _H100,
            80,
            3350,
            _nvlink(4, 450e9),
            400,
            "H100 data sheet",
            _DGX_H100,
            multiprocessors=132,
            sustained=0.88,
        ),
        _gpu(
            "H100-PCIe",
            _H100_PCIE,
            80,
            2000,
            _PCIE5,
            50,
            "H100 data sheet",
            "assumed: 400 Gbit/s for a host of 8",
            multiprocessors=114,
            sustained=0.88,
        ),
        _gpu(
            "H100-NVL",
            _H100_NVL,
            94,
            3900,
            _PCIE5,
            50,
            "H100 NVL data sheet",
            "assumed: 400 Gbit/s for a host of 8",
            multiprocessors=132,
            sustained=0.88,
        ),
        _gpu("A100-SXM-80", _A100, 80, 2039, _nvlink(3, 300e9), 200, "A100 data sheet", _DGX_A100, multiprocessors=108),
        _gpu("A100-SXM-40", _A100, 40, 1555, _nvlink(3, 300e9), 200, "A100 data sheet", _DGX_A100, multiprocessors=108),
        _gpu("A100-PCIe-80", _A100, 80, 1935, _PCIE4, 12.5, "A100 data sheet", _ASSUMED, multiprocessors=108),
        _gpu("A100-PCIe-40", _A100, 40, 1555, _PCIE4, 12.5, "A100 data sheet", _ASSUMED, multiprocessors=108),
        _gpu("V100-SXM-32", _V100, 32, 900, _nvlink(2, 150e9), 50, "V100 data sheet", _DGX1, multiprocessors=80),
        _gpu("V100-SXM-16", _V100, 16, 900, _nvlink(2, 150e9), 50, "V100 data sheet", _DGX1, multiprocessors=80),
        _gpu("V100-PCIe-32", _V100_PCIE, 32, 900, _PCIE3, 12.5, "V100 data sheet", _ASSUMED, multiprocessors=80),
        _gpu("V100-PCIe-16", _V100_PCIE, 16, 900, _PCIE3, 12.5, "V100 data sheet", _ASSUMED, multiprocessors=80),
        _gpu(
            "A10G",
            _peaks(0.49, 31.5, 70, tf32=35),
            22.5,
            600,
            _PCIE4,
            12.5,
            "A10G data sheet (AWS)",
            "AWS: g5.48xlarge",
        ),
        _gpu("A10", _peaks(0.49, 31.2, 125, tf32=62.5), 22.5, 600, _PCIE4, 12.5, "A10 data sheet", _ASSUMED),
        _gpu(
            "L40S",
            _peaks(1.43, 91.6, 362, tf32=183, fp8=733),
            45,
            864,
            _PCIE4,
            50,
            "L40S data sheet",
            "AWS: g6e.48xlarge",
        ),
        _gpu(
            "L4",
            _peaks(0.47, 30.3, 121, tf32=60, fp8=242.5),
            22.5,
            300,
            _PCIE4,
            12.5,
            "L4 data sheet",
            "AWS: g6.48xlarge",
        ),
        _gpu("A6000", _peaks(0.6, 38.7, 154.8, tf32=77.4), 48, 768, _PCIE4, 12.5, "RTX A6000 data sheet", _ASSUMED),
        _gpu(
            "RTX-4090",
            _peaks(1.29, 82.6, 165.2, tf32=82.6),
            24,
            1008,
            _PCIE4,
            12.5,
            "Ada GPU architecture, NVIDIA, appendix A",
            _ASSUMED,
        ),
        _gpu(
            "RTX-3090",
            _peaks(0.56, 35.6, 71, tf32=35.6),
            24,
            936,
            _PCIE4,
            12.5,
            "GA102 GPU architecture, NVIDIA, appendix A",
            _ASSUMED,
        ),
        _gpu("T4", _peaks(0.25, 8.1, 65, bf16=8.1), 15, 320, _PCIE3, 12.5, "T4 data sheet", _ASSUMED),
        _gpu(
            "MI300X",
            _MI300,
            192,
            5300,
            LinkSpec("Infinity Fabric", 448e9, _NVLINK_S),
            400,
            _MI300X,
            "assumed, as an H100's",
            multiprocessors=304,
            sustained=0.65,
        ),
        _gpu(
            "MI250X",
            _MI250X,
            64,
            1638,
            LinkSpec("Infinity Fabric", 150e9, _NVLINK_S),
            100,
            _GCD,
            "Frontier user guide, OLCF",
        ),
        _tpu("TPU-v5p", 459, 95, 2765, 600, 8960, 50, "Cloud TPU v5p documentation, Google"),
        _tpu("TPU-v5e", 197, 16, 819, 200, 256, 25, "Cloud TPU v5e documentation, Google"),
        _core("CPU", 32),
        _core("CPU-AVX2", 32),
        _core("CPU-AVX512", 64),
        _core("CPU-AVX512-BF16", 64, 128),
        _core("CPU-AMX", 64, 2048),
        _core("CPU-NEON", 16),
    )
)
