"""The commands of the tutorial work as written, beside a copy of the examples."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.cluster import cluster_from
from paceline.job.job import Job
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.plan import Plan

ROOT = Path(__file__).parent.parent
TUTORIAL = (ROOT / "docs/tutorials/first_run.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
COMMANDS = [words for block in BLOCKS for line in block.splitlines() if (words := shlex.split(line, comments=True))]
DEADLINE_S = 900


def test_every_plan_of_the_tutorial_can_run_its_job() -> None:
    planned = [words for words in COMMANDS if "--plan" in words]
    assert len(planned) > 5
    for words in planned:
        job, plan = Job.load(ROOT / words[2]), Plan.parse(words[words.index("--plan") + 1])
        assert plan_errors(job, plan, cluster=cluster_from(f"{max(plan.ranks, 2)}xcpu")) == [], words


@pytest.mark.slow
def test_the_tutorial_can_be_followed_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for words in COMMANDS:
        found = [_found(word, tmp_path) for word in words]
        program = found[0] if "/" in found[0] else str(Path(sys.executable).parent / found[0])
        done = subprocess.run(
            [program, *found[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


def _found(word: str, folder: Path) -> str:
    """Newest folder that matches a name like `runs/digits-…`."""
    if not word.endswith("…"):
        return word
    return str(max(folder.glob(f"{word.removesuffix('…')}*"), key=lambda path: path.stat().st_mtime))
