"""All that bears on what a plan costs: the work, the machines, how one is laid out over the other. Needs neither torch nor a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from paceline.cluster.catalogue.hardware import Accelerator, LinkSpec
from paceline.trace.graph import Trace

if TYPE_CHECKING:
    from paceline.planner.calibrate import Calibration

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Stack:
    """The software that runs the plan: what it adds to the physics. One derating a stack, the rest is how its code works.

    Attributes:
        name: such as `paceline`, `Megatron-LM`, `Megatron-DeepSpeed`, `FSDP`.
        derating: by what the time of all computing is multiplied.
        kernel_floor_s: the least time a kernel takes, from Python to its end; None: the device's own.
        overlaps_gradients: whether gradients travel while the backward pass goes on.
        flash: whether attention is one fused kernel without its squares in memory.
        attention: the generation of that kernel: FlashAttention 1, or 2 and what came after.
        loss: how much memory traffic its loss over a vocabulary makes, relative to torch's.
        kernels: how many kernels it launches for each of the trace's, where it is less fused.
        softmax_of: a multiple of how many of attention's squares its fused softmax needs; for others it takes several kernels.
        stops_early: whether computing a block again stops where all that was kept is there again, before its last product (torch's does).
        scatters_hops: whether the ranks of tp send a part each of what goes to the next stage, and gather it there.
    """

    name: str = "paceline"
    derating: float = 1.0
    kernel_floor_s: float | None = None
    overlaps_gradients: bool = True
    flash: bool = True
    attention: int = 2
    loss: float = 1.0
    kernels: float = 1.0
    softmax_of: int = 1
    scatters_hops: bool = False
    stops_early: bool = True


@dataclass(frozen=True)
class Machines:
    """A cluster as the cost model sees it: equal hosts, one kind of device, two levels of links.

    Attributes:
        device: the slowest of those that take part.
        hosts: how many.
        per_host: devices of each.
        between: from host to host: bytes per second of *one device* (a host's divided by its devices).
        speeds: of each host relative to `device`, where they differ; () where all are alike.
        memory_bytes: of one device that a job may have; None: the catalogue's.
    """

    device: Accelerator
    hosts: int
    per_host: int
    between: LinkSpec
    speeds: tuple[float, ...] = ()
    memory_bytes: int | None = None
    price_per_hour: float | None = None  # of one device
    calibration: Calibration | None = None  # what was measured here; it goes before the catalogue

    @property
    def devices(self) -> int:
        """All of them."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Layout:
    """A plan, a model and machines, as numbers.

    The degrees multiply to the ranks; ranks fill hosts in the order tp, ep, cp, fsdp, pp, dp (a run's mesh), unless `order` says otherwise.

    Attributes:
        samples: of one microbatch of one data-parallel rank (dp × fsdp × ep of them).
        microbatches: of one data-parallel rank in a step.
        chunks: virtual stages of a pipeline's rank.
        zero: what fsdp shares out, 1 to 3. `zero_dp`: whether the optimizer's state is shared out over dp as well (ZeRO-1 of others).
        parameter_bytes, gradient_bytes, optimizer_bytes: per parameter; a master copy counts to the optimizer.
        cut: how many blocks each virtual stage has, in order; (): as even as the blocks' times allow.
        sync_bytes: per gradient that travels between replicas; `sync_every`: in how many steps once.
        order: axes from those whose ranks are nearest.
    """

    trace: Trace
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
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    chunks: int = 1
    remat: Literal["none", "selective", "block"] = "none"
    precision: Precision = "fp32"
    parameter_bytes: float = 4.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    offload: bool = False
    cut: tuple[int, ...] = ()
    sync_bytes: float = 4.0
    sync_every: int = 1
    stack: Stack = field(default_factory=Stack)
    order: tuple[str, ...] = ("tp", "ep", "cp", "fsdp", "pp", "dp")
    threads: int = 1  # of a rank on CPUs
    transport: str = "auto"  # between ranks on CPUs
    fused: bool = False  # the optimizer's update as one kernel

    @property
    def ranks(self) -> int:
        """The product of all degrees."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Into how many shares a global batch is dealt."""
        return self.dp * self.fsdp * self.ep

    @property
    def global_batch(self) -> float:
        """Samples of a step."""
        return self.data_ranks * self.samples * self.microbatches

    @property
    def number_bytes(self) -> int:
        """The size of an activation's number."""
        return BYTES[self.precision]

    @cached_property
    def stride(self) -> dict[str, int]:
        """Of each axis: how far apart, in ranks, its neighbours are."""
        strides, apart = {}, 1
        for axis in self.order:
            strides[axis] = apart
            apart *= getattr(self, axis)
        return strides

    def link(self, axis: str) -> LinkSpec:
        """The slowest link that a message along the axis takes: inside a host where all ranks of a group are in one."""
        span = self.stride[axis] * getattr(self, axis)
        return self.machines.device.inside if span <= self.machines.per_host else self.machines.between
