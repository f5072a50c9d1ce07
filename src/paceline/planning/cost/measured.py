"""Step times on CPUs, composed of measured times.

A rank computes its microbatches one after the other. The time of a microbatch is the measured time of a pass of the
undivided model with the same microbatch size and number of busy ranks. This time is multiplied by the fraction that
remains on one tp rank, and the overhead of each split is added. The overheads and the times of updates and reductions
are fitted to the calibration points, which are steps of the engine at other sizes.

Precisions and axes without measurements are assumed to be as slow as the measured ones. Otherwise a plan might be
chosen for a speed that was never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from paceline.cluster.catalogue import CATALOGUE, LinkSpec
from paceline.partition import contiguous
from paceline.planning.calibrate import Calibration, CalibrationPoint, interpolated
from paceline.planning.cost.frameworks import summed
from paceline.planning.cost.layout import Layout, Machines, exchanged, joined_s, served_s, summed_bytes, sums_in_memory
from paceline.planning.cost.stages import StageCost, StageTimes, StepInputs, simulated, times_of
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import DEGREES
from paceline.planning.sync_info import (
    BETWEEN_HOSTS,
    TRANSPORTS,
    WITHIN_HOST,
    WITHOUT_SHARED_MEMORY,
    bucket_bytes_between_hosts,
)

# share of the time to read a calibration point's samples that does not grow with their number
_DATA_FIXED = 0.3
# fraction of a pass by which the engine may seem faster than the pass alone, because of the timer's overhead
_LEAST_ADDED = 0.05
# cost of an axis without measurements, relative to its best possible result
_UNSEEN = 1.3
# bounds of the fraction of a pass that remains on a tp rank
_TP_SHARES = (0.3, 1.2)


class Passes(NamedTuple):
    """Seconds of one microbatch on one rank, for each block of the trace."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    again_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the forward and backward pass of all blocks, without recomputation."""
        return sum(self.forward_s) + sum(self.backward_s)


@dataclass(frozen=True)
class Added:
    """Overhead of a split, fitted to its calibration points.

    Attributes:
        share: fraction of the undivided model's pass that each rank computes.
        each_s: seconds added to each microbatch.
        comm_s, optimizer_s: seconds per step.
        data_s: seconds to read `samples` samples.
    """

    share: float = 1.0
    each_s: float = 0.0
    comm_s: float = 0.0
    optimizer_s: float = 0.0
    data_s: float = 0.0
    samples: float = 1.0


def measured_inputs(layout: Layout) -> StepInputs | None:
    """Return the times that determine a step, or None without a calibration."""
    found = calibration_of(layout)
    if found is None:
        return None
    links = links_of(layout, found)
    passes, added = passes_of(layout, found), added_by(layout, found)
    times, hop = _stages(layout, passes, added, links)
    return StepInputs(
        times=times,
        hop_s=hop,
        whole_s=_whole_s(layout, times, hop),
        fsdp_s=links.fsdp_s(layout),
        dp_s=max(0.0, added.comm_s + _dp_s(layout, found, passes, links)),
        optimizer_s=added.optimizer_s,
        other_s=_data_s(layout, added),
    )


def calibration_of(layout: Layout) -> Calibration | None:
    """Return the calibration of a layout's machines.

    The result is None if there is none, or if it lacks pass timings or calibration points. It is also None for
    offloaded activations, which no calibration measures.
    """
    found = None if layout.offload_activations else layout.machines.calibration
    return found if found is not None and found.timings and found.points else None


# Times of a microbatch on one rank with the whole model


def passes_of(layout: Layout, found: Calibration) -> Passes:
    """Return the pass times for the layout's microbatch size and number of ranks."""
    return _times(
        layout.trace, found, layout.ranks, found.nearest_precision(layout.precision), layout.samples, layout.remat
    )


@lru_cache(maxsize=4096)
def _times(trace: ModelTrace, found: Calibration, ranks: int, precision: str, samples: float, remat: str) -> Passes:
    plain = found.timings_of(ranks, precision)
    sizes = [timing.samples for timing in plain]
    each = range(len(plain[0].forward_s))
    forward = [interpolated(sizes, [timing.forward_s[i] for timing in plain], samples) for i in each]
    backward = [interpolated(sizes, [timing.backward_s[i] for timing in plain], samples) for i in each]
    again = sum(forward) * _again(found, remat) if remat != "none" else 0.0
    return Passes(_by_block(trace, found.segments, forward), _by_block(trace, found.segments, backward), again)


