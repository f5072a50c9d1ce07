"""Peak memory of a plan, on the rank that needs the most memory.

Sources of the formulas: for the sharded state, ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054); for activations,
Korthikanti et al. (2022, arXiv:2205.05198, §4); for microbatches in flight in a pipeline, Narayanan et al. (2021,
arXiv:2104.04473, §2.2) and Qi et al. (2024, arXiv:2401.10241).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import NamedTuple

from paceline.job.loss import WHOLE_LOGITS_BYTES, chunk_rows
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.stages import stages
from paceline.planning.model.graph import BlockTrace, ModelTrace
from paceline.planning.plan import V_SCHEDULES, reduces_once

HOLDERS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "working",
    "gathered",
    "buffers",
    "fragments",
    "runtime",
)
# parts of a rank's memory in tables of predicted and measured bytes, each with the predicted `HOLDERS` that it sums
PARTS = {
    "weights": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits", "working"),
    "communication": ("gathered", "buffers"),
    "cache": ("fragments",),
    "runtime": ("runtime", "copies"),
}
# on a GPU: context, libraries' workspaces, NCCL's channel buffers
RUNTIME_BYTES = 1.4e9
# a process with torch, the engine and a small data set
RUNTIME_BYTES_ON_CPU = 3.95e8
# mean factor by which torch rounds pinned host memory up to a power of two
PINNED_ROUNDING = 1.44
# fraction of a step's temporary memory lost to fragmentation
FRAGMENTS = 0.03
# the same if the allocator's segments cannot grow (the default of PYTORCH_CUDA_ALLOC_CONF) and sizes vary
_SEGMENTS = 0.1
# share of a GPU for its driver
RESERVE = 0.01
# Standard deviation of the logarithm of measured / predicted peak memory, and of the same if the job was measured on
# the machine (assumed). Four in five rows of published tables lie within 1.28 such deviations
# (`memory_coverage_80` of `benchmarks/published.py`).
SPREAD, MEASURED_SPREAD = 0.15, 0.1
# smallest probability that a proposed plan fits on accelerators; on CPUs, it is more likely to fit than not
PROPOSED = 0.8
_PROPOSED_Z = NormalDist().inv_cdf(PROPOSED)
# share of a rank's memory that a plan may use by a prediction that runs on the machine have corrected
MEASURED_SHARE = (1 - RESERVE) * math.exp(-_PROPOSED_Z * MEASURED_SPREAD)


class MemoryModel(NamedTuple):
    """Properties of a framework that affect its memory.

    Attributes:
        workspace_bytes: bytes of buckets and buffers, independent of the model.
        update_bytes: temporary bytes during an optimizer update, per parameter whose state the rank holds; in addition
            to the memory that activations have left cached.
        narrow_gradients: True if replicas have buffers of gradients in the precision of activations in addition to the
            accumulated four-byte gradients, as with DistributedDataParallel.
        stage_results: number of copies of a stage's output that are kept until the gradient of the output arrives.
        products: True if remat=selective keeps only results of matrix products and recomputes all other results.
        head: peak memory of the head, relative to its saved 32-bit log-probabilities; below 1 if the loss overwrites
            the logits. Torch's cross entropy needs 14 bytes for each 16-bit logit: the logit, the log-probability and
            two gradients. Of these, 4 bytes are saved (measured: 17.2 GB for a GPT on an H100, benchmarks/gpu.py).
        head_wide: as `head`, for 32-bit logits.
        apart: True if fsdp gathers the embedding and the head separately.
        at_once: number of gathered blocks that fsdp holds in memory at the same time.
        narrow_scattered: True if gradients are reduce-scattered in the precision of activations.
        keeps_wide: True if products in low precision keep their inputs in the precision of activations, as torchao's.
        fragments: fraction of a step's temporary memory that is lost to fragmentation.
        gathered_inputs: True if sequence parallelism keeps the gathered inputs of matrix products instead of gathering
            them again in the backward pass (Korthikanti et al., §4.2.2, gathers again).
        gates: True if gated layers keep the activation of the gate as well as its input, as separate kernels do.
    """

    workspace_bytes: float = 0.0
    update_bytes: float = 0.0
    narrow_gradients: bool = False
    stage_results: int = 1
    products: bool = False
    head: float = 1.5
    head_wide: float = 1.0
    apart: bool = False
    at_once: int = 2
    narrow_scattered: bool = False
    keeps_wide: bool = False
    fragments: float = FRAGMENTS
    gathered_inputs: bool = False
    gates: bool = False


# DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, of 5e8 numbers of 16 bits each
_BUCKETS = 2e9
# by the prefix of the framework's name
_MEMORY_MODELS = {
    "paceline": MemoryModel(products=True, head=3.5, head_wide=4.0, keeps_wide=True),
    # ZeRO-1 flattens a rank's part of the gradients in 16 bits and casts it to 32
    "Megatron-DeepSpeed": MemoryModel(
        workspace_bytes=_BUCKETS, update_bytes=6.0, narrow_gradients=True, fragments=_SEGMENTS
    ),
    # frees a stage's result after sending it
    "Megatron": MemoryModel(stage_results=0),
    "Composer": MemoryModel(head=1 / 2),  # FlashAttention's cross entropy
    # logits and their gradient in 16 bits, since the loss is compiled too
    "torchtitan, compiled": MemoryModel(apart=True, head=1.0, gathered_inputs=True),
    "torchtitan of 2024": MemoryModel(apart=True, head=2.55, fragments=_SEGMENTS, gathered_inputs=True),
    "torchtitan": MemoryModel(apart=True, head=3.0, fragments=_SEGMENTS, gathered_inputs=True, gates=True),
    # DistributedDataParallel with a hook that accumulates in fp32; the cross entropy copies logits to fp32 once and
    # works in place. Its shared buffers of gathered tensors and cuBLAS's workspaces are assumed.
    "nanotron": MemoryModel(workspace_bytes=5e8, narrow_gradients=True, head=2.5, gathered_inputs=True, gates=True),
    # XLA allocates all buffers in advance, and computes logits in parts
    "MaxText": MemoryModel(apart=True, head=0.375, at_once=1, narrow_scattered=True, fragments=0.0),
}
_OTHER = MemoryModel()


def memory(layout: Layout, *, first: bool = False) -> dict[str, float]:
    """Return the bytes for each of `HOLDERS` on the rank that needs the most memory.

    Args:
        first: True for the first pipeline stage instead, whose memory frameworks print.
    """
    memory_model = _memory_model(layout.framework.name)
    ranks = _ranks(layout, memory_model)[: 1 if first else None]
    worst = max((_of_rank(layout, memory_model, stage, chunks) for stage, chunks in ranks), key=sum)
    held = dict(zip(HOLDERS, worst, strict=False))
    on_core = layout.machines.device.is_core
    held["buffers"] += 0.0 if on_core else memory_model.workspace_bytes
    temporary = held["activations"] + held["logits"] + held["working"] + held["gathered"]
    held["fragments"] = memory_model.fragments * temporary
    held["runtime"] = _baseline_bytes(layout) if on_core else RUNTIME_BYTES
    found = layout.machines.adjustment
    return held if found is None else {name: size * found.memory_factor for name, size in held.items()}


def by_part(held: Mapping[str, float]) -> dict[str, float]:
    """Sum predicted bytes of `HOLDERS` to `PARTS`."""
    return {part: sum(held.get(holder, 0.0) for holder in holders) for part, holders in PARTS.items()}


@cache
def _memory_model(framework: str) -> MemoryModel:
    return next((memory_model for start, memory_model in _MEMORY_MODELS.items() if framework.startswith(start)), _OTHER)


def capacity_bytes(layout: Layout) -> float:
    """Return the memory of a rank's device, in bytes.

    On CPUs, the ranks of a host divide its memory evenly.
    """
    machines = layout.machines
    own = float(machines.memory_bytes or machines.device.memory_bytes)
    if not machines.device.is_core:
        return own
    on_a_core = -(-layout.ranks // machines.devices)  # hosts are filled in order
    return own * machines.per_host / min(layout.ranks, machines.per_host * on_a_core)


def fit_probability(layout: Layout, used: float) -> float:
    """Return the probability that a rank's memory suffices, given its predicted peak in bytes.

    The ratio of measured to predicted memory has a log-normal distribution.
    """
    return NormalDist().cdf(math.log(_available_bytes(layout) / max(used, 1.0)) / _spread(layout))


def usable_bytes(layout: Layout) -> float:
    """Return the largest predicted peak of a proposed plan, in bytes.

    On accelerators, such a plan fits with a probability of `PROPOSED`.
    """
    z = 0.0 if layout.machines.device.is_core else _PROPOSED_Z
    return _available_bytes(layout) * math.exp(-z * _spread(layout))


def _available_bytes(layout: Layout) -> float:
    return capacity_bytes(layout) * (1.0 if layout.machines.device.is_core else 1 - RESERVE)


def _spread(layout: Layout) -> float:
    """Return the standard deviation of the logarithm of a prediction.

    Measured runs of the user narrow it.
    """
    if getattr(layout.machines.calibration, "baseline_bytes", 0):
        return MEASURED_SPREAD
    found = layout.machines.adjustment
    return SPREAD if found is None else found.memory_spread


def offloaded_bytes(layout: Layout) -> float:
    """Return the largest number of bytes of activations that a rank keeps in host memory."""
    if not layout.offload_activations:
        return 0.0
    kept = max(
        sum(held.kept * count for held, count in zip(chunks, _in_flight(layout, stage), strict=True))
        for stage, chunks in _ranks(layout, _memory_model(layout.framework.name))
    )
    return PINNED_ROUNDING * kept * layout.samples / layout.cp * layout.number_bytes


def host_fits(layout: Layout) -> bool:
    """Return True if the offloaded activations fit in a rank's share of the host's memory."""
    return offloaded_bytes(layout) <= layout.machines.device.host_memory_bytes


def _of_rank(
    layout: Layout, memory_model: MemoryModel, stage: int, chunks: tuple[BlockMemory, ...]
) -> tuple[float, ...]:
    """Return the bytes of one pipeline rank, in the order of `HOLDERS` up to `buffers`."""
    sample = layout.samples / layout.cp * layout.number_bytes
    kept = logits = 0.0
    head = memory_model.head_wide if layout.number_bytes > 2 else memory_model.head
    for held, count in zip(chunks, _in_flight(layout, stage), strict=True):
        results = memory_model.stage_results if layout.pp > 1 else 0
        kept += (held.kept + results * held.result) * count
        logits += held.logits * min(count, 1) * head
    classes, width = max((held.classes, held.width) for held in chunks)
    working = max(held.working for held in chunks) * sample
    parameters, gradients, optimizer, gathered, update = _state(layout, memory_model, chunks)
    kept, logits = kept * sample, _logits_bytes(layout, logits * sample, classes, width)
    if layout.offload_activations:
        # of the kept activations, two blocks' are in transfer
        kept *= min(2 * layout.pp / max(len(layout.trace.blocks), 1), 1.0)
    if layout.dp == layout.fsdp == layout.pp == layout.microbatches == 1 and memory_model.products:
        kept = _while_gradients_come(layout, kept, sample)
    if memory_model.update_bytes:
        working += update
    else:
        working += max(update - kept - logits - working - gathered, 0.0)
    received = 0.0
    # buffers for the activations that microbatches in flight receive, and for a gradient each of two; torch's stages of
    # V schedules have both for every microbatch
    if layout.pp > 1 and memory_model.products:
        flight = min(max(_in_flight(layout, stage)) + 1, layout.microbatches)
        count = 2 * layout.microbatches if layout.schedule in V_SCHEDULES else layout.chunks * (flight + 2)
        received = count * max(held.result for held in chunks) * sample
    return parameters, gradients, optimizer, kept, logits, working, gathered, received


def _logits_bytes(layout: Layout, whole: float, classes: float, width: float) -> float:
    """Return the bytes that the loss needs for logits and their gradients.

    Args:
        whole: bytes without chunks.
        classes: number of logits of one token on this rank.
        width: features that the head reads.
    """
    rows = int(layout.trace.tokens * layout.samples / layout.cp)
    few = layout.loss_chunk == 0 and rows * classes * layout.number_bytes <= WHOLE_LOGITS_BYTES
    chunked = layout.trace.plain_head and layout.framework.name.startswith("paceline")
    if layout.loss_chunk is None or few or not chunked:
        return whole
    count = min(layout.loss_chunk or chunk_rows(rows, layout.number_bytes), rows)
    # logits of 16 bits are also held in 32 bits, and a chunk's gradient of the weight in 16
    narrow = layout.number_bytes < 4
    logits = count * classes * (layout.number_bytes + (4 if narrow else 0))
    return min(whole, logits + (classes * width * layout.number_bytes if narrow else 0.0))


def _state(
    layout: Layout, memory_model: MemoryModel, chunks: tuple[BlockMemory, ...]
) -> tuple[float, float, float, float, float]:
    """Return the bytes of parameters, gradients, optimizer state, gathered tensors and update temporaries.

    Gathered tensors are those that FSDP has all-gathered. Update temporaries exist only during an optimizer update.
    """
    dense, experts = sum(held.dense for held in chunks), sum(held.experts for held in chunks)
    if layout.pp == 1 or (layout.schedule in V_SCHEDULES and chunks[0].outside and chunks[-1].outside):
        dense -= layout.trace.tied / layout.tp
    numbers, over_cp = dense + experts, layout.cp if layout.shards_over_cp else 1
    shards = layout.fsdp * (over_cp if layout.zero == 3 and not layout.zero_dp and layout.dp == 1 else 1)
    own = numbers / shards
    if layout.zero_dp:
        own = (dense / (layout.dp * layout.ep * over_cp) + experts / layout.expert_copies) / shards
    narrow = min(layout.parameter_bytes, layout.number_bytes)
    whole = layout.pp > 1 or layout.zero < 3
    gathered, beside = 0.0, 0.0
    if shards > 1:
        largest, outside = max(held.largest for held in chunks), sum(held.outside for held in chunks)
        if memory_model.apart:
            outside /= 2 if layout.pp == 1 and not layout.trace.tied else 1
        in_turn = max(memory_model.at_once * largest, outside) if memory_model.apart else 2 * largest + outside
        gathered = narrow * (numbers if whole else in_turn)
        # a gradient before and during its scatter
        scattered = 0.0 if memory_model.narrow_scattered else layout.gradient_bytes
        gathered += (narrow + scattered) * max(largest, outside)
        if layout.regather_ranks and not whole:
            gathered += layout.gathered_bytes * numbers / min(layout.regather_ranks, shards)
        if layout.microbatches > 1 and reduces_once(layout.zero, layout.pp, layout.schedule):
            beside = layout.gradient_bytes
    elif memory_model.narrow_gradients and layout.dp > 1 and layout.gradient_bytes > layout.number_bytes:
        beside = layout.number_bytes
    trained = trained_part(layout)
    gradients = numbers * trained * (layout.gradient_bytes / shards + beside)
    kept = (numbers * _weight_bytes(layout, trained) / shards, gradients, own * trained * layout.optimizer_bytes)
    if layout.offload and shards > 1 and not layout.machines.device.is_core:
        return 0.0, numbers * beside, 0.0, gathered, 0.0
    optimizer_copy = layout.parameter_bytes if layout.optimizer_bytes >= 2 * layout.parameter_bytes else 0.0
    update = own * (memory_model.update_bytes or (0.0 if layout.machines.device.is_core else optimizer_copy))
    return *kept, gathered, update * trained


def _weight_bytes(layout: Layout, trained: float) -> float:
    """Return the mean bytes of a weight. Weights under adapters are kept in the precision in which they are used."""
    if not layout.lora:
        return layout.parameter_bytes
    frozen = 1.0 if layout.products else min(layout.parameter_bytes, layout.number_bytes)
    return trained * layout.parameter_bytes + (1 - trained) * frozen


def kept_bytes(layout: Layout) -> float:
    """Return the bytes of activations that one microbatch keeps on a rank.

    The result is the mean over all stages.
    """
    held = block_memories(layout.trace, _memory_config(layout, _memory_model(layout.framework.name)))
    return sum(block.kept for block in held) / layout.pp * layout.samples / layout.cp * layout.number_bytes


def trained_part(layout: Layout) -> float:
    """Return the fraction of the parameters that is trained.

    An adapter that is not in the trace has two narrow matrices for each weight matrix.
    """
    if not layout.lora:
        return layout.trained
    return min(2 * layout.lora / max(block.boundary / layout.trace.tokens for block in layout.trace.blocks), 1.0)


def _while_gradients_come(layout: Layout, kept: float, sample: float) -> float:
    """Return the peak memory of the backward pass in addition to all gradients.

    The backward pass frees the activations of one block after another while it creates the gradients of the blocks.
    """
    held = block_memories(layout.trace, _memory_config(layout, _MEMORY_MODELS["paceline"]))
    later, most = 0.0, 0.0
    for block in reversed(held):
        later += (block.dense + block.experts) * trained_part(layout) * layout.gradient_bytes
        most = max(most, kept + later)
        kept -= block.kept * sample
    return most - later


def _in_flight(layout: Layout, stage: int) -> list[int]:
    """Return the largest number of microbatches in flight for each chunk of a rank."""
    pp, chunks, count = layout.pp, layout.chunks, layout.microbatches
    if pp == 1:
        return [1] * chunks
    if layout.schedule == "gpipe" or (layout.schedule == "interleaved" and (count < pp or count % (count // pp))):
        return [count] * chunks
    # V schedule: down through the first chunks, up through the second ones
    if layout.schedule in V_SCHEDULES:
        return [min(count, 2 * pp - stage), min(count, stage + 1)][:chunks]
    if chunks == 1:
        return [min(count, pp - stage)]
    begun = min(2 * (pp - stage - 1) + (chunks - 1) * pp + 1, count * chunks)
    rounds, remainder = divmod(begun, pp * chunks)
    return [rounds * pp + min(max(remainder - chunk * pp, 0), pp) for chunk in range(chunks)]


def _ranks(layout: Layout, memory_model: MemoryModel) -> list[tuple[int, tuple[BlockMemory, ...]]]:
    """Return the pipeline ranks with distinct chunks, each with the memory of its chunks.

    Of several ranks with equal chunks, only the first is returned, because it has the most microbatches in flight.
    """
    config = _memory_config(layout, memory_model)
    cut = layout.cut or _even_cut(layout)
    key = (config, cut, layout.pp, layout.schedule in V_SCHEDULES)
    memo = layout.trace.memo
    if key not in memo:
        chunks, pp = _chunks(layout.trace, config, cut), layout.pp
        firsts: dict[tuple[BlockMemory, ...], int] = {}
        for rank in range(pp):
            back = layout.schedule in V_SCHEDULES and len(chunks) == 2 * pp
            firsts.setdefault((chunks[rank], chunks[-1 - rank]) if back else tuple(chunks[rank::pp]), rank)
        memo[key] = [(rank, own) for own, rank in firsts.items()]
    found: list[tuple[int, tuple[BlockMemory, ...]]] = memo[key]
    return found


def _even_cut(layout: Layout) -> tuple[int, ...]:
    """Return the number of blocks of each virtual stage for a plan without cuts.

    The prediction of the step time uses the same cut.
    """
    if layout.pp == 1:
        return (len(layout.trace.blocks),)
    degrees = (layout.pp, layout.chunks, layout.tp, layout.cp, layout.ep, layout.sequence, layout.samples)
    key = ("cut", *degrees, layout.remat, layout.precision, layout.framework, layout.machines.device.name)
    memo = layout.trace.memo
    if key not in memo:
        memo[key] = tuple(int(stage.blocks) for stage in stages(layout))
    cut: tuple[int, ...] = memo[key]
    return cut


def _memory_config(layout: Layout, memory_model: MemoryModel) -> MemoryConfig:
    return MemoryConfig(
        layout.tp,
        layout.expert_parts,
        layout.sequence,
        layout.remat,
        not layout.framework.flash,
        memory_model.products or layout.framework.keeps != "attention",
        0.5 if layout.framework.keeps == "half" else 1.0,
        layout.remat_share,
        bool(layout.products) and not memory_model.keeps_wide,
        _cast_copies(layout) if memory_model.keeps_wide else 0.0,
        memory_model.gathered_inputs and layout.sequence,
        memory_model.gates,
        bool(layout.lora),
    )


def _cast_copies(layout: Layout) -> float:
    """Return the size of the copies that a cast makes, relative to activations.

    A compiled cast writes one byte per element in two layouts. Otherwise three results in float32 come before.
    """
    if not layout.products:
        return 0.0
    return (2.0 if layout.framework.fused_casts else 13.0) / layout.number_bytes


def _chunks(trace: ModelTrace, config: MemoryConfig, cut: tuple[int, ...]) -> list[BlockMemory]:
    memories = block_memories(trace, config)
    return [summed(memories[start:end]) for start, end in pairwise(accumulate(cut, initial=0))]


def _baseline_bytes(layout: Layout) -> float:
    measured = getattr(layout.machines.calibration, "baseline_bytes", 0)
    return float(measured or RUNTIME_BYTES_ON_CPU)


# share of the activations inside layers that remains if products keep their inputs in 8 bits: these are about half
LOW_KEPT = 0.75
# kinds of blocks that are layers, even if there is only one of a kind
LAYERS = ("layer", "mixture", "encoder", "mamba", "delta", "attention", "feed_forward", "mtp")


class BlockMemory(NamedTuple):
    """Memory of consecutive blocks on one rank, in elements. Activations are counted for one sample.

    Attributes:
        dense: number of parameters outside of experts, divided by tp.
        experts: number of expert parameters, divided by tp and ep.
        outside: number of parameters in `dense` that are not in layers.
        largest: number of parameters in the largest layer.
        kept: elements saved for the backward pass, without those of the head's loss.
        logits: elements that the loss saves in the head.
        working: additional elements while the backward pass recomputes a layer.
        result: elements of the output that is passed to the next stage.
        classes: number of logits of one token in the head; 0 in other blocks.
        width: features that the head reads.
    """

    dense: float
    experts: float
    outside: float
    largest: float
    kept: float
    logits: float
    working: float
    result: float
    classes: float = 0.0
    width: float = 0.0


class MemoryConfig(NamedTuple):
    """Parameters that determine the `BlockMemory` of a block.

    Attributes:
        expert_parts: number of ranks over which a layer's experts are divided (`Layout.expert_parts`).
        squares: True if attention scores are kept for the backward pass.
        products: True if remat=selective keeps only results of matrix products.
        kept_products: fraction of the matrix products with weights whose results remat=selective keeps.
        share: fraction of the layers that remat=block recomputes.
        narrow: True if matrix products keep their inputs in low precision.
        copies: copies of a product's inputs while they are cast to low precision.
        gathered: True if the gathered inputs of matrix products are kept.
        gates: True if gated layers also keep the activation of the gate.
        adapters: True if weights are frozen and only attention has adapters: frozen products do not keep inputs.
    """

    tp: int
    expert_parts: int
    sequence: bool
    remat: str
    squares: bool
    products: bool
    kept_products: float
    share: float
    narrow: bool
    copies: float
    gathered: bool = False
    gates: bool = False
    adapters: bool = False


def block_memories(trace: ModelTrace, config: MemoryConfig) -> tuple[BlockMemory, ...]:
    """Return the memory of every block on one rank.

    Equal blocks share one object. Sums over equal blocks are therefore bitwise equal.
    """
    if config not in trace.memo:
        kinds = [block.kind for block in trace.blocks]
        repeated = {kind for kind in kinds if kinds.count(kind) > 1 or kind in LAYERS}
        by_block: dict[BlockTrace, BlockMemory] = {}
        for block in trace.blocks:
            if block not in by_block:
                by_block[block] = _held(block, config, block.kind in repeated)
        trace.memo[config] = tuple(by_block[block] for block in trace.blocks)
    memories: tuple[BlockMemory, ...] = trace.memo[config]
    return memories


def _held(block: BlockTrace, config: MemoryConfig, layer: bool) -> BlockMemory:
    tp, across = config.tp, config.tp if config.sequence else 1
    dense, experts = block.vectors + block.matrices / tp, block.experts / config.expert_parts
    squares = block.kept_scores / tp if config.squares else 0.0
    result = block.boundary / across
    inside, outside = block.kept_inside, block.kept_outside / across
    if layer:
        gated, down = _feed_forward(block)
        if config.gates:
            inside += gated
        if config.gathered and across > 1:
            outside += 2 * (block.boundary - result)
        if config.adapters and down:
            inside, outside = inside - down, outside - result
    kept = inside * (LOW_KEPT if config.narrow and block.kind != "head" else 1.0) / tp + outside
    logits = working = classes = width = 0.0
    if block.kind == "head":
        kept, logits = block.kept_outside / across, block.kept_inside / tp
        columns = [(gemm.n, gemm.k) for gemm in block.gemms if not gemm.batch]
        classes, width = max(columns, default=(0, 0))
    elif not block.trained:
        kept = 0.0
    elif layer and config.remat == "block":
        whole = kept + squares
        kept, working = config.share * result + (1 - config.share) * whole, whole
    elif layer and config.remat == "selective":
        products = result + _products(block, config, across) if config.products else kept
        kept, working = min(products, kept), squares + max(kept - products, 0.0)
    else:
        kept += squares
        if layer and config.gates:
            # gradients of the gated layer's results, and of whole inputs before tp ranks share them out
            working = 3 * _feed_forward(block)[1] / tp + 2 * (block.boundary - result)
    if config.copies and block.kind not in ("embedding", "head"):
        inputs = (gemm.rows * gemm.k / (tp if gemm.divided == "k" else 1) for gemm in block.gemms if not gemm.batch)
        working += config.copies * max(inputs, default=0.0)
    return BlockMemory(
        dense,
        experts,
        0.0 if layer else dense,
        dense + experts if layer else 0.0,
        kept,
        logits,
        working,
        result,
        classes / tp,
        width,
    )


def _feed_forward(block: BlockTrace) -> tuple[float, float]:
    """Return the elements of a layer's gates, and of the input of its last product."""
    weights = [gemm for gemm in block.gemms if not gemm.batch]
    gates = sum(gemm.rows * gemm.n * (gemm.times - 1) for gemm in weights if gemm.divided == "n" and gemm.times == 2)
    inputs = [gemm.rows * gemm.k for gemm in weights if gemm.divided == "k"]
    return gates, inputs[-1] if len(inputs) > 1 else 0.0


def _products(block: BlockTrace, config: MemoryConfig, across: int) -> float:
    """Return the elements kept of the results of attention and of matrix products with weights."""
    width = {"n": config.tp, "batch": config.tp}
    weights = sum(
        gemm.rows * gemm.n * gemm.times / width.get(gemm.divided, across) for gemm in block.gemms if not gemm.batch
    )
    attention = [gemm.rows * gemm.n * gemm.batch * gemm.times / config.tp for gemm in block.gemms if gemm.batch]
    return weights * config.kept_products + min(attention, default=0.0)


def summed(memories: tuple[BlockMemory, ...]) -> BlockMemory:
    """Return the total memory of consecutive blocks."""
    dense, experts, outside, largest, kept, logits, working, _, classes, width = zip(*memories, strict=True)
    return BlockMemory(
        sum(dense),
        sum(experts),
        sum(outside),
        max(largest),
        sum(kept),
        sum(logits),
        max(working),
        memories[-1].result,
        max(classes),
        max(width),
    )
