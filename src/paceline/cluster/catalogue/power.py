"""Sustained arithmetic by power.

Dense products are slower on a device that is built for, or capped at, fewer watts.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster.catalogue.accelerator import Accelerator
from paceline.errors import ClusterError

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
