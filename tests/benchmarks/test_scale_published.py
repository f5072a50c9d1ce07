"""The benchmark of published curves: each is scored without its own source, and misses are counted as misses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import scale_published as benchmark
from paceline_lab.simulated.measured_here import held_against


def test_every_curve_is_scored_and_the_figures_are_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])["figures"]
    assert found["curves"] == len(held_against())
    assert sum(name.startswith("error_of_") for name in found) == found["curves"]
    outside = sum(line.endswith("OUTSIDE") for line in lines)
    assert found["coverage_80"] == pytest.approx(1 - outside / found["curves"])
    assert found["coverage_80"] > 0.6, "an interval of 80 % that misses this often is none"
    assert found["mean_error"] < found["planner_mean_error"], "what other curves lose must help"


def test_what_a_source_measured_does_not_correct_its_own_curves() -> None:
    curves = held_against()
    before = {one.held.curve.id: one.middle for one in benchmark.at_most_devices(benchmark.score(curves))}
    changed = [
        replace(one, efficiency=(1.0, *[0.1] * (len(one.efficiency) - 1))) if "MLPerf" in one.curve.source else one
        for one in curves
    ]
    after = {one.held.curve.id: one.middle for one in benchmark.at_most_devices(benchmark.score(changed))}
    alone = [one for one in curves if one.curve.id == "resnet50-ddp-a100"]
    assert after["resnet50-ddp-a100"] < before["resnet50-ddp-a100"], "other sources' curves do"
    only = [one if one.curve.source != alone[0].curve.source else replace(one, efficiency=(1.0, 0.1)) for one in curves]
    own = {one.held.curve.id: one for one in benchmark.at_most_devices(benchmark.score(only))}
    assert own["resnet50-ddp-a100"].middle == pytest.approx(before["resnet50-ddp-a100"])
    assert not own["resnet50-ddp-a100"].inside
