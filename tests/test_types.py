"""Types of the public API in a user's project, held by `mypy --strict`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
PROJECT = Path(__file__).parent / "typed_project"
# torch alone takes mypy half a minute; what it has found is kept from run to run
CACHE = ROOT / "build" / "mypy_of_a_user"


@pytest.mark.timeout(300)
def test_a_users_project_passes_strictly_and_misuse_is_refused_where_it_stands(tmp_path: Path) -> None:
    for file in PROJECT.glob("*.py"):
        shutil.copy(file, tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(CACHE)]
    ran = subprocess.run(
        [*command, "project.py", "misuse.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    errors = re.findall(r"^(\w+\.py):(\d+): error: (.*)", ran.stdout, re.MULTILINE)
    assert [error for error in errors if error[0] == "project.py"] == []
    lines = (tmp_path / "misuse.py").read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "# refused" in line]
    assert sorted({int(line) for file, line, _ in errors if file == "misuse.py"}) == marked, ran.stdout + ran.stderr


def test_the_project_uses_every_public_name() -> None:
    text = (PROJECT / "project.py").read_text()
    assert [name for name in paceline.__all__ if not re.search(rf"\b{name}\b", text)] == []
