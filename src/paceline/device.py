"""Devices of a rank, and their capabilities.

All accelerator code of the project is in this module. It uses torch's generic APIs (`torch.accelerator`,
`torch.get_device_module`), so every accelerator of the installed torch (CUDA, ROCm, XPU, MPS, a plugin's) is supported.
Functions import torch when they need it, because the launcher does not use torch.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from paceline.errors import ClusterError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup


CPU = "cpu"
GPU = "cuda"  # torch's device type for NVIDIA and AMD
DEVICE_VARIABLE = "PACELINE_DEVICE"
# variables that hide devices from the vendors' software
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
)
ON_CPU = {DEVICE_VARIABLE: CPU}
"""Environment variables of a process that must not use the accelerators."""
# device files that are open once a vendor's runtime has started, even if another library than torch started it
_DRIVERS_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


def accelerator_type() -> str | None:
    """Return torch's device type for this machine's accelerators, such as `cuda`; None without accelerators.

    The result is also None if PACELINE_DEVICE is `cpu`.

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
            "{variable}={wanted}, but torch {version} finds {there} on this machine. Unset the variable to use the "
            "available devices, or set {variable}={cpu}.",
            variable=DEVICE_VARIABLE,
            wanted=wanted,
            version=torch.__version__,
            there=there,
            cpu=CPU,
        )
    return found.type if found is not None else None


def count() -> int:
    """Return the number of accelerators that this process may use."""
    import torch

    return torch.accelerator.device_count() if accelerator_type() else 0


def use(local_rank: int) -> torch.device:
    """Select and return the device of this process: an accelerator, or the CPU without accelerators.

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
            "no accelerator is left for local rank {local_rank}: this host has {count} accelerators of type {kind}. "
            "Start at most one rank per accelerator, or set {variable}={cpu} to train on the CPU.",
            local_rank=local_rank,
            count=count(),
            kind=kind,
            variable=DEVICE_VARIABLE,
            cpu=CPU,
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def warm_up(device: torch.device) -> None:
    """Create an accelerator's context, and load the libraries of its first operations."""
    import torch

    if is_accelerator(device):
        ones = torch.ones(8, 8, device=device)
        torch.cat([ones, ones @ ones]).sum().item()


def is_accelerator(device: torch.device) -> bool:
    """Return True if the host queues work on the device without waiting for results."""
    return device.type not in (CPU, "meta")


def on_accelerator(tensor: Tensor) -> bool:
    """Return True if a tensor is in an accelerator's memory."""
    return is_accelerator(tensor.device)


def is_started() -> bool:
    """Return True if this process has started an accelerator, and therefore must not fork."""
    import torch

    found = torch.accelerator.current_accelerator()
    asked = getattr(torch.get_device_module(found), "is_initialized", None) if found else None
    return bool(asked and asked()) or any(file.startswith(_DRIVERS_FILES) for file in _open_files())


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # macOS has none
        with suppress(OSError):  # closed in the meantime
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def default_backend(device: torch.device) -> str:
    """Return torch's name of the collective library for a device's tensors, such as `gloo`.

    Raises:
        ClusterError: the installed torch has no collective library for the device.
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


def survive_lost_peers() -> None:
    """Keep this process when a rank is lost.

    Call this function before a process group is created. By default, torch ends the whole process. The supervisor
    enforces the deadline instead.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


@contextmanager
def aborted_together(group: ProcessGroup) -> Iterator[None]:
    """Return a context in which a collective library aborts several groups in one call.

    In NCCL, separate calls may wait for each other (pytorch#119797). Other libraries need no such context.
    """
    import torch
    from torch.distributed import distributed_c10d

    backend = None
    if distributed_c10d.is_nccl_available():
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device(GPU))
    if backend is None or not isinstance(backend, distributed_c10d.ProcessGroupNCCL):
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


# functions of torch that dump the flight recorders of its collective libraries
FLIGHT_RECORDERS = ("_dump_nccl_trace", "_dump_xccl_trace", "_dump_fr_trace")


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all queued work; on the CPU, return immediately."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def uploaded(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a new tensor on a device without making the host wait."""
    import torch

    staged = torch.tensor(numbers, dtype=dtype, pin_memory=has_pinned_memory(device))
    return staged.to(device, non_blocking=True)


