"""Measurement of the speed of this machine, with matrix products and memory copies."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from paceline import device as accelerator
from paceline.cluster.host import Host
from paceline.device import nvidia_uuid
from paceline.errors import ClusterError

if TYPE_CHECKING:
    import torch


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_CALL_S = 0.008  # minimum duration of a measurement, so that clock resolution and call overhead have no influence
_BUDGET_S, _REPEATS = 0.25, 5
_LARGEST = 16384  # number of rows and of columns of a matrix
_SMALLEST_COPY_BYTES = 2**26
_XID_WAIT_MS = 100  # the driver may report an XID some time after the error of the device


@dataclass(frozen=True)
class ProbedSpeed:
    """The result of one measurement: the median of several repetitions after a warm-up.

    Attributes:
        what: `matmul` for matrix products, in floating-point operations per second (2 n^3 for a product of n x n
            matrices); `copy` for copies between two buffers much larger than the caches, in bytes read and written per
            second.
        device: `cpu`, or an accelerator as torch names it (`cuda:0`).
        threads: number of CPU threads; 0 on an accelerator.
        value: the result; None if the measurement failed.
        why_not: the reason if `value` is None.
    """

    what: Literal["matmul", "copy"]
    device: str
    dtype: str
    threads: int
    value: float | None = None
    why_not: str | None = None


class Probe:
    """A separate process with its own torch, which measures speed on request.

    The process ends with the context. If torch cannot be imported or crashes, only this process ends.

    Args:
        deadline_s: longest time to wait for one answer, in seconds.
    """

    def __init__(self, host: Host, deadline_s: float = 120.0) -> None:
        self.host, self.deadline_s = host, deadline_s

    def __enter__(self) -> Self:
        threads = str(self.host.physical_cores)
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.cluster.probe"],
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def torch(self) -> dict[str, Any]:
        """Ask torch for `version`, `built_for`, `capability` (of the CPU) and `gloo`.

        The answer also describes the usable accelerators: `kind`, the number of `devices`, and their capabilities,
        `can` (`device.Capabilities`). Without accelerators, these entries are None, 0 and {}.

        Raises:
            ClusterError: torch cannot be imported.
        """
        return self._answer("import torch")

    def speeds(self) -> Iterator[ProbedSpeed]:
        """Measure matrix products and copies on all cores, on one thread, and on every accelerator.

        Cores are physical cores. Call `torch` before this method.

        Raises:
            ClusterError: the process ended before all measurements were done. Earlier results have already been
                returned.
        """
        assert self._process.stdin is not None
        host = self.host
        wanted: list[tuple[str, list[str], int]] = []
        for threads in sorted({host.physical_cores, 1}, reverse=True):
            wanted.append(("cpu", ["fp32", "bf16"] if host.cpu_bf16 else ["fp32"], threads))
        wanted += [(f"{gpu.kind}:{gpu.index}", ["fp32", "bf16"] if gpu.bf16 else ["fp32"], 0) for gpu in host.gpus]
        self._process.stdin.write(json.dumps({"wanted": wanted, "copy_bytes": copy_bytes(host.memory_bytes)}) + "\n")
        self._process.stdin.flush()
        while answer := self._answer("measure"):
            yield ProbedSpeed(**answer)

    def _answer(self, task: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self.deadline_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
            is_late = not timer.is_alive()
        finally:  # also after Ctrl-C, because Python waits for the timer at its exit
            timer.cancel()
            timer.join()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        late = f" (was it more than {self.deadline_s:g} s?)" if is_late else ""
        raise ClusterError(
            "cluster.probe_failed",
            "the process for this task ({task}) ended with exit code {code}{late}{last}",
            task=task,
            code=code,
            late=late,
            last=": " + said[-1] if said else "",
        )


def cache_bytes(root: Path = Path("/")) -> dict[int, int]:
    """Return the total size of the data caches of each level in bytes; {} if unknown.

    A cache that several cores share is counted only once.
    """
    found: dict[tuple[int, str], int] = {}
    for cache in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        try:
            level, kind, size, cores = (
                (cache / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue  # the processor does not expose its caches
        if kind != "Instruction":
            found[int(level), cores] = int(size.rstrip("K")) * 1024  # the kernel states every size in KiB
    return {
        level: sum(size for (of, _), size in found.items() if of == level)
        for level in sorted({level for level, _ in found})
    }


def copy_bytes(memory_bytes: int, root: Path = Path("/")) -> int:
    """Return the size of each of the two buffers for copies, in bytes.

    The size is four times the size of the largest caches, but at most an eighth of the memory.
    """
    caches = cache_bytes(root)
    return min(max(_SMALLEST_COPY_BYTES, 4 * caches.get(max(caches, default=0), 0)), memory_bytes // 8)


# In the separate process


def main() -> None:
    """Describe torch, read the request, and print a line for each speed.

    An empty line ends the answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be part of the answer
    print(json.dumps(_describe_torch()), file=answers, flush=True)
    question = sys.stdin.readline()
    if not question:
        return
    request = json.loads(question)
    for device, dtypes, threads in request["wanted"]:
        for speed in _measure(device, dtypes, threads, request["copy_bytes"]):
            print(json.dumps(asdict(speed)), file=answers, flush=True)
    print("{}", file=answers, flush=True)


