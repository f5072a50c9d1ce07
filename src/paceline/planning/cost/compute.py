"""Compute time of a block, from matrix products and the memory traffic of other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from paceline.cluster.catalogue import Accelerator
from paceline.planning.cost import constants
from paceline.planning.cost.constants import STACKS, StackName, cached
from paceline.planning.cost.layout import BYTES, Layout, Precision
from paceline.planning.model.graph import BlockTrace, Gemm


class BlockConfig(NamedTuple):
    """Parameters that determine a block's time on one rank.

    The remaining fields have the same meaning as in `Layout` and `FrameworkProfile`.

    Attributes:
        attention: generation of the fused attention kernel; 0 if attention is not fused.
        floor_s: minimum time that Python needs to launch a kernel, in seconds.
        added_bytes: bytes moved per element of a weight's gradient to add it to the gradient of earlier microbatches.
        products: reduced precision of matrix products with weights; "" if the device is not faster in a reduced
            precision.
        casts: fraction of a step's microbatches in which weights are cast to `products`.
        fused_casts: True if a cast and its scale are one kernel.
    """

    device: Accelerator
    samples: float
    tp: int
    cp: int
    ep: int
    sequence: bool
    precision: Precision
    attention: int
    stack: StackName
    softmax_of: int
    stops_early: bool
    keeps: str
    blocking: bool
    floor_s: float
    added_bytes: float
    products: str
    casts: float
    fused_casts: bool
    expert_ranks: int
    expert_tp: int
    lora: int
    overlaps_tp: float
    overlaps_ep: float
    node_limit: int
    ulysses: bool
    imbalance: float

    @property
    def expert_groups(self) -> int:
        """Number of groups of ranks with different experts of a layer."""
        return self.expert_ranks or self.ep

    @property
    def expert_parts(self) -> int:
        """Number of parts into which a layer's experts are divided."""
        return self.expert_ranks * self.expert_tp or self.tp * self.ep


class BlockTime(NamedTuple):
    """Time of one microbatch in a block on one rank, in seconds.

    The `launch_` fields are the time that Python needs to launch the kernels; the other fields are time on the device.

    Attributes:
        scores_s: forward time of the attention, which remat=selective recomputes in frameworks that keep everything
            except attention scores.
        last_s: forward time of the block's last matrix product.
        others_s: forward time of memory-bound kernels.
        weights_s: forward time of matrix products with weights.
    """

    forward_s: float
    backward_s: float
    scores_s: float
    last_s: float
    others_s: float
    weights_s: float
    launch_forward_s: float
    launch_backward_s: float


def block_config(layout: Layout) -> BlockConfig:
    """Return the parameters of a layout that determine the time of a block."""
    framework, device = layout.framework, device_of(layout)
    queued = (device.is_gpu or device.is_core) and not framework.graphs
    regathers = layout.fsdp > 1 and layout.zero == 3 and layout.pp == 1
    adds_up = layout.microbatches > 1 and not regathers and not layout.lora
    faster = layout.products in LOW and peak_flops(device, layout.products) > peak_flops(device, "bf16")
    return BlockConfig(
        device=device,
        samples=layout.samples,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence=layout.sequence,
        precision=layout.precision,
        attention=framework.attention if framework.flash else 0,
        stack=framework.stack,
        softmax_of=framework.softmax_of,
        stops_early=framework.stops_early,
        keeps=framework.keeps,
        blocking=framework.blocking,
        floor_s=max(device.launch_s, constants.LAUNCH_S) if queued else 0.0,
        added_bytes=3 * layout.gradient_bytes if adds_up else 0.0,
        products=layout.products if faster else "",
        casts=1.0 if regathers or not framework.fused_casts else 1.0 / layout.microbatches,
        fused_casts=framework.fused_casts,
        expert_ranks=layout.expert_ranks,
        expert_tp=layout.expert_tp,
        lora=layout.lora,
        overlaps_tp=framework.overlaps_tp,
        overlaps_ep=framework.overlaps_ep,
        node_limit=framework.node_limit,
        ulysses=layout.ulysses,
        imbalance=layout.imbalance,
    )


def device_of(layout: Layout) -> Accelerator:
    """Return the compute device of one rank.

    On CPUs, this is a device with as many cores as the rank has threads.
    """
    device = layout.machines.device
    return _cores(device, layout.threads) if device.is_core and layout.threads > 1 else device


