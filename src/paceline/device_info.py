"""A device's name, its memory, and what torch can do on it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.device import (
    default_backend,
    device_module,
    has_batch_norm_kernels,
    has_bf16,
    has_counted_memory,
    has_flash_attention,
    has_fused_optimizers,
    has_graphs,
    has_pinned_memory,
    has_streams,
    has_timed_events,
    widest_float,
)
from paceline.errors import ClusterError

if TYPE_CHECKING:
    import torch


def name(device: torch.device) -> str:
    """The maker's name of an accelerator, or torch's type where its module states none."""
    ask = getattr(device_module(device), "get_device_name", None)
    return str(ask(device)) if ask else device.type


def states_bf16(device: torch.device) -> bool | None:
    """True if a device's module says that it computes in bfloat16; None without an answer."""
    ask = getattr(device_module(device), "is_bf16_supported", None)
    return bool(ask()) if ask else None


def total_memory(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory; None where nothing states them.

    Properties are asked first, as they need no device to be started.
    """
    import torch

    properties = getattr(device_module(device), "get_device_properties", None)
    if properties is not None and hasattr(found := properties(device), "total_memory"):
        return int(found.total_memory)
    with suppress(RuntimeError, NotImplementedError):
        return int(torch.accelerator.get_memory_info(device)[1])
    return None


@dataclass(frozen=True)
class Memory:
    """Bytes of an accelerator's memory.

    Attributes:
        allocated: in tensors of this process now.
        peak: the most that was, since the process began or `reset_peak_memory`.
        free: to all processes.
        total: of the hardware.
    """

    allocated: int
    peak: int
    free: int
    total: int


def memory(device: torch.device) -> Memory | None:
    """Memory of an accelerator; None where torch does not count it."""
    import torch

    if not has_counted_memory(device):
        return None
    free, total = torch.accelerator.get_memory_info(device)
    allocated, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
    return Memory(allocated, peak, free, total)


def reset_peak_memory(device: torch.device) -> None:
    """Count the peak of `memory` from here on."""
    import torch

    if has_counted_memory(device):
        torch.accelerator.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class Capabilities:
    """Abilities of torch on a device, each tried or asked for by a function `has_…`.

    Attributes:
        collectives: torch's name of the device's collective library; None without one.
    """

    streams: bool
    timed_events: bool
    pinned_memory: bool
    memory_counted: bool
    fused_optimizers: bool
    graphs: bool
    flash_attention: bool
    batch_norm_kernels: bool
    collectives: str | None
    bf16: bool
    float64: bool


def capabilities(device: torch.device) -> Capabilities:
    """All abilities of a device, for people to read."""
    import torch
    import torch.distributed as dist

    collectives = None
    if dist.is_available():
        with suppress(ClusterError):
            collectives = default_backend(device)
    return Capabilities(
        streams=has_streams(device),
        timed_events=has_timed_events(device),
        pinned_memory=has_pinned_memory(device),
        memory_counted=has_counted_memory(device),
        fused_optimizers=has_fused_optimizers(device.type),
        graphs=has_graphs(device),
        flash_attention=has_flash_attention(device),
        batch_norm_kernels=has_batch_norm_kernels(device),
        collectives=collectives,
        bf16=has_bf16(device),
        float64=widest_float(device) == torch.float64,
    )
