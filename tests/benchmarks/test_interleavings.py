"""`benchmarks/interleavings.py` plays the recovery protocol, and says which seed broke a promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import interleavings
from paceline.launch.membership import Membership

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "interleavings.py"


@pytest.mark.slow
def test_some_thousand_interleavings_break_no_promise() -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--millions", "0.004", "--processes", "2"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["figures"]
    assert (figures["interleavings"], figures["violations"]) == (4000, 0)
    assert 100 * 4000 <= figures["events"] <= 400 * 4000


def test_a_broken_promise_is_told_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleavings, "PACKAGE", 20)
    monkeypatch.setattr(Membership, "note", lambda *_: None)
    played, _, wrong = interleavings.package(40)
    seed, what = wrong[0]
    assert played == 20
    assert seed in range(40, 60)
    with pytest.raises(AssertionError, match=re.escape(what.partition(" (")[0])):
        interleavings.play(seed)
