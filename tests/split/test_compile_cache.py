"""Code that torch.compile generates is kept where only this user writes."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.split.remat import keep_compiled_code_private
from refusals import raises


def test_compiled_code_lies_in_a_private_folder_of_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "paceline" / "torchinductor")
    assert stat.S_IMODE((tmp_path / "paceline" / "torchinductor").stat().st_mode) == 0o700


def test_a_folder_that_the_user_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


@pytest.mark.needs_root
def test_compiled_code_of_another_user_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chown(folder, 1234, 1234)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        with raises(PlanError, "plan.compile_folder_open"):
            keep_compiled_code_private()