@lru_cache(maxsize=1000)
def _cores(core: Accelerator, count: int) -> Accelerator:
    peaks = {precision: flops * count for precision, flops in core.peak_flops.items()}
    return replace(core, peak_flops=peaks, memory_bandwidth=core.memory_bandwidth * count)


@cached(maxsize=200_000)
def block_time(block: BlockTrace, config: BlockConfig) -> BlockTime:
    """Compute the time of a block for one microbatch, without communication."""
    if config.products and block.kind in ("embedding", "head"):
        config = config._replace(products="")
    weights = [gemm for gemm in block.gemms if not (gemm.batch and config.attention)]
    attention, attention_backward = _attention_s(block, config)
    products = sum(gemm_s(gemm, config) for gemm in weights)
    products_backward = sum(gemm_s(gemm, config, backward=True) for gemm in weights)
    unfused = _softmax_is_unfused(block, config)
    scores, other = _scores_s(block, config, unfused), _other_s(block, config)
    cast, cast_backward = _casts_s(weights, block, config)
    added = held_weights(block, config) * config.added_bytes / vector_bandwidth(config.device)
    others_backward = constants.VECTOR_BACKWARD * other + constants.SCORES_BACKWARD * scores + added + cast_backward
    kernels = _kernels(block, config, unfused)
    starts = kernels * constants.KERNEL_S if config.device.is_gpu else 0.0
    starts += constants.EXPERT_S * STACKS[config.stack].mixtures if block.experts else 0.0
    launch = kernels * config.floor_s * (1 + constants.LAUNCH_TP * (config.tp - 1))
    beside = attention + attention_backward + other + scores + cast + others_backward + 3 * starts
    # the clock of the forward pass does not depend on whether weights get gradients
    throttled = _throttled(products + (2 * products if config.lora else products_backward), beside, 3 * launch, config)
    trained = 1.0 if block.trained else 0.0
    backward = products_backward * throttled + attention_backward + others_backward
    return BlockTime(
        forward_s=products * throttled + attention + other + scores + cast + starts,
        backward_s=(backward + 2 * starts) * trained,
        scores_s=scores + attention + sum(gemm_s(gemm, config) for gemm in weights if gemm.batch),
        last_s=gemm_s(block.gemms[-1], config) if block.gemms else 0.0,
        others_s=other + cast + starts,
        weights_s=sum(gemm_s(gemm, config) for gemm in weights if not gemm.batch) * throttled,
        launch_forward_s=launch,
        launch_backward_s=2 * launch * trained,
    )


def held_weights(block: BlockTrace, config: BlockConfig) -> float:
    """Return the number of elements of a block's weight matrices that one rank holds."""
    return block.matrices / config.tp + block.experts / config.expert_parts


def _attention_s(block: BlockTrace, config: BlockConfig) -> tuple[float, float]:
    """Return the forward and backward time of fused attention or of a state-space scan."""
    if not config.attention:
        return 0.0, 0.0
    reached = constants.SCAN if block.kind.startswith("mamba") else 1.0
    peak = peak_flops(config.device, config.precision)
    forward = backward = 0.0
    for gemm in block.gemms:
        if gemm.batch:
            ranks = config.cp * (config.tp if gemm.divided != "none" else 1)
            times = fused_attention_s(gemm, config.device, config.attention, peak, config.samples, ranks)
            forward, backward = forward + times[0] / reached, backward + times[1] / reached
    return forward, backward


def _throttled(products_s: float, others_s: float, launch_s: float, config: BlockConfig) -> float:
    """Return the factor by which the device's power limit slows down matrix products.

    A device that computes matrix products all the time keeps only the fraction `sustained` of its clock frequency. With
    a lower share of products, the frequency is higher.
    """
    if not products_s:
        return 1.0
    share = products_s / max(products_s + others_s, launch_s)
    return 1 / (1 - (1 - min(_sustained(config.device) / constants.GEMM_TOP, 1.0)) * share)


def _sustained(device: Accelerator) -> float:
    """Return the fraction of the peak FLOP/s that long matrix products sustain."""
    if device.is_core:
        return constants.CORES_SUSTAINED
    return constants.fitted(f"SUSTAINED_{family_of(device)}") * device.sustained


