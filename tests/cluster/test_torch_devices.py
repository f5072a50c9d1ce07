"""Accelerators that torch knows and NVML does not.

Wrong here: a run that quietly takes the cores beside an accelerator, or a launcher that imports torch for nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster import machine
from paceline.cluster.machine import hint

DISCOVER = "from paceline.cluster.discover import discover; print(discover().kind)"


def plugin(folder: Path, code: str) -> Path:
    """A folder for PYTHONPATH with an installed plugin of torch, which runs `code` when torch is imported."""
    (folder / "a_plugin.py").write_text(f"def load():\n    {code}\n")
    about = folder / "a_plugin-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a_plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nacme = a_plugin:load\n")
    return folder


def alone(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `code` prints in a Python of its own."""
    path = os.pathsep.join(filter(None, (variables.pop("path", ""), os.environ.get("PYTHONPATH", ""))))
    environ = {name: value for name, value in os.environ.items() if name != "PACELINE_DEVICE"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", None),
        ("cuda = None\nhip: Optional[str] = '7.1.25424'\n", "torch is built for AMD's GPUs"),
        ("hip: Optional[str] = None\nxpu: Optional[str] = '20250201'\n", "torch is built for Intel's GPUs"),
    ],
    ids=["cuda", "rocm", "xpu"],
)
def test_the_installed_torch_says_what_it_is_built_for_without_being_imported(
    version: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_version_file", lambda: version)
    monkeypatch.setattr(machine, "_plugins", lambda path: [])
    assert hint() == said


@pytest.mark.slow
def test_a_plugin_without_a_device_leaves_a_machine_of_cores(tmp_path: Path) -> None:
    found = alone(DISCOVER, path=str(plugin(tmp_path, "pass")), CUDA_VISIBLE_DEVICES="")
    assert found.stdout.split() == ["cpu"], found.stderr


def test_a_plugin_that_fails_is_an_error_that_says_why_and_how_to_do_without(tmp_path: Path) -> None:
    path = str(plugin(tmp_path, "raise OSError('libacme.so: cannot open shared object file')"))
    found = alone(DISCOVER, path=path)
    assert found.returncode != 0
    said = " ".join(found.stderr.split())
    assert "the torch plugin acme is installed, but torch cannot say which devices it has" in said
    assert "libacme.so" in said
    assert "PACELINE_DEVICE=cpu" in said
    assert alone(DISCOVER, path=path, PACELINE_DEVICE="cpu").stdout.split() == ["cpu"]


def test_an_accelerator_that_is_asked_for_and_not_there_is_an_error() -> None:
    found = alone(DISCOVER, PACELINE_DEVICE="acme", CUDA_VISIBLE_DEVICES="")
    assert found.returncode != 0
    assert "PACELINE_DEVICE=acme, but the accelerators here are not to be found" in " ".join(found.stderr.split())
