"""The suite passes on a machine that has only Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from bare_machine import run


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.timeout(5400)
def test_the_suite_passes_without_optional_programs_and_root(tmp_path: Path) -> None:
    for parent in tmp_path.parents[:2]:  # pytest's folders are for their owner alone
        parent.chmod(0o755)
    assert run(["-q", "--numprocesses", "2", "--dist", "loadgroup"], tmp_path) == 0
