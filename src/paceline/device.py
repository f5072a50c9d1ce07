"""Devices: the one that a rank computes on, and what it can do.

All that the project asks of an accelerator goes through here, in torch's generic forms (`torch.accelerator`,
`torch.get_device_module`): whatever the installed torch knows as one (CUDA, ROCm, XPU, MPS, a plugin's) is used.
Torch is imported when a function needs it; the launcher does without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.errors import ClusterError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CPU = "cpu"
GPU = "cuda"  # torch's type of NVIDIA's and of AMD's
DEVICE_VARIABLE = "PACELINE_DEVICE"
# by which makers' own software leaves devices out
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
)
ON_CPU = {DEVICE_VARIABLE: CPU}
"""Environment of a process that is to leave the accelerators alone."""
# open where a maker's own runtime was started, also by other libraries than torch
_DRIVERS_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


def accelerator_type() -> str | None:
    """Torch's name of this machine's accelerators, such as `cuda`; None without any.

    Also None where PACELINE_DEVICE is `cpu`.

    Raises:
        ClusterError: PACELINE_DEVICE names a device that this torch cannot use.
    """
    import torch

    wanted = os.environ.get(DEVICE_VARIABLE)
    if wanted == CPU:
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted and (found is None or found.type != wanted):
        there = "none" if found is None else f"`{found.type}`"
        raise ClusterError(
            f"{DEVICE_VARIABLE}={wanted}: torch {torch.__version__} finds {there} of that kind here. "
            f"Unset it to use what there is, or set {DEVICE_VARIABLE}={CPU}."
        )
    return found.type if found is not None else None


def count() -> int:
    """Number of accelerators that this process may use."""
    import torch

    return torch.accelerator.device_count() if accelerator_type() else 0


def use(local_rank: int) -> torch.device:
    """Make an accelerator the current device of this process; the CPU where there is none.

    Raises:
        ClusterError: there are fewer accelerators than ranks on this host.
    """
    import torch

    kind = accelerator_type()
    if kind is None:
        return torch.device(CPU)
    if local_rank >= count():
        raise ClusterError(
            f"local rank {local_rank} has no accelerator: this host shows {count()} of type {kind}. Start at most one "
            f"rank per accelerator, or set {DEVICE_VARIABLE}={CPU} to train on the CPU."
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def is_accelerator(device: torch.device) -> bool:
    """True if the device is not the CPU: its work is queued, and the host runs ahead of it."""
    return device.type != CPU


def on_accelerator(tensor: Tensor) -> bool:
    """True if a tensor's memory is an accelerator's."""
    return is_accelerator(tensor.device)


def is_started() -> bool:
    """True if this process has started an accelerator, which no fork of it would survive."""
    import torch

    found = torch.accelerator.current_accelerator()
    asked = getattr(torch.get_device_module(found), "is_initialized", None) if found else None
    return bool(asked and asked()) or any(file.startswith(_DRIVERS_FILES) for file in _open_files())


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def default_backend(device: torch.device) -> str:
    """Torch's name of the collective library for a device's tensors, such as `gloo`."""
    import torch.distributed as dist

    return dist.get_default_backend_for_device(device)


def synchronize(device: torch.device) -> None:
    """Make the host wait for all work queued on a device; the CPU has none."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


# Streams and events


def event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """A new event of an accelerator, not yet recorded.

    A `timed` one has `elapsed_time`; see `Capabilities.timed_events`.
    """
    import torch

    return torch.Event(device, enable_timing=timed)


def stream(device: torch.device) -> torch.Stream:
    """A new stream of an accelerator, a context manager that makes it the current one."""
    import torch

    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that an accelerator's operations are queued on now."""
    import torch

    return torch.accelerator.current_stream(device)


# Random numbers


