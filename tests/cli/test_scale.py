"""`paceline scale` says what is wrong before it asks a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import paceline


@pytest.mark.parametrize("by", ["2", "-2", "+0", "1"])
def test_a_run_is_scaled_by_one_at_a_time(by: str, tmp_path: Path) -> None:
    shown = paceline("scale", "run", by, folder=tmp_path, columns=200)
    assert shown.code == 2
    assert shown.says(f"{by} is neither +1 nor -1")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "[run.not_scalable]" in paceline("scale", tmp_path, "-1", folder=tmp_path).error
    assert "[run.not_scalable]" in paceline("scale", tmp_path / "none", "-1", folder=tmp_path).error


def test_a_run_at_a_url_is_named_by_its_working_directory(tmp_path: Path) -> None:
    assert "working directory" in paceline("scale", "s3://bucket/run", "+1", folder=tmp_path).error


def test_a_run_that_has_ended_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("")
    (tmp_path / "lock").write_text("")
    assert "is not being trained" in paceline("scale", tmp_path, "-1", folder=tmp_path).error
