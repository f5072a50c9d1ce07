"""Compute time of a block: matrix products by shape, other kernels by memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from paceline.cluster.catalogue.hardware import Accelerator
from paceline.planner.cost import constants
from paceline.planner.cost.attention import fused_attention_s
from paceline.planner.cost.fitted import SUSTAINED
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
    keeps: str
    blocking: bool
    floor_s: float
    derating: float
    added_bytes: float
    products: str
    # of a step's microbatches, in how many weights are cast to `products`
    casts: float
    vector: float
    mixtures: float
    expert_ranks: int
    lora: int
    overlaps_tp: float
    overlaps_ep: float
    node_limit: int
    ulysses: bool


class BlockTime(NamedTuple):
    """Seconds of one microbatch on one rank: the device's, and Python's to launch kernels."""

    forward_s: float
    backward_s: float
    # forward seconds that remat=selective recomputes
    scores_s: float
    # forward seconds of the last product
    last_s: float
    # forward seconds of kernels that only read and write, and of products with weights
    others_s: float
    weights_s: float
    launch_forward_s: float
    launch_backward_s: float


def block_config(layout: Layout) -> BlockConfig:
    """The part of a layout that a block's time depends on."""
    framework, device = layout.framework, device_of(layout)
    floor = (
        0.0
        if framework.graphs or (not device.is_gpu and not device.is_core)
        else max(device.launch_s, constants.LAUNCH_S)
    )
    regathers = layout.fsdp > 1 and layout.zero == 3 and layout.pp == 1
    adds_up = layout.microbatches > 1 and not regathers and not layout.lora
    low = (
        layout.products
        if layout.products in LOW and peak_flops(device, layout.products) > peak_flops(device, "bf16")
        else ""
    )
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
        framework.keeps,
        framework.blocking,
        floor,
        framework.derating,
        3 * layout.gradient_bytes if adds_up else 0.0,
        low,
        1.0 if regathers else 1.0 / layout.microbatches,
        framework.vector,
        framework.mixtures,
        layout.expert_ranks,
        layout.lora,
        framework.overlaps_tp,
        framework.overlaps_ep,
        framework.node_limit,
        layout.ulysses,
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
    if config.products and block.kind in ("embedding", "head"):
        config = config._replace(products="")
    weights = [gemm for gemm in block.gemms if not (gemm.batch and config.attention)]
    fused = [_fused_s(gemm, config) for gemm in block.gemms if gemm.batch and config.attention]
    attention, attention_backward = (sum(times) for times in zip(*fused, strict=True)) if fused else (0.0, 0.0)
    if block.kind.startswith("mamba"):
        attention, attention_backward = attention / constants.SCAN, attention_backward / constants.SCAN
    products = sum(gemm_s(gemm, config) for gemm in weights)
    products_backward = sum(gemm_s(gemm, config, backward=True) for gemm in weights)
    unfused = _softmax_is_unfused(block, config)
    scores = (
        0.0
        if config.attention
        else _pass_s(block.scores / config.tp / config.cp, config) * (constants.UNFUSED_SOFTMAX if unfused else 1)
    )
    other = _other_s(block, config)
    squares = scores + attention + sum(gemm_s(gemm, config) for gemm in weights if gemm.batch)
    added = held_weights(block, config) * config.added_bytes / _vector_bandwidth(config.device)
    cast, cast_backward = _casts_s(weights, block, config)
    kernels = _kernels(block, config, unfused)
    starts = kernels * constants.KERNEL_S if config.device.is_gpu else 0.0
    starts += constants.EXPERT_S if block.experts else 0.0
    launch = kernels * config.floor_s * (1 + constants.LAUNCH_TP * (config.tp - 1))
    slow = config.derating
    trained = 1.0 if block.trained else 0.0
    others_backward = constants.VECTOR_BACKWARD * other + constants.SCORES_BACKWARD * scores + added + cast_backward
    beside = attention + attention_backward + other + scores + cast + others_backward + 3 * starts
    throttled = _throttled(products + products_backward, beside, 3 * launch, config)
    forward, backward = products * throttled + attention, products_backward * throttled + attention_backward
    return BlockTime(
        (forward + other + scores + cast) * slow + starts,
        ((backward + others_backward) * slow + 2 * starts) * trained,
        squares * slow,
        gemm_s(block.gemms[-1], config) * slow if block.gemms else 0.0,
        (other + cast) * slow + starts,
        sum(gemm_s(gemm, config) for gemm in weights if not gemm.batch) * slow * throttled,
        launch,
        2 * launch * trained,
    )


