"""Each slow test is in one of the named groups."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "slow_tests"


def groups() -> dict[str, list[Path]]:
    """The folders and files of each group in the script."""
    entries = re.findall(r'^  "(\w+) (tests/[^"]*)"$', SCRIPT.read_text(), re.MULTILINE)
    return {name: [ROOT / path for path in paths.split()] for name, paths in entries}


def slow_files() -> set[Path]:
    """The files of tests that mark a test as slow."""
    return {file for file in ROOT.glob("tests/**/test_*.py") if re.search(r"\bmark\.slow\b", file.read_text())}


def test_each_file_with_slow_tests_is_in_exactly_one_group() -> None:
    slow = slow_files()
    times = Counter(file for paths in groups().values() for path in paths for file in slow if file.is_relative_to(path))
    wrong = {str(file.relative_to(ROOT)): times[file] for file in slow if times[file] != 1}
    assert not wrong


def test_each_folder_and_file_of_a_group_has_slow_tests() -> None:
    slow = slow_files()
    empty = [
        str(path) for paths in groups().values() for path in paths if not any(f.is_relative_to(path) for f in slow)
    ]
    assert len(groups()) == 6
    assert not empty
