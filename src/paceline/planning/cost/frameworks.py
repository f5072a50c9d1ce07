"""Profiles of other frameworks for the cost model.

The profiles follow the documentation and code of each framework. No number is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline.planning.cost.layout import FrameworkProfile, Layout

# share of tp traffic that user buffers and async TP hide
OVERLAPPED_TP = 0.6
MEGATRON_ORDER = ("tp", "ep", "cp", "fsdp", "dp", "pp")  # neighbours along pp are the farthest apart


@dataclass(frozen=True)
class Framework:
    """Profile of a framework, and the bytes of state that it keeps for each parameter.

    Attributes:
        full: True if parameters are kept in fp32 and cast by autocast; False if they are kept in 16 bits with an fp32
            master copy.
        gradient_bytes, sync_bytes: bytes per gradient element in memory and in communication, if parameters have 16
            bits.
        order: axes of the mesh; ranks along the first axis are nearest to each other.
        shards: default sharding of the state among data-parallel ranks, for runs that do not state it.
        folds: True if whole experts are distributed over the ranks of tp and dp.
        sequence: True if tp ranks also divide the tokens of norms and residuals (sequence parallelism).
        shards_over_cp: True if the state is sharded over cp ranks as well as fsdp ranks.
        recomputes: recomputation of runs that do not state it, if the framework has a default.
        cuts_by_cost: True if pipeline stages have equal shares of the multiplications, instead of equal numbers of
            layers.
    """

    profile: FrameworkProfile
    full: bool = False
    gradient_bytes: float = 2.0
    sync_bytes: float = 2.0
    order: tuple[str, ...] = Layout.order
    shards: Literal["none", "zero1", "zero3"] = "none"
    folds: bool = False
    sequence: bool = False
    shards_over_cp: bool = False
    recomputes: Literal["", "selective"] = ""
    cuts_by_cost: bool = False

    @property
    def name(self) -> str:
        """Name of the profile."""
        return self.profile.name

    def laid_out(
        self, layout: Layout, *, fp32_gradients: bool = False, pure: bool = False, moment_bytes: float = 4.0
    ) -> Layout:
        """Return a copy of a layout with the properties of this framework.

        Args:
            fp32_gradients: True if gradients are accumulated and sent in four bytes per element.
            pure: True if gradients are sent in 16 bits, whatever their precision in memory.
            moment_bytes: bytes per element of each of Adam's two moments: 4 in fp32, 2 in bf16, 1 in 8-bit Adam
                (arXiv:2110.02861).
        """
        layout = replace(layout, framework=self.profile, order=self.order, shards_over_cp=self.shards_over_cp)
        if layout.precision in ("fp32", "tf32", "fp64") or self.full:
            size = 8.0 if layout.precision == "fp64" else 4.0
            state = 2 * moment_bytes * size / 4
            return replace(
                layout, parameter_bytes=size, gradient_bytes=size, optimizer_bytes=state, sync_bytes=self._sent(size)
            )
        kept = 4.0 if fp32_gradients else self.gradient_bytes
        sent = 2.0 if pure else 4.0 if fp32_gradients else self.sync_bytes
        state = 4 + 2 * moment_bytes  # with a master copy
        return replace(layout, parameter_bytes=2.0, gradient_bytes=kept, optimizer_bytes=state, sync_bytes=sent)

    def _sent(self, size: float) -> float:
        return min(size, self.sync_bytes) if self.full else size


PACELINE = FrameworkProfile(fused_casts=False)
PACELINE_COMPILED = FrameworkProfile(stack="traced, compiled")

_MEGATRON = FrameworkProfile(
    overlaps_gradients=False, overlaps_parameters=False, flash=False, softmax_of=4, stops_early=False
)
# Megatron-LM of 2021 to 2022, and DeepSpeed's copy, with less fused kernels
MEGATRON_DEEPSPEED = Framework(
    replace(_MEGATRON, name="Megatron-DeepSpeed", stack="partly fused", sums_gradients=True), order=MEGATRON_ORDER
)
MEGATRON_LM = Framework(
    replace(_MEGATRON, name="Megatron-LM", stack="partly fused", scatters_hops=True), order=MEGATRON_ORDER
)
# Megatron Core with Transformer Engine: cuDNN's attention, all kinds of traffic overlapped
MEGATRON_CORE = Framework(
    FrameworkProfile(
        "Megatron Core",
        stack="fused",
        attention=3,
        overlaps_hops=True,
        overlaps_ep=0.4,
        node_limit=1000,
        scatters_hops=True,
        stops_early=False,
    ),
    gradient_bytes=4.0,
    sync_bytes=2.0,
    order=MEGATRON_ORDER,
    shards="zero1",
    folds=True,
    sequence=True,
    shards_over_cp=True,
)
# DeepSeek's own: DualPipe hides the exchange of experts behind compute, and tokens go to at most 4 hosts
# (DeepSeek-V3, arXiv:2412.19437, sections 2.1.2 and 3.2.1)
HAI_LLM = Framework(
    FrameworkProfile(
        "HAI-LLM",
        stack="fused",
        attention=3,
        overlaps_ep=0.9,
        overlaps_hops=True,
        node_limit=4,
        stops_early=False,
        keeps="half",
    ),
    gradient_bytes=4.0,
    order=MEGATRON_ORDER,
    shards="zero1",
    folds=True,
)
# Gradients are summed over replicas in fp32 after the last backward pass, also with ZeRO-1; only the update is sharded
# (nanotron, `sync_gradients_across_dp` and `get_fp32_accum_hook`)
NANOTRON = Framework(
    FrameworkProfile(
        "nanotron", stack="eager", overlaps_gradients=False, overlaps_parameters=False, sums_gradients=True
    ),
    gradient_bytes=4.0,
    sync_bytes=4.0,
    order=MEGATRON_ORDER,
    sequence=True,
    cuts_by_cost=True,
)
DEEPSPEED = Framework(FrameworkProfile("DeepSpeed", stack="partly fused", stops_early=False))
FSDP = Framework(FrameworkProfile("FSDP", stack="partly fused"), full=True, shards="zero3", sequence=True)
COMPOSER = Framework(FrameworkProfile("Composer FSDP", stack="partly fused"), full=True)
TORCHTITAN = Framework(
    FrameworkProfile("torchtitan", stack="eager", keeps="half"),
    full=True,
    shards="zero3",
    sequence=True,
    recomputes="selective",
    shards_over_cp=True,
)
# torch.compile fuses memory-bound kernels
TORCHTITAN_COMPILED = Framework(
    FrameworkProfile("torchtitan, compiled", stack="compiled", keeps="half"),
    full=True,
    shards="zero3",
    sequence=True,
    recomputes="selective",
    shards_over_cp=True,
)
# until 2024, torchtitan did not compile its loss
TORCHTITAN_2024 = replace(
    TORCHTITAN_COMPILED, profile=replace(TORCHTITAN_COMPILED.profile, name="torchtitan of 2024, compiled")
)
DDP = Framework(FrameworkProfile("DDP", stack="partly fused", flash=False), full=True)
# Horovod's ranks coordinate which gradients are ready once per cycle, of 5 ms until release 0.21 (its release notes)
_CYCLE_S = 0.005
HOROVOD = Framework(
    FrameworkProfile("TensorFlow with Horovod", stack="graph", flash=False, agrees_s=_CYCLE_S), full=True
)
TENSORFLOW_XLA = Framework(
    FrameworkProfile("TensorFlow with XLA", stack="compiled", flash=False, agrees_s=_CYCLE_S), full=True
)
PADDLE = Framework(FrameworkProfile("PaddlePaddle Fleet", stack="fused", flash=False), full=True)
ONEFLOW = Framework(FrameworkProfile("LiBai (OneFlow)", stack="fused", flash=False), full=True)
MAXTEXT = Framework(
    FrameworkProfile("MaxText (XLA)", stack="compiled", graphs=True, keeps="products", overlaps_tp=0.7),
    full=True,
    shards="zero3",
    sequence=True,
)
OTHER = Framework(FrameworkProfile("other", stack="partly fused"))


def summed(layout: Layout, parameters: float) -> float:
    """Return the equivalent size of a rank's gradient reduction, as elements of a dense all-reduce.

    The rows of sparse tables are all-gathered. An all-gather moves half as many bytes as an all-reduce.
    """
    return parameters - _whole(layout) + layout.dp * _own(layout) / 2


def stepped(layout: Layout, parameters: float) -> float:
    """Return the number of a rank's parameters that an optimizer update reads and writes."""
    return parameters - _whole(layout) + layout.dp * _own(layout)


def _whole(layout: Layout) -> float:
    return sum(table.rows * table.width for table in layout.trace.sparse) if _keeps_rows(layout) else 0.0


def _own(layout: Layout) -> float:
    samples = layout.samples * layout.microbatches
    return sum(table.touched(samples) for table in layout.trace.sparse) if _keeps_rows(layout) else 0.0


def _keeps_rows(layout: Layout) -> bool:
    """True if the engine exchanges only the looked-up rows of sparse tables (`engine/calls.py`).

    A stateful optimizer needs all rows.
    """
    if not layout.trace.sparse or layout.optimizer_bytes or not layout.machines.device.is_core:
        return False
    by_itself = layout.sync_every == 1 and not layout.servers and layout.framework == PACELINE
    return by_itself and layout.ranks == layout.dp
