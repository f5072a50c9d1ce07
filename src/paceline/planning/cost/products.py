"""Time of matrix products by their shape and precision."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from paceline.cluster.catalogue.hardware import Accelerator
from paceline.planning.cost import constants
from paceline.planning.cost.layout import BYTES

# precisions of products that are lower than 16 bits, and the peak that each uses
LOW = {"int8": "int8", "fp8": "fp8", "fp8-row": "fp8", "fp8-block": "fp8", "mxfp8": "fp8", "fp4": "fp4"}
_WIDER = {
    "fp4": ("fp8", "bf16"),
    "int8": ("fp8", "bf16"),
    "fp8": ("bf16", "fp16"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("fp32",),
    "tf32": ("fp32",),
}


def peak_flops(device: Accelerator, precision: str) -> float:
    """Peak FLOP/s of a precision, or of the next wider one."""
    precision = LOW.get(precision, precision)
    for name in (precision, *_WIDER.get(precision, ())):
        if name in device.peak_flops:
            return device.peak_flops[name]
    return min(device.peak_flops.values())


@lru_cache(maxsize=100_000)
def product_s(
    device: Accelerator, precision: str, m: float, n: float, k: float, many: float = 1.0, spared: float = 0.0
) -> float:
    """Seconds of `many` equal products (m × k) · (k × n) at once, bound by arithmetic or memory.

    `spared` elements are not moved: convolutions read an element once for many rows.
    """
    low = precision in LOW
    size = constants.LOW_BYTES[precision] if low else BYTES[precision]
    moved = (many * ((m * k + k * n) * size + m * n * (2 if low else size)) - spared * size) / vector_bandwidth(device)
    flops, peak = 2 * m * n * k * many, peak_flops(device, precision)
    if not device.is_gpu:
        return max(flops / (peak * constants.GEMM_TOP), moved)
    alignment = 1.0 if low else _alignment(n, k, int(size))
    if alignment is None and size == 2 and many > 1:
        return max(flops / (peak_flops(device, "fp32") * constants.UNALIGNED_BATCH), moved)
    reached = constants.LOW_TOP[precision] if low else alignment or constants.UNALIGNED
    each = peak * constants.GEMM_TOP * reached / device.multiprocessors
    narrow = precision == "fp32" and min(m, n) <= constants.NARROW_N
    tiles = constants.NARROW_TILES if narrow else constants.TILES
    return max(_tiled_s(max(m, n), min(m, n), k, many, device.multiprocessors, each, tiles), moved)


def _tiled_s(
    m: float, n: float, k: float, many: float, units: int, each: float, sizes: constants.Tiles = constants.TILES
) -> float:
    """Seconds of products whose result is cut into tiles.

    Multiprocessors take one tile each, in waves, the last of which may be almost empty. Of the sizes that libraries
    have the fastest is taken.

    Args:
        units: multiprocessors of the device; `each`: FLOP/s of one.
        sizes: of tiles.
    """
    fastest = float("inf")
    for rows, columns, use in sizes:
        tiles = ceil(m / rows) * ceil(n / columns) * many
        for split in constants.SPLITS if many == 1 and k >= 2048 else (1,):
            exact = tiles * split / units
            whole = ceil(exact) if exact < 20 else exact
            waves = max(exact + constants.WAVE * (whole - exact), min(whole, 1.0))
            depth = k / split + constants.GEMM_START_K * (1 if split == 1 else 2)
            fastest = min(fastest, waves * 2 * rows * columns * depth / (each * use))
    return fastest


def _alignment(n: float, k: float, size: int) -> float | None:
    """Relative speed for the rows' alignment; None if tensor cores cannot be used."""
    speed = 1.0
    for width in (n, k):
        found = next((left for divisor, left in constants.ALIGNED if (width * size) % divisor == 0), None)
        if found is None:
            return None
        speed = min(speed, found)
    return speed


def vector_bandwidth(device: Accelerator) -> float:
    """Bytes per second of kernels that only read and write."""
    return device.memory_bandwidth * constants.VECTOR_TOP
