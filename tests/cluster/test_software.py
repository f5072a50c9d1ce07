"""What `paceline doctor` says of what is installed. Wrong here: a torch that cannot use the GPUs and is called well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.doctor import Finding, check_capabilities, check_software, check_variables
from paceline.cluster.host import Device, Host
from paceline.device import Capabilities

CORES = Host(name="host", cores=4, memory_bytes=2**34)
GPUS = CORES.model_copy(update={"gpus": tuple(Device(index=i, name="H200", memory_bytes=2**37) for i in range(2))})
CPU_BUILD: dict[str, Any] = {
    "version": "2.13.0+cpu",
    "built_for": "CPU only",
    "devices": 0,
    "capability": "AVX512",
    "gloo": True,
}
CUDA_BUILD = CPU_BUILD | {"version": "2.13.0+cu130", "built_for": "CUDA 13.0", "devices": 2}


def levels(findings: Iterable[Finding], *topics: str) -> list[str]:
    return [f.level for f in findings if f.topic in topics]


def test_a_torch_that_fits_the_machine_is_ok() -> None:
    for torch, host in ((CPU_BUILD, CORES), (CUDA_BUILD, GPUS), (CUDA_BUILD | {"devices": 0}, CORES)):
        assert levels(check_software(host, torch), "torch", "torch for GPUs") == ["ok"]


@pytest.mark.parametrize(
    ("torch", "text"),
    [
        (CPU_BUILD, "torch can use 0 of 2 GPUs: it is built for the CPU only"),
        (CUDA_BUILD | {"devices": 1}, "torch can use 1 of 2 GPUs"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_problem(torch: dict[str, Any], text: str) -> None:
    [finding] = [f for f in check_software(GPUS, torch) if f.topic == "torch for GPUs"]
    assert (finding.level, finding.text) == ("problem", text)
    assert "PACELINE_DEVICE=cpu to train on the CPU" in str(finding.advice)


@pytest.mark.parametrize(
    "torch", [CPU_BUILD | {"version": "2.9.1"}, CPU_BUILD | {"gloo": False}, "import torch ended with exit code 1"]
)
def test_a_torch_that_cannot_train_is_a_problem(torch: dict[str, Any] | str) -> None:
    assert levels(check_software(CORES, torch), "torch") == ["problem"]


def test_a_missing_compiler_costs_torch_compile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    [finding] = [f for f in check_software(CORES, CPU_BUILD) if f.topic == "torch.compile"]
    assert finding.level == "note"
    assert finding.text.startswith("missing: no-such-compiler (C++ compiler)")


def test_missing_extras_are_named_with_what_they_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("pyarrow", "transformers", "jinja2") else object()
    )
    notes = {f.topic: f for f in check_software(CORES, CPU_BUILD) if f.level == "note" and f.topic != "torch.compile"}
    assert notes.keys() == {"extra data", "extra hf", "reports"}
    assert (notes["extra hf"].text, notes["extra hf"].advice) == (
        "without transformers: no Hugging Face models",
        "pip install 'paceline[hf]'",
    )
    assert "pyarrow" in notes["extra data"].text
    assert "sklearn" not in notes["extra data"].text


def test_what_a_device_cannot_do_is_noted_with_what_is_so_then() -> None:
    can = dict.fromkeys((field.name for field in fields(Capabilities)), True) | {"collectives": "xccl", "graphs": False}
    findings = {finding.topic: finding for finding in check_capabilities(can)}
    assert len(findings) == len(can), "every capability is shown"
    assert findings["collectives"].text == "xccl"
    assert [f.text for f in findings.values() if f.level == "note"] == ["no: compile=reduce-overhead is refused"]


def test_an_environment_that_misleads_a_run_is_noted() -> None:
    assert levels(check_variables({"PATH": "/bin", "CUDA_LAUNCH_BLOCKING": "0"}), "variables") == ["ok"]
    misleading = {"RANK": "0", "OMP_NUM_THREADS": "64", "OMP_PROC_BIND": "true", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    hiding = {"CUDA_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "0", "PACELINE_DEVICE": "cpu"}
    findings = list(check_variables(misleading | hiding | {"CUDA_LAUNCH_BLOCKING": "1"}))
    assert {f.level for f in findings} == {"note"}
    for name in (*misleading, *hiding, "CUDA_LAUNCH_BLOCKING"):
        assert [f for f in findings if name in f.text], name
