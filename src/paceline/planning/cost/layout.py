"""Inputs of the cost model: work, machines, layout, and times of collectives on it.

Collectives have latency and bandwidth over the links of a group (NCCL's rings and trees). This module needs neither
torch nor a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.cluster.catalogue import Accelerator, LinkSpec
from paceline.planning.cost import constants
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import AXES, Remat, Schedule
from paceline.units import money, rate, seconds, size

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration
    from paceline.planning.machines import Adjustment


Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
# Precision of products with weights, if lower than that of activations, with scales per tensor, per row, per block
# of 128 × 128, or 32 numbers in hardware (OCP MX, 2023).
Products = Literal["", "int8", "fp8", "fp8-row", "fp8-block", "mxfp8", "fp4"]


@dataclass(frozen=True)
class FrameworkProfile:
    """Properties of the software that runs a plan, beyond the physics.

    `derating`, `vector`, `mixtures`, `kernels`, `loss` and `overlaps_ep` are fitted (`FRAMEWORKS_FITTED`), the others
    are not.

    Attributes:
        name: such as `paceline`, `Megatron-LM`, `Megatron-DeepSpeed`, `FSDP`.
        derating: factor on all compute times.
        overlaps_gradients: True if gradients are reduced during the backward pass.
        sums_gradients: True if ZeRO-1's gradients are all-reduced, not scattered (DeepSpeed without `reduce_scatter`).
        overlaps_parameters: True if parameters that ZeRO-1 updates in parts are gathered during the next forward pass.
        agrees_s: seconds of coordination until all ranks know that the last gradients are ready.
        overlaps_tp, overlaps_ep: share of the traffic of tensor and expert parallelism that products hide.
        overlaps_hops: True if stages of a pipeline send while they compute.
        flash: True if attention is one fused kernel that does not store its scores.
        attention: generation of that kernel: FlashAttention 1, 2, or 3 (also cuDNN since 9.0).
        vector: memory traffic of kernels other than products, relative to the trace's; below 1 if more are fused.
        mixtures: the same for layers with experts, relative to `vector`; also for their casts and their kernels.
        graphs: True if kernels are replayed as graphs, without Python.
        blocking: True if Python waits for every kernel (CUDA_LAUNCH_BLOCKING=1).
        keeps: what remat=selective keeps: everything except attention's squares, all results of products, or every
            second one.
        node_limit: maximum number of hosts with a token's experts; a token is sent once to each. 0 for no limit.
        loss: memory traffic of its loss over a vocabulary, relative to torch's.
        kernels: number of kernels launched for each of the trace's; above 1 if less is fused.
        softmax_of: the fused softmax needs a multiple of this number of score matrices; for other numbers it takes
            several kernels.
        stops_early: True if recomputation of a block stops before its last product, because all saved tensors are
            available (as in torch).
        scatters_hops: True if each tp rank sends a part of a stage's output, which is gathered in the next stage.
    """

    name: str = "paceline"
    derating: float = 1.0
    overlaps_gradients: bool = True
    sums_gradients: bool = False
    overlaps_parameters: bool = True
    agrees_s: float = 0.0
    overlaps_tp: float = 0.0
    overlaps_ep: float = 0.0
    overlaps_hops: bool = False
    vector: float = 1.0
    mixtures: float = 1.0
    graphs: bool = False
    blocking: bool = False
    keeps: Literal["attention", "products", "half"] = "attention"
    node_limit: int = 0
    flash: bool = True
    attention: int = 2
    loss: float = 1.0
    kernels: float = 1.0
    softmax_of: int = 1
    scatters_hops: bool = False
    stops_early: bool = True


@dataclass(frozen=True)
class Machines:
    """The cost model's view of a cluster: equal hosts with two levels of links.

    Attributes:
        device: the slowest of the devices in use.
        hosts: number of hosts, or of domains if links inside a host join several (an NVL72, a TPU pod).
        per_host: devices of each host.
        between: link between hosts, in bytes per second of *one device* (a host's link divided by its devices).
        oversubscription: factor of lower bandwidth for groups that span more than `oversubscribed_beyond` hosts.
        speeds: each host's speed relative to `device`, if they differ; else ().
        memory_bytes: memory of one device that a job may use; None uses the catalogue's value.
    """

    device: Accelerator
    hosts: int
    per_host: int
    between: LinkSpec
    speeds: tuple[float, ...] = ()
    memory_bytes: int | None = None
    # price of one device
    price_per_hour: float | None = None
    # measurements on this machine, which take precedence over the catalogue
    calibration: Calibration | None = None
    # factors of measured runs, by which whole predictions are multiplied
    adjustment: Adjustment | None = field(default=None, compare=False)
    oversubscription: float = 1.0
    oversubscribed_beyond: int = 1

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Layout:
    """A plan, a model and machines, as numbers.

    The product of the degrees is the number of ranks. Ranks fill hosts in the order tp, ep, cp, fsdp, pp, dp (a run's
    mesh), unless `order` specifies another order.

    Attributes:
        samples: samples of one microbatch of one data-parallel rank (there are dp × fsdp × ep of them).
        microbatches: microbatches of one data-parallel rank in a step.
        chunks: virtual stages of a pipeline rank.
        zero: ZeRO stage of fsdp, 1 to 3. `zero_dp`: True if the optimizer's state is sharded over dp as well (ZeRO-1 in
            other frameworks).
        parameter_bytes, gradient_bytes, optimizer_bytes: bytes per parameter; a master copy counts as optimizer state.
        cut: number of blocks of each virtual stage, in order; () is as even as the blocks' times allow.
        sync_bytes: bytes per gradient sent between replicas, once in `sync_every` steps.
        servers: number of parameter servers, which sum gradients, or own the parameters if `served`; 0 if replicas
            reduce without servers.
        order: axes, beginning with those whose ranks are nearest.
        products: precision of products with weights inside layers, if lower than `precision`.
        expert_ranks: number of ranks among which a layer's whole experts are divided, if it differs from `ep` (Megatron
            Core's folding, arXiv:2504.14960: they may be dp and tp ranks). 0: it is `ep`, and tp divides each expert.
        shards_over_cp: True if cp ranks shard the state as the ranks of fsdp, or of a sharded dp, do.
        offload_activations: True if the activations that remat keeps are offloaded to the host's memory.
        ulysses: True if cp exchanges heads for tokens (arXiv:2309.14509) instead of passing keys around a ring.
        remat_share: share of the layers that remat=block recomputes.
        lora: rank of adapters that are trained instead of the weights; 0 trains the weights.
        imbalance: tokens of the rank whose experts get the most, relative to the mean; 1 in benchmarks with forced
            balance.
        gather_bytes: bytes of a parameter during the gather, if fewer than for activations (ZeRO++'s quantised weights,
            arXiv:2306.10209); 0 uses the bytes of activations.
        regather_ranks: number of nearest fsdp ranks that keep a further copy for the backward pass (ZeRO++'s
            hierarchical partition; `reshard_after_forward` of torch's FSDP as a number); 0 gathers from all fsdp ranks.
    """

    trace: ModelTrace
    machines: Machines
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 3
    zero_dp: bool = False
    sequence: bool = False
    samples: float = 1.0
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1
    remat: Remat = "none"
    precision: Precision = "fp32"
    parameter_bytes: float = 4.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    offload: bool = False
    cut: tuple[int, ...] = ()
    sync_bytes: float = 4.0
    sync_every: int = 1
    servers: int = 0
    served: bool = False
    framework: FrameworkProfile = field(default_factory=FrameworkProfile)
    order: tuple[str, ...] = AXES[::-1]
    # threads of a rank on CPUs
    threads: int = 1
    transport: str = "auto"  # between ranks on CPUs
    # the optimizer's update is one kernel
    fused: bool = False
    products: Products = ""
    expert_ranks: int = 0
    shards_over_cp: bool = False
    offload_activations: bool = False
    ulysses: bool = False
    remat_share: float = 1.0
    lora: int = 0
    imbalance: float = 1.0
    gather_bytes: float = 0.0
    regather_ranks: int = 0

    def changed(self, **values: Any) -> Layout:
        """Return the layout with other values, like `dataclasses.replace` but faster.

        Searches make a hundred thousand layouts.
        """
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__, **values)
        other.__dict__.pop("stride", None)  # it belonged to the old degrees
        return other

    @property
    def ranks(self) -> int:
        """Product of all degrees."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, among which the global batch is divided."""
        return self.dp * self.fsdp * self.ep

    @property
    def global_batch(self) -> float:
        """Samples of a step."""
        return self.data_ranks * self.samples * self.microbatches

    @property
    def number_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return BYTES[self.precision]

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a parameter during the gather."""
        return self.gather_bytes or min(self.parameter_bytes, self.number_bytes)

    @property
    def expert_parts(self) -> int:
        """Number of parts of a layer's experts: whole experts, or slices of each by tp."""
        return self.expert_ranks or self.tp * self.ep

    @property
    def expert_copies(self) -> float:
        """Number of ranks of a stage that have the same experts."""
        return max(self.ranks / self.pp / self.expert_ranks, 1.0) if self.expert_ranks else float(self.dp)

    @cached_property
    def stride(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides, apart = {}, 1
        for axis in self.order:
            strides[axis] = apart
            apart *= getattr(self, axis)
        return strides

    def link(self, axis: str) -> LinkSpec:
        """Return the slowest link of a message along the axis.

        It is the link inside a host if each group is within one host.
        """
        span = self.stride[axis] * getattr(self, axis)
        return self.machines.device.inside if span <= self.machines.per_host else self.machines.between


# parts of a predicted step, with their names for people
PART_NAMES: Mapping[str, str] = {
    "compute": "computing",
    "recompute": "computing again",
    "launch": "launching kernels",
    "tp": "tp: sums of layers",
    "cp": "cp: keys and values",
    "ep": "ep: tokens to experts",
    "fsdp": "fsdp: weights, gradients",
    "pp": "pp: between stages",
    "bubble": "pipeline bubble",
    "dp": "dp: gradients",
    "optimizer": "optimizer",
    "other": "overhead of a step",
}
PARTS = tuple(PART_NAMES)


@dataclass(frozen=True)
class Span:
    """One span of a pipeline's timeline, in seconds from the step's start."""

    stage: int
    # forward, backward, weight or wait
    what: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Interval:
    """Interval that contains a measured step time with a probability of 80 %.

    Attributes:
        low_s, high_s: bounds of the interval, in seconds.
        rests_on: basis of the interval, for people.
    """

    low_s: float
    high_s: float
    rests_on: str

    @property
    def relative(self) -> float:
        """Half of its width, relative to its middle (the geometric mean of its bounds)."""
        return math.sqrt(self.high_s / self.low_s) - 1

    def __contains__(self, seconds: float) -> bool:
        """True if a time is inside the interval."""
        return self.low_s <= seconds <= self.high_s

    def times(self, factor: float) -> Interval:
        """Return the interval of a time multiplied by a factor."""
        return replace(self, low_s=self.low_s * factor, high_s=self.high_s * factor)


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a plan.

    Attributes:
        step_time_s: seconds of a whole step, all ranks together.
        memory_bytes: peak memory of one rank on its device.
        throughput: samples per second.
        mfu: FLOPs of the model (without recomputation) over the peak of all devices; None if the peak is not known.
        cost_per_run: cost of the run in the currency of the user's prices; None without prices or without a known
            number of steps.
        breakdown: seconds of the step by `PARTS`; they sum to `step_time_s`.
        memory: bytes by holder; they sum to `memory_bytes`.
        fits: True if there is enough memory.
        notes: sentences on what the prediction ignores.
        interval: interval of the step time; None during a search.
    """

    step_time_s: float
    memory_bytes: int
    throughput: float
    mfu: float | None
    breakdown: dict[str, float]
    memory: dict[str, float]
    fits: bool = True
    cost_per_run: float | None = None
    notes: tuple[str, ...] = field(default=())
    interval: Interval | None = None

    def __repr__(self) -> str:
        """Return step time, throughput and memory."""
        step = str(seconds(self.step_time_s))
        if self.interval is not None:
            step = f"{step} ({seconds(self.interval.low_s)} to {seconds(self.interval.high_s)})"
        fits = "fits" if self.fits else "does not fit"
        cost = "" if self.cost_per_run is None else f", {money(self.cost_per_run)} for the run"
        memory = f"{size(self.memory_bytes)} a rank, which {fits}"
        return f"<Prediction: {step} a step, {rate(self.throughput)}, {memory}{cost}>"

    def times(self, factor: float) -> Prediction:
        """Return the prediction with all times multiplied by a factor."""
        if factor == 1.0:
            return self
        return replace(
            self,
            step_time_s=self.step_time_s * factor,
            throughput=self.throughput / factor,
            mfu=None if self.mfu is None else self.mfu / factor,
            cost_per_run=None if self.cost_per_run is None else self.cost_per_run * factor,
            breakdown={part: seconds * factor for part, seconds in self.breakdown.items()},
            interval=None if self.interval is None else self.interval.times(factor),
        )


class LinkPath(NamedTuple):
    """Link path of a group's messages.

    Attributes:
        ranks: ranks of the group, on `hosts` hosts, `together` on each.
        bandwidth: achievable bytes per second that each rank sends in a ring.
        around_s: latency of one round along the ring.
        tree_s: latency up and down a tree.
        inside, between: achievable bytes per second from one rank to others of its host, and to other hosts, if each
            sends to all.
    """

    ranks: int
    hosts: int
    bandwidth: float
    around_s: float
    tree_s: float
    together: int = 1
    inside: float = 1e12
    between: float = 1e12


def link_path(layout: Layout, axis: str) -> LinkPath:
    """Return the link path of the groups along an axis.

    The groups with ranks on a host share the host's links to other hosts.
    """
    return group_path(layout, getattr(layout, axis), layout.stride[axis])


def expert_path(layout: Layout) -> LinkPath:
    """Return the link path of the ranks among which a layer's experts are divided.

    Experts that are divided among ranks of other axes use the nearest ranks of a stage.
    """
    return group_path(layout, layout.expert_ranks, 1) if layout.expert_ranks else link_path(layout, "ep")


def group_path(layout: Layout, ranks: int, apart: int) -> LinkPath:
    """Return the link path of groups of a given size and distance between ranks."""
    machines = layout.machines
    inside = machines.device.inside
    within = inside.bandwidth * constants.LINK_TOP_INSIDE * _of_torus(layout, ranks)
    if ranks == 1 or apart * ranks <= machines.per_host:
        steps = (ranks - 1) * inside.latency_s
        return LinkPath(ranks, 1, within, steps, 2 * steps, ranks, _to_all(layout, ranks, within), within)
    together = max(1, min(ranks, machines.per_host // apart))
    hosts = -(-ranks // together)
    own = machines.between.bandwidth * constants.LINK_TOP_BETWEEN
    if hosts > machines.oversubscribed_beyond:
        own /= machines.oversubscription
    bandwidth = own * together
    if together > 1:
        bandwidth = min(bandwidth, within)
    around = hosts * machines.between.latency_s + (ranks - hosts) * inside.latency_s
    tree = 2 * (log2(hosts) * machines.between.latency_s + (together - 1) * inside.latency_s)
    return LinkPath(ranks, hosts, bandwidth, around, tree, together, _to_all(layout, together, within), own)


def _of_torus(layout: Layout, ranks: int) -> float:
    """Return the share of a device's links that a group uses.

    On a torus, small groups lie along one dimension. In a mesh of pairwise links, a group has only its own links.
    """
    device, torus = layout.machines.device, layout.machines.device.torus
    if device.mesh and 1 < ranks < device.per_host:
        return (ranks - 1) / (device.per_host - 1)
    if not torus or ranks >= layout.machines.per_host:
        return 1.0
    return min(1.0, (1 if ranks <= constants.TORUS_SIDE else 2) / torus)


def _to_all(layout: Layout, ranks: int, within: float) -> float:
    """Return a rank's bytes per second when it sends to all others of its host.

    Half of the data crosses the middle of a torus: a side of s links carries 8 / s of a link for each rank.
    """
    torus = layout.machines.device.torus
    if not torus or ranks < 2:
        return within
    side = max(float(ranks) ** (1 / torus), 2.0)
    links: float = min(8 / side, 2.0 * torus)
    return within / (2 * torus) * links


def all_reduce_s(nbytes: float, path: LinkPath) -> float:
    """Return the seconds of an all-reduce over a ring or a tree.

    The tree has less latency. Each rank sends 2 (n − 1) / n of the bytes (Thakur et al., 2005).
    """
    if path.ranks < 2:
        return 0.0
    return (
        constants.COLLECTIVE_S
        + 2 * nbytes * (path.ranks - 1) / path.ranks / path.bandwidth
        + min(2 * path.around_s, path.tree_s)
    )


def gather_s(nbytes: float, path: LinkPath, parts: float = 1.0) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `nbytes` on each rank.

    Each rank sends (n − 1) / n of the bytes. NCCL's rings have a step for each rank; for many hosts, its PAT algorithm
    has a logarithmic number of steps (NCCL 2.23).

    Args:
        parts: number of collectives into which the bytes are divided.
    """
    if path.ranks < 2:
        return 0.0
    latency = min(path.around_s, path.tree_s)
    return parts * (constants.COLLECTIVE_S + latency) + nbytes * (path.ranks - 1) / path.ranks / path.bandwidth


def all_to_all_s(nbytes: float, path: LinkPath, copies: float = 1.0, node_limit: int = 0) -> float:
    """Return the seconds of an all-to-all, on the slower of both levels of links.

    Args:
        nbytes: bytes that a rank sends to all ranks together.
        copies: number of experts that a token is sent to.
        node_limit: maximum number of hosts with these experts; each of these hosts gets a token once. 0: each expert
            gets its own copy.
    """
    if path.ranks < 2:
        return 0.0
    inside_s = nbytes * (path.ranks - 1) / path.ranks / path.inside
    outside_s = 0.0
    if path.hosts > 1:
        crossing = 1 - path.together / path.ranks
        if node_limit and copies > 1:
            reached = path.hosts * (1 - (1 - 1 / path.hosts) ** copies)
            crossing *= min(reached, node_limit) / copies
        outside_s = nbytes * crossing / path.between
    latency = constants.COLLECTIVE_S + min(path.around_s, path.tree_s)
    return latency + max(inside_s, outside_s)


def send_s(nbytes: float, layout: Layout, axis: str = "pp") -> float:
    """Return the seconds of one message from a rank to its neighbour along an axis."""
    inside = layout.stride[axis] * getattr(layout, axis) <= layout.machines.per_host
    link = layout.machines.device.inside if inside else layout.machines.between
    top = constants.LINK_TOP_INSIDE if inside else constants.LINK_TOP_BETWEEN
    return constants.COLLECTIVE_S + link.latency_s + nbytes / (link.bandwidth * top)


_INNER = ("fsdp", "tp", "pp", "cp", "ep")  # axes of a worker's ranks
_HOLD_PARTS = ("fsdp", "tp", "pp")


def exchanged(layout: Layout, parameters: float) -> tuple[float, float]:
    """Return how many numbers a replica pushes and pulls in a step.

    If servers own the parameters, a replica pushes only the rows of sparse tables that its samples looked up, and pulls
    the rows that any replica has changed. Without such servers, with a period, or if a replica has several ranks,
    tables are treated as dense. If a replica has several ranks, the first one pushes for all.

    Args:
        parameters: numbers of a rank's gradients.
    """
    if layout.served:
        parameters *= prod(getattr(layout, axis) for axis in _HOLD_PARTS)
    tables = layout.trace.sparse if layout.served and layout.sync_every == 1 and not _divided(layout) else ()
    dense = parameters - sum(table.rows * table.width for table in tables)
    samples = layout.samples * layout.microbatches
    own, everyones = (sum(table.touched(n * samples) for table in tables) for n in (1, layout.dp))
    return dense + own, dense + everyones


def joined_s(layout: Layout, parameters: float, send_s: Callable[[float, str], float]) -> float:
    """Return the seconds to join gradients on a worker's first rank, or to send parameters.

    Args:
        parameters: numbers of a rank's gradients.
        send_s: seconds of a message of a given number of bytes along an axis.
    """
    axes = _divided(layout)
    if not layout.served or not axes:
        return 0.0
    others = prod(getattr(layout, axis) for axis in axes) - 1
    return send_s(others * parameters * layout.gradient_bytes, axes[0])


def _divided(layout: Layout) -> list[str]:
    """Return the axes of a replica's ranks, the farthest first."""
    return sorted((axis for axis in _INNER if getattr(layout, axis) > 1), key=lambda axis: -layout.stride[axis])


def served_s(layout: Layout, up_s: float, down_s: float, work_s: float, apply_s: float) -> float:
    """Return the seconds that a step waits for servers, in addition to its own work.

    Pushes of replicas may be compressed, but pulls are not. A server's link carries the traffic of all replicas,
    divided by the servers. If servers own the parameters, workers do not wait for one another. They wait only for a
    server whose work takes longer than a step.

    Args:
        up_s, down_s: seconds to send one replica's gradients to an otherwise idle server, and back.
        work_s: compute of a step.
        apply_s: seconds of an optimizer step on all parameters.
    """
    load = layout.dp / layout.servers
    if not layout.served:
        return max(1.0, load) * (up_s + down_s) / layout.sync_every
    alone_s = (up_s + down_s + apply_s) / layout.sync_every
    return max(alone_s, load * alone_s - work_s)