def upload(numbers: Sequence[float], target: Tensor) -> None:
    """Copy numbers into an existing tensor on a device without making the host wait."""
    import torch

    staged = torch.tensor(numbers, dtype=target.dtype, pin_memory=has_pinned_memory(target.device))
    target.copy_(staged, non_blocking=True)


class Download:
    """Copy of numbers from an accelerator that does not block the host.

    The copy is queued after the current work of the stream, and has its own pinned memory.
    """

    def __init__(self, numbers: Tensor) -> None:
        import torch

        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=has_pinned_memory(numbers.device))
        self._host.copy_(numbers, non_blocking=True)
        self._arrived = event(numbers.device)
        self._arrived.record()

    def numbers(self) -> list[float]:
        """Wait until the numbers have arrived, and return them."""
        if not self._arrived.query():
            self._arrived.synchronize()
        found: list[float] = self._host.tolist()
        return found


# Streams, events and time


def event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Return a new, unrecorded event of an accelerator; a `timed` event supports `elapsed_time`."""
    import torch

    return torch.Event(device, enable_timing=timed)


def stream(device: torch.device) -> torch.Stream:
    """Return a new stream of an accelerator; used as a context manager, it becomes current."""
    import torch

    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream to which an accelerator's operations are queued now."""
    import torch

    return torch.accelerator.current_stream(device)


class Clock:
    """Clock that marks points in the work of a device.

    Points are events in the current stream if the device has timed events, otherwise readings of the host's clock.

    Attributes:
        by_events: True if the points are events, which can be compared once the device has reached them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_events = has_timed_events(device)

    def now(self) -> Any:
        """Return the point at which the device has completed the work queued so far."""
        if not self.by_events:
            return time.perf_counter()
        moment = event(self._device, timed=True)
        moment.record()
        return moment

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two points, which must have passed."""
        return float(start.elapsed_time(stop)) / 1e3 if self.by_events else float(stop - start)

    def reach(self, moment: Any) -> None:
        """Wait until a point has passed."""
        if self.by_events and not moment.query():
            moment.synchronize()


# Random numbers


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's default generator, a uint8 tensor on the CPU."""
    import torch

    # No index is passed, because a rank's device is the current device, and MPS does not accept an index.
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
    """Restore the random states of the process (torch, NumPy, Python) and the device on exit."""
    from paceline.own_random import kept_random

    with kept_random():
        state = random_state(device)
        try:
            yield
        finally:
            set_random_state(device, state)


# Properties and capabilities of a device


def built_for() -> str:
    """Return the vendor software that torch is built for, with its version; otherwise `CPU only`."""
    import torch

    makers = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
    built = {maker: getattr(torch.version, attribute, None) for attribute, maker in makers.items()}
    return next((f"{maker} {version}" for maker, version in built.items() if version), "CPU only")


def nvidia_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU in NVIDIA's driver; None for any other device."""
    import torch

    if device.type != GPU or torch.version.cuda is None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def is_device_type(name: str) -> bool:
    """Return True if torch knows a device type with this name."""
    import torch

    # torch warns about a device type that it will remove
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.device(name).type == name
    return False


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over samples: float64, or float32 on devices without float64."""
    import torch

    return torch.float64 if _works(lambda: torch.zeros(1, dtype=torch.float64, device=device)) else torch.float32


def widened(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype of `widest_float`, on its device."""
    return tensor.to(widest_float(tensor.device))


@cache
def has_streams(device: torch.device) -> bool:
    """Return True if a device has several queues of work."""
    return is_accelerator(device) and _works(lambda: stream(device))


@cache
def has_timed_events(device: torch.device) -> bool:
    """Return True if a device's events can measure the time between two events."""

    def between_two() -> None:
        first, last = event(device, timed=True), event(device, timed=True)
        first.record()
        last.record()
        last.synchronize()
        first.elapsed_time(last)

    return is_accelerator(device) and _works(between_two)


@cache
def has_pinned_memory(device: torch.device) -> bool:
    """Return True if host memory can be pinned, so that its copies are asynchronous."""
    import torch

    return is_accelerator(device) and _works(lambda: torch.empty(1, pin_memory=True))


@cache
def has_counted_memory(device: torch.device) -> bool:
    """Return True if torch reports a device's allocated, peak and free memory."""
    import torch

    return is_accelerator(device) and _works(lambda: torch.accelerator.get_memory_info(device))


