"""Inputs of the cost model: the work, the machines, and their layout.

Needs neither torch nor a job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from paceline.cluster.catalogue import Accelerator, LinkSpec
from paceline.planning.model.graph import ModelTrace
from paceline.planning.plan import AXES, Remat, Schedule

if TYPE_CHECKING:
    from paceline.planning.calibrate import Calibration
    from paceline.planning.machines import Adjustment


Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
# Precision of products with weights, where it is lower than that of activations: scales for a tensor, a row, a block
# of 128 × 128, or 32 numbers in hardware (OCP MX, 2023).
Products = Literal["", "int8", "fp8", "fp8-row", "fp8-block", "mxfp8", "fp4"]


@dataclass(frozen=True)
class FrameworkProfile:
    """Framework profile: what the software that runs a plan adds to the physics.

    `derating`, `vector`, `mixtures`, `kernels`, `loss` and `overlaps_ep` are fitted (`fitted.py`), the others not.

    Attributes:
        name: such as `paceline`, `Megatron-LM`, `Megatron-DeepSpeed`, `FSDP`.
        derating: multiplies all compute times.
        overlaps_gradients: True if gradients are reduced during the backward pass.
        sums_gradients: True if ZeRO-1's gradients are summed whole, not scattered (DeepSpeed without `reduce_scatter`).
        overlaps_parameters: True if parameters that ZeRO-1 updates in parts are gathered during the next forward pass.
        agrees_s: seconds until ranks have agreed that the last gradients are ready.
        overlaps_tp, overlaps_ep: part of the traffic of tensor and expert parallelism that products hide.
        overlaps_hops: True if stages of a pipeline send while they compute.
        flash: True if attention is one fused kernel that does not store its scores.
        attention: the generation of that kernel: FlashAttention 1, 2, or 3 (also cuDNN's since 9.0).
        vector: memory traffic of kernels beside products, relative to the trace's; below 1 if more are fused.
        mixtures: the same of layers with experts, relative to `vector`; of their casts and of their kernels, too.
        graphs: True if kernels are replayed as graphs, without Python.
        blocking: True if Python waits for every kernel (CUDA_LAUNCH_BLOCKING=1).
        keeps: what remat=selective keeps: all but attention's squares, all results of products, or of every second one.
        node_limit: hosts that a token's experts are on, at most; 0: as chance has it. A token is sent to each once.
        loss: memory traffic of its loss over a vocabulary, relative to torch's.
        kernels: number of kernels launched for each of the trace's; above 1 if it is less fused.
        softmax_of: its fused softmax needs a multiple of so many score matrices; for other numbers it takes several
            kernels.
        stops_early: True if recomputation of a block stops before its last product, since all saved tensors are there
            (torch's does).
        scatters_hops: True if the ranks of tp each send a part of a stage's output, and gather it in the next stage.
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
    """A cluster as the cost model sees it: equal hosts with two levels of links.

    Attributes:
        device: the slowest of the devices in use.
        hosts: number of hosts; of domains where links inside a host join several (an NVL72, a TPU pod).
        per_host: devices of each.
        between: link between hosts, in bytes per second of *one device* (a host's divided by its devices).
        oversubscription: how many times less bandwidth groups have that span more than `oversubscribed_beyond` hosts.
        speeds: each host's speed relative to `device`, if they differ; else ().
        memory_bytes: memory of one device that a job may use; None: the catalogue's.
    """

    device: Accelerator
    hosts: int
    per_host: int
    between: LinkSpec
    speeds: tuple[float, ...] = ()
    memory_bytes: int | None = None
    # of one device
    price_per_hour: float | None = None
    # what was measured here; it goes before the catalogue
    calibration: Calibration | None = None
    # factors of runs that were measured, which whole predictions are multiplied with
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

    The degrees multiply to the ranks; ranks fill hosts in the order tp, ep, cp, fsdp, pp, dp (a run's mesh), unless
    `order` says otherwise.

    Attributes:
        samples: samples of one microbatch of one data-parallel rank (dp × fsdp × ep of them).
        microbatches: microbatches of one data-parallel rank in a step.
        chunks: virtual stages of a pipeline's rank.
        zero: ZeRO stage of fsdp, 1 to 3. `zero_dp`: True if the optimizer's state is sharded over dp as well (ZeRO-1 of
            others).
        parameter_bytes, gradient_bytes, optimizer_bytes: bytes per parameter; a master copy counts to the optimizer.
        cut: number of blocks of each virtual stage, in order; (): as even as the blocks' times allow.
        sync_bytes: bytes per gradient sent between replicas, once in `sync_every` steps.
        servers: parameter servers that sum gradients, or, where `served`, own the parameters; 0: replicas sum by
            themselves.
        order: axes, beginning with those whose ranks are nearest.
        products: precision of products with weights inside layers, if lower than `precision`.
        expert_ranks: ranks that a layer's experts are divided among whole, where that is not `ep` (Megatron Core's
            folding, arXiv:2504.14960: they may be ranks of dp and tp); 0: `ep`, and tp divides each expert.
        shards_over_cp: True if ranks of cp share the state as those of fsdp, or of a sharded dp, do.
        offload_activations: True if what remat keeps waits in the host's memory.
        ulysses: True if cp exchanges heads for tokens (arXiv:2309.14509) instead of passing keys around.
        remat_share: part of the layers that remat=block computes again.
        lora: rank of adapters that are trained in place of the weights; 0: the weights are.
        imbalance: tokens of the rank whose experts get the most, relative to the mean (benchmarks balance by force: 1).
        gather_bytes: bytes of a parameter as it is gathered, if fewer than activations have (ZeRO++'s quantised
            weights, arXiv:2306.10209); 0: those of activations.
        regather_ranks: ranks of fsdp, the nearest, that keep a further copy for the backward pass (ZeRO++'s
            hierarchical partition; `reshard_after_forward` of torch's FSDP as a number); 0: it gathers from all.
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
    # of a rank on CPUs
    threads: int = 1
    transport: str = "auto"  # between ranks on CPUs
    # the optimizer's update as one kernel
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
        """The layout with other values, as of `dataclasses.replace`; searches make a hundred thousand."""
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__, **values)
        other.__dict__.pop("stride", None)  # was of the old degrees
        return other

    @property
    def ranks(self) -> int:
        """Product of all degrees."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, into which the global batch is dealt."""
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
        """Bytes of a parameter as it is gathered."""
        return self.gather_bytes or min(self.parameter_bytes, self.number_bytes)

    @property
    def expert_parts(self) -> int:
        """Number of parts of a layer's experts: whole ones, or slices of each by tp."""
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
        """The slowest link of a message along the axis. It is the link inside a host if each group is within one."""
        span = self.stride[axis] * getattr(self, axis)
        return self.machines.device.inside if span <= self.machines.per_host else self.machines.between


# the parts of a predicted step, with their names for people
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
    # forward, backward, weight, wait
    what: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Interval:
    """Interval that holds a measured step time with a probability of 80 %.

    Attributes:
        low_s, high_s: its ends, in seconds.
        rests_on: what it rests on, for people.
    """

    low_s: float
    high_s: float
    rests_on: str

    @property
    def relative(self) -> float:
        """Half of its width, relative to its middle (the geometric mean of its ends)."""
        return math.sqrt(self.high_s / self.low_s) - 1

    def __contains__(self, seconds: float) -> bool:
        """True if a time is inside."""
        return self.low_s <= seconds <= self.high_s

    def times(self, factor: float) -> Interval:
        """The interval of a time that is multiplied."""
        return replace(self, low_s=self.low_s * factor, high_s=self.high_s * factor)


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a plan.

    Attributes:
        step_time_s: seconds of a whole step, all ranks together.
        memory_bytes: peak memory of one rank on its device.
        throughput: samples per second.
        mfu: FLOPs of the model (without recomputation) over the peak of all devices; None if the peak is not known.
        cost_per_run: in the currency of the user's prices; None without prices or without a known number of steps.
        breakdown: seconds of the step by `PARTS`; they sum to `step_time_s`.
        memory: bytes by holder; they sum to `memory_bytes`.
        fits: True if there is enough memory.
        notes: sentences on what the prediction does not know.
        interval: that of the step time; None in the middle of a search.
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

    def times(self, factor: float) -> Prediction:
        """The prediction with all times multiplied."""
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
