"""Predicted cost of a plan: step time, memory, and goodput under failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.planning.cost import constants
from paceline.planning.cost.compute import device_of, peak_flops, vector_bandwidth
from paceline.planning.cost.frameworks import stepped, summed
from paceline.planning.cost.layout import (
    BYTES,
    PARTS,
    FrameworkProfile,
    Layout,
    Prediction,
    Span,
    all_reduce_s,
    exchanged,
    gather_s,
    group_path,
    joined_s,
    link_path,
    send_s,
    served_s,
    state_path,
    summed_bytes,
    sums_in_memory,
)
from paceline.planning.cost.measured import measured_inputs, measured_memory
from paceline.planning.cost.memory import (
    capacity_bytes,
    fit_probability,
    host_fits,
    kept_bytes,
    memory,
    offloaded_bytes,
    trained_part,
)
from paceline.planning.cost.stages import StageCost, StepInputs, exposed_s, hop_s, pipeline_s, simulated, stage_times
from paceline.planning.plan import reduces_once
from paceline.units import size


def predict_layout(layout: Layout) -> Prediction:
    """Predict the time, breakdown and peak memory of one step of a layout."""
    use_corrections(layout)
    parts = step_parts(layout, inputs_of(layout))
    step = sum(parts.values())
    held = measured_memory(layout, memory(layout))
    held |= copies(layout, held)
    used = int(sum(held.values()))
    likely = fit_probability(layout, used) if host_fits(layout) else 0.0
    peak = peak_flops(device_of(layout), layout.precision) * layout.ranks
    flops = sum(layout.trace.training_flops) * layout.global_batch
    return Prediction(
        step_time_s=step,
        memory_bytes=used,
        throughput=layout.global_batch / step,
        mfu=flops / step / peak if peak else None,
        breakdown=parts,
        memory=held,
        fits=likely >= 0.5,
        fit_probability=likely,
        notes=_notes(layout),
    )


def step_time_s(layout: Layout, values: Mapping[str, float] | None = None) -> float:
    """Predict the time of one step of a layout, in seconds, without its memory.

    Args:
        values: fitted constants to use; None uses those that the user's measured runs have moved.
    """
    if values is None:
        use_corrections(layout)
    else:
        constants.use(values)
    return sum(step_parts(layout, inputs_of(layout)).values())


def use_corrections(layout: Layout) -> None:
    """Use the cost model's constants as moved by the measured runs of the layout's machines.

    Only runs on GPUs move constants, and they do not change predictions for cores.
    """
    found = layout.machines.adjustment
    constants.use(found.constants if found and not layout.machines.device.is_core else None)


def _notes(layout: Layout) -> tuple[str, ...]:
    if not layout.offload_activations:
        return ()
    here = size(layout.machines.device.host_memory_bytes)
    return (f"a rank keeps activations of {size(offloaded_bytes(layout))} in host memory; its share of it is {here}",)


def memory_fits(layout: Layout) -> bool:
    """True if the predicted peak memory of a layout fits on devices and hosts."""
    use_corrections(layout)
    return sum(measured_memory(layout, memory(layout)).values()) <= capacity_bytes(layout) and host_fits(layout)


def copies(layout: Layout, held: dict[str, float]) -> dict[str, float]:
    """Return the memory of the state copies that ranks keep for each other, in bytes.

    `training.recovery.mirror` makes these copies. The result is empty if the copies do not fit or the plan makes none.
    """
    alone = layout.dp == layout.cp == layout.ep == 1 and layout.ranks > 1
    if not (alone and layout.machines.device.is_core and layout.framework.name == FrameworkProfile().name):
        return {}
    wanted = constants.STATE_COPIES * (held["parameters"] + held["optimizer"])
    return {"copies": wanted} if sum(held.values()) + wanted <= capacity_bytes(layout) else {}


def inputs_of(layout: Layout) -> StepInputs:
    """Return the times that determine a step, from the calibration or else from the catalogue."""
    return measured_inputs(layout) or _catalogue_inputs(layout)


def step_parts(layout: Layout, inputs: StepInputs) -> dict[str, float]:
    """Return the breakdown of a step: seconds for each of `PARTS`."""
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
    return parts if not layout.reference else _with_reference(parts, layout, slow)


def _with_reference(parts: dict[str, float], layout: Layout, slow: StageCost) -> dict[str, float]:
    """Add the forward pass of the reference.

    The stages of a pipeline also wait for its first microbatch.
    """
    count = layout.microbatches
    parts["compute"] += count * slow.forward_s
    parts["tp"] += count * slow.tp_forward_s
    parts["launch"] += count * max(slow.forward - slow.forward_s - slow.tp_forward_s, 0.0)
    parts["bubble"] += (layout.pp - 1) * slow.forward
    if not slow.blocks:  # measured times do not separate gathers from reductions; one of three collectives is a gather
        parts["fsdp"] *= 4 / 3
    elif layout.fsdp > 1:  # every forward pass without gradients gathers the weights
        gathered = gather_s(slow.parameters * layout.gathered_bytes, link_path(layout, "fsdp"), slow.blocks)
        parts["fsdp"] += count * (exposed_s(gathered, slow.forward) + gathered / slow.blocks)
    return parts


def timeline(layout: Layout) -> list[Span]:
    """Simulate the schedule of every pipeline rank and return its spans."""
    use_corrections(layout)
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
    """Return the fixed overhead of a step, in seconds.

    On CPUs, several ranks have a larger overhead than one rank. In a short step, this overhead can exceed the time that
    dividing the work saves.
    """
    if not layout.machines.device.is_core:
        return constants.STEP_S
    return constants.CORES_STEP_S + (constants.CORES_MEET_S if layout.ranks > 1 else 0.0)


def _offloaded_s(layout: Layout, slow: StageCost, shown_s: float) -> float:
    """Return the exposed time of moving activations to host memory and back, in seconds.

    The transfers overlap both passes and the exposed traffic on other links.
    """
    if not layout.offload_activations:
        return 0.0
    travel_s = layout.microbatches * 2 * kept_bytes(layout) / layout.machines.device.host_link.bandwidth
    return exposed_s(travel_s, layout.microbatches * (slow.forward + slow.backward) + shown_s)


def beside_passes_s(layout: Layout, slow: StageCost) -> tuple[float, float, float]:
    """Return the exposed times of fsdp, dp and the update, in seconds.

    Exposed time is time that the passes of the slowest rank do not hide.

    To compute bounds, the search calls this function with stages whose compute time is zero or infinite.
    """
    return _fsdp_s(layout, slow), _dp_s(layout, slow), _optimizer_s(layout, slow)


def _fsdp_s(layout: Layout, slow: StageCost) -> float:
    """Return the FSDP all-gather and reduce-scatter time that compute cannot overlap, in seconds.

    Each block has its own collectives, each with the latency of the group. The next block is prefetched.
    """
    if layout.fsdp == 1:
        return 0.0
    link = state_path(layout, "fsdp")
    trained = _trained(layout, slow)
    gathered = gather_s(slow.parameters * layout.gathered_bytes, link, slow.blocks)
    scattered = gather_s(trained * layout.sync_bytes, link, slow.blocks)
    one = exposed_s(scattered, slow.backward) + scattered / slow.blocks
    if reduces_once(layout.zero, layout.pp, layout.schedule):
        return gathered + one
    # pipelines gather once a step, for every `zero`
    if layout.zero == 2 or layout.pp > 1:
        return gathered + layout.microbatches * one
    again = gathered
    if layout.regather_ranks:
        near = group_path(layout, min(layout.regather_ranks, layout.fsdp), layout.stride["fsdp"])
        again = gather_s(slow.parameters * layout.gathered_bytes, near, slow.blocks)
    forward = exposed_s(gathered, slow.forward) + gathered / slow.blocks
    backward = exposed_s(again + scattered, slow.backward) + scattered / slow.blocks
    return layout.microbatches * (forward + backward)


def _trained(layout: Layout, slow: StageCost) -> float:
    """Return the number of a rank's trained parameters.

    Adapters have two narrow matrices for each wide one.
    """
    return slow.parameters * trained_part(layout)


def _dp_s(layout: Layout, slow: StageCost) -> float:
    """Return the gradient reduction time that the last backward pass cannot overlap, in seconds.

    Gradients are all-reduced. With `zero_dp`, they are reduce-scattered instead, and the new parameters are
    all-gathered.
    """
    same_s = _same_weights_s(layout, slow)
    if layout.dp * (layout.cp_shards if layout.zero_dp else 1) == 1:
        return _summed_s(same_s, layout, slow)
    shared = summed(layout, _trained(layout, slow) / layout.fsdp)
    if layout.servers and not sums_in_memory(layout):
        return _with_servers_s(layout, slow, shared) + _summed_s(same_s, layout, slow)
    framework, path = layout.framework, state_path(layout, "dp") if layout.zero_dp else link_path(layout, "dp")
    shared -= _single_experts(layout, slow)
    if not layout.zero_dp:
        seconds = all_reduce_s(summed_bytes(layout, shared), path) / layout.sync_every
        return _summed_s(seconds + same_s, layout, slow) + framework.agrees_s
    reduce_s = all_reduce_s if framework.sums_gradients else gather_s
    reduced = reduce_s(shared * layout.sync_bytes, path) / layout.sync_every + same_s
    gathered = gather_s(shared * layout.gathered_bytes, path) / layout.sync_every
    if framework.overlaps_gradients:
        reduced = _behind_chunks_s(reduced, slow.backward, layout.chunks, slow.blocks)
    if framework.overlaps_parameters:
        gathered = _behind_chunks_s(gathered, slow.forward, layout.chunks, slow.blocks)
    return reduced + gathered


def _summed_s(seconds: float, layout: Layout, slow: StageCost) -> float:
    """Return the exposed time of gradient reductions.

    The backward pass cannot overlap the reduction of the last block.
    """
    if not layout.framework.overlaps_gradients:
        return seconds
    return exposed_s(seconds, slow.backward) + seconds / slow.blocks


def _same_weights_s(layout: Layout, slow: StageCost) -> float:
    """Return the time to reduce gradients over cp and ep ranks, in seconds.

    Only cp ranks hold equal expert weights. The time is 0 if cp and ep ranks shard the state, as fsdp ranks do.
    """
    apart = layout.ep * layout.cp
    if apart == 1 or (layout.shards_over_cp and (layout.fsdp > 1 or layout.zero_dp)):
        return 0.0
    experts = slow.experts if layout.ep > 1 else 0.0
    each = trained_part(layout) / layout.fsdp * layout.sync_bytes
    paths = group_path(layout, apart, min(layout.stride["ep"], layout.stride["cp"])), link_path(layout, "cp")
    numbers = slow.parameters - experts, experts
    seconds = sum(all_reduce_s(count * each, path) for count, path in zip(numbers, paths, strict=True) if count)
    return seconds / layout.sync_every


def _with_servers_s(layout: Layout, slow: StageCost, shared: float) -> float:
    """Return the time to exchange `shared` elements with parameter servers, in seconds."""
    up, down = exchanged(layout, shared)
    up_s, down_s = send_s(up * layout.sync_bytes, layout, "dp"), send_s(down * layout.gradient_bytes, layout, "dp")
    apply_s = _optimizer_s(layout, slow) * up / shared
    joined = 2 * joined_s(layout, shared, lambda nbytes, axis: send_s(nbytes, layout, axis))
    return joined + served_s(layout, up_s, down_s, slow.forward + slow.backward, apply_s)


def _behind_chunks_s(seconds: float, behind: float, chunks: int, blocks: float) -> float:
    """Return the exposed time of traffic that is sent chunk by chunk, in seconds.

    The traffic of each chunk overlaps the compute of other chunks, except for one chunk.
    """
    own = seconds / chunks
    return exposed_s(own, behind / chunks) + own / blocks * chunks + constants.CONTENTION * (seconds - own)


def _single_experts(layout: Layout, slow: StageCost) -> float:
    """Return the number of a rank's trained expert parameters that no other rank holds."""
    single = layout.expert_ranks and layout.expert_copies < 2
    return trained_part(layout) * slow.experts / layout.fsdp if single else 0.0