@lru_cache(maxsize=64)
def _again(found: Calibration, remat: str) -> float:
    """Return the time of recomputation relative to a forward pass.

    The result is the median of all measurements, or 1 without measurements.
    """
    plain = {(p.ranks, p.precision, p.samples): p for p in found.timings if p.remat == "none"}
    pairs = [(p, plain.get((p.ranks, p.precision, p.samples))) for p in found.timings if p.remat == remat]
    ratios = [(again.seconds - once.seconds) / sum(once.forward_s) for again, once in pairs if once is not None]
    return max(0.0, median(ratios)) if ratios else 1.0


def _by_block(trace: ModelTrace, segments: Sequence[str], seconds: Sequence[float]) -> tuple[float, ...]:
    """Divide the measured time among the blocks of the trace.

    A segment is named after its first module. Blocks in the same segment share its time in proportion to their FLOPs.
    """
    places = {name: i for i, name in enumerate(segments)}
    last = len(segments) - 1
    belongs, now, seen = [], 0, dict[str, int]()
    for block in trace.blocks:
        if block.name in places and block.name:
            # equal blocks all have the first one's name
            now = min(places[block.name] + seen.get(block.name, 0), max(last - 1, 0))
            seen[block.name] = seen.get(block.name, 0) + 1
        # after the last of the repeated blocks
        elif now == last - 1 and last > 1:
            now = last
        belongs.append(now)
    weights = [max(block.flops, 1.0) for block in trace.blocks]
    of = [sum(w for w, b in zip(weights, belongs, strict=True) if b == i) for i in range(len(segments))]
    # seconds of segments that are not in the trace
    lost = sum(s for s, w in zip(seconds, of, strict=True) if not w)
    found = [seconds[b] * w / of[b] for w, b in zip(weights, belongs, strict=True)]
    scale = 1 + lost / sum(found) if sum(found) else 1.0
    return tuple(scale * s for s in found)


# Overhead of the splits


def added_by(layout: Layout, found: Calibration) -> Added:
    """Return the combined overhead of all axes along which the layout is divided."""
    axes, precision = _axes(layout), found.nearest_precision(layout.precision)
    each = [_added(layout.trace, found, precision, axis, getattr(layout, axis, 1)) for axis in axes]
    base = _added(layout.trace, found, precision, "none", 1) if len(each) > 1 else Added()
    share = 1.0
    for one in each:
        share *= one.share
    smallest = min(each, key=lambda one: one.optimizer_s)
    fused_s = _fused_gain_s(layout, found)
    return Added(
        share,
        sum(one.each_s for one in each) - (len(each) - 1) * base.each_s,
        sum(one.comm_s for one in each),
        max(0.1 * smallest.optimizer_s, smallest.optimizer_s - fused_s),
        each[0].data_s,
        each[0].samples,
    )


def _axes(layout: Layout) -> list[str]:
    return [axis for axis in DEGREES if getattr(layout, axis) > 1] or ["none"]


def _fused_gain_s(layout: Layout, found: Calibration) -> float:
    """Return the seconds that a fused update saves on one rank.

    The result is 0 if the updates of the calibration points were fused.
    """
    if not layout.fused or not {"plain", "fused"} <= found.optimizer_s.keys():
        return 0.0
    return (found.optimizer_s["plain"] - found.optimizer_s["fused"]) / (layout.fsdp * layout.tp * layout.pp)


