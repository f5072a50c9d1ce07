"""What `paceline doctor` says of a machine.

Wrong here: a healthy machine that is called ill, or advice that nobody needs.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from paceline.cluster.discover import discover
from paceline.cluster.doctor import Finding, check_data_plane, check_machine, check_system, other_load
from paceline.cluster.host import Device, Host, Link

HERE = discover().hosts[0]
FOUR = Host(name="four", cores=4, memory_bytes=2**34, affinity=((0, 1), (2, 3)))


def one(findings: Iterable[Finding], topic: str) -> Finding:
    [finding] = [f for f in findings if f.topic == topic]
    return finding


def files(root: Path, **texts: str) -> Path:
    """The kernel's files, a `__` in a name for each `/`."""
    for name, text in texts.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def test_the_machine_that_runs_the_tests_can_train() -> None:
    findings = [*check_machine(HERE, None), *check_system()]
    assert [f for f in findings if f.level == "problem"] == []
    assert {"processor", "cores", "memory", "network", "CPU energy", "shared memory", "loopback"} <= {
        f.topic for f in findings
    }
    assert all(f.advice is None for f in findings if f.level == "ok")


def test_what_the_processor_can_do_is_named(tmp_path: Path) -> None:
    modern = files(tmp_path / "new", proc__cpuinfo="flags : fpu avx2 avx512f avx512_bf16 amx_bf16")
    assert "AVX2, AVX-512, bf16, AMX" in one(check_machine(FOUR, None, modern), "processor").text
    old = one(check_machine(FOUR, None, files(tmp_path / "old", proc__cpuinfo="flags : fpu sse2")), "processor")
    assert (old.level, "Without AVX2" in old.text) == ("note", True)
    assert one(check_machine(FOUR, None, tmp_path / "hidden"), "processor").level == "ok"


def test_a_quota_below_the_cores_is_noted(tmp_path: Path) -> None:
    root = files(tmp_path, proc__self__cgroup="0::/", **{"sys__fs__cgroup__cpu.max": "150000 100000"})
    finding = one(check_machine(FOUR, None, root), "cores")
    assert finding.level == "note"
    assert "4 logical, 2 physical" in finding.text
    assert "the control group allows the time of 1.5" in finding.text


@pytest.mark.parametrize(
    ("governor", "driver", "level"),
    [("powersave", "acpi-cpufreq", "note"), ("powersave", "intel_pstate", "ok"), ("performance", "acpi-cpufreq", "ok")],
)
def test_a_governor_that_keeps_the_clock_low_is_noted(tmp_path: Path, governor: str, driver: str, level: str) -> None:
    cpufreq = "sys__devices__system__cpu__cpu0__cpufreq__scaling_"
    root = files(tmp_path, **{f"{cpufreq}governor": governor, f"{cpufreq}driver": driver})
    assert one(check_machine(FOUR, None, root), "clock").level == level


def test_gpus_are_listed_with_their_links(tmp_path: Path) -> None:
    gpus = tuple(Device(index=i, name="H200", memory_bytes=139 * 2**30) for i in range(2))
    link = Link(name="cuda:0-cuda:1", kind="nvlink", bandwidth_gbps=3600)
    findings = list(check_machine(FOUR.model_copy(update={"gpus": gpus, "links": (link,)}), "595.1", tmp_path))
    for index in range(2):
        assert one(findings, f"cuda:{index}").text == "H200, 139 GiB, driver 595.1; nvlink 3600 Gbit/s (cuda:0-cuda:1)"


def test_an_accelerator_that_nvml_does_not_know_is_listed_without_its_driver_and_energy(tmp_path: Path) -> None:
    gpus = (Device(index=0, kind="xpu", name="Max 1550", memory_bytes=2**30),)
    findings = list(check_machine(FOUR.model_copy(update={"gpus": gpus}), None, tmp_path))
    assert one(findings, "xpu:0").text == "Max 1550, 1 GiB; links unknown"
    assert one(findings, "GPU energy").text == "not available: no counter that is known for these"


def test_a_gpu_without_a_driver_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bus = "sys__bus__pci__devices__0000:01:00.0__"
    root = files(tmp_path, **{f"{bus}vendor": "0x10de", f"{bus}class": "0x030200"})
    finding = one(check_machine(FOUR, None, root), "GPU")
    assert (finding.level, finding.advice) == (
        "note",
        "install the NVIDIA driver (in a container: start it with --gpus all)",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert one(check_machine(FOUR, None, root), "GPU").level == "ok", "it is hidden on purpose"


def test_amds_gpus_that_this_torch_does_not_know_are_noted(tmp_path: Path) -> None:
    finding = one(check_machine(FOUR, None, files(tmp_path, dev__kfd="")), "GPU")
    assert (finding.level, finding.advice) == (
        "note",
        "install torch for ROCm: https://pytorch.org/get-started/locally",
    )


def test_energy_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    finding = one(check_machine(FOUR, None, tmp_path), "CPU energy")
    assert finding.level == "note"
    assert finding.text.startswith("not available: the kernel shows no RAPL counters")


def test_a_missing_dev_shm_is_noted_for_data_loaders(tmp_path: Path) -> None:
    finding = one(check_system(tmp_path), "/dev/shm")
    assert finding.level == "note"
    assert "num_workers > 0" in finding.text


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_few_open_files_are_noted() -> None:
    assert one(check_system(), "open files").text == "at most 256 a process: few for data loader workers"


def test_other_work_on_the_machine_is_found_by_name_and_own_is_not() -> None:
    busy = "import os, time\nprint(os.getpid(), flush=True)\nuntil = time.time() + 20\nwhile time.time() < until: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None
        own.stdout.readline()
        look = "from paceline.cluster.doctor import check_load, other_load; print(other_load(0.5), check_load(1))"
        seen_by_another = subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        _, _, seen_here = other_load(0.5)
        own.kill()
    assert f"(pid {own.pid})" in seen_by_another
    assert "level='note', topic='load'" in seen_by_another
    assert not [name for name, _ in seen_here if f"(pid {own.pid})" in name]


@pytest.mark.parametrize(
    ("variables", "level", "text"),
    [
        ({}, "ok", "on one host ranks meet on loopback; between hosts gloo and NCCL send tensors in plaintext"),
        ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}, "ok", "on one host ranks meet on loopback"),
        (
            {"MASTER_ADDR": "10.0.0.1"},
            "note",
            "between hosts, at 10.0.0.1: gloo and NCCL send tensors in plaintext",
        ),
        ({"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth0"}, "note", "between hosts over eth0"),
        ({"GLOO_SOCKET_IFNAME": "wg0", "NCCL_SOCKET_IFNAME": "=wg0"}, "ok", "over wg0, which is WireGuard: encrypted"),
        ({"GLOO_SOCKET_IFNAME": "wg0", "NCCL_SOCKET_IFNAME": "eth0"}, "note", "between hosts over wg0, eth0"),
    ],
)
def test_what_others_could_read_is_said_before_ranks_span_hosts(
    variables: dict[str, str], level: str, text: str, tmp_path: Path
) -> None:
    for name, kind in (("wg0", "DEVTYPE=wireguard\n"), ("eth0", "")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "uevent").write_text(f"{kind}INTERFACE={name}\n")
    finding = check_data_plane(variables, tmp_path)
    assert (finding.level, finding.topic) == (level, "data plane")
    assert text in finding.text
    assert "docs/network.md" in finding.text + (finding.advice or "") or "encrypted" in finding.text
