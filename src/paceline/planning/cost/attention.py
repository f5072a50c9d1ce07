"""Time of attention in one fused kernel, by the kernel's and the device's generation."""

from __future__ import annotations

from typing import NamedTuple

from paceline.cluster.catalogue.hardware import Accelerator
from paceline.planning.model.graph import Gemm


class KernelSpeed(NamedTuple):
    """Part of the 16-bit peak that a kernel reaches on long sequences.

    Heads are 128 wide.
    """

    forward: float
    backward: float


# By generation of the kernel (FlashAttention 1, 2, 3; cuDNN's from 9.0 on count as 3), then of the device; "" is any
# other. Hopper's 2 and 3 are measured (tables/operations_h100.csv: torch's FlashAttention 2, and cuDNN 9's); Ampere's
# are of Dao, 2023 (arXiv:2307.08691, figures 4 to 6); Blackwell's of NVIDIA's cuDNN 9 notes; CDNA's of AMD's blog on
# composable kernels. Others are assumed to be as Ampere's.
KERNELS: dict[int, dict[str, KernelSpeed]] = {
    1: {"": KernelSpeed(0.36, 0.36), "hopper": KernelSpeed(0.23, 0.23), "blackwell": KernelSpeed(0.12, 0.10)},
    2: {
        "": KernelSpeed(0.60, 0.52),
        "ampere": KernelSpeed(0.66, 0.60),
        "hopper": KernelSpeed(0.322, 0.323),
        "blackwell": KernelSpeed(0.17, 0.16),
        "cdna3": KernelSpeed(0.38, 0.28),
        "cdna4": KernelSpeed(0.38, 0.28),
        "tpu": KernelSpeed(0.50, 0.45),
    },
    3: {
        "": KernelSpeed(0.60, 0.52),
        "ampere": KernelSpeed(0.66, 0.60),
        "hopper": KernelSpeed(0.665, 0.577),
        "blackwell": KernelSpeed(0.62, 0.52),
        "cdna3": KernelSpeed(0.45, 0.35),
        "cdna4": KernelSpeed(0.45, 0.35),
        "tpu": KernelSpeed(0.50, 0.45),
    },
}
# Rows of a sequence at which half of that is reached, forward and backward, with a causal mask and without: measured
# (tables/operations_h100.csv)
HALF_CAUSAL = KernelSpeed(450.0, 1080.0)
HALF = KernelSpeed(100.0, 450.0)
# of the speed at a width of 128, what is left for heads of 64 or less; measured there
NARROW = 0.8
# parts of the peak that products keep on the devices these were measured on (`Accelerator.sustained`): a device with
# less power is slower in attention, too
MEASURED_AT = {"hopper": 0.92, "ampere": 1.0, "blackwell": 0.89}
BACKWARD = 2.5  # five products instead of two


def fused_attention_s(
    gemm: Gemm, device: Accelerator, kernel: int, peak: float, samples: float, ranks: int
) -> tuple[float, float]:
    """Forward and backward seconds of one of attention's two products in a fused kernel.

    The kernel skips what a causal mask hides.

    Args:
        kernel: its generation, 1 to 3.
        peak: FLOP/s of the device in that precision.
        samples: sequences of a microbatch.
        ranks: ranks that share the work.
    """
    by_device = KERNELS[min(max(kernel, 1), 3)]
    speed = by_device.get(device.generation, by_device[""])
    half = HALF_CAUSAL if gemm.causal else HALF
    wide = 1.0 if min(gemm.n, gemm.k) > 64 else NARROW
    wide *= min(device.sustained / MEASURED_AT.get(device.generation, device.sustained), 1.0)
    flops = gemm.flops * samples / ranks * (0.5 if gemm.causal else 1.0)
    length = gemm.rows
    forward, backward = (
        flops * passes / (peak * of_peak * wide * length / (length + rows))
        for passes, of_peak, rows in ((1.0, speed.forward, half.forward), (BACKWARD, speed.backward, half.backward))
    )
    return forward, backward