# families of devices whose products sustain alike, by generation
_FAMILIES = {
    "VOLTA": ("pascal", "volta", "turing"),
    "AMPERE": ("ampere", "ada"),
    "HOPPER": ("hopper",),
    "BLACKWELL": ("blackwell",),
    "CDNA": ("cdna2", "cdna3", "cdna4"),
    "TPU": ("tpu",),
}


def family_of(device: Accelerator) -> str:
    """Return the name of the family whose products sustain alike."""
    own = "tpu" if device.kind == "tpu" else device.generation
    return next((family for family, generations in _FAMILIES.items() if own in generations), "OTHER")


def _kernels(block: BlockTrace, config: BlockConfig, unfused: bool) -> float:
    """Count the kernels of a forward pass, including those of low-precision casts, experts and adapters."""
    products = sum(not gemm.batch for gemm in block.gemms)
    cast = (1 if config.fused_casts else constants.UNFUSED_CAST_KERNELS) if config.products else 0
    added = float(cast * products) + (4 * products if config.lora else 0)
    if block.experts:
        each = next((gemm.experts for gemm in block.gemms if gemm.experts), 0) / config.expert_groups
        each *= constants.EXPERT_KERNELS * (2 if config.products else 1)
        added = (added + constants.MIXTURE_KERNELS + each) * STACKS[config.stack].mixtures
    each = constants.fitted(STACKS[config.stack].kernels)
    return (block.kernels + added + (constants.UNFUSED_KERNELS if unfused else 0)) * each


def _scores_s(block: BlockTrace, config: BlockConfig, unfused: bool) -> float:
    """Return the forward time of the softmax and other kernels on attention scores.

    It is 0 if attention is fused.
    """
    if config.attention:
        return 0.0
    return _pass_s(block.scores / config.tp / config.cp, config) * (constants.UNFUSED_SOFTMAX if unfused else 1)


def _softmax_is_unfused(block: BlockTrace, config: BlockConfig) -> bool:
    if config.attention or config.softmax_of == 1:
        return False
    squares = max((gemm.batch for gemm in block.gemms), default=0) * config.samples / config.tp
    return squares % config.softmax_of != 0


def _other_s(block: BlockTrace, config: BlockConfig) -> float:
    """Return the forward time of memory-bound kernels, except those on attention scores."""
    stack = STACKS[config.stack]
    vector = constants.fitted(stack.vector)
    if any(gemm.read for gemm in block.gemms):
        vector *= constants.CONVOLUTION_VECTOR * (constants.CONVOLUTION_TF32 if config.precision == "tf32" else 1.0)
    vector *= stack.mixtures if block.experts else 1.0
    inside = block.inside * (stack.loss if block.kind == "head" else vector)
    outside = block.outside * vector
    return _pass_s(inside / config.tp / config.cp + outside / (config.tp if config.sequence else 1) / config.cp, config)


def _casts_s(weights: Sequence[Gemm], block: BlockTrace, config: BlockConfig) -> tuple[float, float]:
    """Return the forward and backward time of casts to low precision.

    The forward pass casts inputs and weights. The backward pass casts the gradients of outputs.
    """
    if not config.products:
        return 0.0, 0.0
    forward = backward = 0.0
    for gemm in weights:
        if not gemm.batch:
            shape = _shape(gemm, config)
            forward += shape.rows * shape.k * shape.many * shape.repeated
            backward += shape.rows * shape.n * shape.many * shape.repeated
    forward += held_weights(block, config) * config.casts
    each = constants.CAST_BYTES[config.products] / vector_bandwidth(config.device)
    each *= STACKS[config.stack].mixtures if block.experts else 1.0
    each *= 1.0 if config.fused_casts else constants.UNFUSED_CASTS
    return forward * each, backward * each


def _pass_s(numbers: float, config: BlockConfig) -> float:
    """Return the time to move `numbers` elements per sample through the device's memory."""
    return numbers * config.samples * BYTES[config.precision] / vector_bandwidth(config.device)


