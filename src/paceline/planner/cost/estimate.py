"""Predicted cost of a plan: seconds of a step and bytes of memory, by part."""

from __future__ import annotations

from paceline.planner.cost import constants
from paceline.planner.cost.compute import device_of, peak_flops
from paceline.planner.cost.layout import Layout
from paceline.planner.cost.measured import measured_step
from paceline.planner.cost.measured_memory import measured_memory
from paceline.planner.cost.memory import capacity_bytes, memory
from paceline.planner.cost.pipeline import hop_s, pipeline_s
from paceline.planner.cost.prediction import PARTS, Prediction
from paceline.planner.cost.stages import StageCost, exposed_s, stage_times
from paceline.planner.cost.traffic import all_reduce_s, gather_s, link_path


def estimate(layout: Layout) -> Prediction:
    """Predict the time, memory and breakdown of one step."""
    parts = measured_step(layout) or _parts(layout)
    step = sum(parts.values())
    held = measured_memory(layout, memory(layout))
    used = int(sum(held.values()))
    peak = peak_flops(device_of(layout), layout.precision) * layout.ranks
    flops = 3 * layout.trace.flops * layout.global_batch
    return Prediction(
        step_time_s=step,
        memory_bytes=used,
        throughput=layout.global_batch / step,
        mfu=flops / step / peak if peak else None,
        breakdown=parts,
        memory=held,
        fits=used <= capacity_bytes(layout),
    )


def _parts(layout: Layout) -> dict[str, float]:
    _, forwards, backwards, slow, working = stage_times(layout)
    hop = hop_s(layout)
    whole = pipeline_s(forwards, backwards, layout.microbatches, hop, layout.pp, layout.schedule)
    parts = dict.fromkeys(PARTS, 0.0)
    count = layout.microbatches
    parts["compute"] = count * (slow.forward_s + slow.backward_s)
    parts["recompute"] = count * slow.again_s
    parts["tp"] = count * (slow.tp_forward_s + slow.tp_backward_s)
    parts["cp"], parts["ep"] = count * slow.cp_s, count * slow.ep_s
    busy = sum(parts.values())
    working *= count
    parts["launch"] = max(working - busy, 0.0)
    parts["pp"] = min(hop * (2 * (layout.pp - 1) + count * layout.chunks), max(whole - working, 0.0))
    parts["bubble"] = max(whole - working - parts["pp"], 0.0)
    parts["fsdp"] = _fsdp_s(layout, slow)
    parts["dp"] = _dp_s(layout, slow)
    parts["optimizer"] = _optimizer_s(layout, slow)
    parts["other"] = constants.STEP_S
    return parts


def _fsdp_s(layout: Layout, slow: StageCost) -> float:
    """FSDP all-gather and reduce-scatter time that compute cannot overlap, in seconds."""
    if layout.fsdp == 1:
        return 0.0
    link = link_path(layout, "fsdp")
    gathered = gather_s(slow.parameters * min(layout.parameter_bytes, layout.number_bytes), link)
    scattered = gather_s(slow.parameters * layout.sync_bytes, link)
    one = exposed_s(scattered, slow.backward) + scattered / slow.blocks
    # pipelines gather and scatter once a step, for every `zero`
    if layout.pp > 1 or layout.zero == 1:
        return gathered + one
    if layout.zero == 2:
        return gathered + layout.microbatches * one
    forward = exposed_s(gathered, slow.forward) + gathered / slow.blocks
    backward = exposed_s(gathered + scattered, slow.backward) + scattered / slow.blocks
    return layout.microbatches * (forward + backward)


def _dp_s(layout: Layout, slow: StageCost) -> float:
    """Time of the gradients' all-reduce that the last backward pass cannot overlap."""
    if layout.dp == 1:
        return 0.0
    shared = slow.parameters / layout.fsdp
    seconds = all_reduce_s(shared * layout.sync_bytes, link_path(layout, "dp")) / layout.sync_every
    if not layout.framework.overlaps_gradients:
        return seconds
    return exposed_s(seconds, slow.backward) + seconds / slow.blocks


def _optimizer_s(layout: Layout, slow: StageCost) -> float:
    """Time to read and write parameters, gradients and the optimizer's state once."""
    shards = layout.fsdp * (layout.dp if layout.zero_dp else 1)
    each = constants.OPTIMIZER_PASSES * (2 * layout.parameter_bytes + 2 * layout.gradient_bytes + 2 * layout.optimizer_bytes)
    return slow.parameters / shards * each / (device_of(layout).memory_bandwidth * constants.VECTOR_TOP)
