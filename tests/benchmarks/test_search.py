"""The benchmark of the search measures the job and the cluster that it says."""

from __future__ import annotations

import pytest

import search as benchmark


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own_that_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = benchmark.run_once("trillion")
    assert not run["torch"]
    assert run["considered"] > 1_000_000
    assert "dp=" in benchmark.table("trillion", run)
    assert set(benchmark.figures("trillion", [run])) >= {"trillion_seconds", "trillion_mb", "trillion_gap"}
