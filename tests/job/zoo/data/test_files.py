"""Finding files: what counts as data, and what a missing file or package is told as."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.extensions import optional_package
from paceline.job.zoo.arrays import files_below, reading
from refusals import raises


def test_hidden_files_caches_and_installed_packages_are_no_data(tmp_path: Path) -> None:
    for name in ("b.py", "a.PY", "sub/c.py", ".git/d.py", ".e.py", "__pycache__/f.py", "site-packages/g.py", "h.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [os.path.relpath(f, tmp_path) for f in files_below(tmp_path, (".py",))]
    assert found == ["a.PY", "b.py", "sub/c.py"]
    assert files_below(tmp_path, (".TXT",)) == [str(tmp_path / "h.txt")]


def test_a_missing_file_is_named_absolutely_with_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        raises(DataError, "data.unreadable", expected="numbers", reason="No such file or directory", place=tmp_path),
        reading(Path("."), "numbers"),
    ):
        Path("gone.bin").read_bytes()


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # Python's own way to have an import fail
    with raises(DataError, "data.package_missing", package="pyarrow"):
        optional_package("pyarrow.parquet", "pyarrow")
