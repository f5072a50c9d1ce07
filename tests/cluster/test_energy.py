"""Energy from copies of the kernel's files.

Wrong here: joules counted twice, negative ones, or a run that ends for want of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from paceline.cluster.probe import Telemetry, cpu_energy, gpu_energy

ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",
    "intel-rapl:0:1": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",
}


def machine(root: Path, *, joules: float = 100, range_joules: float = 1000) -> Path:
    """A machine of two packages whose zones have all used as much."""
    for zone, name in ZONES.items():
        folder = root / "sys/class/powercap" / zone
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{range_joules * 1e6:.0f}\n")
        (folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    return root


def test_packages_count_from_the_moment_of_asking_and_their_parts_not_twice(tmp_path: Path) -> None:
    energy = cpu_energy(machine(tmp_path, joules=100))
    assert (energy.joules(), energy.why_not) == (0, None)
    machine(tmp_path, joules=107.5)
    assert energy.joules() == 15.0


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    energy = cpu_energy(machine(tmp_path, joules=990))
    for joules in (20, 980, 5):  # 30, then 960, then 25 more, in each of two packages
        machine(tmp_path, joules=joules)
        used = energy.joules()
    assert used == 2 * (30 + 960 + 25)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    energy = cpu_energy(tmp_path)
    assert energy.joules() is None
    assert "no RAPL counters in /sys/class/powercap, as in most virtual machines" in str(energy.why_not)


def test_a_counter_that_goes_away_ends_the_answers_and_nothing_else(tmp_path: Path) -> None:
    energy = cpu_energy(machine(tmp_path))
    (tmp_path / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
    assert energy.joules() is None
    machine(tmp_path)
    assert energy.joules() is None, "a sum with a gap in it is not a sum"


def test_counters_for_root_only_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # another user may not walk through the folders above
    with as_nobody():
        why_not = cpu_energy(Path()).why_not
    assert why_not == "/sys/class/powercap/intel-rapl:0/energy_uj can be read by root only"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, which may read every file."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_gpu_counts_in_millijoules() -> None:
    readings = iter([5_000, 12_500])
    nvml = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(readings), NVMLError=pynvml.NVMLError
    )
    energy = gpu_energy(nvml, "gpu")
    assert energy.joules() == 7.5


def test_a_gpu_that_does_not_count_says_so() -> None:
    def refuse(handle: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    energy = gpu_energy(SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=refuse, NVMLError=pynvml.NVMLError), "gpu")
    assert (energy.joules(), energy.why_not) == (None, "a counter cannot be read: NVML says Not Supported")


def test_the_driver_knows_the_question() -> None:
    assert callable(pynvml.nvmlDeviceGetTotalEnergyConsumption)


def test_this_machine_answers_or_says_why_not() -> None:
    energy = cpu_energy()
    joules = energy.joules()
    assert (joules is None) == (energy.why_not is not None)
    assert joules is None or joules >= 0


def test_a_gpu_that_tells_no_utilization_has_none() -> None:
    def refuse(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvml = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 7,
        nvmlDeviceGetUtilizationRates=refuse,
        NVMLError=pynvml.NVMLError,
    )
    assert Telemetry(nvml, "gpu").percent() is None
    nvml.nvmlDeviceGetUtilizationRates = lambda gpu: SimpleNamespace(gpu=42)
    assert Telemetry(nvml, "gpu").percent() == 42


def test_other_processes_on_a_gpu_are_named_only_if_this_process_is_known() -> None:
    def process(pid: int) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, usedGpuMemory=pid * 2)

    listed = [process(7), process(os.getpid())]
    nvml = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 7,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: listed,
        NVMLError=pynvml.NVMLError,
    )
    assert Telemetry(nvml, "gpu").other_processes() == [(7, 14)]
    listed.pop()
    assert not Telemetry(nvml, "gpu").other_processes()
    assert callable(pynvml.nvmlDeviceGetComputeRunningProcesses)


def test_xids_are_collected_until_there_are_no_more() -> None:
    events = iter([79, 48])

    def wait(watched: object, timeout_ms: int) -> SimpleNamespace:
        for xid in events:
            return SimpleNamespace(eventData=xid)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    nvml = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: 7,
        nvmlEventSetCreate=object,
        nvmlDeviceRegisterEvents=lambda gpu, kinds, watched: None,
        nvmlEventTypeXidCriticalError=pynvml.nvmlEventTypeXidCriticalError,
        nvmlEventSetWait_v2=wait,
        NVMLError=pynvml.NVMLError,
    )
    telemetry = Telemetry(nvml, "gpu")
    assert telemetry.xids() == []
    telemetry.watch_xids()
    assert [telemetry.xids(), telemetry.xids()] == [[79, 48], []]
