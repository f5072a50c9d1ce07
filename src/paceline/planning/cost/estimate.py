"""Predicted cost of a plan: seconds of a step and bytes of memory, by part."""

from __future__ import annotations

from paceline.planning.cost import constants
from paceline.planning.cost.compute import device_of
from paceline.planning.cost.layout import FrameworkProfile, Layout
from paceline.planning.cost.measured import measured_inputs
from paceline.planning.cost.measured_memory import measured_memory
from paceline.planning.cost.memory import capacity_bytes, kept_bytes, memory
from paceline.planning.cost.pipeline import hop_s, pipeline_s, simulated
from paceline.planning.cost.prediction import PARTS, Prediction, Span
from paceline.planning.cost.products import peak_flops
from paceline.planning.cost.stages import StageCost, StepInputs, exposed_s, stage_times
from paceline.planning.cost.state_traffic import beside_passes_s


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
        other_s=_fixed_s(layout) + _offloaded_s(layout, times.slowest, fsdp + dp),
    )


def _fixed_s(layout: Layout) -> float:
    """Seconds of a step that depend neither on the model nor on the batch.

    Several ranks on cores have more of them than one, which no division of the work makes up for in a short step.
    """
    if not layout.machines.device.is_core:
        return constants.STEP_S
    return constants.CORES_STEP_S + (constants.CORES_MEET_S if layout.ranks > 1 else 0.0)


def _offloaded_s(layout: Layout, slow: StageCost, shown_s: float) -> float:
    """Exposed time of activations that wait for the backward pass in the host's memory.

    They travel beside both passes, and beside what these show of other traffic, which has other links.
    """
    if not layout.offload_activations:
        return 0.0
    travel_s = layout.microbatches * 2 * kept_bytes(layout) / layout.machines.device.host_link.bandwidth
    return exposed_s(travel_s, layout.microbatches * (slow.forward + slow.backward) + shown_s)
