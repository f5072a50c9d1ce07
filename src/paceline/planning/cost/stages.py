"""Cost of each pipeline stage for one microbatch: the sum over its blocks."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.partition import contiguous
from paceline.planning.cost import constants
from paceline.planning.cost.compute import BlockConfig, BlockTime, block_config, block_time, held_weights
from paceline.planning.cost.layout import BYTES, Layout
from paceline.planning.cost.traffic import LinkPath, all_reduce_s, all_to_all_s, expert_path, gather_s, link_path
from paceline.planning.model.graph import BlockTrace, ModelTrace


class StageCost(NamedTuple):
    """Seconds of one microbatch on one rank of a (virtual) stage, and its parameters.

    Seconds of communication are exposed ones.

    Attributes:
        again_s: recomputation of the forward pass, if remat asks for it.
        launch_forward_s, launch_backward_s: Python's time to launch the kernels; it runs ahead of the device.
        tp_backward_s: with the collectives of recomputation.
        parameters: numbers on one rank, before fsdp; `experts`: of experts among these.
        tail_forward_s, tail_backward_s: compute time of the head beyond its launch time; nothing else is left to launch
            then.
        added_s: measured overhead of a split, half of it forward.
        waited_s: launches that Python waits for.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0
    launch_forward_s: float = 0.0
    launch_backward_s: float = 0.0
    tp_forward_s: float = 0.0
    tp_backward_s: float = 0.0
    cp_s: float = 0.0
    ep_s: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    blocks: float = 0.0
    tail_forward_s: float = 0.0
    tail_backward_s: float = 0.0
    added_s: float = 0.0
    waited_s: float = 0.0

    def plus(self, other: StageCost, times: float = 1.0) -> StageCost:
        """Cost with so many times the other one."""
        return StageCost._make([mine + times * theirs for mine, theirs in zip(self, other, strict=True)])

    @property
    def forward(self) -> float:
        """Seconds from a microbatch's arrival to its departure."""
        device = self.forward_s + self.tp_forward_s + (self.cp_s + self.ep_s) / 3
        return (
            _step_time_s(device, self.launch_forward_s + self.tail_forward_s, self.tp_forward_s > 0)
            + self.added_s / 2
            + self.waited_s / 3
        )

    @property
    def backward(self) -> float:
        """Seconds from a gradient's arrival to its departure."""
        device = self.backward_s + self.again_s + self.tp_backward_s + (self.cp_s + self.ep_s) * 2 / 3
        return (
            _step_time_s(device, self.launch_backward_s + self.tail_backward_s, self.tp_backward_s > 0)
            + self.added_s / 2
            + self.waited_s * 2 / 3
        )


def _step_time_s(device_s: float, python_s: float, meets: bool) -> float:
    """Step time of Python and the device together. It is the slower of the two, as Python runs ahead.

    With tensor parallelism every layer is a barrier, so launch and kernel jitter add up; modelled as a p-norm of the
    two times.
    """
    if not meets or not python_s:
        return max(device_s, python_s)
    power = constants.MEETING
    return float((device_s**power + python_s**power) ** (1 / power))


class StageTimes(NamedTuple):
    """Stage costs of a layout in the order of a microbatch, and the slowest rank's.

    Attributes:
        working_s: seconds of the slowest rank for each microbatch.
    """

    costs: tuple[StageCost, ...]
    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    slowest: StageCost
    working_s: float


class StepInputs(NamedTuple):
    """Step inputs, by the catalogue or measured on this machine.

    Attributes:
        times: of the pipeline's virtual stages, for one microbatch.
        hop_s: seconds to send one microbatch to the next stage.
        whole_s: seconds from the first microbatch's start to the last gradient's end.
        fsdp_s, dp_s: seconds of a step's collectives beside its passes.
        optimizer_s: seconds of the update.
        other_s: seconds of a step in which nothing of these is done.
    """

    times: StageTimes
    hop_s: float
    whole_s: float
    fsdp_s: float
    dp_s: float
    optimizer_s: float
    other_s: float


def stages(layout: Layout) -> tuple[StageCost, ...]:
    """Costs of the virtual stages, in the order in which a microbatch passes them."""
    return stage_times(layout).costs


def stage_times(layout: Layout) -> StageTimes:
    """Stage costs, and the rank that all others wait for; cached, since searches repeat them."""
    paths = link_path(layout, "tp"), link_path(layout, "cp"), expert_path(layout)
    return _stage_times(
        layout.trace,
        block_config(layout),
        layout.remat,
        *paths,
        layout.pp,
        layout.chunks,
        layout.cut,
        layout.remat_share,
    )


@lru_cache(maxsize=16384)
def _stage_times(
    trace: ModelTrace,
    config: BlockConfig,
    remat: str,
    tp_path: LinkPath,
    cp_path: LinkPath,
    ep_path: LinkPath,
    ranks: int,
    chunks: int,
    cut: tuple[int, ...],
    share: float = 1.0,
) -> StageTimes:
    until = _summed(trace, config, remat, tp_path, cp_path, ep_path)
    if remat == "block" and share < 1:
        none = _summed(trace, config, "none", tp_path, cp_path, ep_path)
        until = tuple(_mixed(full, plain, share) for full, plain in zip(until, none, strict=True))
    cut = cut or _even(until, ranks * chunks)
    ends = accumulate(cut)
    costs = tuple(until[end].plus(until[end - count], -1) for count, end in zip(cut, ends, strict=True))
    return times_of(costs, ranks)


