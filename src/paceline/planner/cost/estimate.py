"""Predicted cost of a plan: seconds of a step and bytes of memory, by part."""

from __future__ import annotations

from paceline.planner.calibrate import Calibration, CalibrationPoint, interpolated
from paceline.planner.cost import constants
from paceline.planner.cost.compute import device_of, peak_flops
from paceline.planner.cost.layout import FrameworkProfile, Layout
from paceline.planner.cost.measured import measured_inputs
from paceline.planner.cost.measured_links import here
from paceline.planner.cost.memory import capacity_bytes, memory, trained_part
from paceline.planner.cost.pipeline import hop_s, pipeline_s, simulated
from paceline.planner.cost.prediction import PARTS, Prediction, Span
from paceline.planner.cost.servers import exchanged, joined_s, served_s
from paceline.planner.cost.stages import StageCost, StepInputs, exposed_s, stage_times
from paceline.planner.cost.traffic import all_reduce_s, gather_s, link_path, send_s


def estimate(layout: Layout) -> Prediction:
    """Predict the time, memory and breakdown of one step."""
    parts = step_parts(layout, inputs_of(layout))
    step = sum(parts.values())
    held = measured_memory(layout, memory(layout))
    held |= copies(layout, held)
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


def memory_fits(layout: Layout) -> bool:
    """True if a device has enough memory for a layout."""
    return sum(measured_memory(layout, memory(layout)).values()) <= capacity_bytes(layout)


def copies(layout: Layout, held: dict[str, float]) -> dict[str, float]:
    """Bytes of copies of ranks' states in each other's memory, where a run makes them (`training.recovery.mirror`).

    It makes none where they do not fit.
    """
    alone = layout.dp == layout.cp == layout.ep == 1 and layout.ranks > 1
    if not (alone and layout.machines.device.is_core and layout.framework.name == FrameworkProfile().name):
        return {}
    wanted = constants.STATE_COPIES * (held["parameters"] + held["optimizer"])
    return {"copies": wanted} if sum(held.values()) + wanted <= capacity_bytes(layout) else {}


def inputs_of(layout: Layout) -> StepInputs:
    """Inputs of a step: measured ones if the machine was calibrated, else the catalogue's."""
    return measured_inputs(layout) or _catalogue_inputs(layout)


def step_parts(layout: Layout, inputs: StepInputs) -> dict[str, float]:
    """Seconds of a step by `PARTS`."""
    slow, count = inputs.times.slowest, layout.microbatches
    parts = dict.fromkeys(PARTS, 0.0)
    parts["compute"] = count * (slow.forward_s + slow.backward_s)
    parts["recompute"] = count * slow.again_s
    parts["tp"] = count * (slow.tp_forward_s + slow.tp_backward_s)
    parts["cp"], parts["ep"] = count * slow.cp_s, count * slow.ep_s
    busy = sum(parts.values())
    working, added = count * inputs.times.working_s, count * slow.added_s
    parts["launch"] = max(working - added - busy, 0.0) + added
    parts["pp"] = min(inputs.hop_s * (2 * (layout.pp - 1) + count * layout.chunks), max(inputs.whole_s - working, 0.0))
    parts["bubble"] = max(inputs.whole_s - working - parts["pp"], 0.0)
    parts["fsdp"], parts["dp"] = inputs.fsdp_s, inputs.dp_s
    parts["optimizer"], parts["other"] = inputs.optimizer_s, inputs.other_s
    return parts


def timeline(layout: Layout) -> list[Span]:
    """Timeline of every pipeline stage in one step, by simulation of each rank's schedule."""
    inputs = inputs_of(layout)
    return simulated(layout, inputs.times, inputs.hop_s)


def _catalogue_inputs(layout: Layout) -> StepInputs:
    times, hop = stage_times(layout), hop_s(layout)
    fsdp, dp, optimizer = beside_passes_s(layout, times.slowest)
    return StepInputs(
        times=times,
        hop_s=hop,
        whole_s=pipeline_s(
            times.forwards,
            times.backwards,
            layout.microbatches,
            hop,
            layout.pp,
            layout.schedule,
            layout.framework.overlaps_hops,
        ),
        fsdp_s=fsdp,
        dp_s=dp,
        optimizer_s=optimizer,
        other_s=constants.STEP_S + _offloaded_s(layout, times.slowest),
    )


def _offloaded_s(layout: Layout, slow: StageCost) -> float:
    """Exposed time of activations that wait for the backward pass in the host's memory."""
    if not layout.offload_activations:
        return 0.0
    across = layout.cp * layout.pp * (layout.tp if layout.sequence else 1)
    kept = sum(block.boundary for block in layout.trace.blocks) * layout.samples * layout.number_bytes / across
    travel_s = kept / layout.machines.device.host_link.bandwidth
    return layout.microbatches * (exposed_s(travel_s, slow.forward) + exposed_s(travel_s, slow.backward))