def _optimizer_s(layout: Layout, slow: StageCost) -> float:
    """Return the time of an optimizer update, in seconds."""
    shards = layout.fsdp * (layout.dp if layout.zero_dp else 1) * layout.cp_shards
    numbers = stepped(layout, _trained(layout, slow) / shards)
    if layout.expert_ranks and layout.zero_dp and slow.experts:
        apart = 1 / layout.expert_copies - layout.fsdp / shards
        numbers += trained_part(layout) * slow.experts / layout.fsdp * apart
    each = constants.OPTIMIZER_PASSES * (
        2 * layout.parameter_bytes + 2 * layout.gradient_bytes + 2 * layout.optimizer_bytes
    )
    matrices_s = _matrices_s(layout) if layout.matrix_flops else 0.0
    if layout.offload and not layout.machines.device.is_core:
        return _on_host_s(layout, numbers) + matrices_s
    return numbers * each / vector_bandwidth(device_of(layout)) + matrices_s


def _matrices_s(layout: Layout) -> float:
    """Return the time to orthogonalize the updates of matrices, and to exchange them, in seconds."""
    replicas = layout.dp if layout.sync_every == 1 else 1
    parts = layout.fsdp * layout.tp * layout.ep
    ranks = replicas * parts * layout.cp
    each = 1 / layout.pp
    flops_s = layout.matrix_flops * each / ranks / (peak_flops(device_of(layout), "bf16") * constants.GEMM_TOP)
    if ranks == 1:
        return flops_s
    path = group_path(layout, ranks, min(layout.stride[axis] for axis in ("fsdp", "tp", "ep", "cp", "dp")))
    nbytes = BYTES["bf16"] * layout.matrix_numbers * each
    to_owners = gather_s(nbytes / ranks, path) if parts > 1 else 0.0
    return flops_s + to_owners + gather_s(nbytes / parts, path)


