"""Energy counters where the machine tells: RAPL for processor packages, NVML for GPUs.

They count all that the package or GPU does, for whichever process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.device import nvidia_uuid

if TYPE_CHECKING:
    import torch

_ZONES = "sys/class/powercap"


class Energy:
    """The energy used since this object was made.

    Ask at least every few minutes: a counter that went round twice counts once.

    Attributes:
        why_not: why there is no answer; None where there is one.
    """

    def __init__(self, counters: list[Counter], why_not: str | None = None) -> None:
        self._counters = counters
        self.why_not = why_not
        self.joules()

    def joules(self) -> float | None:
        """Joules since this object was made; None, for good, where a counter cannot be read."""
        if self.why_not is not None:
            return None
        try:
            return sum(counter.microjoules() for counter in self._counters) / 1e6
        except (OSError, ValueError) as error:
            self.why_not = f"a counter cannot be read: {error}"
            return None


class Counter:
    """A counter of microjoules that begins again at 0 when it reaches `range_uj`."""

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
    """The energy of all processor packages of this host."""
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
    """Energy counter of the GPU `handle` of an initialised NVML (the module `pynvml`).

    GPUs have one since Volta.
    """

    def read_uj() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1000
        except nvml.NVMLError as error:
            raise OSError(f"NVML says {error}") from error

    return Energy([Counter(read_uj, 2**64)])


class Telemetry:
    """Readings that NVML has of one GPU: `energy`, and its utilization."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.energy = gpu_energy(nvml, handle)

    def percent(self) -> int | None:
        """Part of the time in which the GPU computed; None where it does not tell."""
        try:
            return int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None


def telemetry_of(device: torch.device) -> Telemetry | None:
    """NVML's readings of an accelerator; None where it knows none."""
    if (uuid := nvidia_uuid(device)) is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return Telemetry(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
    except pynvml.NVMLError:
        return None


def _packages(zones: Path) -> Iterator[Path]:
    """The zones of whole packages: not their parts (cores, memory controller), nor `psys`, which holds the packages."""
    for zone in sorted(zones.glob("intel-rapl:*")):
        try:
            if (zone / "name").read_text().startswith("package"):
                yield zone
        except OSError:
            continue  # a zone that has just gone, as when a package is taken offline