def beside_passes_s(layout: Layout, slow: StageCost) -> tuple[float, float, float]:
    """Seconds of fsdp, of dp and of the update, beside the slowest rank's passes.

    The search bounds plans by it, with stages that compute nothing, or for ever.
    """
    return _fsdp_s(layout, slow), _dp_s(layout, slow), _optimizer_s(layout, slow)


def _fsdp_s(layout: Layout, slow: StageCost) -> float:
    """FSDP all-gather and reduce-scatter time that compute cannot overlap, in seconds.

    Each block is gathered and scattered by itself, with the latency of its group; the next one's is prefetched.
    """
    if layout.fsdp == 1:
        return 0.0
    link = link_path(layout, "fsdp")
    trained = _trained(layout, slow)
    gathered = gather_s(slow.parameters * min(layout.parameter_bytes, layout.number_bytes), link, slow.blocks)
    scattered = gather_s(trained * layout.sync_bytes, link, slow.blocks)
    one = exposed_s(scattered, slow.backward) + scattered / slow.blocks
    # pipelines gather and scatter once a step, for every `zero`
    if layout.pp > 1 or layout.zero == 1:
        return gathered + one
    if layout.zero == 2:
        return gathered + layout.microbatches * one
    forward = exposed_s(gathered, slow.forward) + gathered / slow.blocks
    backward = exposed_s(gathered + scattered, slow.backward) + scattered / slow.blocks
    return layout.microbatches * (forward + backward)


def _trained(layout: Layout, slow: StageCost) -> float:
    """Numbers of a rank's trained parameters; adapters have two narrow matrices for each wide one."""
    return slow.parameters * trained_part(layout)


def _dp_s(layout: Layout, slow: StageCost) -> float:
    """Time of the gradients' all-reduce that the last backward pass cannot overlap.

    Where each replica updates a part (`zero_dp`), it is a reduce-scatter, and an all-gather of the new parameters.
    """
    if layout.dp == 1:
        return 0.0
    shared = _trained(layout, slow) / layout.fsdp
    if layout.servers:
        up, down = exchanged(layout, shared)
        up_s, down_s = send_s(up * layout.sync_bytes, layout, "dp"), send_s(down * layout.gradient_bytes, layout, "dp")
        apply_s = _optimizer_s(layout, slow) * up / shared
        joined = 2 * joined_s(layout, shared, lambda nbytes, axis: send_s(nbytes, layout, axis))
        return joined + served_s(layout, up_s, down_s, slow.forward + slow.backward, apply_s)
    path, framework = link_path(layout, "dp"), layout.framework
    shared -= _with_fewer_copies(layout, slow)
    if not layout.zero_dp:
        seconds = all_reduce_s(shared * layout.sync_bytes, path) / layout.sync_every
        if not framework.overlaps_gradients:
            return seconds
        return exposed_s(seconds, slow.backward) + seconds / slow.blocks
    reduced, gathered = (
        gather_s(shared * size, path) / layout.sync_every
        for size in (layout.sync_bytes, min(layout.parameter_bytes, layout.number_bytes))
    )
    total = 0.0
    for seconds, hidden, behind in (
        (reduced, framework.overlaps_gradients, slow.backward),
        (gathered, framework.overlaps_parameters, slow.forward),
    ):
        total += _behind_chunks_s(seconds, behind, layout.chunks, slow.blocks) if hidden else seconds
    return total


def _behind_chunks_s(seconds: float, behind: float, chunks: int, blocks: float) -> float:
    """Exposed seconds of what travels chunk by chunk: that of all chunks but one hides behind other chunks' work."""
    own = seconds / chunks
    return exposed_s(own, behind / chunks) + own / blocks * chunks + constants.CONTENTION * (seconds - own)


def _with_fewer_copies(layout: Layout, slow: StageCost) -> float:
    """Numbers of experts that fewer ranks than dp have copies of, as part of what dp sums."""
    if not layout.expert_ranks or not slow.experts:
        return 0.0
    among = layout.ranks / layout.pp / layout.expert_ranks
    return slow.experts / layout.fsdp if among < 2 else 0.0


def _optimizer_s(layout: Layout, slow: StageCost) -> float:
    """Time to read and write parameters, gradients and the optimizer's state once."""
    shards = layout.fsdp * (layout.dp if layout.zero_dp else 1)
    numbers = _trained(layout, slow) / shards
    if layout.expert_ranks and layout.zero_dp and slow.experts:
        among = max(layout.ranks / layout.pp / layout.expert_ranks, 1.0)
        numbers += slow.experts / layout.fsdp * (1 / among - 1 / layout.dp)
    each = constants.OPTIMIZER_PASSES * (
        2 * layout.parameter_bytes + 2 * layout.gradient_bytes + 2 * layout.optimizer_bytes
    )
    if layout.offload and not layout.machines.device.is_core:
        return _on_host_s(layout, numbers)
    return numbers * each / (device_of(layout).memory_bandwidth * constants.VECTOR_TOP)


