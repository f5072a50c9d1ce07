"""Devices: the one that a rank computes on, and what it can do.

All that the project asks of an accelerator goes through here, in torch's generic forms (`torch.accelerator`,
`torch.get_device_module`): whatever the installed torch knows as one (CUDA, ROCm, XPU, MPS, a plugin's) is used.
Torch is imported when a function needs it; the launcher does without.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
        there = "no accelerator" if found is None else f"`{found.type}`"
        raise ClusterError(
            "device.not_found",
            "{variable}={wanted}, but torch {version} finds {there} here. Unset it to use what there is, or set "
            "{variable}={cpu}.",
            variable=DEVICE_VARIABLE,
            wanted=wanted,
            version=torch.__version__,
            there=there,
            cpu=CPU,
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
            "device.rank_without",
            "local rank {local_rank} has no accelerator: this host has {count} of type {kind}. Start at most one rank "
            "per accelerator, or set {variable}={cpu} to train on the CPU.",
            local_rank=local_rank,
            count=count(),
            kind=kind,
            variable=DEVICE_VARIABLE,
            cpu=CPU,
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def is_accelerator(device: torch.device) -> bool:
    """True if work on the device is queued, and the host runs ahead of it."""
    return device.type not in (CPU, "meta")


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
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # macOS has none
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def default_backend(device: torch.device) -> str:
    """Torch's name of the collective library for a device's tensors, such as `gloo`.

    Raises:
        ClusterError: this torch has none for the device.
    """
    import torch.distributed as dist

    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        backend = ""
    if device.type not in dist.Backend.backend_capability.get(backend, ()):
        raise ClusterError(
            "device.no_collectives",
            "this torch has no collective library for devices of type {type}, so ranks on them cannot communicate. "
            "Use one rank, or set {variable}={cpu} to train on the CPU.",
            type=device.type,
            variable=DEVICE_VARIABLE,
            cpu=CPU,
        )
    return backend


def synchronize(device: torch.device) -> None:
    """Make the host wait for all work queued on a device; the CPU has none."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def uploaded(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device; the host does not wait for the copy."""
    import torch

    staged = torch.tensor(numbers, dtype=dtype, pin_memory=has_pinned_memory(device))
    return staged.to(device, non_blocking=True)


class Download:
    """Numbers on their way from an accelerator; the host goes on meanwhile.

    The copy is queued behind what the current stream has now, into pinned memory of its own.
    """

    def __init__(self, numbers: Tensor) -> None:
        import torch

        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=has_pinned_memory(numbers.device))
        self._host.copy_(numbers, non_blocking=True)
        self._arrived = event(numbers.device)
        self._arrived.record()

    def numbers(self) -> list[float]:
        """The numbers; the host waits until they have come, if they have not yet."""
        if not self._arrived.query():
            self._arrived.synchronize()
        found: list[float] = self._host.tolist()
        return found


# Streams, events and time


def event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """A new event of an accelerator, not yet recorded; a `timed` one has `elapsed_time`."""
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


class Clock:
    """Moments of a device's work.

    Events in the current stream where it has timed ones, else the host's clock.

    Attributes:
        by_events: moments are events, which can be compared once the device has reached them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_events = has_timed_events(device)

    def now(self) -> Any:
        """The moment at which the device has done what is queued so far."""
        if not self.by_events:
            return time.perf_counter()
        moment = event(self._device, timed=True)
        moment.record()
        return moment

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two moments, which must have passed."""
        return float(start.elapsed_time(stop)) / 1e3 if self.by_events else float(stop - start)

    def reach(self, moment: Any) -> None:
        """Make the host wait until a moment has passed, if it has not yet."""
        if self.by_events and not moment.query():
            moment.synchronize()


# Random numbers


