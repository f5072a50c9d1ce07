"""Diagnoses of records made by hand: how they compare with one device, and what is suggested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handmade_steps import machines, record
from paceline.errors import RunError
from paceline.job.job import Job
from paceline.planning.plan import Plan, spelled_out
from paceline.report.advice import measured, model_of, one_device_plan
from paceline.report.diagnosis import Diagnosis, diagnosis_of, try_suggestions
from paceline.run.record.run import Run
from refusals import raises

STEPS = 30
EVEN = {rank: {"compute": 40, "comm": 8, "optimizer": 2} for rank in (0, 1)}


def small(**changes: Any) -> Job:
    """A convolutional network, with a batch of 64."""
    values: dict[str, Any] = {
        "name": "small",
        "model": "cifar_cnn",
        "data": {"kind": "synthetic", "samples": 640, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 0.001},
        "global_batch": 64,
        "stop": {"steps": STEPS},
    }
    return Job.model_validate(values | changes)


def run_of(
    folder: Path, parts_ms: Mapping[int, Mapping[str, float]], plan: str = "dp=2 threads=1", **changes: Any
) -> Run:
    folder.mkdir(exist_ok=True)
    return record(folder, parts_ms, plan=plan, steps=STEPS, of=small(**changes))


def said(diagnosis: Diagnosis) -> str:
    return "\n".join(diagnosis.sentences)


def lines(diagnosis: Diagnosis) -> list[str]:
    return [suggestion.line() for suggestion in diagnosis.suggestions]


def test_a_run_that_is_slower_than_one_device_is_told_so_with_the_causes_shares(tmp_path: Path) -> None:
    many = run_of(tmp_path / "many", {rank: {"compute": 25, "comm": 60, "optimizer": 5} for rank in (0, 1)})
    one = run_of(tmp_path / "one", {0: {"compute": 40, "optimizer": 5}}, "dp=1 threads=1")
    found = diagnosis_of(many, one=one, predicts=False)
    assert found.speedup == pytest.approx(0.5)
    # lost: 25 - 40 / 2 = 5 ms of compute, 60 ms of communication, 5 - 5 / 2 = 2.5 ms of the optimizer
    assert "This is slower than one core: 0.500 × its speed. One core takes 45.0 ms a step" in said(found)
    assert (
        "A step takes 90 ms instead of 22.5 ms, which is 1/2 of one core's step. Causes of the difference: "
        "89 % exposed communication and 7 % slower compute."
    ) in said(found)


def test_a_faster_run_is_told_what_keeps_it_from_the_ideal(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", {0: {"compute": 78, "optimizer": 2}}, "dp=1 threads=1")
    found = diagnosis_of(run_of(tmp_path / "many", EVEN), one=one, predicts=False)
    assert "This is 1.60 × as fast as one core" in said(found)
    assert "the ideal is 2 ×. A step takes" in said(found)


def test_the_record_alone_bounds_what_one_rank_could_do(tmp_path: Path) -> None:
    parts = {rank: {"compute": 10, "comm": 70, "optimizer": 5} for rank in (0, 1)}
    found = diagnosis_of(run_of(tmp_path, parts), predicts=False)
    # 2 x 10 ms of compute and one update of 5 ms, against 85 ms
    assert "take at most 25.0 ms a step, so the run is at most 0.294 × as fast" in said(found)
    assert "The run is therefore slower than one rank, even if the predictions are wrong." in said(found)
    assert found.one is None


def test_a_slow_rank_is_waiting_and_not_slow_compute_of_all(tmp_path: Path) -> None:
    parts = {0: {"compute": 20, "imbalance": 60, "comm": 5}, 1: {"compute": 80, "comm": 5}}
    run = measured(run_of(tmp_path, parts))
    assert run.compute_s == pytest.approx(0.020)
    assert run.even_parts["imbalance"] == pytest.approx(0.060)
    assert sum(run.even_parts.values()) == pytest.approx(run.step_s)
    assert run.one_compute_s == pytest.approx(0.040)


def test_what_a_part_could_give_at_most_is_its_share(tmp_path: Path) -> None:
    parts = {
        0: {"data": 20, "compute": 50, "imbalance": 10, "comm": 5, "checkpoint": 15},
        1: {"data": 20, "compute": 60, "comm": 5, "checkpoint": 15},
    }
    found = diagnosis_of(run_of(tmp_path, parts, "dp=2 threads=1 balance=off"), predicts=False)
    gains = {one.what.partition(" ")[0]: one.gain for one in found.suggestions}
    expected = {"num_workers=1": 0.2 / 0.8, "checkpoints": 0.075 / 0.925, "balance=auto": 0.05 / 0.95}
    assert gains == pytest.approx(expected)
    assert found.advice == [], "the gain may be anything from a loss to that"


def test_a_predicted_gain_within_the_error_of_predictions_is_no_advice(tmp_path: Path) -> None:
    found = diagnosis_of(run_of(tmp_path, EVEN))
    assert found.doubt > 0
    predicted = [one for one in found.suggestions if one.known == "predicted"]
    assert predicted
    assert found.advice == [one for one in predicted if one.gain is not None and one.gain > found.doubt]
    slow = run_of(tmp_path / "slow", {rank: {"compute": 10, "comm": 390, "optimizer": 2} for rank in (0, 1)})
    assert any(one.plan is not None and one.plan.ranks == 1 for one in diagnosis_of(slow).advice)


@pytest.mark.parametrize("plan", ["dp=1 threads=1", "dp=2 threads=1"])
def test_a_plan_is_neither_compared_with_itself_nor_suggested_to_itself(plan: str, tmp_path: Path) -> None:
    parts = {rank: {"compute": 400, "optimizer": 20} for rank in range(Plan.parse(plan).dp)}
    found = diagnosis_of(run_of(tmp_path, parts, plan))
    cluster = found.run.run.cluster
    own = spelled_out(found.run.plan, cluster)
    assert all(spelled_out(one.plan, cluster) != own for one in found.suggestions if one.plan is not None)
    if found.run.plan.ranks == 1:
        assert found.speedup == 1


def test_the_model_held_to_a_run_gives_that_run_back(tmp_path: Path) -> None:
    parts = {
        0: {"data": 1, "compute": 9, "imbalance": 2, "comm": 3, "optimizer": 2},
        1: {"data": 1, "compute": 11, "comm": 3, "optimizer": 2},
    }
    run = measured(run_of(tmp_path, parts))
    model = model_of(run)
    assert not model.why_not
    again = model.parts_of(run.plan)
    assert again == pytest.approx(run.even_parts)
    alone = model.one_device()
    assert one_device_plan(run) == Plan(threads=1)
    assert alone["comm"] == alone["imbalance"] == alone["bubble"] == 0.0
    assert alone["compute"] <= run.one_compute_s * (1 + 1e-9)


def test_suggested_plans_have_a_gain_and_are_other_than_the_run_s(tmp_path: Path) -> None:
    parts = {rank: {"compute": 10, "comm": 40, "optimizer": 2} for rank in (0, 1)}
    found = diagnosis_of(run_of(tmp_path, parts))
    plans = [one for one in found.suggestions if one.plan is not None and one.known == "predicted"]
    assert plans
    assert all(one.gain is not None and one.gain > 0 and one.plan != found.run.plan for one in plans)
    # of 52 ms 40 are communication, which one rank does not have
    assert any(one.plan is not None and one.plan.ranks == 1 for one in plans)
    gains = [one.order for one in found.suggestions]
    assert gains == sorted(gains, reverse=True)


def test_nothing_is_predicted_from_a_run_that_the_model_does_not_know(tmp_path: Path) -> None:
    found = diagnosis_of(run_of(tmp_path, {rank: {"compute": 9000, "comm": 8} for rank in (0, 1)}))
    assert found.one is None
    assert "Nothing is predicted: the run computes" in said(found)
    assert {one.known for one in found.suggestions} == {"not predicted"}
    assert all(one.gain is None for one in found.suggestions)


def test_a_run_of_other_work_or_of_several_ranks_is_no_run_of_one_device(tmp_path: Path) -> None:
    many = run_of(tmp_path / "many", EVEN)
    other = run_of(tmp_path / "other", {0: {"compute": 80}}, "dp=1", global_batch=32)
    with raises(RunError, "report.other_work", differences="global_batch was 64, is 32"):
        diagnosis_of(many, one=other, predicts=False)
    with raises(RunError, "report.not_one_rank"):
        diagnosis_of(many, one=many, predicts=False)


def test_more_than_the_ideal_is_not_believed(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", {0: {"compute": 500}}, "dp=1 threads=1")
    found = diagnosis_of(run_of(tmp_path / "many", EVEN), one=one, predicts=False)
    assert "more than the ideal 2 ×, so other load disturbed one of the two" in said(found)


def test_workers_of_servers_record_no_parts_and_none_are_made_up(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: {"compute": 30}}, "dp=2 sync=server:staleness=2")
    found = diagnosis_of(run, predicts=False)
    assert "its workers record no parts" in said(found)
    assert lines(found) == []


def test_a_run_without_enough_steps_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path, EVEN, plan="dp=2", steps=5, of=small())
    with raises(RunError, "report.no_timed_steps", warm_up=5):
        diagnosis_of(run, predicts=False)


def test_nothing_is_tried_where_the_run_was_not_or_where_a_few_steps_show_nothing(tmp_path: Path) -> None:
    elsewhere = run_of(tmp_path / "elsewhere", EVEN)
    assert elsewhere.cluster == machines()
    with raises(RunError, "report.other_machine"):
        try_suggestions(diagnosis_of(elsewhere, predicts=False), 1, str)
