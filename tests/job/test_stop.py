"""Stop rules. One that fires late burns hours; one that fires early throws a run away."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.errors import JobError
from paceline.job.loss import MetricSpec, build_metrics
from paceline.job.stop import BestSpec, Epochs, StopRule, StopSpec


def rule(steps_per_epoch: int = 10, elapsed_before_s: float = 0.0, **values: Any) -> StopRule:
    return StopRule(StopSpec(**values), Epochs(steps_per_epoch), elapsed_before_s)


def stopped_at(rule: StopRule, losses: list[float]) -> tuple[int, str] | None:
    for step, loss in enumerate(losses, start=1):
        if reason := rule.after_step(step, loss):
            return step, reason
    return None


@pytest.mark.parametrize(
    ("values", "stop"),
    [
        ({"steps": 7}, (7, "steps: 7 done")),
        ({"epochs": 2}, (20, "epochs: 2 done")),
        ({"epochs": 2, "steps": 7}, (7, "steps: 7 done")),
        ({"epochs": 1, "steps": 70}, (10, "epochs: 1 done")),
        ({"loss_below": 0.75, "steps": 70}, (27, "loss_below: 0.74 < 0.75 at step 27")),
    ],
)
def test_the_first_rule_that_comes_true_ends_the_run_and_is_named(
    values: dict[str, Any], stop: tuple[int, str]
) -> None:
    assert stopped_at(rule(**values), [1 - step / 100 for step in range(100)]) == stop


def test_a_metric_ends_the_run_only_above_its_target() -> None:
    watch = rule(metric_above={"accuracy": 0.97})
    assert watch.after_evaluation({"accuracy": 0.97}, 1) is None
    assert watch.after_evaluation({"top5": 1.0}, 1) is None
    assert watch.after_evaluation({"accuracy": float("nan")}, 1) is None
    assert watch.after_evaluation({"accuracy": 0.98}, 1) == "metric_above: accuracy 0.9800 > 0.97"


def test_earlier_attempts_count_towards_the_time() -> None:
    assert rule(seconds=100.0, elapsed_before_s=100.0).out_of_time() == "seconds: 100 s are over"
    assert rule(seconds=100.0).out_of_time() is None
    assert rule(steps=1, elapsed_before_s=1e9).out_of_time() is None


def test_a_plateau_is_found_when_the_loss_stops_falling_and_not_before() -> None:
    losses = [10 - step for step in range(8)] + [3.0] * 20
    step, reason = stopped_at(rule(plateau={"less_than": 0.01, "over": 4}), losses) or (0, "")
    assert step == 7 + 8  # the first step from which twice 4 losses are all alike
    assert reason.startswith("plateau: the loss fell by 0 over 4 steps")


def test_a_noisy_loss_that_still_falls_is_no_plateau() -> None:
    losses = [100.0 - step + (5 if step % 2 else -5) for step in range(90)]
    assert stopped_at(rule(plateau={"less_than": 1.0, "over": 10}), losses) is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.integers(0, 59), st.integers(1, 6))
def test_a_resumed_run_stops_where_an_undisturbed_one_would_have(losses: list[float], cut: int, over: int) -> None:
    values: dict[str, Any] = {"plateau": {"less_than": 0.5, "over": over}}
    undisturbed = stopped_at(rule(**values), losses)
    first, second = rule(**values), rule(**values)
    before = stopped_at(first, losses[:cut])
    second.load_state_dict(first.state_dict())
    after = next(((s, r) for s in range(cut + 1, len(losses) + 1) if (r := second.after_step(s, losses[s - 1]))), None)
    assert (before or after) == undisturbed


def test_the_elapsed_time_survives_a_restart() -> None:
    resumed = rule(seconds=1e9)
    resumed.load_state_dict({**rule(seconds=1e9).state_dict(), "elapsed_s": 500.0})
    assert 500.0 <= resumed.elapsed_s < 1e6


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 3}, 30),
        ({"epochs": 3, "steps": 99}, 30),
        ({"seconds": 5.0}, None),
        ({"loss_below": 1.0}, None),
    ],
)
def test_the_most_steps_are_known_where_steps_or_epochs_bound_the_run(
    values: dict[str, Any], total: int | None
) -> None:
    assert StopSpec(**values).total_steps(steps_per_epoch=10) == total


@pytest.mark.parametrize("values", [{}, {"metric_above": {}}, {"epochs": None}, {"epochs": 0}, {"seconds": -1.0}])
def test_a_run_without_an_end_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StopSpec(**values)


def test_a_metric_that_falls_ends_the_run_only_below_its_target() -> None:
    watch = rule(metric_below={"loss": 0.1})
    assert watch.after_evaluation({"loss": 0.1}, 1) is None
    assert watch.after_evaluation({"loss": float("nan")}, 2) is None
    assert str(watch.after_evaluation({"loss": 0.09}, 3)).startswith("metric_below: ")


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1.0), ("accuracy", -1.0)])
def test_patience_ends_after_so_many_evaluations_without_a_better_one(metric: str, sign: float) -> None:
    metrics = build_metrics(["accuracy"])
    spec = StopSpec.model_validate({"patience": {"metric": metric, "evaluations": 2, "min_delta": 0.1}})
    watch = StopRule(spec, Epochs(10), metrics=metrics)
    values = [1.0, 0.8, 0.75, float("nan")]
    reasons = [watch.after_evaluation({metric: sign * value}, step) for step, value in enumerate(values)]
    assert reasons[:3] == [None, None, None]
    assert str(reasons[3]).startswith("patience: ")
    assert str(watch.ended(4)).startswith("patience: "), "a run that is resumed after its end would go on"


def test_an_evaluation_that_is_not_due_can_only_be_the_best() -> None:
    spec = StopSpec.model_validate({"metric_below": {"loss": 0.5}, "patience": {"metric": "loss", "evaluations": 1}})
    watch = StopRule(spec, Epochs(10), keep=BestSpec(metric="loss"))
    assert watch.after_evaluation({"loss": 1.0}, 10) is None
    before = watch.state_dict()["patience"]
    assert watch.after_evaluation({"loss": 0.1}, 15, counts=False) is None
    assert watch.ended(15) is None
    assert watch.state_dict()["patience"] == before
    assert watch.best is not None
    assert watch.best.step == 15


def test_patience_and_the_best_evaluation_survive_a_resume_and_a_repeated_evaluation() -> None:
    spec = StopSpec.model_validate({"steps": 100, "patience": {"metric": "loss", "evaluations": 2}})
    watch = StopRule(spec, Epochs(10), keep=BestSpec(metric="loss"))
    watch.after_evaluation({"loss": 1.0}, 10)
    watch.after_evaluation({"loss": 2.0}, 20)
    resumed = StopRule(spec, Epochs(10), keep=BestSpec(metric="loss"))
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.best is not None
    assert (resumed.best.step, resumed.best.value) == (10, 1.0)
    assert resumed.after_evaluation({"loss": 2.0}, 20) is None, "a failure had this evaluation repeated"
    assert str(resumed.after_evaluation({"loss": 1.0}, 30)).startswith("patience: ")
    other = StopRule(
        spec, Epochs(10), keep=BestSpec(metric="accuracy", mode="max"), metrics=build_metrics(["accuracy"])
    )
    other.load_state_dict(watch.state_dict())
    assert other.best is not None
    assert other.best.value is None, "the best value of another metric"


def test_the_better_direction_of_a_metric_is_known_or_must_be_given() -> None:
    class Own:
        name = "own"

    spec = StopSpec(steps=1)
    with pytest.raises(JobError):
        StopRule(spec, Epochs(1), keep=BestSpec(metric="own"), metrics=[Own()])
    with pytest.raises(JobError):
        StopRule(spec, Epochs(1), keep=BestSpec(metric="accuracy"))  # is never measured
    best = StopRule(spec, Epochs(1), keep=BestSpec(metric="own", mode="max"), metrics=[Own()]).best
    assert best is not None
    assert best.higher
    area = build_metrics([MetricSpec(name="torchmetrics.classification:BinaryAUROC")])
    best = StopRule(spec, Epochs(1), keep=BestSpec(metric="BinaryAUROC"), metrics=area).best
    assert best is not None
    assert best.higher
