"""The catalogue: every device by its name.

Makers print links both ways together; here is one way. A peak that a sheet prints with sparsity is halved. Memory is in
GiB, about what drivers report, whatever a sheet calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.cluster.catalogue import hosts
from paceline.cluster.catalogue.accelerator import HPU, Accelerator
from paceline.cluster.catalogue.entries import Chip, core, gpu, neuron, peaks, tpu
from paceline.cluster.catalogue.gpu_entries import GPUS

_MAMF = "largest products measured, of an A100's part (ml-engineering, Bekman, MAMF)"
_HALF = "a core, half of a chip, as frameworks see it; ICI: 4 links of 656 Gbit/s for 2 cores"
_AS_V5P = {"network": "assumed, as a v5p's"}

# fp32 and tf32: an eighth and a quarter of bf16's, as the Gaudi 3 has them; fp64 in software
_GAUDI_2 = Chip("gaudi", 2, peaks(9, 54, 432, tf32=108, fp8=865))
_GAUDI_3 = Chip("gaudi", 8, peaks(38, 229, 459, tf32=459, bf16=1835, fp8=1835), 0.78, _MAMF)
_TRAINIUM_1 = (
    "Trainium documentation, AWS Neuron: a NeuronCore-v2, half of a chip; trn1.32xlarge, links taken as both ways"
)
_TRAINIUM_2 = (
    "Trainium2 documentation, AWS Neuron: two of a chip's eight cores (LNC=2); trn2.48xlarge, links taken as both ways"
)

TPUS = (
    tpu(
        "TPU-v7x",
        2307,
        192,
        7380,
        600,
        9216,
        100,
        torus=3,
        machine=4,
        host_gib=240,
        fp8=4614,
    ),
    tpu("TPU-v6e", 918, 32, 1638, 400, 256, 100, torus=2, machine=8, host_gib=192, fp8=918, int8=1836),
    tpu("TPU-v5p", 459, 95, 2765, 600, 8960, 50, torus=3, machine=4, host_gib=104, fp8=459, int8=918),
    tpu("TPU-v5e", 197, 16, 819, 200, 256, 25, torus=2, machine=8, host_gib=64, int8=393),
    tpu(
        "TPU-v4", 275, 32, 1200, 300, 4096, 50, torus=3, machine=4, host_gib=95, int8=275, power_w=192, assumed=_AS_V5P
    ),
    tpu(
        "TPU-v3",
        61.5,
        16,
        450,
        164,
        2048,
        12.5,
        torus=2,
        machine=8,
        host_gib=40,
        power_w=131,
        assumed={"device": _HALF, "network": "assumed: 100 Gbit/s for a host of 8", "host": "assumed"},
    ),
)
OTHERS = (
    gpu("Gaudi-3", _GAUDI_3, 128, 3700, 900, hosts.GAUDI_3, "Gaudi 3 white paper", HPU),
    gpu("Gaudi-2", _GAUDI_2, 96, 2450, 600, hosts.GAUDI_2, "Gaudi 2 white paper; fp32, tf32 assumed", HPU),
    neuron(
        "Trainium-2",
        peaks(7.5, 45.25, 166.75, tf32=166.75, fp8=324.75),
        24,
        725,
        128,
        64,
        50,
        32,
        _TRAINIUM_2,
    ),
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
