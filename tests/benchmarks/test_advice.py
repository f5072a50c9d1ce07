"""The benchmark of advice counts what helped, and ends with its figures."""

from __future__ import annotations

import json

import pytest

import advice


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_prints_a_row_for_each_job_and_ends_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advice, "CASES", [("cnn", "cifar_cnn", "digits", "fsdp=2")])
    monkeypatch.setattr(advice, "ROUNDS", 3)
    monkeypatch.setattr("sys.argv", ["advice.py", "--json"])
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    advice.main()
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["figures"]["jobs"] == 1
    assert found["figures"]["advised"] == len([line for line in lines if "%" in line]) - 1, "the heading has one, too"
    assert found["environment"]["torch"]