@lru_cache(maxsize=256)
def _added(trace: ModelTrace, found: Calibration, precision: str, axis: str, ranks: int) -> Added:
    """Return the overhead of an axis.

    It is the measured time of the calibration points minus the time predicted without overhead.
    """
    points = found.points_of(axis, precision)
    if not points:
        other = next(other for other in ("tp", "dp", "none", "fsdp", "pp") if found.points_of(other, precision))
        like = _added(trace, found, precision, other, ranks)
        shares = {"tp": 1 / ranks, "cp": 1 / ranks}
        return replace(like, share=min(1.0, _UNSEEN * shares.get(axis, 1.0)), each_s=_UNSEEN * like.each_s)
    precision = points[0].precision
    layouts = [_as_layout(trace, found, point, precision) for point in points]
    plain = [_times(trace, found, point.ranks, precision, point.samples, "none") for point in points]
    links = [links_of(layout, found) for layout in layouts]
    share = 1.0
    if axis == "pp":
        bare = [_whole_s(a, *_stages(a, t, Added(), link)) for a, t, link in zip(layouts, plain, links, strict=True)]
        over = [a.compute_s + a.bubble_s + a.comm_s - b for a, b in zip(points, bare, strict=True)]
        weights = [float(a.microbatches + layout.pp - 1) for a, layout in zip(points, layouts, strict=True)]
    else:
        inside = [
            link.fsdp_s(layout) + a.microbatches * link.tp_s(layout)
            for a, layout, link in zip(points, layouts, links, strict=True)
        ]
        computed = [a.compute_s - i for a, i in zip(points, inside, strict=True)]
        if axis == "tp":
            share = _remaining(points, computed, plain)
        over = [c - a.microbatches * share * t.seconds for a, c, t in zip(points, computed, plain, strict=True)]
        weights = [float(a.microbatches) for a in points]
    each_s = sum(o * w for o, w in zip(over, weights, strict=True)) / sum(w * w for w in weights)
    each_s = max(each_s, -_LEAST_ADDED * min(times.seconds for times in plain))
    comm_s = 0.0 if axis == "pp" else sum(a.comm_s for a in points) / len(points)
    return Added(
        share=share,
        each_s=each_s,
        comm_s=comm_s,
        optimizer_s=sum(a.optimizer_s for a in points) / len(points),
        data_s=sum(a.data_s for a in points) / len(points),
        samples=float(points[0].samples * points[0].microbatches),
    )


def _as_layout(trace: ModelTrace, found: Calibration, point: CalibrationPoint, precision: str) -> Layout:
    degrees = {} if point.axis == "none" else {point.axis: point.ranks}
    return Layout(
        trace=trace,
        machines=replace(here(found), calibration=found),
        samples=float(point.samples),
        microbatches=point.microbatches,
        precision=precision,  # type: ignore[arg-type]
        **degrees,  # type: ignore[arg-type]
    )


def _remaining(points: Sequence[CalibrationPoint], computed: Sequence[float], plain: Sequence[Passes]) -> float:
    """Return the fraction of a pass that remains on a tp rank.

    The difference between two calibration points separates this fraction from the fixed overhead of a microbatch.
    """
    per = [c / a.microbatches for a, c in zip(points, computed, strict=True)]
    long, short = plain[0].seconds, plain[-1].seconds
    slope = (per[0] - per[-1]) / (long - short) if abs(long - short) > 0.2 * long else per[0] / long
    return min(max(slope, _TP_SHARES[0]), _TP_SHARES[1])


# Parts of a step


def _stages(layout: Layout, passes: Passes, added: Added, links: Links) -> tuple[StageTimes, float]:
    """Return the times of the virtual stages, and of a message between stages."""
    again = passes.again_s / max(passes.seconds, 1e-12)
    each = [f + b for f, b in zip(passes.forward_s, passes.backward_s, strict=True)]
    virtual = layout.pp * layout.chunks if layout.pp > 1 else 1
    cut = layout.cut if layout.pp > 1 and sum(layout.cut) == len(each) else contiguous(each, min(virtual, len(each)))
    ends = list(accumulate(cut))
    tp, cp, ep = (
        seconds * layout.pp / len(cut) for seconds in (links.tp_s(layout), links.cp_s(layout), links.ep_s(layout))
    )
    calls = _calls(layout) / 3 if layout.fsdp > 1 and layout.pp == 1 else 1.0
    costs = tuple(
        StageCost(
            forward_s=added.share * sum(passes.forward_s[end - number : end]),
            backward_s=added.share * sum(passes.backward_s[end - number : end]),
            again_s=added.share * again * sum(each[end - number : end]),
            tp_forward_s=tp / 2,
            tp_backward_s=tp / 2,
            cp_s=cp,
            ep_s=ep,
            added_s=added.each_s * calls / layout.chunks,
        )
        for end, number in zip(ends, cut, strict=True)
    )
    hop = (
        links.hop_s(layout, max((layout.trace.blocks[end - 1].boundary for end in ends[:-1]), default=0.0))
        if layout.pp > 1
        else 0.0
    )
    return times_of(costs, layout.pp), hop


def _whole_s(layout: Layout, times: StageTimes, hop: float) -> float:
    if layout.pp == 1:
        return layout.microbatches * times.working_s
    return max(span.end_s for span in simulated(layout, times, hop))