def has_fused_optimizers(device_type: str) -> bool:
    """Return True if torch.optim supports `fused=True` for parameters on a device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device_type in _get_fused_kernels_supported_devices()


def has_graphs(device: torch.device) -> bool:
    """Return True if recorded kernels can be replayed (`compile=reduce-overhead`)."""
    return is_accelerator(device) and hasattr(device_module(device), "graph")


def has_flash_attention(device: torch.device) -> bool:
    """Return True if there is a fused attention kernel that returns log-sum-exps."""
    return _has_kernels(device.type, "_scaled_dot_product_flash_attention")


def has_varlen_attention(device: torch.device) -> bool:
    """Return True if `torch.nn.attention.varlen` has a kernel for the device."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_batch_norm_kernels(device: torch.device) -> bool:
    """Return True if the kernels of torch.nn.SyncBatchNorm exist."""
    return _has_kernels(device.type, "batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt")


def has_bf16(device: torch.device) -> bool:
    """Return True if a device multiplies bfloat16 matrices."""
    import torch

    def multiply() -> None:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        (ones @ ones).sum().item()

    return _works(multiply)


def has_fp8(device: torch.device) -> bool:
    """Return True if a device multiplies float8 matrices."""
    import torch

    def multiply(dtype: torch.dtype) -> None:
        ones = torch.ones(16, 16, device=device).to(dtype)
        scale = torch.ones((), device=device)
        torch._scaled_mm(ones, ones.t(), scale, scale, out_dtype=torch.bfloat16).sum().item()

    # AMD's MI300 has a format of its own
    return any(_works(partial(multiply, dtype)) for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz))


@cache
def _has_kernels(device_type: str, *operators: str) -> bool:
    import torch

    key = torch._C._dispatch_key_for_device(device_type)
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for name in operators)


def device_module(device: torch.device) -> Any:
    """Return torch's module of a device type, such as `torch.xpu`."""
    import torch

    return torch.get_device_module(device)


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError, AssertionError):
        return False
    return True


def name(device: torch.device) -> str:
    """Return the vendor's name of an accelerator, or torch's device type without such a name."""
    ask = getattr(device_module(device), "get_device_name", None)
    return str(ask(device)) if ask else device.type


def states_bf16(device: torch.device) -> bool | None:
    """Return True if a device's module reports bfloat16 support; None if unknown."""
    ask = getattr(device_module(device), "is_bf16_supported", None)
    return bool(ask()) if ask else None


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory; None if unknown.

    Device properties are read first, because reading them does not start the device.
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
        allocated: bytes in tensors of this process now.
        peak: largest `allocated` since the process began or `reset_peak_memory`.
        reserved: bytes that torch's allocator holds now, for tensors or for later ones.
        peak_reserved: largest `reserved`, as for `peak`.
        free: bytes available to all processes.
        total: bytes of the whole memory.
    """

    allocated: int
    peak: int
    reserved: int
    peak_reserved: int
    free: int
    total: int

    @property
    def elsewhere(self) -> int:
        """Used bytes outside of torch's allocator: memory of the driver and of other processes."""
        return self.total - self.free - self.reserved


def memory(device: torch.device) -> Memory | None:
    """Return the memory of an accelerator; None if torch does not count it."""
    import torch

    if not has_counted_memory(device):
        return None
    free, total = torch.accelerator.get_memory_info(device)
    module = torch.accelerator
    return Memory(
        module.memory_allocated(device),
        module.max_memory_allocated(device),
        module.memory_reserved(device),
        module.max_memory_reserved(device),
        free,
        total,
    )


_WANTED = re.compile(r"allocate ([\d.]+) ?(bytes|[KMG]iB)")
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def wanted_bytes(error: BaseException) -> int | None:
    """Return the size in bytes of an allocation that failed for lack of memory.

    The allocation may be on a device or on the host. The result is None for any other error, and 0 if the error does
    not contain the size.
    """
    import torch

    # torch raises a RuntimeError for memory of the host
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    if not (on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)):
        return None
    found = _WANTED.search(str(error))
    return int(float(found[1]) * _BYTES[found[2]]) if found else 0


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `memory` reports."""
    import torch

    if has_counted_memory(device):
        torch.accelerator.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of torch on a device, each determined by a function `has_…`.

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
    fp8: bool
    float64: bool


def capabilities(device: torch.device) -> Capabilities:
    """Return all capabilities of a device for display."""
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
        fp8=has_fp8(device),
        float64=widest_float(device) == torch.float64,
    )
