"""The built library: which builds are kept, and that a script finds the accelerator whatever lies beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulated import build
from simulated.environment import Simulated


def test_the_builds_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", Path.touch)  # the compiler takes a minute

    def used(flag: str) -> Path:
        monkeypatch.setattr(build, "_FLAGS", (flag,))
        return build.build()

    first, *others = [used(f"-D{number}") for number in range(build.KEPT)]
    assert used("-D0") == first
    newest = used("-Dnew")
    assert {file for file in (first, *others, newest) if file.exists()} == {first, *others[1:], newest}
    assert len(list(newest.parent.parent.glob("*/"))) == build.KEPT


def test_a_script_beside_another_module_of_that_name_has_the_accelerator(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "simulated.py").write_text("raise SystemExit('this is not the accelerator')\n")
    (tmp_path / "script.py").write_text("import torch\nprint(torch.accelerator.current_accelerator())\n")
    environ = os.environ | simulated.environment()
    ended = subprocess.run([sys.executable, tmp_path / "script.py"], env=environ, capture_output=True, timeout=100)
    assert ended.stdout.strip() == b"sim", ended.stderr
