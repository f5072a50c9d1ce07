"""Accelerators that torch knows and NVML does not.

Wrong here: a run that quietly takes the cores beside an accelerator, or a launcher that imports torch for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cluster import machine
from paceline.cluster.discover import discover
from paceline.cluster.machine import hint
from paceline.errors import ClusterError
from refusals import raises


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a plugin of torch, which runs some code when torch is imported."""

    def install(code: str) -> None:
        (tmp_path / "a_plugin.py").write_text(f"def load():\n    {code}\n")
        about = tmp_path / "a_plugin-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: a_plugin\nVersion: 1\n")
        (about / "entry_points.txt").write_text("[torch.backends]\nacme = a_plugin:load\n")
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
        monkeypatch.setenv("PYTHONPATH", path)  # of the process that is asked
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delenv("PACELINE_DEVICE", raising=False)

    return install


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
def test_a_plugin_without_a_device_leaves_a_machine_of_cores(
    plugin: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("pass")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discover().kind == "cpu"


def test_a_plugin_that_fails_is_an_error_that_says_why_and_how_to_do_without(
    plugin: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("raise OSError('libacme.so: cannot open shared object file')")
    with raises(ClusterError, "device.unknown_to_torch", hint="the torch plugin acme is installed") as caught:
        discover()
    assert "libacme.so" in str(caught.value)
    assert "PACELINE_DEVICE=cpu" in str(caught.value)
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    assert discover().kind == "cpu"


def test_an_accelerator_that_is_asked_for_and_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DEVICE", "acme")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with raises(ClusterError, "device.not_there", there="no accelerator", variable="PACELINE_DEVICE", wanted="acme"):
        discover()