def _on_host_s(layout: Layout, numbers: float) -> float:
    """Return the time of an optimizer update in host memory, in seconds.

    Gradients are sent to the host, and new parameters are sent back. The CPU reads and writes the state, as in
    ZeRO-Offload's Adam (arXiv:2101.06840). All devices of a host share the host's memory bandwidth.
    """
    device = layout.machines.device
    travel_s = numbers * max(layout.gradient_bytes, layout.number_bytes) / device.host_link.bandwidth
    state = numbers * (2 * layout.parameter_bytes + layout.gradient_bytes + 2 * layout.optimizer_bytes)
    return max(2 * travel_s, state / constants.HOST_MEMORY_EACH) + travel_s


_DAY_S = 86_400.0
_ITERATIONS = 100  # maximum for Newton's method, which needs about six
_LARGEST = 700.0  # largest argument of exp()


@dataclass(frozen=True)
class FailureCosts:
    """Times, in seconds, that determine the cost of failures under one plan.

    Attributes:
        between_s: mean time between two failures of any host in use.
        step_s: duration of a step.
        stall_s: time by which one checkpoint delays the steps.
        write_s: time from the start of a checkpoint until a run can restart from it.
        restart_s: time from a failure to the first step of the new attempt, including reading the checkpoint.
        in_place: True if the remaining hosts hold the whole state after the loss of any host, and their replicas
            continue.
        copied_s: time between two copies of the state to the memory of other hosts, for plans with one replica; 0
            without copies.
    """

    between_s: float
    step_s: float
    stall_s: float
    write_s: float
    restart_s: float
    in_place: bool = False
    copied_s: float = 0.0

    def goodput(self, interval_s: float) -> float:
        """Predict the goodput for a checkpoint interval of `interval_s` seconds.

        If the plan allows recovery in place, the result is the goodput with recovery, else with restarts.
        """
        return self.recovering(interval_s) if self.goes_on else self.restarting(interval_s)

    @property
    def goes_on(self) -> bool:
        """True if the loss of any host leaves the whole state in memory."""
        return self.in_place or self.copied_s > 0

    def restarting(self, interval_s: float) -> float:
        """Return the goodput if the run restarts from the newest complete checkpoint after every failure.

        The formula is exact for exponentially distributed times between failures with the mean `between_s`. Only an
        interval whose checkpoint is written before the next failure counts as progress.
        """
        cycle_s = interval_s + self.stalled_s(interval_s)
        exponent = (self.restart_s + self.write_s + cycle_s) / self.between_s
        if exponent > _LARGEST:
            return 0.0
        lost = math.exp((self.restart_s + self.write_s) / self.between_s)
        return interval_s / (self.between_s * lost * math.expm1(cycle_s / self.between_s))

    def recovering(self, interval_s: float) -> float:
        """Return the goodput if ranks recover in place.

        Checkpoints are still written, because copies in memory do not cover every loss.
        """
        saving = interval_s / (interval_s + self.stalled_s(interval_s))
        if not self.in_place:
            saving *= 1 - constants.STATE_SHARE
        return saving * self.between_s / (self.between_s + self.failure_s)

    @property
    def failure_s(self) -> float:
        """Seconds lost by one failure if ranks recover in place.

        A failure costs the repeated step and the recovery. With copies in memory, it also costs the wait for a new host
        and the steps since the newest copy.
        """
        waits_s = 0.0 if self.in_place else constants.RESTART_S + self.copied_s / 2
        return self.step_s + constants.RECOVERY_S + waits_s

    @property
    def best_interval_s(self) -> float:
        """Checkpoint interval with the highest goodput under restarts, in seconds.

        The interval is at least one step and at least the time to write a checkpoint. It is the maximum of
        `restarting`, found by Newton's method starting at Young's first-order approximation. Daly's formula is a series
        expansion of this maximum.
        """
        stall = self.stall_s / self.between_s
        share = min(1.0, math.sqrt(2 * stall))  # of `between_s`
        for _ in range(_ITERATIONS):
            change = (share + math.expm1(-share - stall)) / -math.expm1(-share - stall) if share else 0.0
            share -= change
            if abs(change) <= 1e-12 * share:
                break
        return max(share * self.between_s, self.write_s, self.step_s)

    @property
    def best_every_steps(self) -> int:
        """`best_interval_s` as a number of steps, rounded to the integer with the higher goodput."""
        below = max(1, math.floor(self.best_interval_s / self.step_s))
        return max((below, below + 1), key=lambda steps: self.restarting(steps * self.step_s))

    def stalled_s(self, interval_s: float) -> float:
        """Return the delay caused by one checkpoint, in seconds.

        It includes the wait for the previous checkpoint if that is still being written.
        """
        return self.stall_s + max(0.0, self.write_s - interval_s)


