"""The catalogue's GPUs, with the figures of data sheets.

A peak that a sheet prints with sparsity is halved (NVIDIA's do, since Ampere). Consumer cards sum 16-bit products in
fp32 at half of their first rate. Memory is in GiB, about what drivers report, whatever a sheet calls it.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster.catalogue import hosts
from paceline.cluster.catalogue.accelerator import Accelerator
from paceline.cluster.catalogue.entries import Chip, gpu, peaks
from paceline.cluster.catalogue.power import at_power

_ADA = "Ada GPU architecture, NVIDIA, appendix A"
_GA102 = "GA102 GPU architecture, NVIDIA, appendix A"
_TURING = "Turing GPU architecture, NVIDIA, appendix A"
_RTX_BLACKWELL = "RTX Blackwell GPU architecture, NVIDIA, appendix A"
_PRO_BLACKWELL = "RTX PRO Blackwell GPU architecture, NVIDIA"
_A_DIE = "half of a card: torch sees its two dies as two devices"
_P100_SHEET = "P100 data sheet; its sums in fp32 take an fp32 unit, so that fp16 is no faster"
# Part of the peak that the largest products reach, over the 0.869 of an A100.
_MAMF = "largest products measured, of an A100's part (ml-engineering, Bekman, MAMF)"
_MAF = "largest products measured, of an A100's part (ROCm blogs, Measuring Max-Achievable FLOPs, part 2)"
_SCALED = "an H100-SXM's, by power for each multiprocessor (catalogue/power.py)"

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
_MI350X = Chip(
    "cdna4",
    256,
    peaks(72.1, 144.2, 2306.9, fp8=4613.7, fp4=9227.5, int8=4613.7),
    0.66,
    "an MI355X's, by power (catalogue/power.py)",
)


def _of_another_memory(device: Accelerator, name: str, memory_gib: float, memory_gbps: float) -> Accelerator:
    """The device with other memory chips."""
    return replace(device, name=name, memory_bytes=int(memory_gib * 2**30), memory_bandwidth=memory_gbps * 1e9)


_H100_SXM = gpu("H100-SXM", _H100, 80, 3350, 700, hosts.DGX_H100, "H100 data sheet")
_GRAND_TETON = "an H100 with 96 GB of HBM2e at 2.4 TB/s, of 500 W: torchtitan, benchmarks; torchao, roofline_utils"
_H100_HBM2E = at_power(_of_another_memory(_H100_SXM, "H100-SXM-96", 96, 2400), 500)

# of one family the usual one first
GPUS = (
    gpu("GB300", _GB300, 277, 8000, 1400, hosts.GB300_NVL72, "GB300 NVL72 data sheet"),
    gpu("GB200", _GB200, 186, 8000, 1200, hosts.GB200_NVL72, "GB200 NVL72 data sheet"),
    gpu("B300", _B300, 268, 8000, 1100, hosts.DGX_B300, "HGX B300 data sheet"),
    gpu("B200", _B200, 180, 8000, 1000, hosts.DGX_B200, "HGX B200 data sheet"),
    gpu("GH200-96", _GH200, 96, 4000, 900, hosts.QUAD_GH200, "GH200 data sheet"),
    gpu("GH200-144", _GH200, 141, 4900, 900, hosts.QUAD_GH200, "GH200 data sheet, HBM3e"),
    gpu("H200", _H100, 141, 4800, 700, hosts.DGX_H200, "H200 data sheet"),
    gpu("H200-NVL", _H200_NVL, 141, 4800, 600, hosts.NVL_4, "H200 data sheet"),
    _H100_SXM,
    replace(_H100_HBM2E, sources={**_H100_HBM2E.sources, "all": _GRAND_TETON}),
    gpu("H100-PCIe", _H100_PCIE, 80, 2000, 350, hosts.SERVER_5, "H100 data sheet"),
    gpu("H100-NVL", _H100_NVL, 94, 3900, 400, hosts.SERVER_5, "H100 NVL data sheet"),
    gpu("H800-SXM", _H800, 80, 3350, 700, hosts.HGX_H800, "H800 data sheet"),
    gpu("H800-PCIe", _H800_PCIE, 80, 2000, 350, hosts.SERVER_5, "H800 data sheet"),
    gpu("H20", _H20, 96, 4000, 500, hosts.HGX_H20, "H20 data sheet; the press prints 400 to 550 W"),
    gpu("A100-SXM-80", _A100, 80, 2039, 400, hosts.DGX_A100, "A100 data sheet"),
    gpu("A100-SXM-40", _A100, 40, 1555, 400, hosts.DGX_A100_40, "A100 data sheet"),
    gpu("A100-PCIe-80", _A100_PCIE, 80, 1935, 300, hosts.SERVER_4, "A100 data sheet"),
    gpu("A100-PCIe-40", _A100_PCIE, 40, 1555, 250, hosts.SERVER_4, "A100 data sheet"),
    gpu("A800-SXM-80", _A100, 80, 2039, 400, hosts.HGX_A800, "A800 data sheet"),
    gpu("A800-PCIe-80", _A100_PCIE, 80, 1935, 300, hosts.SERVER_4, "A800 data sheet"),
    gpu("V100-SXM-32", _V100, 32, 900, 300, hosts.DGX1, "V100 data sheet"),
    gpu("V100-SXM-16", _V100, 16, 900, 300, hosts.DGX1, "V100 data sheet"),
    gpu("V100-PCIe-32", _V100_PCIE, 32, 900, 250, hosts.SERVER_3, "V100 data sheet"),
    gpu("V100-PCIe-16", _V100_PCIE, 16, 900, 250, hosts.SERVER_3, "V100 data sheet"),
    gpu("P100", _P100, 16, 732, 300, hosts.DGX1_P100, _P100_SHEET),
    gpu("A10G", _A10G, 22.5, 600, 300, hosts.G5, "A10G data sheet (AWS)"),
    gpu("A10", _A10, 22.5, 600, 150, hosts.SERVER_4, "A10 data sheet"),
    gpu("A40", _A40, 45, 696, 300, hosts.SERVER_4, "A40 data sheet"),
    gpu("L40S", _L40S, 45, 864, 350, hosts.G6E, "L40S data sheet"),
    gpu("L40", _L40, 45, 864, 300, hosts.SERVER_4, "L40 data sheet"),
    gpu("L20", _L20, 45, 864, 275, hosts.SERVER_L20, "L20 data sheet"),
    gpu("L4", _L4, 22.5, 300, 72, hosts.G6, "L4 data sheet"),
    gpu("A6000", _A6000, 48, 768, 300, hosts.SERVER_4, "RTX A6000 data sheet"),
    gpu("RTX-PRO-6000", _PRO_6000, 96, 1792, 600, hosts.SERVER_5, _PRO_BLACKWELL),
    gpu("RTX-5090", _RTX_5090, 32, 1792, 575, hosts.SERVER_5, _RTX_BLACKWELL),
    gpu("RTX-4090", _RTX_4090, 24, 1008, 450, hosts.SERVER_4, _ADA),
    gpu("RTX-3090", _RTX_3090, 24, 936, 350, hosts.SERVER_4, _GA102),
    gpu("RTX-2080-Ti", _RTX_2080_TI, 11, 616, 250, hosts.SERVER_3, _TURING),
    gpu("TITAN-RTX", _TITAN_RTX, 24, 672, 280, hosts.SERVER_3, _TURING),
    gpu("T4", _T4, 15, 320, 70, hosts.SERVER_3, "T4 data sheet"),
    gpu("MI355X", _MI355X, 288, 8000, 1400, hosts.OF_8_MI355X, "MI355X data sheet; 7 Infinity Fabric links"),
    gpu("MI350X", _MI350X, 288, 8000, 1000, hosts.OF_8_MI355X, "MI350X data sheet; 7 Infinity Fabric links"),
    gpu("MI325X", _MI325X, 256, 6000, 1000, hosts.OF_8_MI300X, "MI325X data sheet; 7 Infinity Fabric links"),
    gpu("MI300X", _MI300X, 192, 5300, 750, hosts.OF_8_MI300X, "MI300X data sheet; 7 Infinity Fabric links"),
    gpu("MI250X", _MI250X, 64, 1638, 280, hosts.FRONTIER, f"MI250X data sheet, {_A_DIE}"),
    gpu("MI250", _MI250, 64, 1638, 280, hosts.FRONTIER, f"MI250 data sheet, {_A_DIE}; host as an MI250X's"),
    gpu("MI210", _MI210, 64, 1638, 300, hosts.MI210_SERVER, "MI210 data sheet"),
)