def _describe_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    kind = accelerator.accelerator_type()
    return {
        "version": torch.__version__,
        "built_for": accelerator.built_for(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "kind": kind,
        "devices": accelerator.count(),
        "can": asdict(accelerator.capabilities(torch.device(kind, 0))) if kind else {},
    }


def _measure(device: str, dtypes: list[str], threads: int, copy_bytes: int) -> Iterator[ProbedSpeed]:
    import torch

    if threads:
        torch.set_num_threads(threads)
    tasks: list[tuple[Literal["matmul", "copy"], str, Callable[[], float]]] = [
        ("matmul", dtype, lambda dtype=dtype: _matmul_flops(device, getattr(torch, _DTYPES[dtype])))  # type: ignore[misc]
        for dtype in dtypes
    ]
    tasks.append(("copy", "fp32", lambda: _copy_rate(device, copy_bytes)))
    for what, dtype, task in tasks:
        try:
            yield ProbedSpeed(what, device, dtype, threads, task())
        # too little memory, a device that torch cannot use, or a dtype that torch does not support on the device
        except (RuntimeError, AssertionError) as error:
            yield ProbedSpeed(what, device, dtype, threads, why_not=str(error).strip().partition("\n")[0])


def _matmul_flops(device: str, dtype: Any) -> float:
    n = 256  # limit in seconds for a product of 1024 rows, which a device exceeds if it emulates bf16
    # the fastest run, because other work on the machine only adds time
    while min(_product_times_s(device, dtype, n)) < _CALL_S and n < _LARGEST:
        n *= 2
    return 2 * n**3 / statistics.median(_product_times_s(device, dtype, n, _REPEATS, _BUDGET_S))


def _product_times_s(device: str, dtype: Any, n: int, repeats: int = 3, budget_s: float = 0.0) -> list[float]:
    import torch

    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _times_s(device, lambda: torch.mm(a, b, out=out), repeats, budget_s)


def _copy_rate(device: str, copy_bytes: int) -> float:
    """Measure the bytes read and written per second."""
    import torch

    if device != "cpu":
        memory = accelerator.memory(torch.device(device))
        copy_bytes = min(2**30, memory.free // 8) if memory else _SMALLEST_COPY_BYTES
    # write to every page, because pages that were never written share one page of zeros
    source = torch.ones(copy_bytes // 4, device=device)
    target = torch.ones_like(source)
    return 2 * source.nbytes / statistics.median(_times_s(device, lambda: target.copy_(source), _REPEATS, _BUDGET_S))


def _times_s(device: str, call: Callable[[], object], repeats: int, budget_s: float) -> list[float]:
    """Measure the duration of repeated calls in seconds, after a warm-up.

    The function is called at least `repeats` times, and more often if time permits.
    """
    import torch

    place = torch.device(device)
    call()
    accelerator.synchronize(place)
    times_s: list[float] = []
    while len(times_s) < repeats or sum(times_s) < budget_s:
        started = time.perf_counter()
        call()
        accelerator.synchronize(place)
        times_s.append(time.perf_counter() - started)
    return times_s


_ZONES = "sys/class/powercap"


class Energy:
    """Meter of the energy that was used since this object was created.

    Read the meter at least every few minutes. If a counter wraps around twice between two readings, only one wrap is
    counted.

    Attributes:
        why_not: the reason why the energy cannot be read; None if it can be read.
    """

    def __init__(self, counters: list[Counter], why_not: str | None = None) -> None:
        self._counters = counters
        self.why_not = why_not
        self.joules()

    def joules(self) -> float | None:
        """Return the joules since this object was created.

        The result is None if a counter cannot be read, now or earlier.
        """
        if self.why_not is not None:
            return None
        try:
            return sum(counter.microjoules() for counter in self._counters) / 1e6
        except (OSError, ValueError) as error:
            self.why_not = f"a counter cannot be read: {error}"
            return None


class Counter:
    """A counter of microjoules that wraps around to 0 at `range_uj`."""

    def __init__(self, read_uj: Callable[[], int], range_uj: int) -> None:
        self._read_uj, self._range_uj = read_uj, range_uj
        self._used_uj = 0
        self._last_uj: int | None = None

    def microjoules(self) -> int:
        """Return the microjoules since the first call."""
        now = self._read_uj()
        if self._last_uj is not None:
            self._used_uj += (now - self._last_uj) % self._range_uj
        self._last_uj = now
        return self._used_uj


def cpu_energy(root: Path = Path("/")) -> Energy:
    """Return a meter of the energy of all processor packages of this host."""
    zones = list(_packages(root / _ZONES))
    if not zones:
        return Energy([], f"the kernel shows no RAPL counters in /{_ZONES}, as in most virtual machines and containers")
    counters = []
    for zone in zones:
        file = zone / "energy_uj"
        try:
            range_uj = int((zone / "max_energy_range_uj").read_text())
            file.read_text()
        except PermissionError:
            return Energy([], f"/{file.relative_to(root)} can be read by root only")
        except (OSError, ValueError) as error:
            return Energy([], f"the RAPL counters in /{_ZONES} cannot be read: {error}")
        counters.append(Counter(lambda file=file: int(file.read_text()), range_uj))  # type: ignore[misc]
    return Energy(counters)


def gpu_energy(nvml: Any, handle: Any) -> Energy:
    """Return the energy counter of a GPU, which exists since the Volta generation.

    `handle` is a handle of an initialized NVML, the module `pynvml`.
    """

    def read_uj() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1000
        except nvml.NVMLError as error:
            raise OSError(f"NVML says {error}") from error

    return Energy([Counter(read_uj, 2**64)])


class Telemetry:
    """NVML readings of one GPU: the energy that it used, and its utilization."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.energy = gpu_energy(nvml, handle)
        self._events: Any = None

    def other_processes(self) -> list[tuple[int, int]]:
        """Return the other processes that hold memory of the GPU, each with its bytes.

        The result is empty if NVML does not list this process, for example because a container has its own
        process numbers.
        """
        try:
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return []
        held = {int(process.pid): int(process.usedGpuMemory or 0) for process in found}
        return sorted(held.items()) if held.pop(os.getpid(), None) is not None else []

    def watch_xids(self) -> None:
        """Collect the XID errors of the GPU from now on."""
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def xids(self) -> list[int]:
        """Return the XID errors since the last call, or since `watch_xids`."""
        found: list[int] = []
        with suppress(self._nvml.NVMLError):  # the wait times out after the last error
            while self._events is not None:
                found.append(int(self._nvml.nvmlEventSetWait_v2(self._events, _XID_WAIT_MS).eventData))
        return found

    def percent(self) -> int | None:
        """Return the percentage of the time in which the GPU computed; None if unknown."""
        try:
            return int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None


def telemetry_of(device: torch.device) -> Telemetry | None:
    """Return the NVML readings of an accelerator; None if there are none."""
    if (uuid := nvidia_uuid(device)) is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return Telemetry(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
    except pynvml.NVMLError:
        return None


def _packages(zones: Path) -> Iterator[Path]:
    """Return the zones of whole packages.

    Parts of a package (cores, memory controller) and `psys`, which contains packages, are omitted.
    """
    for zone in sorted(zones.glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith("package"):
                yield zone
        except OSError:
            continue  # the zone has just disappeared, for example because a package went offline


if __name__ == "__main__":
    main()