def gemm_s(gemm: Gemm, config: BlockConfig, backward: bool = False) -> float:
    """Return the time of all matrix products of one shape in a microbatch, in seconds.

    The backward pass has two products for each forward product. It has only one if the weight is not trained or the
    input is data, which needs no gradient.
    """
    shape = _shape(gemm, config)
    precision: str = config.precision if gemm.batch else config.products or config.precision
    repeated, read = shape.repeated, 0.0
    if gemm.read:
        read = gemm.read * config.samples * shape.k / gemm.k
        repeated *= constants.CONVOLUTION * _of_products(gemm, config)

    def seconds(m: float, n: float, k: float, image: float = read, kind: str = precision) -> float:
        spared = max(shape.rows * shape.k - image, 0.0) if image else 0.0
        return product_s(config.device, kind, m, n, k, shape.many, spared)

    if not backward:
        return repeated * seconds(shape.rows, shape.n, shape.k)
    inputs = 0.0 if gemm.data else seconds(*_gradient_of_inputs(gemm, shape, read))
    if config.lora and not gemm.batch:
        return repeated * inputs
    # with int8 products, the gradients of weights are computed in 16 bits (AQT's default in MaxText)
    kept = config.precision if precision == "int8" else precision
    # the sum over rows is contiguous in neither operand, so its length needs no alignment
    summed = ceil(shape.rows / 64) * 64.0 if shape.rows > 64 else shape.rows
    return repeated * (inputs + seconds(shape.n, shape.k, summed, kind=kept))


def _gradient_of_inputs(gemm: Gemm, shape: Shape, read: float) -> tuple[float, float, float, float]:
    """Return the shape of the matrix product that computes the gradient of the left operand.

    The result has the rows, the width, the summed dimension, and the number of elements read. For a convolution, the
    gradient of the output is convolved, and each position of the image is one row.
    """
    if gemm.taps == 1:
        return shape.rows, shape.k, shape.n, read
    rows = read * gemm.taps / shape.k
    summed = shape.n * gemm.taps / max(round(rows / shape.rows), 1)
    return rows, shape.k / gemm.taps, summed, shape.rows * shape.n


class Shape(NamedTuple):
    """Matrix products of one rank in a microbatch: batches of `many` products, `repeated` times.

    Each product is (rows × k) · (k × n).
    """

    rows: float
    n: float
    k: float
    many: float
    repeated: float


def _shape(gemm: Gemm, config: BlockConfig) -> Shape:
    """Return the shape of one rank's part of a matrix product."""
    rows, n, k = gemm.rows / config.cp, float(gemm.n), float(gemm.k)
    times, tp = float(gemm.times), config.tp
    if gemm.batch:
        times *= gemm.batch * config.samples / (tp if gemm.divided != "none" else 1)
    elif gemm.experts:
        # if some tp ranks hold different experts, each group of `expert_tp` ranks has its part of the tokens
        rows *= config.samples * config.imbalance * config.expert_groups / gemm.experts
        rows *= config.expert_tp / tp if config.expert_ranks else 1
        rows = ceil(rows / constants.EXPERT_ROWS) * constants.EXPERT_ROWS
        times *= gemm.experts / config.expert_groups
        tp = config.expert_tp if config.expert_ranks else tp
    else:
        rows *= config.samples
    if gemm.divided == "n":
        n /= tp
    elif gemm.divided == "k":
        k /= tp
    if gemm.read and gemm.times > 1 and n < constants.GROUPS_N:
        # several narrow groups of a convolution are computed at once
        together = min(constants.GROUPS_N / n, times)
        n, k, times = n * together, k * together, times / together
    many = times if gemm.batch or gemm.experts else 1.0
    return Shape(rows, n, k, many, times / many)


def _of_products(gemm: Gemm, config: BlockConfig) -> float:
    """Return the time of a convolution relative to plain matrix products.

    In fp32, which uses no tensor cores, 3 × 3 kernels use Winograd's algorithm (arXiv:1509.09308). With tensor cores,
    3D convolutions are slower than 2D convolutions.
    """
    wide = config.precision == "fp32" and config.device.is_gpu
    if wide:
        return 1 / constants.WINOGRAD if gemm.taps == 9 else 1.0
    return constants.CONVOLUTION_3D if gemm.taps == 27 else 1.0


# precisions of products below 16 bits, and the peak that each uses
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
    """Return the peak FLOP/s in a precision, or in the next wider one."""
    precision = LOW.get(precision, precision)
    for name in (precision, *_WIDER.get(precision, ())):
        if name in device.peak_flops:
            return device.peak_flops[name]
    return min(device.peak_flops.values())


