"""Inputs of the cost model: machines, layouts, and times of collectives.

The time of a collective follows from the latency and bandwidth of a group's links, as with NCCL's rings and trees. This
module needs neither torch nor a job.
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
from paceline.planning.cost.constants import StackName
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import AXES, Remat, Schedule
from paceline.planning.sync_info import TRANSPORTS, WITHIN_HOST
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
    """Properties of the framework that runs a plan.

    None of the values is fitted.

    Attributes:
        name: name of the framework, such as `paceline`, `Megatron-LM`, `Megatron-DeepSpeed` or `FSDP`.
        overlaps_gradients: True if gradients are reduced during the backward pass.
        sums_gradients: True if gradients are all-reduced under ZeRO-1 instead of reduce-scattered (DeepSpeed without
            `reduce_scatter`).
        overlaps_parameters: True if the all-gather of updated parameters under ZeRO-1 overlaps the next forward pass.
        agrees_s: time in seconds until all ranks know that the last gradients are ready.
        overlaps_tp, overlaps_ep: fraction of the communication of tensor and expert parallelism that overlaps matrix
            products.
        overlaps_hops: True if pipeline stages send activations while they compute.
        flash: True if attention is one fused kernel that does not store its scores.
        attention: generation of the attention kernel: FlashAttention 1, 2 or 3; cuDNN since 9.0 counts as 3.
        graphs: True if kernels are replayed as CUDA graphs, without Python.
        blocking: True if Python waits for every kernel (CUDA_LAUNCH_BLOCKING=1).
        keeps: results that remat=selective keeps: everything except attention scores, all results of matrix products,
            or every second one.
        node_limit: maximum number of hosts with the experts of one token; a token is sent to each of these hosts once.
            0 means no limit.
        stack: how far the software fuses kernels (`constants.STACKS`).
        softmax_of: the softmax is fused only if the number of score matrices is a multiple of this number.
        fused_casts: True if a cast to low precision and its scale are one kernel.
        stops_early: True if recomputation of a block stops before its last matrix product, because the backward pass
            does not need its output (as in torch).
        scatters_hops: True if each tp rank sends a part of a stage's output and the next stage gathers the parts.
    """

    name: str = "paceline"
    overlaps_gradients: bool = True
    sums_gradients: bool = False
    overlaps_parameters: bool = True
    agrees_s: float = 0.0
    overlaps_tp: float = 0.0
    overlaps_ep: float = 0.0
    overlaps_hops: bool = False
    graphs: bool = False
    blocking: bool = False
    keeps: Literal["attention", "products", "half"] = "attention"
    node_limit: int = 0
    flash: bool = True
    attention: int = 2
    stack: StackName = "traced"
    softmax_of: int = 1
    scatters_hops: bool = False
    fused_casts: bool = True
    stops_early: bool = True


@dataclass(frozen=True)
class Machines:
    """A cluster as the cost model sees it: equal hosts with two levels of links.

    Attributes:
        device: the slowest of the devices in use.
        hosts: number of hosts, or of domains if fast links join several hosts into one domain (an NVL72, a TPU pod).
        per_host: number of devices in each host.
        between: link between hosts; its bandwidth is the share of *one device*, which is the host's bandwidth divided
            by its devices.
        oversubscription: factor by which the bandwidth is lower for groups that span more than `oversubscribed_beyond`
            hosts.
        speeds: speed of each host relative to `device`; () if all hosts are equally fast.
        memory_bytes: memory of one device that a job may use, in bytes; None uses the catalogue's value.
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
    # factors from measured runs; predictions are multiplied by them
    adjustment: Adjustment | None = field(default=None, compare=False)
    oversubscription: float = 1.0
    oversubscribed_beyond: int = 1

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Layout:
    """A plan, a model and machines as numbers for the cost model.

    The product of the degrees is the number of ranks. Ranks are placed on hosts in the order tp, ep, cp, fsdp, pp, dp,
    as in a run's mesh, unless `order` specifies another order.

    Attributes:
        samples: number of samples in one microbatch of one data-parallel rank. There are dp × fsdp × ep data-parallel
            ranks.
        microbatches: number of microbatches of one data-parallel rank in a step.
        chunks: number of virtual stages on each pipeline rank.
        zero: ZeRO stage of fsdp, 1 to 3.
        zero_dp: True if the optimizer state is also sharded over dp (ZeRO-1 in other frameworks).
        parameter_bytes, gradient_bytes, optimizer_bytes: bytes per parameter of the parameters, gradients and optimizer
            state; a master copy counts as optimizer state.
        cut: number of blocks of each virtual stage, in order; () balances the stages by the times of the blocks.
        sync_bytes: bytes per gradient element that replicas exchange, once every `sync_every` steps.
        servers: number of parameter servers; 0 if replicas reduce without servers. Servers own the parameters if
            `served` is True, else they only sum gradients.
        order: axes of the mesh; ranks along the first axis are nearest to each other.
        products: precision of matrix products with weights inside layers, if lower than `precision`.
        expert_ranks: number of ranks over which the whole experts of a layer are distributed, if it differs from `ep`.
            0 means `ep` ranks, and tp divides each expert. With Megatron Core's folding (arXiv:2504.14960), dp and tp
            ranks hold experts.
        expert_tp: number of neighbouring ranks that divide each expert, if `expert_ranks` is set.
        shards_over_cp: True if the state is also sharded over cp ranks.
        offload_activations: True if the activations that remat keeps are offloaded to the host's memory.
        ulysses: True if cp redistributes heads by an all-to-all (arXiv:2309.14509) instead of passing keys and values
            around a ring.
        remat_share: fraction of the layers that remat=block recomputes.
        lora: rank of the adapters that are trained instead of the weights and are not in the trace; 0 without them.
        trained: fraction of the trace's parameters that is trained.
        imbalance: largest number of tokens that one rank's experts get, relative to the mean; 1 in benchmarks with
            forced balance.
        gather_bytes: bytes per gathered parameter, if fewer than per activation (ZeRO++'s quantised weights,
            arXiv:2306.10209); 0 uses the bytes per activation.
        regather_ranks: number of neighbouring fsdp ranks that keep a second copy of the parameters for the backward
            pass (ZeRO++'s hierarchical partition, or an integer `reshard_after_forward` in torch's FSDP); 0 gathers
            from all fsdp ranks.
        loss_chunk: number of tokens whose logits the loss computes at a time; 0 chooses it by size, and None computes
            whole logits.
        matrix_flops, matrix_numbers: operations of Muon on the matrices in a step, and elements of these matrices; 0
            for other optimizers.
        reference: True if each step has another forward pass, of the reference of the loss.
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
    expert_tp: int = 1
    shards_over_cp: bool = False
    offload_activations: bool = False
    ulysses: bool = False
    remat_share: float = 1.0
    lora: int = 0
    trained: float = 1.0
    imbalance: float = 1.0
    gather_bytes: float = 0.0
    regather_ranks: int = 0
    loss_chunk: int | None = None
    matrix_flops: float = 0.0
    matrix_numbers: float = 0.0
    reference: bool = False

    def changed(self, **values: Any) -> Layout:
        """Return a copy with changed fields, like `dataclasses.replace` but faster.

        A search creates a hundred thousand layouts.
        """
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__, **values)
        other.__dict__.pop("stride", None)  # it belonged to the old degrees
        return other

    @property
    def ranks(self) -> int:
        """Number of ranks, which is the product of all degrees."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, which divide the global batch."""
        return self.dp * self.fsdp * self.ep

    @property
    def global_batch(self) -> float:
        """Number of samples in one step."""
        return self.data_ranks * self.samples * self.microbatches

    @property
    def number_bytes(self) -> int:
        """Bytes per element of an activation."""
        return BYTES[self.precision]

    @property
    def gathered_bytes(self) -> float:
        """Bytes per parameter in an FSDP all-gather."""
        return self.gather_bytes or min(self.parameter_bytes, self.number_bytes)

    @property
    def expert_parts(self) -> int:
        """Number of ranks over which the experts of a layer are divided.

        Each rank holds whole experts, or tp slices of experts.
        """
        return self.expert_ranks * self.expert_tp or self.tp * self.ep

    @property
    def expert_copies(self) -> float:
        """Number of ranks of a stage that hold the same experts."""
        return max(self.ranks / self.pp / self.expert_parts, 1.0) if self.expert_ranks else float(self.dp)

    @property
    def cp_shards(self) -> int:
        """Number of cp ranks that shard the state together with fsdp or dp ranks."""
        return self.cp if self.shards_over_cp and (self.fsdp > 1 or self.zero_dp) else 1

    @cached_property
    def stride(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides, apart = {}, 1
        for axis in self.order:
            strides[axis] = apart
            apart *= getattr(self, axis)
        return strides

    def link(self, axis: str) -> LinkSpec:
        """Return the slowest link that messages along the axis use.

        The result is the link inside a host if each group is within one host, else the link between hosts.
        """
        span = self.stride[axis] * getattr(self, axis)
        return self.machines.device.inside if span <= self.machines.per_host else self.machines.between


# parts of a predicted step, with their display names
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
    """One span of a pipeline's timeline. Times are in seconds since the start of the step."""

    stage: int
    # forward, backward, weight or wait
    what: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Interval:
    """Interval that contains the measured step time with a probability of 80 %.

    Attributes:
        low_s, high_s: bounds of the interval.
        rests_on: text that states the basis of the interval.
    """

    low_s: float
    high_s: float
    rests_on: str

    @property
    def relative(self) -> float:
        """Half of the interval's width, relative to the geometric mean of its bounds."""
        return math.sqrt(self.high_s / self.low_s) - 1

    def __contains__(self, seconds: float) -> bool:
        """Return True if a time in seconds is inside the interval."""
        return self.low_s <= seconds <= self.high_s

    def times(self, factor: float) -> Interval:
        """Return the interval with both bounds multiplied by a factor."""
        return replace(self, low_s=self.low_s * factor, high_s=self.high_s * factor)


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a plan.

    Attributes:
        step_time_s: duration of one step, in seconds.
        memory_bytes: peak memory of the rank that needs the most, in bytes.
        throughput: samples per second of all ranks together.
        mfu: model FLOPs utilization: FLOP/s of the model without recomputation, divided by the peak of all devices;
            None if the peak is unknown.
        cost_per_run: cost of the run in the currency of the user's prices; None if prices or the number of steps are
            unknown.
        breakdown: seconds for each of `PARTS`; they sum to `step_time_s`.
        memory: bytes for each use of memory (`HOLDERS`); they sum to `memory_bytes`.
        fit_probability: probability that the peak memory of each rank fits on its device.
        fits: True if this is more likely than not.
        notes: sentences that state what the prediction does not include.
        interval: interval of the measured step time; None during a search.
    """

    step_time_s: float
    memory_bytes: int
    throughput: float
    mfu: float | None
    breakdown: dict[str, float]
    memory: dict[str, float]
    fits: bool = True
    fit_probability: float = 1.0
    cost_per_run: float | None = None
    notes: tuple[str, ...] = field(default=())
    interval: Interval | None = None

    def __repr__(self) -> str:
        """Return step time, throughput and memory as text."""
        step = str(seconds(self.step_time_s))
        if self.interval is not None:
            step = f"{step} ({seconds(self.interval.low_s)} to {seconds(self.interval.high_s)})"
        fits = "fits" if self.fits else "does not fit"
        cost = "" if self.cost_per_run is None else f", {money(self.cost_per_run)} for the run"
        memory = f"{size(self.memory_bytes)} a rank, which {fits}"
        return f"<Prediction: {step} a step, {rate(self.throughput)}, {memory}{cost}>"

    def times(self, factor: float) -> Prediction:
        """Return the prediction with all times and the cost multiplied by a factor."""
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
    """Bandwidth and latency of the links between the ranks of a group.

    Attributes:
        ranks: number of ranks in the group, of which `together` are on each of `hosts` hosts.
        bandwidth: bytes per second that each rank can send in a ring.
        around_s: latency of one round along the ring, in seconds.
        tree_s: latency up and down a tree, in seconds.
        inside, between: bytes per second that one rank can send to ranks of its own host, and to other hosts, in an
            all-to-all.
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
    """Return the link path of a group of ranks along an axis.

    All groups with ranks on the same host share the host's links to other hosts.
    """
    return group_path(layout, getattr(layout, axis), layout.stride[axis])


def state_path(layout: Layout, axis: str) -> LinkPath:
    """Return the link path of the ranks along `axis` and cp that shard the state."""
    if layout.cp_shards == 1:
        return link_path(layout, axis)
    apart = min(layout.stride[axis], layout.stride["cp"])
    return group_path(layout, getattr(layout, axis) * layout.cp_shards, apart)


def expert_path(layout: Layout) -> LinkPath:
    """Return the link path of the ranks among which a layer's experts are divided.

    If `expert_ranks` is set, these are the nearest ranks of a stage with different experts, whatever their axis.
    """
    if not layout.expert_ranks:
        return link_path(layout, "ep")
    return group_path(layout, layout.expert_ranks, layout.expert_tp)


def group_path(layout: Layout, ranks: int, apart: int) -> LinkPath:
    """Return the link path of `ranks` ranks that are `apart` ranks from each other."""
    machines = layout.machines
    inside = machines.device.inside
    within = inside.bandwidth * constants.LINK_TOP_INSIDE * _of_torus(layout, ranks)
    if ranks == 1 or apart * ranks <= machines.per_host:
        steps = (ranks - 1) * inside.latency_s
        return LinkPath(ranks, 1, within, steps, 2 * steps, ranks, _to_all(layout, ranks, within), within)
    together = max(1, min(ranks, machines.per_host // apart))
    hosts = -(-ranks // together)
    own = machines.between.bandwidth * constants.LINK_TOP_BETWEEN / hosts**constants.HOSTS
    if hosts > machines.oversubscribed_beyond:
        own /= machines.oversubscription
    bandwidth = own * together
    if together > 1:
        bandwidth = min(bandwidth, within)
    around = hosts * machines.between.latency_s + (ranks - hosts) * inside.latency_s
    tree = 2 * (log2(hosts) * machines.between.latency_s + (together - 1) * inside.latency_s)
    return LinkPath(ranks, hosts, bandwidth, around, tree, together, _to_all(layout, together, within), own)


def _of_torus(layout: Layout, ranks: int) -> float:
    """Return the fraction of a device's links that a group can use.

    On a torus, a small group lies along one dimension. In a full mesh, a group uses only the links between its own
    devices.
    """
    device, torus = layout.machines.device, layout.machines.device.torus
    if device.mesh and 1 < ranks < device.per_host:
        return (ranks - 1) / (device.per_host - 1)
    if not torus or ranks >= layout.machines.per_host:
        return 1.0
    return min(1.0, (1 if ranks <= constants.TORUS_SIDE else 2) / torus)


def _to_all(layout: Layout, ranks: int, within: float) -> float:
    """Return the bandwidth of an all-to-all within a host, in bytes per second.

    On a torus, half of the data crosses the middle. With s devices along a side, each rank therefore gets 8 / s of a
    link.
    """
    torus = layout.machines.device.torus
    if not torus or ranks < 2:
        return within
    side = max(float(ranks) ** (1 / torus), 2.0)
    links: float = min(8 / side, 2.0 * torus)
    return within / (2 * torus) * links


def all_reduce_s(nbytes: float, path: LinkPath) -> float:
    """Return the time of an all-reduce over a ring or a tree, in seconds.

    Each of n ranks sends 2 (n − 1) / n of the bytes (Thakur et al., 2005).
    """
    if path.ranks < 2:
        return 0.0
    return (
        constants.COLLECTIVE_S
        + 2 * nbytes * (path.ranks - 1) / path.ranks / path.bandwidth
        + min(2 * path.around_s, path.tree_s)
    )


def gather_s(nbytes: float, path: LinkPath, parts: float = 1.0) -> float:
    """Return the time of an all-gather or reduce-scatter of `nbytes`, in seconds.

    Each of n ranks sends (n − 1) / n of the bytes. A ring of NCCL has a step for each rank. Since NCCL 2.23, the PAT
    algorithm for many hosts has a logarithmic number of steps.

    Args:
        parts: number of collectives that transfer the bytes, each with its own latency.
    """
    if path.ranks < 2:
        return 0.0
    latency = min(path.around_s, path.tree_s)
    return parts * (constants.COLLECTIVE_S + latency) + nbytes * (path.ranks - 1) / path.ranks / path.bandwidth


def all_to_all_s(nbytes: float, path: LinkPath, copies: float = 1.0, node_limit: int = 0) -> float:
    """Return the time of an all-to-all, in seconds.

    The slower of the two link levels, inside a host and between hosts, determines the time.

    Args:
        nbytes: total number of bytes that a rank sends.
        copies: number of experts to which a token is sent.
        node_limit: maximum number of hosts with these experts; each of these hosts gets a token once. 0 means that each
            expert gets its own copy.
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
    """Return the time of a message between neighbours along an axis, in seconds."""
    inside = layout.stride[axis] * getattr(layout, axis) <= layout.machines.per_host
    link = layout.machines.device.inside if inside else layout.machines.between
    top = constants.LINK_TOP_INSIDE if inside else constants.LINK_TOP_BETWEEN
    return constants.COLLECTIVE_S + link.latency_s + nbytes / (link.bandwidth * top)


_INNER = ("fsdp", "tp", "pp", "cp", "ep")  # axes of a worker's ranks
_HOLD_PARTS = ("fsdp", "tp", "pp")


def exchanged(layout: Layout, parameters: float) -> tuple[float, float]:
    """Return how many elements a replica pushes to and pulls from parameter servers.

    If servers own the parameters, a replica pushes only those rows of sparse tables that its samples looked up, and
    pulls the rows that any replica has changed. If servers only sum gradients, `sync_every` exceeds 1, or a replica has
    several ranks, tables are treated as dense. If a replica has several ranks, its first rank pushes for all of them.

    Args:
        parameters: number of gradient elements on one rank.
    """
    if layout.served:
        parameters *= prod(getattr(layout, axis) for axis in _HOLD_PARTS)
    tables = layout.trace.sparse if layout.served and layout.sync_every == 1 and not _divided(layout) else ()
    dense = parameters - sum(table.rows * table.width for table in tables)
    samples = layout.samples * layout.microbatches
    own, everyones = (sum(table.touched(n * samples) for table in tables) for n in (1, layout.dp))
    return dense + own, dense + everyones


def joined_s(layout: Layout, parameters: float, send_s: Callable[[float, str], float]) -> float:
    """Return the time to gather gradients on a worker's first rank, in seconds.

    Sending parameters from the first rank to the others takes the same time.

    Args:
        parameters: number of gradient elements on one rank.
        send_s: function that returns the time of a message of a given number of bytes along an axis.
    """
    axes = _divided(layout)
    if not layout.served or not axes:
        return 0.0
    others = prod(getattr(layout, axis) for axis in axes) - 1
    return send_s(others * parameters * layout.gradient_bytes, axes[0])


def _divided(layout: Layout) -> list[str]:
    """Return the axes that divide a replica, by descending distance between ranks."""
    return sorted((axis for axis in _INNER if getattr(layout, axis) > 1), key=lambda axis: -layout.stride[axis])


def sums_in_memory(layout: Layout) -> bool:
    """Return True if parameter servers sum in the host's shared memory."""
    if not layout.servers or layout.served or not layout.machines.device.is_core:
        return False
    within = WITHIN_HOST if layout.transport == "auto" else layout.transport
    return layout.stride["dp"] * layout.dp <= layout.machines.per_host and TRANSPORTS[within].shares_memory


def summed_bytes(layout: Layout, parameters: float) -> float:
    """Return the size of an all-reduce that takes as long as the gradient sum.

    The size is in bytes. In shared memory, each server sums its part of all gradients, and compressed gradients are
    decoded before the sum.

    Args:
        parameters: number of gradient elements on one rank.
    """
    if not layout.servers:
        return parameters * layout.sync_bytes
    return parameters * layout.gradient_bytes * layout.dp / min(layout.servers, layout.dp)


def served_s(layout: Layout, up_s: float, down_s: float, work_s: float, apply_s: float) -> float:
    """Return the seconds that a step waits for parameter servers that exchange messages.

    Pushes may be compressed, but pulls are not. Each server's link carries its share of the traffic of all replicas. If
    servers own the parameters, workers do not wait for one another. They wait only for a server whose work takes longer
    than a step.

    Args:
        up_s, down_s: time to send one replica's gradients to an otherwise idle server, and the time to send the result
            back.
        work_s: compute time of a step.
        apply_s: time of an optimizer step on all parameters.
    """
    load = layout.dp / layout.servers
    if not layout.served:
        return max(1.0, load) * (up_s + down_s) / layout.sync_every
    alone_s = (up_s + down_s + apply_s) / layout.sync_every
    return max(alone_s, load * alone_s - work_s)
