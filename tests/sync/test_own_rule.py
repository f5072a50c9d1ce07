"""A user's own rule, installed from the package in examples/rules: found by its name in a plan, and held to what all-reduce computes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import losses, paceline, write_job

RULES = Path(__file__).parent.parent.parent / "examples" / "rules"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH that holds the example package as pip installs it."""
    folder = tmp_path_factory.mktemp("own-rule")
    package = shutil.copytree(RULES, folder / "rules")  # setuptools builds in the source's folder
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(folder / "site"), str(package)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return str(folder / "site")


def test_a_rule_from_a_users_package_trains_as_all_reduce_does(installed: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", global_batch=18)  # the last batch of an epoch is smaller, so shares differ
    for rule in ("allreduce", "averaging"):
        shown = paceline("train", job, "--plan", f"dp=2 sync={rule}", "--run", rule, folder=tmp_path, PYTHONPATH=installed)
        assert shown.code == 0, shown.err
    by_all_reduce, by_own = losses(tmp_path / "allreduce"), losses(tmp_path / "averaging")
    assert len(by_own) == 6
    assert by_own == pytest.approx(by_all_reduce, rel=1e-5)


def test_without_its_package_a_rule_is_unknown_and_the_nearest_is_named(tmp_path: Path) -> None:
    shown = paceline("train", write_job(tmp_path / "job.yaml"), "--plan", "dp=2 sync=averaging", folder=tmp_path)
    assert shown.code == 1
    assert shown.error.count('unknown rule "averaging"') == 1


def test_a_setting_that_the_rule_does_not_take_is_an_error_that_names_it(installed: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    shown = paceline("train", job, "--plan", "dp=2 sync=averaging:3", folder=tmp_path, PYTHONPATH=installed)
    assert shown.code == 1
    assert shown.says("sync=averaging", "averaging_rule:Averaging", "cannot be made")


def test_the_rule_in_the_documentation_is_the_one_that_is_tested() -> None:
    _, shown = (RULES.parent.parent / "docs" / "sync.md").read_text().split("```python\n")
    code = [line for line in (RULES / "averaging_rule.py").read_text().splitlines() if line and '"""' not in line]
    lines = [line for line in shown.partition("```")[0].splitlines() if line]
    assert lines == code[code.index(lines[0]) :]
