"""The benchmark of the planner on this machine: its plans can run, and its figures are what its head says they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner_local as local
import planner_local_cases as cases
from paceline.planning.calibrate import Calibration, PassTiming
from paceline.planning.cost.layout import PARTS, Prediction
from paceline.planning.plan import Plan


def row(place: str, plan: str, predicted_s: float, measured_s: float, memory: tuple[int, int] = (100, 100)) -> Any:
    prediction = Prediction(predicted_s, memory[0], 1.0, None, dict.fromkeys(PARTS, 0.0) | {"compute": predicted_s}, {})
    parts = {"step_s": measured_s, "compute_s": measured_s} | dict.fromkeys(
        ("bubble_s", "comm_s", "imbalance_s", "optimizer_s", "data_s"), 0.0
    )
    return local.Row(cases.Case("mlp", place, Plan.parse(plan)), prediction, [parts], memory[1])


def test_there_are_at_least_forty_plans_and_all_can_run() -> None:
    all_cases = [case for model in cases.JOBS for case in cases.cases(model)]
    assert len(all_cases) == len(set(all_cases)) >= 40
    for case in all_cases:
        hosts = cases.RATES.get(case.place)
        assert case.plan.ranks == (2 if hosts or case.place == cases.TWO else 1)
        assert cases.job_of(case.model).global_batch % (case.plan.data_ranks * case.plan.microbatches) == 0


def test_errors_and_regrets_are_those_of_the_chosen_plans() -> None:
    rows = [
        row("1 worker", "dp=1", 1.0, 1.0),
        row("2 workers", "dp=2", 0.9, 1.0, (110, 100)),  # chosen, and not the best
        row("2 workers", "fsdp=2", 1.0, 0.8, (120, 100)),
    ]
    assert local.regrets(rows) == {("mlp", "1 worker"): 0.0, ("mlp", "2 workers"): pytest.approx(0.25)}
    figures = local.figures(rows)
    assert figures["plans"] == 3
    assert figures["median_error"] == pytest.approx(0.1)
    assert figures["p90_error"] == pytest.approx(0.25)
    assert figures["memory_median_error"] == pytest.approx(0.1)
    assert figures["regret"] == pytest.approx(0.125)
    assert figures["worst_regret"] == pytest.approx(0.25)


def test_the_first_step_of_a_block_does_not_count_and_ranks_end_a_step_together() -> None:
    answers = [{"steps": [{"step_s": 9.0}, {"step_s": 1.0}]}, {"steps": [{"step_s": 9.0}, {"step_s": 3.0}]}]
    assert local.slowest(answers) == [{"step_s": 2.0}]


def test_a_plan_that_could_not_be_measured_is_named() -> None:
    failed = row("1 worker", "dp=1", 1.0, 1.0)
    failed.steps, failed.problem = [], "no memory"
    lines = list(local.table([failed, row("1 worker", "microbatches=2", 1.0, 1.0)], detail=True))
    assert any("not measured: no memory" in line for line in lines)
    assert any("compute 1000.00 / 1000.00" in line for line in lines)


def test_the_picture_works_offline(tmp_path: Path) -> None:
    local.plot([row("1 worker", "dp=1", 1.0, 1.0)], tmp_path / "plot.html")
    text = (tmp_path / "plot.html").read_text()
    assert "as measured" in text
    assert "<script src" not in text


def test_what_was_measured_is_kept_and_predicted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("1 worker", "microbatches=2", 1.0, 2.0)]
    calibration = Calibration(
        key="k",
        machine={},
        created=0.0,
        reference_s=1.0,
        cores=2,
        ranks=2,
        global_batch=32,
        parameters=1,
        segments=("",),
        timings=(PassTiming(1, 2, "fp32", "none", 32, (0.1,), (0.1,)),),
    )
    local.save(tmp_path / "kept.json", {"mlp": calibration}, rows)
    monkeypatch.setattr(local, "prediction", lambda case, calibrations: rows[0].predicted)
    calibrations, found = local.loaded(tmp_path / "kept.json", ["mlp"])
    assert calibrations == {"mlp": calibration}
    assert found == rows
    assert local.loaded(tmp_path / "kept.json", ["gpt"]) == ({}, [])