def _throttled(products_s: float, others_s: float, launch_s: float, config: BlockConfig) -> float:
    """How much longer products take where their power slows the clock.

    A device that is busy with products all the time keeps `sustained` of its clock; with less to do, more.
    """
    if not products_s:
        return 1.0
    share = products_s / max(products_s + others_s, launch_s)
    sustained = SUSTAINED.get(config.device.name, config.device.sustained * constants.PRODUCTS_TOP)
    return 1 / (1 - (1 - min(sustained / constants.GEMM_TOP, 1.0)) * share)


def held_weights(block: BlockTrace, config: BlockConfig) -> float:
    """Numbers of weights that one rank has of a block."""
    divided = config.expert_ranks or config.tp * config.ep
    return block.matrices / config.tp + block.experts / divided


def _kernels(block: BlockTrace, config: BlockConfig, unfused: bool) -> float:
    """Kernels of a forward pass; casts to low precision come on top of those of the trace."""
    casts = float(sum(not gemm.batch for gemm in block.gemms)) if config.products else 0.0
    if block.experts:
        casts += constants.MIXTURE_KERNELS
        each = next((gemm.experts for gemm in block.gemms if gemm.experts), 0) / (config.expert_ranks or config.ep)
        casts += each * constants.EXPERT_KERNELS * (2 if config.products else 1)
    adapters = 4 * sum(not gemm.batch for gemm in block.gemms) if config.lora else 0
    return (block.kernels + casts + adapters + (constants.UNFUSED_KERNELS if unfused else 0)) * config.kernels


def _other_s(block: BlockTrace, config: BlockConfig) -> float:
    """Seconds of the kernels that only read and write, forward, without attention's squares."""
    head = block.kind == "head"
    vector = config.vector * (constants.CONVOLUTION_VECTOR if any(gemm.read for gemm in block.gemms) else 1.0)
    vector *= config.mixtures if block.experts else 1.0
    inside = block.inside * (config.loss if head else vector)
    outside = block.outside * vector
    return _pass_s(inside / config.tp / config.cp + outside / (config.tp if config.sequence else 1) / config.cp, config)


def _casts_s(weights: Sequence[Gemm], block: BlockTrace, config: BlockConfig) -> tuple[float, float]:
    """Seconds of casts to low precision, forward and backward: inputs and weights, then gradients of results."""
    if not config.products:
        return 0.0, 0.0
    forward = backward = 0.0
    for gemm in weights:
        if not gemm.batch:
            rows = gemm.rows * config.samples / config.cp * gemm.times
            forward += rows * gemm.k / (config.tp if gemm.divided == "k" else 1)
            backward += rows * gemm.n / (config.tp if gemm.divided == "n" else 1)
    forward += held_weights(block, config) * config.casts
    each = constants.CAST_BYTES[config.products] / _vector_bandwidth(config.device)
    return forward * each, backward * each


def _softmax_is_unfused(block: BlockTrace, config: BlockConfig) -> bool:
    if config.attention or config.softmax_of == 1:
        return False
    squares = max((gemm.batch for gemm in block.gemms), default=0) * config.samples / config.tp
    return squares % config.softmax_of != 0


