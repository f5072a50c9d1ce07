"""`benchmarks/interleavings.py` plays the recovery protocol, and says which seed broke a promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import interleavings
from paceline.elastic.membership import Membership

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "interleavings.py"


@pytest.mark.slow
def test_some_thousand_interleavings_break_no_promise() -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--millions", "0.004", "--processes", "2"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])["figures"]
    assert (figures["interleavings"], figures["violations"]) == (4000, 0)
    assert 30 * 4000 <= figures["events"] <= 300 * 4000


@pytest.mark.slow
def test_a_later_start_goes_on_where_the_one_before_has_ended(tmp_path: Path) -> None:
    results = tmp_path / "played.json"
    command = [sys.executable, str(BENCHMARK), "--processes", "2", "--out", str(results), "--millions"]
    subprocess.run([*command, "0.004"], capture_output=True, check=True)
    before = json.loads(results.read_text())
    subprocess.run([*command, "0.008"], capture_output=True, check=True)
    after = json.loads(results.read_text())
    assert (before["interleavings"], after["interleavings"]) == (4000, 8000)
    assert after["events"] > before["events"]
    results.write_text(json.dumps(after | {"protocol": "another"}))
    told = subprocess.run([*command, "0.002"], capture_output=True, text=True, check=True).stdout
    assert "played anew" in told
    assert json.loads(results.read_text())["interleavings"] == 2000


def test_a_broken_promise_is_told_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleavings, "PACKAGE", 20)
    monkeypatch.setattr(Membership, "note", lambda *_: None)
    played, _, wrong = interleavings.package(40)
    seed, what = wrong[0]
    assert played == 20
    assert seed in range(40, 60)
    with pytest.raises(AssertionError, match=re.escape(what.partition(" (")[0])):
        interleavings.play(seed)
