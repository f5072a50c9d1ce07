"""Compute time of a block: matrix products by shape, other kernels by memory traffic."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from paceline.cluster.catalogue.hardware import Accelerator
from paceline.planner.cost import constants
from paceline.planner.cost.layout import BYTES, Layout, Precision
from paceline.trace.graph import BlockTrace, Gemm


class BlockConfig(NamedTuple):
    """Everything that a block's time on one rank depends on, but for the block."""

    device: Accelerator
    samples: float
    tp: int
    cp: int
    ep: int
    sequence: bool
    precision: Precision
    attention: int
    loss: float
    kernels: float
    softmax_of: int
    stops_early: bool
    floor_s: float
    derating: float
    added_bytes: float


class BlockTime(NamedTuple):
    """Seconds of one microbatch on one rank: the device's, and Python's to launch kernels."""

    forward_s: float
    backward_s: float
    # forward seconds that remat=selective recomputes
    scores_s: float
    # forward seconds of the last product
    last_s: float
    launch_forward_s: float
    launch_backward_s: float


def block_config(layout: Layout) -> BlockConfig:
    """The part of a layout that a block's time depends on."""
    framework, device = layout.framework, device_of(layout)
    floor = max(device.launch_s, constants.LAUNCH_S)
    adds_up = layout.microbatches > 1 and not (layout.fsdp > 1 and layout.zero == 3)
    return BlockConfig(
        device,
        layout.samples,
        layout.tp,
        layout.cp,
        layout.ep,
        layout.sequence,
        layout.precision,
        framework.attention if framework.flash else 0,
        framework.loss,
        framework.kernels,
        framework.softmax_of,
        framework.stops_early,
        floor,
        framework.derating,
        3 * layout.gradient_bytes if adds_up else 0.0,
    )


def device_of(layout: Layout) -> Accelerator:
    """A rank's compute device; on CPUs as many cores as it has threads."""
    device = layout.machines.device
    return _cores(device, layout.threads) if device.is_core and layout.threads > 1 else device


@lru_cache(maxsize=1000)
def _cores(core: Accelerator, count: int) -> Accelerator:
    peaks = {precision: flops * count for precision, flops in core.peak_flops.items()}
    return replace(core, peak_flops=peaks, memory_bandwidth=core.memory_bandwidth * count)


@lru_cache(maxsize=200_000)
def block_time(block: BlockTrace, config: BlockConfig) -> BlockTime:
    """Times of a block for one microbatch, without communication."""
    fused = [gemm for gemm in block.gemms if gemm.batch and config.attention]
    weights = [gemm for gemm in block.gemms if not (gemm.batch and config.attention)]
    attention = sum(_fused_attention_s(gemm, config) for gemm in fused)
    forward = sum(gemm_s(gemm, config) for gemm in weights) + attention
    backward = sum(gemm_s(gemm, config, backward=True) for gemm in weights) + attention * constants.FUSED_BACKWARD
    unfused = _softmax_is_unfused(block, config)
    scores = (
        0.0
        if config.attention
        else _pass_s(block.scores / config.tp / config.cp, config) * (constants.UNFUSED_SOFTMAX if unfused else 1)
    )
    inside = block.inside * (config.loss if block.kind == "head" else 1.0)
    other = _pass_s(
        inside / config.tp / config.cp + block.outside / (config.tp if config.sequence else 1) / config.cp, config
    )
    squares = scores + attention + sum(gemm_s(gemm, config) for gemm in weights if gemm.batch)
    held = block.matrices / config.tp + block.experts / config.tp / config.ep
    added = held * config.added_bytes / _vector_bandwidth(config.device)
    kernels = (block.kernels + (constants.UNFUSED_KERNELS if unfused else 0)) * config.kernels
    starts = kernels * constants.KERNEL_S if config.device.is_gpu else 0.0
    launch = kernels * config.floor_s * (1 + constants.LAUNCH_TP * (config.tp - 1))
    slow = config.derating
    trained = 1.0 if block.trained else 0.0
    others_backward = constants.VECTOR_BACKWARD * other + constants.SCORES_BACKWARD * scores + added
    return BlockTime(
        (forward + other + scores) * slow + starts,
        ((backward + others_backward) * slow + 2 * starts) * trained,
        squares * slow,
        gemm_s(block.gemms[-1], config) * slow if block.gemms else 0.0,
        launch,
        2 * launch * trained,
    )


def _softmax_is_unfused(block: BlockTrace, config: BlockConfig) -> bool:
    if config.attention or config.softmax_of == 1:
        return False
    squares = max((gemm.batch for gemm in block.gemms), default=0) * config.samples / config.tp
    return squares % config.softmax_of != 0