def _calls(layout: Layout) -> float:
    """Return the number of FSDP2's collectives for each unit and microbatch.

    With zero=3 there are 3: two gathers and one scatter.
    """
    once = 1 / layout.microbatches
    return {3: 3.0, 2: 1 + once, 1: 2 * once}[layout.zero]


def _dp_s(layout: Layout, found: Calibration, times: Passes, links: Links) -> float:
    """Return how much longer the gradient reduction takes than in the calibration points, in seconds.

    The calibration points were measured over shared memory.
    """
    if layout.dp == 1:
        return links.step_s(layout)
    held = found.parameters / layout.fsdp / layout.tp / layout.pp
    if layout.servers and not sums_in_memory(layout):
        up, down = exchanged(layout, held)
        up_s, down_s = (
            links.message_s(up * layout.sync_bytes, "dp"),
            links.message_s(down * layout.gradient_bytes, "dp"),
        )
        waits_s = served_s(layout, up_s, down_s, layout.microbatches * times.seconds, 0.0)
        return waits_s + 2 * joined_s(layout, held, links.message_s) - links.shared_all_reduce_s(held * 4.0)
    held = summed(layout, held)
    if not links.dp_between:
        sums = links.all_reduce_s(summed_bytes(layout, held), "dp") - links.shared_all_reduce_s(held * 4.0)
        return sums / layout.sync_every
    weights = [float(block.parameters) for block in layout.trace.blocks]
    sums = between_hosts_s(links, held * layout.sync_bytes, times.backward_s, weights, whole=layout.ranks == layout.dp)
    return (sums - links.shared_all_reduce_s(held * 4.0)) / layout.sync_every


def _data_s(layout: Layout, added: Added) -> float:
    share = layout.samples * layout.microbatches
    return added.data_s * (_DATA_FIXED + (1 - _DATA_FIXED) * share / added.samples)


# bytes on an Ethernet link per byte of TCP
HEADERS = 1514 / 1448
# TCP's utilization of a link: it slows down after a full queue
_EFFICIENCY = 0.95
# slowdown of a transport without shared memory between passes, since its buffers are not cached
_COLD = 2.0
# share of the shorter of the transport's and the wire's time that does not overlap
_OWN_BESIDE = 0.1
_REPLICA = ("tp", "pp", "fsdp")
_NETWORK = LinkSpec("network", 1e12, 0.0)