def times_of(costs: tuple[StageCost, ...], ranks: int) -> StageTimes:
    """Stage times of virtual stages that are dealt to ranks in turn."""
    own = [costs[rank::ranks] for rank in range(ranks)]
    working = [sum(cost.forward + cost.backward for cost in stages) for stages in own]
    slowest = own[working.index(max(working))]
    total = StageCost._make([sum(values) for values in zip(*slowest, strict=True)])
    return StageTimes(
        costs, tuple(cost.forward for cost in costs), tuple(cost.backward for cost in costs), total, max(working)
    )


def _mixed(full: StageCost, plain: StageCost, share: float) -> StageCost:
    """Cost where a part of the layers is computed again."""
    return StageCost._make([share * one + (1 - share) * other for one, other in zip(full, plain, strict=True)])


@lru_cache(maxsize=4096)
def _summed(trace: ModelTrace, config: BlockConfig, remat: str, *links: LinkPath) -> tuple[StageCost, ...]:
    """Costs of the first 0, 1, 2, … blocks."""
    found = [StageCost()]
    for block, count in trace.runs:
        cost, until = block_cost(block, config, remat, *links), found[-1]
        found += [until.plus(cost, times) for times in range(1, count + 1)]
    return tuple(found)


@lru_cache(maxsize=4096)
def _even(prefix: tuple[StageCost, ...], virtual: int) -> tuple[int, ...]:
    """Number of blocks of each stage, so that the slowest is fastest. Each has at least one."""
    until = [cost.forward_s + cost.backward_s + cost.again_s for cost in prefix]
    blocks = [late - early for early, late in pairwise(until)]
    return contiguous(blocks, virtual) if virtual <= len(blocks) else (len(blocks),)


@lru_cache(maxsize=100_000)
def block_cost(
    block: BlockTrace, config: BlockConfig, remat: str, tp_path: LinkPath, cp_path: LinkPath, ep_path: LinkPath
) -> StageCost:
    """Cost of one block."""
    time = block_time(block, config)
    layer = block.kind not in ("embedding", "between", "head")
    again, launch_again, reductions = _again(block, time, remat if layer else "none", config)
    width = config.samples / config.cp * BYTES[config.precision]
    reduced = _shown(all_reduce_s(block.reduced * width, tp_path), config.overlaps_tp)
    routed = _routed_s(block, config, ep_path) if block.routed else 0.0
    return StageCost(
        forward_s=time.forward_s,
        backward_s=time.backward_s,
        again_s=again,
        launch_forward_s=time.launch_forward_s,
        launch_backward_s=time.launch_backward_s + launch_again,
        tp_forward_s=block.reductions * reduced,
        tp_backward_s=(block.reductions + reductions) * reduced if block.trained else 0.0,
        cp_s=_context_s(block, config, time, cp_path) if config.cp > 1 and layer else 0.0,
        ep_s=(6 if remat == "block" else 4) * routed,
        parameters=held_weights(block, config) + block.vectors,
        experts=block.experts / config.expert_parts,
        blocks=1.0,
        tail_forward_s=0.0 if layer else max(time.forward_s - time.launch_forward_s, 0.0),
        tail_backward_s=0.0 if layer else max(time.backward_s - time.launch_backward_s, 0.0),
        waited_s=time.launch_forward_s + time.launch_backward_s if config.blocking else 0.0,
    )


def _shown(travel_s: float, hidden: float) -> float:
    """Communication time that is left where products hide a part of it and slow down."""
    return travel_s * (1 - hidden + constants.CONTENTION * hidden)


def _routed_s(block: BlockTrace, config: BlockConfig, path: LinkPath) -> float:
    """Exposed seconds of sending a microbatch's tokens to experts, or back."""
    sent = block.routed * config.samples / config.cp * BYTES[config.precision]
    if config.sequence or config.expert_ranks:
        sent /= config.tp
    copies = block.routed / block.boundary if block.boundary else 1.0
    travel_s = all_to_all_s(sent * config.imbalance, path, copies, config.node_limit)
    return _shown(travel_s, config.overlaps_ep)


def _context_s(block: BlockTrace, config: BlockConfig, time: BlockTime, path: LinkPath) -> float:
    """Exposed seconds of a ring of keys and values, or of heads exchanged for tokens."""
    each = config.samples * BYTES[config.precision]
    if config.ulysses:
        keys = block.keys or 2 * block.boundary
        exchanged = (2 * block.boundary + keys) / config.tp / config.cp * each
        return 2 * all_to_all_s(exchanged, path)
    attends = any(gemm.batch for gemm in block.gemms) and block.kind not in ("mamba", "delta")
    keys = (block.keys / config.tp or (2 * block.boundary if attends else 0.0)) * each
    if not keys:
        return 0.0
    return exposed_s(3 * gather_s(keys, path), 3.5 * time.scores_s)


def exposed_s(travel_s: float, compute_s: float) -> float:
    """Communication time that compute does not overlap, with its slow-down of compute."""
    return max(travel_s - compute_s, 0.0) + constants.CONTENTION * min(travel_s, compute_s)


def _again(block: BlockTrace, time: BlockTime, remat: str, config: BlockConfig) -> tuple[float, float, int]:
    """Seconds, launch seconds and reductions of recomputation in the backward pass."""
    if remat == "block" and block.trained:
        if config.stops_early:
            return time.forward_s - time.last_s, time.launch_forward_s, max(block.reductions - 1, 0)
        return time.forward_s, time.launch_forward_s, block.reductions
    if remat == "selective" and block.trained:
        if config.keeps == "attention":
            return time.scores_s, 4 * constants.LAUNCH_S if time.scores_s else 0.0, 0
        products_s = time.weights_s / 2 if config.keeps == "half" else 0.0
        return time.others_s + products_s, time.launch_forward_s, 0
    return 0.0, 0.0, 0