def gemm_s(gemm: Gemm, config: BlockConfig, backward: bool = False) -> float:
    """Seconds of all products of this shape in a microbatch, forward or backward.

    The backward pass has two products for each.
    """
    rows, n, k = gemm.rows / config.cp, float(gemm.n), float(gemm.k)
    times = float(gemm.times)
    if gemm.batch:
        times *= gemm.batch * config.samples / (config.tp if gemm.divided != "none" else 1)
    elif gemm.experts:
        rows *= config.samples * config.ep / gemm.experts
        times *= gemm.experts / config.ep
    else:
        rows *= config.samples
    if gemm.divided == "n":
        n /= config.tp
    elif gemm.divided == "k":
        k /= config.tp
    if gemm.batch:
        if backward:
            return _both(config, rows, n, k, times)
        return product_s(config.device, config.precision, rows, n, k, times)
    many = times if gemm.experts else 1.0
    repeated = 1.0 if gemm.experts else times
    if backward:
        return repeated * _both(config, rows, n, k, many)
    return repeated * product_s(config.device, config.precision, rows, n, k, many)


def _both(config: BlockConfig, rows: float, n: float, k: float, many: float) -> float:
    """Seconds of the products for the gradients of both operands."""
    device, precision = config.device, config.precision
    return product_s(device, precision, rows, k, n, many) + product_s(device, precision, n, k, rows, many)


@lru_cache(maxsize=100_000)
def product_s(device: Accelerator, precision: Precision, m: float, n: float, k: float, many: float = 1.0) -> float:
    """Seconds of `many` equal products (m × k) · (k × n) at once, bound by arithmetic or memory.

    The result is cut into tiles; multiprocessors take one each, in waves, the last of which may be almost empty. Of the
    sizes of tiles that libraries have, the fastest is taken.
    """
    size = BYTES[precision]
    moved = many * (m * k + k * n + m * n) * size / _vector_bandwidth(device)
    alignment = _alignment(n, k, size)
    if not device.is_gpu:
        return max(2 * m * n * k * many / (peak_flops(device, precision) * constants.GEMM_TOP), moved)
    if alignment is None and size == 2 and many > 1:
        return max(2 * m * n * k * many / (peak_flops(device, "fp32") * constants.UNALIGNED_BATCH), moved)
    units = device.multiprocessors
    each = (
        peak_flops(device, precision)
        * constants.GEMM_TOP
        * device.sustained
        * (alignment or constants.UNALIGNED)
        / units
    )
    fastest = float("inf")
    for rows, columns, use in constants.TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * many
        for split in constants.SPLITS if many == 1 and k >= 2048 else (1,):
            waves = ceil(tiles * split / units) if tiles * split < 20 * units else tiles * split / units
            depth = k / split + constants.GEMM_START_K * (1 if split == 1 else 2)
            fastest = min(fastest, waves * 2 * rows * columns * depth / (each * use))
    return max(fastest, moved)


def peak_flops(device: Accelerator, precision: Precision) -> float:
    """Peak FLOP/s of a precision, or of the next wider one."""
    for name in (precision, *{"bf16": ("fp16", "fp32"), "fp16": ("fp32",), "tf32": ("fp32",)}.get(precision, ())):
        if name in device.peak_flops:
            return device.peak_flops[name]
    return min(device.peak_flops.values())


def _fused_attention_s(gemm: Gemm, config: BlockConfig) -> float:
    """Seconds of one of attention's two products inside a fused kernel. The kernel skips what a causal mask hides."""
    flops = gemm.flops * config.samples / config.cp / config.tp * (0.5 if gemm.causal else 1.0)
    length = gemm.rows
    reached = constants.FUSED_ATTENTION[min(config.attention, 2)] * length / (length + constants.FUSED_ATTENTION_HALF)
    return flops / (peak_flops(config.device, config.precision) * reached)


def _alignment(n: float, k: float, size: int) -> float | None:
    """Relative speed for the rows' alignment; None if tensor cores cannot be used."""
    speed = 1.0
    for width in (n, k):
        found = next((left for divisor, left in constants.ALIGNED if (width * size) % divisor == 0), None)
        if found is None:
            return None
        speed = min(speed, found)
    return speed


def _pass_s(numbers: float, config: BlockConfig) -> float:
    """Seconds to move `numbers` elements per sample through the device's memory."""
    return numbers * config.samples * BYTES[config.precision] / _vector_bandwidth(config.device)


def _vector_bandwidth(device: Accelerator) -> float:
    return device.memory_bandwidth * constants.VECTOR_TOP
