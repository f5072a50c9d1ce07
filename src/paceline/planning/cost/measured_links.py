"""Time of messages between ranks on CPUs, from measured collectives and links' rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

from paceline.cluster.catalogue import CATALOGUE, LinkSpec
from paceline.planning.calibrate import Calibration, CalibrationPoint, interpolated
from paceline.planning.cost.layout import Layout, Machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.transport_info import (
    BETWEEN_HOSTS,
    TRANSPORTS,
    WITHIN_HOST,
    WITHOUT_SHARED_MEMORY,
    bucket_bytes_between_hosts,
)

# bytes on an Ethernet link for each of TCP's
HEADERS = 1514 / 1448
# TCP's use of a link: it slows down after a full queue
_EFFICIENCY = 0.95
# a transport without shared memory between passes, whose buffers are in no cache, relative to it alone
_COLD = 2.0
# fraction of the shorter of the transport's and the wire's time that is not overlapped
_OWN_BESIDE = 0.1
_REPLICA = ("tp", "pp", "fsdp")
_NETWORK = LinkSpec("network", 1e12, 0.0)


@dataclass(frozen=True)
class Links:
    """The links that carry a layout's messages.

    Attributes:
        within: the transport between ranks of a host; `across` that between hosts.
        far: the axes whose ranks are on several hosts.
        rate: bytes per second of a host's link; `latency_s` one way.
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
        """Seconds of an all-reduce over the ranks of an axis."""
        return self._collective_s("all_reduce", size, axis, sent=1.0, turns=2)

    def shared_all_reduce_s(self, size: float) -> float:
        """Seconds of an all-reduce through shared memory."""
        return _time(self.found, WITHIN_HOST, "all_reduce", size)

    def gather_s(self, size: float, axis: str) -> float:
        """Seconds of an all-gather of `size` bytes."""
        return self._collective_s("all_gather", size, axis, sent=0.5, turns=1)

    def scatter_s(self, size: float, axis: str) -> float:
        """Seconds of a reduce-scatter of `size` bytes."""
        return self._collective_s("reduce_scatter", size, axis, sent=0.5, turns=1)

    def message_s(self, size: float, axis: str) -> float:
        """Seconds of a message from one rank to the next."""
        return self._collective_s("send_receive", size, axis, sent=1.0, turns=1)

    def tp_s(self, layout: Layout) -> float:
        """Seconds of the tensor-parallel all-reduces of one microbatch, forward and backward."""
        if layout.tp == 1:
            return 0.0
        width = layout.samples * layout.number_bytes
        again = {"none": 2, "selective": 2, "block": 3}[layout.remat]
        return (
            sum(again * count * self.all_reduce_s(size * width, "tp") for size, count in _reductions(layout.trace))
            / layout.pp
        )

    def cp_s(self, layout: Layout) -> float:
        """Seconds of passing one microbatch's keys and values around, forward and backward."""
        if layout.cp == 1:
            return 0.0
        width = layout.samples * layout.number_bytes
        blocks = sum(
            self.gather_s(2 * block.boundary * width, "cp") for block in layout.trace.blocks if block.reductions
        )
        return 3 * blocks / layout.pp

    def ep_s(self, layout: Layout) -> float:
        """Seconds of sending one microbatch's tokens to experts and back."""
        width = layout.samples * layout.number_bytes
        if layout.ep > 1:
            return 4 * sum(self.gather_s(block.routed * width, "ep") for block in layout.trace.blocks if block.routed)
        return 0.0

    def fsdp_s(self, layout: Layout) -> float:
        """Seconds of gathering and scattering for all microbatches of a step."""
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
        """Seconds to send a microbatch's activations to the next stage.

        `boundary` is their number of elements per sample.
        """
        return self.message_s(boundary * layout.samples * 4, "pp")

    def step_s(self, layout: Layout) -> float:
        """Seconds of a step's small agreement beyond those of shared memory.

        0 for a replica of one rank on one host.
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
        """Seconds of `size` bytes on a host's link, one way."""
        return size * HEADERS / (_EFFICIENCY * self.rate)


def links_of(layout: Layout, found: Calibration) -> Links:
    """Links of a layout, by its transport and its ranks' hosts."""
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
    """Names of what carries a plan's messages, within a host and between hosts."""
    if transport == "auto":
        return WITHIN_HOST, BETWEEN_HOSTS
    info = TRANSPORTS[transport]
    return transport if info.within_hosts else WITHIN_HOST, BETWEEN_HOSTS if info.one_host else transport


def _measured(found: Calibration, transport: str) -> str:
    """The transport if it was measured; else gloo, which always is."""
    known = any(c.transport == transport for c in found.collectives)
    return transport if known else WITHOUT_SHARED_MEMORY


def here(found: Calibration) -> Machines:
    """The measured machine, as a cluster of one host."""
    return Machines(CATALOGUE["CPU"], 1, max(found.cores, found.ranks), _NETWORK)


def between_hosts_s(
    links: Links, size: float, backward_s: Sequence[float], weights: Sequence[float], *, whole: bool
) -> float:
    """Seconds of gradient all-reduces after the backward pass, with the slow-down they cause.

    Gradients fill buckets from the last block to the first, and a full one is sent while others are computed; one at a
    time uses the link, and the last starts at the end of the backward pass. With a divided model, all of them start
    then.
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
    """Times at which the buckets are full, relative to the backward pass's end, in seconds.

    The last one is full at its end.
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
    """Tensor-parallel all-reduces of a forward pass: their elements per sample, and counts."""
    found: dict[float, int] = {}
    for block in trace.blocks:
        if block.reductions:
            found[block.reduced] = found.get(block.reduced, 0) + block.reductions
    return tuple(found.items())


@lru_cache(maxsize=64)
def _pieces(trace: ModelTrace, found: Calibration) -> tuple[int, ...]:
    """Parameters of FSDP2's units: of each repeated block, and of the remainder."""
    named = set(found.segments[1:-1])
    blocks = [block.parameters for block in trace.blocks if block.name in named]
    return (*blocks, max(0, found.parameters - sum(blocks)))


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
