"""Time of each pipeline stage for one microbatch, and time of the whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.partition import contiguous
from paceline.planning.cost import constants
from paceline.planning.cost.compute import BlockConfig, BlockTime, block_config, block_time, held_weights
from paceline.planning.cost.layout import (
    BYTES,
    Layout,
    LinkPath,
    Span,
    all_reduce_s,
    all_to_all_s,
    expert_path,
    gather_s,
    link_path,
    send_s,
)
from paceline.planning.model.graph import BlockTrace, ModelTrace


class StageCost(NamedTuple):
    """Times of one microbatch on one rank of a virtual stage.

    Times are in seconds. Communication counts only as far as compute does not hide it.

    Attributes:
        again_s: time to recompute the forward pass, if remat requires it.
        launch_forward_s, launch_backward_s: time that Python needs to launch the kernels. Python runs ahead of the
            device.
        tp_backward_s: time of the tp collectives in the backward pass, including those of recomputation.
        parameters: number of parameters on one rank before fsdp shards them.
        experts: number of these parameters that belong to experts.
        tail_forward_s, tail_backward_s: compute time of the head beyond its launch time, during which Python has no
            other kernels to launch.
        added_s: measured overhead of a split; half of it is in the forward pass.
        waited_s: launch time of kernels for which Python waits.
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
        """Return the sum of this cost and `times` times another cost."""
        return StageCost._make([mine + times * theirs for mine, theirs in zip(self, other, strict=True)])

    @property
    def forward(self) -> float:
        """Time of the forward pass of one microbatch, including communication, in seconds."""
        device = self.forward_s + self.tp_forward_s + (self.cp_s + self.ep_s) / 3
        return (
            _step_time_s(device, self.launch_forward_s + self.tail_forward_s, self.tp_forward_s > 0)
            + self.added_s / 2
            + self.waited_s / 3
        )

    @property
    def backward(self) -> float:
        """Time of the backward pass of one microbatch, including communication, in seconds."""
        device = self.backward_s + self.again_s + self.tp_backward_s + (self.cp_s + self.ep_s) * 2 / 3
        return (
            _step_time_s(device, self.launch_backward_s + self.tail_backward_s, self.tp_backward_s > 0)
            + self.added_s / 2
            + self.waited_s * 2 / 3
        )


def _step_time_s(device_s: float, python_s: float, meets: bool) -> float:
    """Combine Python's launch time and the device's time.

    Without tensor parallelism, the result is the longer of the two times, because Python runs ahead of the device.

    With tensor parallelism, every layer is a barrier, so the variations of both times add up. The result is then a
    p-norm of the two times.
    """
    if not meets or not python_s:
        return max(device_s, python_s)
    power = constants.MEETING
    return float((device_s**power + python_s**power) ** (1 / power))


class StageTimes(NamedTuple):
    """Costs of all virtual stages of a layout, and of the slowest rank.

    Attributes:
        working_s: time of the slowest rank for one microbatch, in seconds.
    """

    costs: tuple[StageCost, ...]
    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    slowest: StageCost
    working_s: float


class StepInputs(NamedTuple):
    """Times that determine a step, from the catalogue or measured on this machine.

    Attributes:
        times: times of the virtual stages for one microbatch.
        hop_s: time to send one microbatch to the next stage.
        whole_s: time from the start of the first microbatch to the end of the last backward pass.
        fsdp_s, dp_s: time of the fsdp and dp collectives that the passes do not hide.
        optimizer_s: time of the optimizer update.
        other_s: remaining time of a step.
    """

    times: StageTimes
    hop_s: float
    whole_s: float
    fsdp_s: float
    dp_s: float
    optimizer_s: float
    other_s: float


def stages(layout: Layout) -> tuple[StageCost, ...]:
    """Return the costs of the virtual stages, in the order of the pipeline."""
    return stage_times(layout).costs


def stage_times(layout: Layout) -> StageTimes:
    """Return the costs of all stages, and the cost of the slowest rank.

    The result is cached, because a search repeats the same calls.
    """
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


@constants.cached(maxsize=16384)
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
    """Return the stage times for virtual stages that are assigned to `ranks` ranks in turn."""
    own = [costs[rank::ranks] for rank in range(ranks)]
    working = [sum(cost.forward + cost.backward for cost in stages) for stages in own]
    slowest = own[working.index(max(working))]
    total = StageCost._make([sum(values) for values in zip(*slowest, strict=True)])
    return StageTimes(
        costs, tuple(cost.forward for cost in costs), tuple(cost.backward for cost in costs), total, max(working)
    )


