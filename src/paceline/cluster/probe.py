"""Measured speed of this machine: matrix products and memory copies, in a new process. It takes a few seconds."""

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
_CALL_S = 0.008  # minimum time of a measurement, so that clock resolution and call overhead do not matter
_BUDGET_S, _REPEATS = 0.25, 5
_LARGEST = 16384  # rows and columns of a matrix
_SMALLEST_COPY_BYTES = 2**26


@dataclass(frozen=True)
class ProbedSpeed:
    """Result of one measurement: the median over several repeats, after a warm-up.

    Attributes:
        what: `matmul` in floating-point operations per second (2 n^3 for a product of n x n matrices), `copy` in bytes
            read and written per second, between two buffers much larger than the caches.
        device: `cpu`, or an accelerator as torch names it (`cuda:0`).
        threads: number of CPU threads; 0 on an accelerator.
        value: result; None if it could not be measured.
        why_not: reason why `value` is None.
    """

    what: Literal["matmul", "copy"]
    device: str
    dtype: str
    threads: int
    value: float | None = None
    why_not: str | None = None


class Probe:
    """Process with its own torch, which measures on request. It ends with the context.

    If torch cannot be imported or crashes, only that process ends.

    Args:
        deadline_s: longest time for one answer.
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

        The answer also has the usable accelerators: `kind`, the number of `devices`, and their capabilities `can`
            (`device.Capabilities`); without any these are None, 0 and {}.

        Raises:
            ClusterError: torch cannot be imported.
        """
        return self._answer("import torch")

    def speeds(self) -> Iterator[ProbedSpeed]:
        """Measure matrix products and copies: on all cores, one thread, and every accelerator.

        Cores are physical cores. `torch` must have been called before.

        Raises:
            ClusterError: the process ended before it was done. Results until then have been returned.
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
        finally:  # also on Ctrl-C, because Python waits for the timer
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
    """Total size of the data caches of each level, in bytes; empty if unknown.

    Each cache counts once, even if several cores share it.
    """
    found: dict[tuple[int, str], int] = {}
    for cache in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        try:
            level, kind, size, cores = (
                (cache / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue  # a processor that does not expose it
        if kind != "Instruction":
            found[int(level), cores] = int(size.rstrip("K")) * 1024  # the kernel uses KiB for every size
    return {
        level: sum(size for (of, _), size in found.items() if of == level)
        for level in sorted({level for level, _ in found})
    }


def copy_bytes(memory_bytes: int, root: Path = Path("/")) -> int:
    """Size of each of a copy's two buffers, in bytes.

    It is four times the largest caches, but no more than an eighth of the memory.
    """
    caches = cache_bytes(root)
    return min(max(_SMALLEST_COPY_BYTES, 4 * caches.get(max(caches, default=0), 0)), memory_bytes // 8)


# In the separate process


def main() -> None:
    """Describe torch, read the request, and answer with a line per speed. An empty line ends the answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not an answer
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
        # no memory, a device that torch cannot use, a dtype that it lacks there
        except (RuntimeError, AssertionError) as error:
            yield ProbedSpeed(what, device, dtype, threads, why_not=str(error).strip().partition("\n")[0])


def _matmul_flops(device: str, dtype: Any) -> float:
    n = 256  # seconds for a product of 1024 rows, for a device that emulates bf16
    # the fastest: other work only adds time
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
    # every page is touched, because untouched pages share one page of zeros
    source = torch.ones(copy_bytes // 4, device=device)
    target = torch.ones_like(source)
    return 2 * source.nbytes / statistics.median(_times_s(device, lambda: target.copy_(source), _REPEATS, _BUDGET_S))


def _times_s(device: str, call: Callable[[], object], repeats: int, budget_s: float) -> list[float]:
    """Measure the seconds of repeated calls, after a warm-up.

    There are at least `repeats` calls, and more if time permits.
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
    """Meter of the energy used since this object was made.

    Read it at least every few minutes: a counter that wraps around twice counts once.

    Attributes:
        why_not: reason why there is no reading; None if there is one.
    """

    def __init__(self, counters: list[Counter], why_not: str | None = None) -> None:
        self._counters = counters
        self.why_not = why_not
        self.joules()

    def joules(self) -> float | None:
        """Joules since this object was made; permanently None after a counter could not be read."""
        if self.why_not is not None:
            return None
        try:
            return sum(counter.microjoules() for counter in self._counters) / 1e6
        except (OSError, ValueError) as error:
            self.why_not = f"a counter cannot be read: {error}"
            return None


class Counter:
    """Counter of microjoules that wraps around to 0 at `range_uj`."""

    def __init__(self, read_uj: Callable[[], int], range_uj: int) -> None:
        self._read_uj, self._range_uj = read_uj, range_uj
        self._used_uj = 0
        self._last_uj: int | None = None

    def microjoules(self) -> int:
        """Microjoules since the first call."""
        now = self._read_uj()
        if self._last_uj is not None:
            self._used_uj += (now - self._last_uj) % self._range_uj
        self._last_uj = now
        return self._used_uj


def cpu_energy(root: Path = Path("/")) -> Energy:
    """Meter of the energy of all processor packages of this host."""
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
    """Energy counter of the GPU `handle` of an initialized NVML (the module `pynvml`), available since Volta."""

    def read_uj() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1000
        except nvml.NVMLError as error:
            raise OSError(f"NVML says {error}") from error

    return Energy([Counter(read_uj, 2**64)])


class Telemetry:
    """NVML readings of one GPU: `energy` and utilization."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.energy = gpu_energy(nvml, handle)

    def percent(self) -> int | None:
        """Percent of the time in which the GPU computed; None if unknown."""
        try:
            return int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None


def telemetry_of(device: torch.device) -> Telemetry | None:
    """NVML's readings of an accelerator, or None."""
    if (uuid := nvidia_uuid(device)) is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return Telemetry(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
    except pynvml.NVMLError:
        return None


def _packages(zones: Path) -> Iterator[Path]:
    """Zones of whole packages, without their parts (cores, memory controller) and `psys`, which contains packages."""
    for zone in sorted(zones.glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith("package"):
                yield zone
        except OSError:
            continue  # a zone that has just disappeared, for instance because a package went offline


if __name__ == "__main__":
    main()
