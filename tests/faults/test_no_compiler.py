"""`compile=on` on a machine that cannot compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import in_a_process, write_job


@pytest.mark.slow
def test_without_a_compiler_compile_on_is_a_clear_error_and_no_trace_of_torchs_inside(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    outcome = in_a_process("train", job, "--plan", "dp=1 compile=on", folder=tmp_path, CXX="no-such-compiler")
    assert outcome.code == 1
    error = outcome.fails_with("plan.compile_failed")
    assert "InvalidCxxCompiler" in error
    assert "Traceback" not in error
