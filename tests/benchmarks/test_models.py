"""The survey of models tries each on real ranks and classifies the outcome rightly.

A model counts where the axis means something for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import models as survey
from models_cases import Case, cases

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "models.py"


def test_there_are_enough_models_of_enough_kinds_and_each_has_its_own_name() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) >= 80
    assert sum(name.startswith("hf/") for name in names) >= 50
    assert sum(name.startswith("plain/") for name in names) >= 20


def test_every_description_of_a_model_is_a_job(tmp_path: Path) -> None:
    for case in cases():
        assert case.job(tmp_path).global_batch == 8


def test_a_share_is_of_the_models_that_the_axis_means_something_for() -> None:
    with_tokens, without = Case("a", {}, {}, tokens=True), Case("b", {}, {})
    results = [
        survey.Result(with_tokens, "cp", "agree", "", 0.0),
        survey.Result(without, "cp", "refused_before_start", "", 0.0),
    ]
    figures = survey.figures_of(results)
    assert figures["agree_cp"] == 1.0
    assert (figures["models"], figures["agree"], figures["refused_before_start"], figures["wrong"]) == (2, 1, 1, 0)
    assert "agree_ep" not in figures


@pytest.mark.slow
def test_outcomes_of_real_ranks_are_told_apart(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--only", "plain/mlp$", "--axes", "dp,cp", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].split()[:3] == ["plain/mlp", "dp", "agree"]
    assert lines[1].split()[:3] == ["plain/mlp", "cp", "refused_before_start"]
    figures = json.loads(lines[-1])["figures"]
    assert (figures["agree"], figures["refused_before_start"], figures["crashed"], figures["agree_dp"]) == (
        1,
        1,
        0,
        1.0,
    )