def gemm_s(gemm: Gemm, config: BlockConfig, backward: bool = False) -> float:
    """Seconds of all products of this shape in a microbatch, forward or backward.

    The backward pass has two products for each, and one where the weight is not trained.
    """
    rows, n, k = gemm.rows / config.cp, float(gemm.n), float(gemm.k)
    times, tp = float(gemm.times), config.tp
    if gemm.batch:
        times *= gemm.batch * config.samples / (tp if gemm.divided != "none" else 1)
    elif gemm.experts:
        among = config.expert_ranks or config.ep
        # with experts whole on some of the ranks of tp, each of these has its part of the tokens
        rows *= config.samples * among / gemm.experts / (tp if config.expert_ranks else 1)
        times *= gemm.experts / among
        tp = 1 if config.expert_ranks else tp
    else:
        rows *= config.samples
    if gemm.divided == "n":
        n /= tp
    elif gemm.divided == "k":
        k /= tp
    if gemm.read and gemm.times > 1 and n < constants.GROUPS_N:
        # a convolution's narrow groups are computed several at once
        together = min(constants.GROUPS_N / n, times)
        n, k, times = n * together, k * together, times / together
    many = times if gemm.batch or gemm.experts else 1.0
    repeated = times / many
    precision: str = config.precision if gemm.batch else config.products or config.precision
    spared = 0.0
    if gemm.read:
        spared = max(rows * k - gemm.read * config.samples, 0.0)
        repeated *= constants.CONVOLUTION * _of_products(gemm, config)
    if not backward:
        return repeated * product_s(config.device, precision, rows, n, k, many, spared)
    inputs = product_s(config.device, precision, rows, k, n, many, spared)
    if config.lora and not gemm.batch:
        return repeated * inputs
    # AQT's products in int8 leave the weights' gradients in 16 bits (MaxText's default)
    weights = config.precision if precision == "int8" else precision
    return repeated * (inputs + product_s(config.device, weights, n, k, rows, many, spared))


def _of_products(gemm: Gemm, config: BlockConfig) -> float:
    """Part of a convolution's products that its algorithm computes.

    Kernels of 3 × 3 are computed by Winograd's in fp32 (arXiv:1509.09308), where tensor cores do not multiply.
    """
    wide = config.precision == "fp32" and config.device.is_gpu
    return 1 / constants.WINOGRAD if wide and gemm.k % 9 == 0 and gemm.k % 27 and gemm.k > 9 else 1.0


@lru_cache(maxsize=100_000)
def product_s(
    device: Accelerator, precision: str, m: float, n: float, k: float, many: float = 1.0, spared: float = 0.0
) -> float:
    """Seconds of `many` equal products (m × k) · (k × n) at once, bound by arithmetic or memory.

    `spared` elements are not moved: convolutions read an element once for many rows.

    The result is cut into tiles; multiprocessors take one each, in waves, the last of which may be almost empty. Of the
    sizes of tiles that libraries have, the fastest is taken.
    """
    low = precision in LOW
    size = constants.LOW_BYTES[precision] if low else BYTES[precision]
    moved = (many * ((m * k + k * n) * size + m * n * (2 if low else size)) - spared * size) / _vector_bandwidth(device)
    alignment = 1.0 if low else _alignment(n, k, int(size))
    if not device.is_gpu:
        return max(2 * m * n * k * many / (peak_flops(device, precision) * constants.GEMM_TOP), moved)
    if alignment is None and size == 2 and many > 1:
        return max(2 * m * n * k * many / (peak_flops(device, "fp32") * constants.UNALIGNED_BATCH), moved)
    units = device.multiprocessors
    each = (
        peak_flops(device, precision)
        * constants.GEMM_TOP
        * (constants.LOW_TOP[precision] if low else alignment or constants.UNALIGNED)
        / units
    )
    fastest = float("inf")
    for rows, columns, use in constants.TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * many
        for split in constants.SPLITS if many == 1 and k >= 2048 else (1,):
            exact = tiles * split / units
            whole = ceil(exact) if exact < 20 else exact
            waves = max(exact + constants.WAVE * (whole - exact), min(whole, 1.0))
            depth = k / split + constants.GEMM_START_K * (1 if split == 1 else 2)
            fastest = min(fastest, waves * 2 * rows * columns * depth / (each * use))
    return max(fastest, moved)


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


def _fused_s(gemm: Gemm, config: BlockConfig) -> tuple[float, float]:
    """Seconds of one of attention's products in a fused kernel, forward and backward."""
    ranks = config.cp * (config.tp if gemm.divided != "none" else 1)
    peak = peak_flops(config.device, config.precision)
    return fused_attention_s(gemm, config.device, config.attention, peak, config.samples, ranks)


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