@dataclass(frozen=True)
class Links:
    """Transports and links that carry the messages of a layout.

    Attributes:
        within: transport between ranks of the same host.
        across: transport between hosts.
        far: axes whose ranks are on several hosts.
        rate: bytes per second of a host's link.
        latency_s: one-way latency of a host's link.
    """

    found: Calibration
    within: str
    across: str
    far: frozenset[str]
    rate: float
    latency_s: float

    @property
    def dp_between(self) -> bool:
        """True if replicas are on several hosts."""
        return "dp" in self.far

    def all_reduce_s(self, size: float, axis: str) -> float:
        """Return the time of an all-reduce of `size` bytes along an axis, in seconds."""
        return self._collective_s("all_reduce", size, axis, sent=1.0, turns=2)

    def shared_all_reduce_s(self, size: float) -> float:
        """Return the time of an all-reduce of `size` bytes through shared memory, in seconds."""
        return _time(self.found, WITHIN_HOST, "all_reduce", size)

    def gather_s(self, size: float, axis: str) -> float:
        """Return the time of an all-gather of `size` bytes, in seconds."""
        return self._collective_s("all_gather", size, axis, sent=0.5, turns=1)

    def scatter_s(self, size: float, axis: str) -> float:
        """Return the time of a reduce-scatter of `size` bytes, in seconds."""
        return self._collective_s("reduce_scatter", size, axis, sent=0.5, turns=1)

    def message_s(self, size: float, axis: str) -> float:
        """Return the time to send `size` bytes from one rank to the next, in seconds."""
        return self._collective_s("send_receive", size, axis, sent=1.0, turns=1)

    def tp_s(self, layout: Layout) -> float:
        """Return the time of all tensor-parallel all-reduces for one microbatch, in seconds."""
        if layout.tp == 1:
            return 0.0
        width = layout.samples * layout.number_bytes
        again = {"none": 2, "selective": 2, "block": 3}[layout.remat]
        return (
            sum(again * count * self.all_reduce_s(size * width, "tp") for size, count in _reductions(layout.trace))
            / layout.pp
        )

    def cp_s(self, layout: Layout) -> float:
        """Return the time to exchange keys and values of one microbatch, in seconds."""
        if layout.cp == 1:
            return 0.0
        width = layout.samples * layout.number_bytes
        blocks = sum(
            self.gather_s(2 * block.boundary * width, "cp") for block in layout.trace.blocks if block.reductions
        )
        return 3 * blocks / layout.pp

    def ep_s(self, layout: Layout) -> float:
        """Return the time to send one microbatch's tokens to experts and back, in seconds.

        This includes the same traffic in the backward pass.
        """
        width = layout.samples * layout.number_bytes
        if layout.ep > 1:
            return 4 * sum(self.gather_s(block.routed * width, "ep") for block in layout.trace.blocks if block.routed)
        return 0.0

    def fsdp_s(self, layout: Layout) -> float:
        """Return the time of FSDP's gathers and scatters in a step, in seconds."""
        if layout.fsdp == 1:
            return 0.0
        width = 2 if layout.precision == "bf16" else 4
        gathers, scatters = {
            3: (2, 1),
            2: (1 / layout.microbatches, 1),
            1: (1 / layout.microbatches, 1 / layout.microbatches),
        }[layout.zero]
        total = 0.0
        for parameters in _pieces(layout.trace, self.found):
            held = parameters / layout.tp / layout.pp
            total += gathers * self.gather_s(held * width, "fsdp") + scatters * self.scatter_s(held * 4, "fsdp")
        return layout.microbatches * total

    def hop_s(self, layout: Layout, boundary: float) -> float:
        """Return the time to send a microbatch's activations to the next stage, in seconds.

        `boundary` is the number of activation elements per sample.
        """
        return self.message_s(boundary * layout.samples * 4, "pp")

    def step_s(self, layout: Layout) -> float:
        """Return how much longer a small all-reduce takes than over shared memory, in seconds.

        Each step has one such all-reduce, for example of the loss. The result is 0 for a single rank.
        """
        if layout.ranks == 1:
            return 0.0
        axis = next((a for a in _REPLICA if a in self.far), next((a for a in _REPLICA if getattr(layout, a) > 1), "dp"))
        return self.all_reduce_s(64, axis) - self.shared_all_reduce_s(64)

    def _collective_s(self, name: str, size: float, axis: str, *, sent: float, turns: int) -> float:
        if axis not in self.far:
            cold = _COLD if axis in ("tp", "fsdp") and not TRANSPORTS[self.within].shares_memory else 1.0
            return cold * _time(self.found, self.within, name, size)
        own_s, wire_s = _time(self.found, self.across, name, size), self.wire_s(size * sent)
        return max(own_s, wire_s) + _OWN_BESIDE * min(own_s, wire_s) + turns * self.latency_s

    def wire_s(self, size: float) -> float:
        """Return the time to transfer `size` bytes over a host's link, in seconds."""
        return size * HEADERS / (_EFFICIENCY * self.rate)


def links_of(layout: Layout, found: Calibration) -> Links:
    """Return the links of a layout.

    They depend on the transport and on the placement of ranks on hosts.
    """
    machines = layout.machines
    far = frozenset(
        axis
        for axis in ("dp", "cp", "ep", *_REPLICA)
        if getattr(layout, axis) > 1 and layout.link(axis) == machines.between
    )
    within, across = (_measured(found, name) for name in _carriers(layout.transport))
    return Links(found, within, across, far, machines.between.bandwidth * machines.per_host, machines.between.latency_s)


@cache
def _carriers(transport: str) -> tuple[str, str]:
    """Return the transports that a plan uses within a host and between hosts."""
    if transport == "auto":
        return WITHIN_HOST, BETWEEN_HOSTS
    info = TRANSPORTS[transport]
    return transport if info.within_hosts else WITHIN_HOST, BETWEEN_HOSTS if info.one_host else transport


def _measured(found: Calibration, transport: str) -> str:
    """Return the transport if it was measured, else gloo, which every calibration measures."""
    known = any(c.transport == transport for c in found.collectives)
    return transport if known else WITHOUT_SHARED_MEMORY