def failure_costs(
    layout: Layout, step_s: float, failures_per_host_day: float, ranks_per_host: Sequence[int], *, copied: bool = False
) -> FailureCosts:
    """Compute the costs of failures from the size of the state and assumed constants.

    Args:
        failures_per_host_day: number of failures of one host per day, above 0.
        ranks_per_host: number of ranks on every host; a failure of a host without ranks costs nothing.
        copied: True if ranks keep copies of each other's state in memory (`copies`).
    """
    most, hosts = max(ranks_per_host), sum(ranks > 0 for ranks in ranks_per_host)
    state_bytes = layout.trace.parameters * (layout.parameter_bytes + layout.optimizer_bytes)
    written_bytes = state_bytes / layout.ranks  # by each rank
    held_bytes = state_bytes * layout.dp / layout.ranks  # by each rank
    rate = min(constants.CHECKPOINT_WRITE, constants.STORAGE / most)
    write_s = constants.CHECKPOINT_WRITE_S + written_bytes / rate
    copy_s = written_bytes / constants.CHECKPOINT_COPY
    # the interval of copies follows from their share of the time; copies are on other hosts only if no host has more
    # than half of the ranks
    apart_s = max(constants.COPY_TRAFFIC * copy_s / constants.STATE_SHARE, step_s)
    copied_s = apart_s if copied and 2 * most <= layout.ranks else 0.0
    return FailureCosts(
        between_s=_DAY_S / (failures_per_host_day * hosts),
        step_s=step_s,
        stall_s=constants.CHECKPOINT_STALL_S + constants.CHECKPOINT_SLOWS * write_s + max(copy_s - step_s, 0.0),
        write_s=write_s,
        restart_s=constants.RESTART_S + held_bytes * most / constants.STORAGE,
        in_place=not layout.zero_dp and (layout.dp - 1) * layout.stride["dp"] >= most,
        copied_s=copied_s,
    )
