"""Memory of each block on a rank: parameters, and activations kept for its backward pass."""

from __future__ import annotations

from typing import NamedTuple

from paceline.planning.model.graph import BlockTrace, ModelTrace

# of the activations inside layers, what is left where products keep their inputs in 8 bits: these are about half
LOW_KEPT = 0.75
# kinds of blocks that are layers, also where there is only one of a kind
LAYERS = ("layer", "mixture", "encoder", "mamba", "delta", "attention", "feed_forward", "mtp")


class BlockMemory(NamedTuple):
    """Memory of a rank for consecutive blocks. Activations are elements of one sample.

    Attributes:
        dense, experts: parameters, after tp, and after tp and ep.
        outside: those of `dense` that are not in layers.
        largest: parameters of the largest layer.
        kept: saved for the backward pass; `logits` for the head.
        working: further memory of a layer while its backward pass recomputes it.
        result: output to the next stage.
    """

    dense: float
    experts: float
    outside: float
    largest: float
    kept: float
    logits: float
    working: float
    result: float


class MemoryConfig(NamedTuple):
    """Everything that a block's `BlockMemory` depends on, but for the block.

    Attributes:
        expert_parts: as `Layout.expert_parts`.
        squares: True if attention keeps its squares.
        products: True if remat=selective keeps matrix products only.
        kept_products: part of the products with weights that it keeps then.
        share: part of the layers that remat=block computes again.
        narrow: True if products keep their inputs in low precision.
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


def block_memories(trace: ModelTrace, config: MemoryConfig) -> tuple[BlockMemory, ...]:
    """Memory of every block. Equal blocks share one object, so that equal sums are equal to the last bit."""
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
    inside = block.kept_inside * (LOW_KEPT if config.narrow and block.kind != "head" else 1.0)
    kept, result = inside / tp + block.kept_outside / across, block.boundary / across
    logits, working = 0.0, 0.0
    if block.kind == "head":
        kept, logits = block.kept_outside / across, block.kept_inside / tp
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
    return BlockMemory(
        dense, experts, 0.0 if layer else dense, dense + experts if layer else 0.0, kept, logits, working, result
    )


def _products(block: BlockTrace, config: MemoryConfig, across: int) -> float:
    """Elements of the results of products with weights that are kept, and of attention's."""
    width = {"n": config.tp, "batch": config.tp}
    weights = sum(
        gemm.rows * gemm.n * gemm.times / width.get(gemm.divided, across) for gemm in block.gemms if not gemm.batch
    )
    attention = [gemm.rows * gemm.n * gemm.batch * gemm.times / config.tp for gemm in block.gemms if gemm.batch]
    return weights * config.kept_products + min(attention, default=0.0)


def summed(memories: tuple[BlockMemory, ...]) -> BlockMemory:
    """Memory of consecutive blocks."""
    dense, experts, outside, largest, kept, logits, working, _ = zip(*memories, strict=True)
    return BlockMemory(
        sum(dense), sum(experts), sum(outside), max(largest), sum(kept), sum(logits), max(working), memories[-1].result
    )