def here(found: Calibration) -> Machines:
    """Return the calibrated machine as a cluster of one host."""
    return Machines(CATALOGUE["CPU"], 1, max(found.cores, found.ranks), _NETWORK)


def between_hosts_s(
    links: Links, size: float, backward_s: Sequence[float], weights: Sequence[float], *, whole: bool
) -> float:
    """Return the time that gradient all-reduces between hosts add to a step, in seconds.

    Gradients fill buckets from the last block to the first. A full bucket is sent while further gradients are computed.
    Only one bucket at a time uses the link, and the last bucket is sent after the backward pass. If the model is
    divided, all buckets are sent after the backward pass.
    """
    count = max(1, round(size / bucket_bytes_between_hosts(size) + 0.499))
    each = size / count
    wire_s = links.wire_s(each) + 2 * links.latency_s
    own = next((c for c in links.found.collectives if c.transport == links.across and c.name == "all_reduce"), None)
    own_s, busy_s = (own.time_s(each), own.busy_s(each)) if own is not None else (0.0, 0.0)
    ready = _ready(count, backward_s, weights) if whole else [0.0] * count
    end = free = -sum(backward_s) if whole else 0.0
    for at in ready:
        free = max(free, at) + max(wire_s, own_s)
        end = free + (own_s if wire_s > own_s else 0.0) / 2
    return max(0.0, end) + (busy_s * (count - 1) if whole else 0.0)


def _ready(count: int, backward_s: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return when each bucket is full, relative to the end of the backward pass.

    The time of the last bucket is 0; the other times are negative.
    """
    done, total = [0.0, *accumulate(reversed(weights))], sum(weights)
    clock = [0.0, *accumulate(reversed(backward_s))]
    ready = []
    for i in range(1, count):
        wanted = total * i / count
        k = next(k for k in range(1, len(done)) if done[k] >= wanted)
        part = (wanted - done[k - 1]) / max(done[k] - done[k - 1], 1e-12)
        ready.append(clock[k - 1] + part * (clock[k] - clock[k - 1]) - clock[-1])
    return [*ready, 0.0]


def _time(found: Calibration, transport: str, name: str, size: float) -> float:
    measured = found.collective(transport, name)
    return measured.time_s(size) if measured is not None else 0.0


@lru_cache(maxsize=64)
def _reductions(trace: ModelTrace) -> tuple[tuple[float, int], ...]:
    """Return the sizes (elements per sample) of a forward pass's tensor-parallel all-reduces, with their counts."""
    found: dict[float, int] = {}
    for block in trace.blocks:
        if block.reductions:
            found[block.reduced] = found.get(block.reduced, 0) + block.reductions
    return tuple(found.items())


@lru_cache(maxsize=64)
def _pieces(trace: ModelTrace, found: Calibration) -> tuple[int, ...]:
    """Return the number of parameters in each FSDP2 unit.

    Each repeated block is one unit, and the rest of the model is another.
    """
    named = set(found.segments[1:-1])
    blocks = [block.parameters for block in trace.blocks if block.name in named]
    return (*blocks, max(0, found.parameters - sum(blocks)))


# share of activations that every tp rank keeps whole: norms, residuals, inputs of matrices
_UNDIVIDED = 0.6
# largest share of the baseline that an engine uses besides tensors
_MOST_BESIDE = 0.3


def measured_memory(layout: Layout, held: dict[str, float]) -> dict[str, float]:
    """Scale the bytes of `held` to the peak memory that the calibration predicts.

    The difference between the predicted peak and the sum of the other entries becomes `runtime`. If it is too small for
    a process, all other entries are scaled down. Without a calibration, `held` is returned unchanged.
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
    """Return the peak memory of the rank that needs the most, in bytes."""
    return found.baseline_bytes + _beside(layout, found) + _state_bytes(layout, found) + _pass_bytes(layout, found)


def _beside(layout: Layout, found: Calibration) -> float:
    """Return the memory that the engine needs besides tensors, in bytes.

    It is derived from the first calibration points of a process. Later points include memory left over from earlier
    ones.
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
    """Return the bytes of a rank's parameters and optimizer state.

    Gradients are not included; `_pass_bytes` counts them.
    """
    return found.parameters * (layout.parameter_bytes + layout.optimizer_bytes) / (layout.fsdp * layout.tp * layout.pp)


def _pass_bytes(layout: Layout, found: Calibration) -> float:
    """Return the bytes of gradients and of activations in flight on the first stage."""
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
