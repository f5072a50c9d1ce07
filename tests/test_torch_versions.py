"""Every entry point reports once that torch is newer than the tested versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import paceline
from commands import paceline as command
from paceline import torch_versions
from paceline.cluster.doctor import check_software
from paceline.cluster.host import Host
from paceline.torch_versions import NEWEST, OLDEST, newer_than_tested

ROOT = Path(__file__).parent.parent
DESCRIBED = {"built_for": "CPU only", "devices": 0, "capability": "AVX2", "gloo": True}


def test_the_package_asks_for_the_tested_versions_alone() -> None:
    [asked] = [
        Requirement(line)
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if Requirement(line).name == "torch"
    ]
    assert str(asked.specifier) == f"<{NEWEST[0]}.{NEWEST[1] + 1},>={OLDEST[0]}.{OLDEST[1]}"
    assert (
        f"torch {OLDEST[0]}.{OLDEST[1]} or {NEWEST[0]}.{NEWEST[1]}." in (ROOT / "docs/tutorials/install.md").read_text()
    )


def test_the_pinned_version_is_the_oldest_and_ci_tests_the_newest() -> None:
    found = [re.findall(r"torch==(\d+)\.(\d+)", (ROOT / file).read_text()) for file in ("Makefile", ".ci/run")]
    assert [[tuple(map(int, one)) for one in versions] for versions in found] == [[OLDEST], [NEWEST]]


@pytest.mark.parametrize(("version", "newer"), [("2.13.0", False), ("2.14.1+cu130", False), ("2.15.0a0+git1", True)])
def test_only_a_newer_minor_version_is_untested(version: str, newer: bool) -> None:
    assert (newer_than_tested(version) is not None) == newer


def test_doctor_notes_a_newer_torch() -> None:
    host = Host(name="host", cores=4, memory_bytes=2**34)
    found = {v: [f.level for f in check_software(host, DESCRIBED | {"version": v}) if f.topic == "torch"] for v in V}
    assert found == dict(zip(V, (["problem"], ["ok"], ["note"]), strict=True))


V = ("2.9.1", "2.14.0", "2.15.0")


def test_a_command_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = command("runs", folder=tmp_path).err
    monkeypatch.setattr(torch_versions, "NEWEST", (2, 9))
    monkeypatch.setattr(torch_versions, "version", lambda name: "2.99.0")
    assert quiet.count("2.99.0") == 0
    assert command("runs", folder=tmp_path).err.count("2.99.0") == 1


def test_setup_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "version", lambda name: "2.99.0")
    model = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match=r"2\.99\.0"):
        paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss()).close()