@cached(maxsize=100_000)
def product_s(
    device: Accelerator, precision: str, m: float, n: float, k: float, many: float = 1.0, spared: float = 0.0
) -> float:
    """Return the time of a batch of `many` equal matrix products, in seconds.

    Each product is (m × k) · (k × n). The time is bound by either arithmetic or memory traffic. `spared` is the number
    of elements that need not be moved, because a convolution reads an element once for several rows.
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
    reached = constants.LOW_TOP[precision] * constants.LOW_PRECISION if low else alignment or constants.UNALIGNED
    each = peak * constants.GEMM_TOP * reached / device.multiprocessors
    narrow = precision == "fp32" and min(m, n) <= constants.NARROW_N
    tiles = constants.NARROW_TILES if narrow else constants.TILES
    return max(_tiled_s(max(m, n), min(m, n), k, many, device.multiprocessors, each, tiles), moved)


def _tiled_s(
    m: float, n: float, k: float, many: float, units: int, each: float, sizes: constants.Tiles = constants.TILES
) -> float:
    """Return the time of matrix products whose result is divided into tiles, in seconds.

    In each wave, every multiprocessor computes one tile. The last wave may be almost empty. The result is the time with
    the fastest tile size.

    Args:
        units: number of multiprocessors of the device.
        each: FLOP/s of one multiprocessor.
        sizes: available tile sizes.
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
    """Return the relative speed for the alignment of the rows.

    It is None if the rows are too poorly aligned for tensor cores.
    """
    speed = 1.0
    for width in (n, k):
        found = next((left for divisor, left in constants.ALIGNED if (width * size) % divisor == 0), None)
        if found is None:
            return None
        speed = min(speed, found)
    return speed


def vector_bandwidth(device: Accelerator) -> float:
    """Return the memory bandwidth that memory-bound kernels reach, in bytes per second."""
    return device.memory_bandwidth * constants.VECTOR_TOP


class KernelSpeed(NamedTuple):
    """Fraction of the 16-bit peak FLOP/s that an attention kernel reaches on long sequences.

    The values are for heads of width 128.
    """

    forward: float
    backward: float


# By generation of the kernel (FlashAttention 1, 2, 3; cuDNN since 9.0 counts as 3), then by device; "" is any other
# device. Hopper's 2 and 3 are measured (tables/operations_h100.csv: torch's FlashAttention 2, and cuDNN 9). Ampere's
# are from Dao, 2023 (arXiv:2307.08691, figures 4 to 6), Blackwell's from NVIDIA's cuDNN 9 notes, CDNA's from AMD's blog
# on composable kernels. Other devices are assumed to behave like Ampere.
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
# Sequence length at which half of that is reached, forward and backward, with a causal mask and without: measured
# (tables/operations_h100.csv)
HALF_CAUSAL = KernelSpeed(450.0, 1080.0)
HALF = KernelSpeed(100.0, 450.0)
# share of the speed at a width of 128 that remains for heads of 64 or less; from the same measurements
NARROW = 0.8
# share of the peak that products sustain on the measured devices (`Accelerator.sustained`): a device with
# less power is slower in attention as well
MEASURED_AT = {"hopper": 0.92, "ampere": 1.0, "blackwell": 0.89}
BACKWARD = 2.5  # five products instead of two


def fused_attention_s(
    gemm: Gemm, device: Accelerator, kernel: int, peak: float, samples: float, ranks: int
) -> tuple[float, float]:
    """Return the forward and backward time of one matrix product of fused attention.

    The kernel skips positions that a causal mask hides.

    Args:
        kernel: generation of the kernel, 1 to 3.
        peak: peak FLOP/s of the device in the precision of the kernel.
        samples: number of sequences in a microbatch.
        ranks: number of ranks that share the work.
    """
    by_device = KERNELS[min(max(kernel, 1), 3)]
    speed = by_device.get(device.generation, by_device[""])
    half = HALF_CAUSAL if gemm.causal else HALF
    wide = constants.ATTENTION * (1.0 if min(gemm.n, gemm.k) > 64 else NARROW)
    wide *= min(device.sustained / MEASURED_AT.get(device.generation, device.sustained), 1.0)
    flops = gemm.flops * samples / ranks * (0.5 if gemm.causal else 1.0)
    length = gemm.rows
    forward, backward = (
        flops * passes / (peak * of_peak * wide * length / (length + rows))
        for passes, of_peak, rows in ((1.0, speed.forward, half.forward), (BACKWARD, speed.backward, half.backward))
    )
    return forward, backward