def random_state(device: torch.device) -> Tensor:
    """State of the default generator of this process's device, a uint8 tensor on the CPU."""
    import torch

    # Without an index: a rank's device is the current one, and MPS takes none.
    return _module(device).get_rng_state() if is_accelerator(device) else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the default generator of this process's device."""
    import torch

    if is_accelerator(device):
        _module(device).set_rng_state(state)
    else:
        torch.set_rng_state(state)


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Restore the CPU's and the device's random state at the end."""
    import torch

    states = [(place, random_state(place)) for place in {torch.device(CPU), device}]
    try:
        yield
    finally:
        for place, state in states:
            set_random_state(place, state)


# Memory


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

    if not capabilities(device).memory_counted:
        return None
    free, total = torch.accelerator.get_memory_info(device)
    allocated, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
    return Memory(allocated, peak, free, total)


def reset_peak_memory(device: torch.device) -> None:
    """Count the peak of `memory` from here on."""
    import torch

    if capabilities(device).memory_counted:
        torch.accelerator.reset_peak_memory_stats(device)


# What a device is and can do


def name(device: torch.device) -> str:
    """The maker's name of an accelerator, or torch's type where its module states none."""
    ask = getattr(_module(device), "get_device_name", None)
    return str(ask(device)) if ask else device.type


def built_for() -> str:
    """Makers' software that torch is built for, with its version; `CPU only` without any."""
    import torch

    makers = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
    built = {maker: getattr(torch.version, attribute, None) for attribute, maker in makers.items()}
    return next((f"{maker} {version}" for maker, version in built.items() if version), "CPU only")


def total_memory(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory; None where nothing states them.

    Properties are asked first, as they need no device to be started.
    """
    import torch

    properties = getattr(_module(device), "get_device_properties", None)
    if properties is not None and hasattr(found := properties(device), "total_memory"):
        return int(found.total_memory)
    with suppress(RuntimeError, NotImplementedError):
        return int(torch.accelerator.get_memory_info(device)[1])
    return None


def nvidia_uuid(device: torch.device) -> str | None:
    """Number by which NVIDIA's driver knows a GPU; None for any other device."""
    import torch

    if device.type != GPU or torch.version.cuda is None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def states_bf16(device: torch.device) -> bool | None:
    """True if a device's module says that it computes in bfloat16; None without an answer."""
    ask = getattr(_module(device), "is_bf16_supported", None)
    return bool(ask()) if ask else None


@dataclass(frozen=True)
class Capabilities:
    """What torch can do on a device; each was tried or asked for, none follows from the device's name.

    Attributes:
        streams: several queues of work.
        timed_events: events that tell the time between two of them.
        pinned_memory: host memory that copies to the device need not wait for.
        memory_counted: torch tells allocated, peak, free memory.
        fused_optimizers: `fused=True` of torch.optim.
        graphs: recorded kernels that are replayed (`compile=reduce-overhead`).
        flash_attention: the fused attention kernel that also returns the logarithm of its sums.
        batch_norm_kernels: the kernels of torch.nn.SyncBatchNorm.
        collectives: torch's name of its collective library; None without one.
        bf16: arithmetic in bfloat16.
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


@cache
def capabilities(device: torch.device) -> Capabilities:
    """What a device can do, tried once per process."""
    import torch
    import torch.distributed as dist

    def bf16() -> None:
        (torch.ones(2, 2, dtype=torch.bfloat16, device=device) @ torch.ones(2, 2, dtype=torch.bfloat16, device=device))

    def timed_events() -> None:
        first, last = event(device, timed=True), event(device, timed=True)
        first.record()
        last.record()
        last.synchronize()
        first.elapsed_time(last)

    there = is_accelerator(device)
    return Capabilities(
        streams=there and _works(lambda: stream(device)),
        timed_events=there and _works(timed_events),
        pinned_memory=there and _works(lambda: torch.empty(1, pin_memory=True)),
        memory_counted=there and _works(lambda: torch.accelerator.get_memory_info(device)),
        fused_optimizers=has_fused_optimizers(device.type),
        graphs=there and hasattr(_module(device), "graph"),
        flash_attention=_has_kernel("_flash_attention_forward", device),
        batch_norm_kernels=_has_kernel("batch_norm_gather_stats_with_counts", device),
        collectives=default_backend(device)
        if dist.is_available() and _works(lambda: default_backend(device))
        else None,
        bf16=_works(bf16),
    )


def has_fused_optimizers(device_type: str) -> bool:
    """True if torch.optim takes `fused=True` for parameters on a device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device_type in _get_fused_kernels_supported_devices()


def _has_kernel(operator: str, device: torch.device) -> bool:
    import torch

    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)


def _module(device: torch.device) -> Any:
    import torch

    return torch.get_device_module(device)


def _works(action: Any) -> bool:
    try:
        action()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError, AssertionError):
        return False
    return True
