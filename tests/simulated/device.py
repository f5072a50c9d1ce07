"""The module `torch.sim`: what torch and its users ask of a device's module, and controls for tests."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, _register_device_module
from torch._C._autograd import DeviceType
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from simulated.build import NAME, built
from simulated.environment import DEVICES, TRACE_WAITS

TYPE = "sim"
_lines: Counter[str] = Counter()


def _loaded() -> Any:
    """The C++ part; loading it registers the device's kernels."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _loaded()


def register() -> None:
    """Make this module `torch.sim`; a second call does nothing."""
    if getattr(torch, TYPE, None) is not None:
        return
    _C.set_device_count(int(os.environ.get(DEVICES, 2)))
    rename_privateuse1_backend(TYPE)
    _register_device_module(TYPE, sys.modules[__name__])
    generate_methods_for_privateuse1_backend(for_storage=True)
    # torch 2.13 does not count PrivateUse1 among the backends whose tensors may take one another's place: `Module.to`
    # would make new Parameters, and an optimizer that holds the old ones would train nothing.
    torch.__future__.set_swap_module_params_on_conversion(True)
    if os.environ.get(TRACE_WAITS) == "1":
        trace_waits(True)


# Controls and counters


def set_order(order: str, seed: int = 0) -> None:
    """Run streams as late as they may (`late`), at `random`, or at once (`eager`)."""
    _C.set_order(order, seed)


def set_memory_limit(limit_bytes: int, device: Any = None) -> None:
    _C.set_memory_limit(_index(device), limit_bytes)


def launches(device: Any = None) -> int:
    """Kernels and copies so far, which planted faults count as well."""
    return int(_C.launches(_index(device)))


def allocations(device: Any = None) -> int:
    """Allocations so far."""
    return int(_C.allocations(_index(device)))


def bytes_older_than(allocation: int, device: Any = None) -> int:
    """Bytes that have been held since the allocation of this number, or for longer."""
    return int(_C.bytes_older_than(_index(device), allocation))


def forget_waits(forget: bool) -> None:
    """Drop every wait of a stream for an event from now on: what a program without any would do."""
    _C.forget_waits(forget)


def counts() -> dict[str, int]:
    """Counters of this process since its begin or `reset_counts`.

    `launches` (kernels and copies), `host_waits` (all), `idle_waits` (those that leave the device without a kernel to
    run), `synchronizing_operators` (those that wait for values), `copies_to_device`, `copies_to_host`.
    """
    return dict(_C.counts())


def waits_by_kind() -> dict[str, int]:
    """Waits of the host: how many of each kind, such as `item` or `operator aten::nonzero`."""
    return dict(_C.waits_by_kind())


def reset_counts() -> None:
    _C.reset_counts()
    _lines.clear()


def trace_waits(trace: bool) -> None:
    """Note from now on which line of Python makes the host wait."""
    _C.on_wait(_note_line if trace else None)


def wait_lines() -> dict[str, int]:
    """Lines of Python that made the host wait, innermost last: `item: loop.py:12 step < model.py:3 forward`."""
    return dict(_lines)


def _note_line(kind: str) -> None:
    frames = [f for f in traceback.extract_stack()[:-1] if os.sep + "torch" + os.sep not in f.filename]
    shown = [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
    _lines[f"{kind}: {' < '.join(shown) or 'a thread of torch'}"] += 1


# Devices


@dataclass(frozen=True)
class Properties:
    name: str
    total_memory: int
    uuid: str
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def init() -> None:
    """Nothing is to be initialised."""


_lazy_init = init


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(_C.is_used()) and not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(_C.is_in_bad_fork())


def device_count() -> int:
    return int(_C.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def _exchange_device(device: int) -> int:
    before = current_device()
    if device >= 0:
        set_device(device)
    return before


_maybe_exchange_device = _exchange_device


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_properties(device: Any = None) -> Properties:
    index = _index(device)
    return Properties("Simulated accelerator", mem_get_info(index)[1], f"sim-{index:08d}")


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


class device(torch.accelerator.device_index):
    """Context manager that makes a device the current one; None leaves it."""

    def __init__(self, device: Any) -> None:
        super().__init__(None if device is None else _index(device))


class device_of(device):
    """Context manager that makes a tensor's device the current one."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == TYPE else None)


class _DeviceGuard:
    def __init__(self, index: int) -> None:
        self.index, self.before = index, -1

    def __enter__(self) -> None:
        self.before = _exchange_device(self.index)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.before)


# Streams and events


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:
            return torch.Stream.__new__(cls, priority=priority, **given)
        return torch.Stream.__new__(cls, torch.device(TYPE, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return torch.Event.__new__(cls, TYPE, enable_timing=enable_timing)


class StreamContext:
    """Context manager that makes a stream the current one; None leaves it."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, where)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    kind: Any = DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(kind))


# Random numbers


def manual_seed(seed: int) -> None:
    _C.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _C.default_generator(index).manual_seed(seed)


def seed() -> int:
    return int(_C.default_generator(current_device()).seed())


def initial_seed() -> int:
    return int(_C.default_generator(current_device()).initial_seed())


def get_rng_state(device: Any = TYPE) -> Tensor:
    state: Tensor = _C.default_generator(_index(device)).get_state()
    return state


def set_rng_state(new_state: Tensor, device: Any = TYPE) -> None:
    _C.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# Memory


def _of_accelerator(name: str) -> Callable[..., Any]:
    call = getattr(torch.accelerator, name)
    return lambda device=None: call(_index(device))


memory_allocated = _of_accelerator("memory_allocated")
max_memory_allocated = _of_accelerator("max_memory_allocated")
memory_reserved = _of_accelerator("memory_reserved")
max_memory_reserved = _of_accelerator("max_memory_reserved")
reset_peak_memory_stats = _of_accelerator("reset_peak_memory_stats")


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    free, total = torch.accelerator.get_memory_info(_index(device))
    return free, total


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