def _mixed(full: StageCost, plain: StageCost, share: float) -> StageCost:
    """Return the mean cost if the fraction `share` of the layers is recomputed."""
    return StageCost._make([share * one + (1 - share) * other for one, other in zip(full, plain, strict=True)])


@constants.cached(maxsize=4096)
def _summed(trace: ModelTrace, config: BlockConfig, remat: str, *links: LinkPath) -> tuple[StageCost, ...]:
    """Return the cumulative costs of the first 0, 1, 2, … blocks."""
    found = [StageCost()]
    for block, count in trace.runs:
        cost, until = block_cost(block, config, remat, *links), found[-1]
        found += [until.plus(cost, times) for times in range(1, count + 1)]
    return tuple(found)


@lru_cache(maxsize=4096)
def _even(prefix: tuple[StageCost, ...], virtual: int) -> tuple[int, ...]:
    """Return the numbers of blocks per stage that minimize the time of the slowest stage.

    Each stage has at least one block.
    """
    until = [cost.forward_s + cost.backward_s + cost.again_s for cost in prefix]
    blocks = [late - early for early, late in pairwise(until)]
    return contiguous(blocks, virtual) if virtual <= len(blocks) else (len(blocks),)


@constants.cached(maxsize=100_000)
def block_cost(
    block: BlockTrace, config: BlockConfig, remat: str, tp_path: LinkPath, cp_path: LinkPath, ep_path: LinkPath
) -> StageCost:
    """Compute the cost of one block for one microbatch."""
    time = block_time(block, config)
    layer = block.kind not in ("embedding", "between", "head")
    again, launch_again, reductions = _again(block, time, remat if layer else "none", config)
    width = config.samples / config.cp * BYTES[config.precision]
    reduced = _shown(all_reduce_s(block.reduced * width, tp_path), config.overlaps_tp)
    routed = _routed_s(block, config, ep_path, tp_path) if block.routed else 0.0
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
    """Return the exposed communication time, plus the slowdown of matrix products that hide the rest."""
    return travel_s * (1 - hidden + constants.CONTENTION * hidden)


def _routed_s(block: BlockTrace, config: BlockConfig, path: LinkPath, near: LinkPath) -> float:
    """Return the exposed time to send a microbatch's tokens to experts in one direction.

    Ranks that divide an expert gather each other's tokens over `near`.
    """
    sent = block.routed * config.samples / config.cp * BYTES[config.precision]
    if config.sequence or config.expert_ranks:
        sent /= config.tp
    copies = block.routed / block.boundary if block.boundary else 1.0
    travel_s = all_to_all_s(sent * config.imbalance, path, copies, config.node_limit)
    if config.expert_tp > 1:
        travel_s += gather_s(sent * config.imbalance * config.expert_tp, near._replace(ranks=config.expert_tp))
    return _shown(travel_s, config.overlaps_ep)


def _context_s(block: BlockTrace, config: BlockConfig, time: BlockTime, path: LinkPath) -> float:
    """Return the exposed communication time of context parallelism.

    The communication is a ring of keys and values, or with `ulysses` an all-to-all that redistributes heads.
    """
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
    """Return the communication time that compute does not hide, plus the slowdown of compute."""
    return max(travel_s - compute_s, 0.0) + constants.CONTENTION * min(travel_s, compute_s)


def _again(block: BlockTrace, time: BlockTime, remat: str, config: BlockConfig) -> tuple[float, float, int]:
    """Return the time, the launch time and the number of tp reductions of recomputation."""
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


def pipeline_s(
    forwards: Sequence[float],
    backwards: Sequence[float],
    microbatches: int,
    hop_s: float,
    ranks: int,
    schedule: str,
    overlaps: bool = False,
) -> float:
    """Return the time of all microbatches in a pipeline, in seconds.

    The first microbatch fills the pipeline and the last one drains it (Narayanan et al., 2021, arXiv:2104.04473). In
    between, the slowest rank determines the time. With interleaved stages, filling takes only the time of one chunk of
    each rank.
    """
    times = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    if ranks == 1:
        return microbatches * sum(times)
    busy = [sum(times[rank::ranks]) for rank in range(ranks)]
    chunks = len(times) // ranks
    fill = (sum(times) - max(busy) * 1.0) / chunks
    if schedule == "zero-bubble":
        # the gradients of weights, a third of the work, fill the bubble (Qi et al., 2023, arXiv:2401.10241)
        fill /= 3
    elif schedule == "dualpipe":
        fill = dualpipe_bubble_s(sum(forwards) / len(times), sum(backwards) / len(times), ranks)
    hops = 2 * (ranks - 1) + (0 if overlaps else (microbatches - 1) * chunks)
    return microbatches * max(busy) + fill + hops * hop_s