def _on_host_s(layout: Layout, numbers: float) -> float:
    """Time of an update in the host's memory: gradients go there, new parameters come back.

    The host's processors read and write the state (as ZeRO-Offload's Adam, arXiv:2101.06840); its memory is shared.
    """
    device = layout.machines.device
    travel_s = numbers * max(layout.gradient_bytes, layout.number_bytes) / device.host_link.bandwidth
    state = numbers * (2 * layout.parameter_bytes + layout.gradient_bytes + 2 * layout.optimizer_bytes)
    return max(2 * travel_s, state / constants.HOST_MEMORY_EACH) + travel_s


# fraction of activations that every rank of tp keeps whole: norms, residuals, inputs of matrices
_UNDIVIDED = 0.6
# largest fraction of the baseline that an engine takes besides tensors
_MOST_BESIDE = 0.3


def measured_memory(layout: Layout, held: dict[str, float]) -> dict[str, float]:
    """The bytes of `held`, adjusted to sum to the calibration's prediction.

    They are unchanged without a calibration. A process holds more than tensors: `runtime` gets the difference, and if
    that is negative, all are reduced in proportion.
    """
    found = layout.machines.calibration
    if found is None or not found.timings or not found.baseline_bytes:
        return held
    peak = peak_bytes(layout, found)
    others = {name: size for name, size in held.items() if name != "runtime"}
    runtime = max(peak - sum(others.values()), 0.5 * found.baseline_bytes)
    scale = (peak - runtime) / max(sum(others.values()), 1.0)
    return {name: size * scale for name, size in others.items()} | {"runtime": runtime}


def peak_bytes(layout: Layout, found: Calibration) -> float:
    """Bytes of the rank that holds the most."""
    return found.baseline_bytes + _beside(layout, found) + _state_bytes(layout, found) + _pass_bytes(layout, found)


def _beside(layout: Layout, found: Calibration) -> float:
    """Bytes of an engine besides tensors, from the process's first calibration point.

    Later points were measured with memory left over from earlier ones.
    """
    axis = "none" if layout.ranks == 1 else "dp"
    points = [point for point in found.points_of(axis, found.precisions[0]) if point.precision == found.precisions[0]]
    if not points:
        return 0.0
    beside = [point.peak_bytes - found.baseline_bytes - _known_bytes(layout, found, point) for point in points]
    return min(max(sum(beside) / len(beside), 0.0), _MOST_BESIDE * found.baseline_bytes)


def _known_bytes(layout: Layout, found: Calibration, point: CalibrationPoint) -> float:
    degrees = {} if point.axis == "none" else {point.axis: point.ranks}
    own = Layout(
        trace=layout.trace,
        machines=here(found),
        samples=float(point.samples),
        microbatches=point.microbatches,
        precision=point.precision,  # type: ignore[arg-type]
        parameter_bytes=layout.parameter_bytes,
        gradient_bytes=layout.gradient_bytes,
        optimizer_bytes=layout.optimizer_bytes,
        **degrees,  # type: ignore[arg-type]
    )
    return _state_bytes(own, found) + _pass_bytes(own, found)


def _state_bytes(layout: Layout, found: Calibration) -> float:
    """Bytes of parameters and optimizer state; gradients come with the pass.

    FSDP2 has one unit of the model gathered besides.
    """
    return found.parameters * (layout.parameter_bytes + layout.optimizer_bytes) / (layout.fsdp * layout.tp * layout.pp)


def _pass_bytes(layout: Layout, found: Calibration) -> float:
    """Bytes of gradients and of activations in flight on the first stage."""
    precision = found.nearest_precision(layout.precision)
    plain = found.timings_of(layout.ranks, precision)
    whole = interpolated(
        [timing.samples for timing in plain], [float(timing.peak_bytes) for timing in plain], layout.samples
    )
    again = found.timings_of(layout.ranks, precision, layout.remat) if layout.remat != "none" else []
    known = {timing.samples: timing.peak_bytes for timing in plain}
    less = [
        (timing.samples, float(known[timing.samples] - timing.peak_bytes))
        for timing in again
        if timing.samples in known
    ]
    if less:
        whole -= max(0.0, interpolated([samples for samples, _ in less], [size for _, size in less], layout.samples))
    gradients = min(found.parameters * layout.gradient_bytes, whole)
    begun = 1.0
    if layout.pp > 1:
        begun = (layout.microbatches if layout.schedule == "gpipe" else min(layout.microbatches, layout.pp)) / layout.pp
    kept = (whole - gradients) * begun * (_UNDIVIDED + (1 - _UNDIVIDED) / layout.tp) / layout.cp
    return gradients / (layout.tp * layout.pp) + kept