def random_state(device: torch.device) -> Tensor:
    """State of the default generator of this process's device, a uint8 tensor on the CPU."""
    import torch

    # Without an index: a rank's device is the current one, and MPS takes none.
    return device_module(device).get_rng_state() if is_accelerator(device) else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the default generator of this process's device."""
    import torch

    if is_accelerator(device):
        device_module(device).set_rng_state(state)
    else:
        torch.set_rng_state(state)


def seed(device: torch.device, number: int) -> None:
    """Seed the default generator of this process's device, and no other."""
    import torch

    if is_accelerator(device):
        device_module(device).manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Restore the random states of the process (torch, NumPy, Python) and of the device at the end."""
    from paceline.own_random import kept_random

    with kept_random():
        state = random_state(device)
        try:
            yield
        finally:
            set_random_state(device, state)


# What a device is and can do


def built_for() -> str:
    """Makers' software that torch is built for, with its version; `CPU only` without any."""
    import torch

    makers = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
    built = {maker: getattr(torch.version, attribute, None) for attribute, maker in makers.items()}
    return next((f"{maker} {version}" for maker, version in built.items() if version), "CPU only")


def nvidia_uuid(device: torch.device) -> str | None:
    """Number by which NVIDIA's driver knows a GPU; None for any other device."""
    import torch

    if device.type != GPU or torch.version.cuda is None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def is_device_type(name: str) -> bool:
    """True if torch knows a type of devices by this name."""
    import torch

    # of one that torch is to lose
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.device(name).type == name
    return False


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Dtype of sums over samples: float64, or float32 where a device has no other."""
    import torch

    return torch.float64 if _works(lambda: torch.zeros(1, dtype=torch.float64, device=device)) else torch.float32


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the dtype of `widest_float`, on its device."""
    return tensor.to(widest_float(tensor.device))


@cache
def has_streams(device: torch.device) -> bool:
    """True if a device has several queues of work."""
    return is_accelerator(device) and _works(lambda: stream(device))


@cache
def has_timed_events(device: torch.device) -> bool:
    """True if events of a device tell the time between two of them."""

    def between_two() -> None:
        first, last = event(device, timed=True), event(device, timed=True)
        first.record()
        last.record()
        last.synchronize()
        first.elapsed_time(last)

    return is_accelerator(device) and _works(between_two)


@cache
def has_pinned_memory(device: torch.device) -> bool:
    """True if host memory can be pinned, so that its copies need no wait."""
    import torch

    return is_accelerator(device) and _works(lambda: torch.empty(1, pin_memory=True))


@cache
def has_counted_memory(device: torch.device) -> bool:
    """True if torch tells a device's allocated, peak and free memory."""
    import torch

    return is_accelerator(device) and _works(lambda: torch.accelerator.get_memory_info(device))


def has_fused_optimizers(device_type: str) -> bool:
    """True if torch.optim takes `fused=True` for parameters on a device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device_type in _get_fused_kernels_supported_devices()


def has_graphs(device: torch.device) -> bool:
    """True if recorded kernels can be replayed (`compile=reduce-overhead`)."""
    return is_accelerator(device) and hasattr(device_module(device), "graph")


def has_flash_attention(device: torch.device) -> bool:
    """True if the fused attention kernel that returns log-sum-exps is there."""
    return _has_kernels(device.type, "_scaled_dot_product_flash_attention")


def has_batch_norm_kernels(device: torch.device) -> bool:
    """True if the kernels of torch.nn.SyncBatchNorm are there."""
    return _has_kernels(device.type, "batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt")


def has_bf16(device: torch.device) -> bool:
    """True if a device multiplies matrices of bfloat16."""
    import torch

    def multiply() -> None:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        (ones @ ones).sum().item()

    return _works(multiply)


@cache
def _has_kernels(device_type: str, *operators: str) -> bool:
    import torch

    key = torch._C._dispatch_key_for_device(device_type)
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for name in operators)


def device_module(device: torch.device) -> Any:
    """Torch's module of a type of devices, such as `torch.xpu`."""
    import torch

    return torch.get_device_module(device)


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError, AssertionError):
        return False
    return True


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
