"""The software stacks of the published tables.

How each works, its one derating, and how many bytes it keeps of each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.planner.cost.layout import FrameworkProfile, Layout


@dataclass(frozen=True)
class StackFacts:
    """A framework profile, and its state in bytes.

    Gradients of 4 bytes where it adds them up in fp32, what an update keeps.
    """

    stack: FrameworkProfile
    gradient_bytes: float = 2.0
    sync_bytes: float = 2.0
    parameter_bytes: float = 2.0
    optimizer_bytes: float = 12.0

    def laid_out(self, layout: Layout, cells: Mapping[str, str]) -> Layout:
        """With this stack, and its bytes for each parameter in the row's precision."""
        precision = cells.get("precision", "").lower()
        if "tf32" in precision or ("fp32" in precision and "16" not in precision):
            return replace(
                layout,
                framework=self.stack,
                parameter_bytes=4.0,
                gradient_bytes=4.0,
                optimizer_bytes=8.0,
                sync_bytes=4.0,
            )
        adds_up_in_fp32 = "fp32 grad" in precision
        return replace(
            layout,
            framework=self.stack,
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=4.0 if adds_up_in_fp32 else self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            sync_bytes=2.0 if "pure" in precision else 4.0 if adds_up_in_fp32 else self.sync_bytes,
        )


# autocast over fp32 parameters
_FULL = {"parameter_bytes": 4.0, "gradient_bytes": 4.0, "optimizer_bytes": 8.0, "sync_bytes": 4.0}
_MEGATRON = FrameworkProfile(overlaps_gradients=False, flash=False, softmax_of=4, stops_early=False)
_EAGER = replace(_MEGATRON, loss=2.50, kernels=5.55)

MEGATRON_EAGER = StackFacts(replace(_EAGER, name="Megatron-DeepSpeed eager", derating=0.81))
MEGATRON_ZERO = StackFacts(replace(_EAGER, name="Megatron-DeepSpeed", derating=1.16))
MEGATRON_LM = StackFacts(
    replace(_MEGATRON, name="Megatron-LM", derating=1.03, loss=2.0, kernels=2.0, scatters_hops=True)
)
MEGATRON_CORE = StackFacts(
    FrameworkProfile("Megatron Core", derating=1.03, loss=2.0, kernels=1.5, scatters_hops=True, stops_early=False),
    gradient_bytes=4.0,
    sync_bytes=4.0,
)  # as Megatron-LM's
DEEPSPEED = StackFacts(FrameworkProfile("DeepSpeed", derating=1.09, kernels=2.0, stops_early=False))  # as FSDP's
FSDP = StackFacts(FrameworkProfile("FSDP", derating=1.09, kernels=1.5), **_FULL)  # as Composer's
COMPOSER = StackFacts(
    FrameworkProfile("Composer FSDP, FlashAttention 1", derating=1.09, kernels=1.5, attention=1), **_FULL
)
HOROVOD = StackFacts(FrameworkProfile("TensorFlow 1 with Horovod", derating=2.57, flash=False, kernels=1.5), **_FULL)
DDP = StackFacts(FrameworkProfile("DDP", derating=1.09, flash=False, kernels=1.5), **_FULL)
OTHER = StackFacts(FrameworkProfile("other", derating=1.05))  # between those that are known
STACKS = (MEGATRON_EAGER, MEGATRON_ZERO, MEGATRON_LM, MEGATRON_CORE, DEEPSPEED, FSDP, COMPOSER, HOROVOD, DDP, OTHER)


def facts(cells: Mapping[str, str]) -> StackFacts:
    """By what a row says of its framework."""
    name = cells.get("framework", "").lower()
    notes = cells.get("notes", "").lower()
    if "deepspeed" in name and "megatron" not in name:
        return DEEPSPEED
    if "deepspeed" in name:
        return MEGATRON_ZERO if "zero" in cells.get("zero_fsdp", "").lower() else MEGATRON_EAGER
    if "megatron" in name or "nemo" in name:
        modern = re.search(r"dev|core|nemo|h[12]\d\d|b200", f"{name} {cells.get('gpu', '').lower()}") or re.search(
            r"transformer_engine|(?<!no )flash", notes
        )
        return MEGATRON_CORE if modern else MEGATRON_LM
    if re.search(r"composer|llm-foundry", name) and "a100" in cells.get("gpu", "").lower():
        return COMPOSER
    if (
        re.search(r"fsdp|composer|torchtitan|llm-foundry|pytorch 2|lit-gpt|olmo", name)
        or "fsdp" in cells.get("zero_fsdp", "").lower()
    ):
        return FSDP
    if "horovod" in name or re.search(r"\btf\b|tensorflow", name):
        return HOROVOD
    if "ddp" in name or "ddp" in cells.get("zero_fsdp", "").lower():
        return DDP
    return OTHER