def dualpipe_bubble_s(forward_s: float, backward_s: float, ranks: int) -> float:
    """Return the bubble of DualPipe over `ranks` ranks with two stages each, in seconds.

    With PP stages, the bubble is (PP / 2 - 1) (F&B + B - 3 W) (Liu et al., 2024, arXiv:2412.19437, table 2). F&B, a
    simultaneous forward and backward pass, takes the sum of both here, because torch runs one after the other. W, the
    gradients of the weights, takes as many matrix products as the forward pass.

    Args:
        forward_s, backward_s: times of one stage in seconds.
    """
    weights_s = min(forward_s, backward_s / 2)
    return (ranks - 1) * (forward_s + 2 * backward_s - 3 * weights_s)


def hop_s(layout: Layout) -> float:
    """Return the time to send one microbatch to the next stage, in seconds."""
    if layout.pp == 1:
        return 0.0
    boundary = max(block.boundary for block, _ in layout.trace.runs)
    numbers = (
        boundary * layout.samples / layout.cp / (layout.tp if layout.sequence or layout.framework.scatters_hops else 1)
    )
    return constants.PIPELINE_S + send_s(numbers * min(layout.number_bytes, 4), layout)


def simulated(layout: Layout, times: StageTimes, hop: float) -> list[Span]:
    """Simulate one step of a layout's schedule and return the spans of every rank."""
    orders = [
        work_of(rank, layout.pp, layout.microbatches, layout.schedule, layout.chunks) for rank in range(layout.pp)
    ]
    return simulate(times.forwards, times.backwards, orders, hop)


# (kind, virtual stage, microbatch)
Work = tuple[str, int, int]


def simulate(
    forwards: Sequence[float], backwards: Sequence[float], orders: Sequence[Sequence[Work]], hop: float
) -> list[Span]:
    """Simulate a pipeline and return the spans of all ranks.

    Each rank does its work in the given order, and waits for the inputs of each item.

    Between two stages, microbatches are sent one after the other, independently in each direction. Over a slow link,
    they queue.
    """
    arrived: dict[Work, float] = {}
    clock, next_of, spans = [0.0] * len(orders), [0] * len(orders), []
    last, moved = len(forwards) - 1, True
    way_free: dict[tuple[str, int], float] = {}
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while next_of[rank] < len(order):
                what, stage, microbatch = work = order[next_of[rank]]
                needed = _needs(what, stage, microbatch, last)
                if any(need not in arrived for need in needed):
                    break
                start = max(clock[rank], *(arrived[need] for need in needed)) if needed else clock[rank]
                end = start + (forwards if what == "forward" else backwards)[stage]
                if start > clock[rank]:
                    spans.append(Span(rank, "wait", microbatch, clock[rank], start))
                spans.append(Span(rank, what, microbatch, start, end))
                stays = stage == (last if what == "forward" else 0)
                arrived[work] = end if stays else max(end, way_free.get((what, stage), 0.0)) + hop
                way_free[what, stage] = arrived[work]
                clock[rank], moved = end, True
                next_of[rank] += 1
    return spans


def _needs(what: str, stage: int, microbatch: int, last: int) -> list[Work]:
    if what == "forward":
        return [("forward", stage - 1, microbatch)] if stage else []
    before: Work = ("backward", stage + 1, microbatch) if stage < last else ("forward", stage, microbatch)
    return [before]


def work_of(rank: int, ranks: int, microbatches: int, schedule: str, chunks: int) -> list[Work]:
    """Return the work of one rank in one step, in order."""
    total = microbatches * chunks
    if chunks > 1:
        warmup = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    else:
        warmup = min(ranks - rank - 1, total)
    if schedule == "gpipe":
        warmup = total
    forwards = [_piece("forward", index, rank, ranks, microbatches, chunks) for index in range(total)]
    backwards = [_piece("backward", index, rank, ranks, microbatches, chunks) for index in range(total)]
    order: list[Work] = forwards[:warmup]
    for index in range(total - warmup):
        order += [forwards[warmup + index], backwards[index]]
    return order + backwards[total - warmup :]


def _piece(what: str, index: int, rank: int, ranks: int, microbatches: int, chunks: int) -> Work:
    """Return the forward or backward pass that a rank runs as number `index`.

    Groups of `ranks` microbatches run through one chunk, then through the next.
    """
    if chunks == 1:
        return (what, rank, index)
    group, inside = divmod(index, ranks * chunks)
    size = min(ranks, microbatches - group * ranks)
    chunk, offset = divmod(inside, size)
    chunk = chunk if what == "forward" else chunks - 1 - chunk
    return (what, chunk * ranks + rank, group * ranks + offset)
