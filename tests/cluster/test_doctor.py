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


CPUFREQ, BUS = "sys__devices__system__cpu__cpu0__cpufreq__scaling_", "sys__bus__pci__devices__0000:01:00.0__"
QUOTA = {"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpu.max": "150000 100000"}


@pytest.mark.parametrize(
    ("texts", "topic", "level", "said"),
    [
        (
            {"proc__cpuinfo": "flags : fpu avx2 avx512f avx512_bf16 amx_bf16"},
            "processor",
            "ok",
            "AVX2, AVX-512, bf16, AMX",
        ),
        ({"proc__cpuinfo": "flags : fpu sse2"}, "processor", "note", "Without AVX2"),
        ({}, "processor", "ok", "features unknown"),
        (QUOTA, "cores", "note", "4 logical, 2 physical; the control group allows the time of 1.5"),
        ({f"{CPUFREQ}governor": "powersave", f"{CPUFREQ}driver": "acpi-cpufreq"}, "clock", "note", "powersave"),
        ({f"{CPUFREQ}governor": "powersave", f"{CPUFREQ}driver": "intel_pstate"}, "clock", "ok", "powersave"),
        ({f"{CPUFREQ}governor": "performance", f"{CPUFREQ}driver": "acpi-cpufreq"}, "clock", "ok", "performance"),
        ({f"{BUS}vendor": "0x10de", f"{BUS}class": "0x030200"}, "GPU", "note", "install the NVIDIA driver"),
        ({"dev__kfd": ""}, "GPU", "note", "install torch for ROCm"),
        ({}, "CPU energy", "note", "not available: the kernel shows no RAPL counters"),
    ],
)
def test_a_machine_is_judged_by_the_kernels_files(
    texts: dict[str, str], topic: str, level: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = one(check_machine(FOUR, None, files(tmp_path, **texts)), topic)
    assert finding.level == level
    assert said in f"{finding.text} {finding.advice}"


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


def test_a_gpu_that_is_hidden_on_purpose_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = files(tmp_path, **{f"{BUS}vendor": "0x10de", f"{BUS}class": "0x030200"})
    assert one(check_machine(FOUR, None, root), "GPU").level == "ok"


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
    assert "docs/how-to/secure_the_network.md" in finding.text + (finding.advice or "") or "encrypted" in finding.text
