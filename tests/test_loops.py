"""The scripts of examples/loops: each prints the same losses in one process and on two ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from ranks import Ranks

LOOPS = sorted((Path(__file__).parent.parent / "examples" / "loops").glob("*.py"))
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+")


def printed(folder: str) -> list[str]:
    """What each script writes on this rank, run as a person runs it, in a folder of its own."""
    found = []
    for script in LOOPS:
        own = Path(folder) / script.stem
        own.mkdir(exist_ok=True)
        os.chdir(own)
        sys.argv = [str(script)]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
        found.append(said.getvalue())
    return found


@pytest.mark.timeout(400)
def test_every_script_prints_the_same_losses_alone_and_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    alone = ranks(1, printed, str(tmp_path / "one"), deadline_s=180)[0]
    first, second = ranks(2, printed, str(tmp_path / "two"), deadline_s=180)
    assert second == [""] * len(LOOPS)
    for script, one, two in zip(LOOPS, alone, first, strict=True):
        numbers = [float(number) for number in NUMBER.findall(one)]
        assert len(numbers) >= 4, script.name
        assert NUMBER.sub("#", two) == NUMBER.sub("#", one), script.name
        assert [float(number) for number in NUMBER.findall(two)] == pytest.approx(numbers, rel=1e-4, abs=2e-5), (
            script.name
        )


def test_the_scripts_are_as_short_as_people_write_them() -> None:
    assert {
        path.name: len(path.read_text().splitlines()) for path in LOOPS if len(path.read_text().splitlines()) > 85
    } == {}
