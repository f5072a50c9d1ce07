"""A simulated federated run learns, resumes exactly, and says what went wrong with its clients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from federated_jobs import federated_job
from paceline.errors import DataError, JobError, RunError
from paceline.job.job import Job
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline_federated.record import Fairness
from paceline_federated.simulation import Simulation, simulate
from refusals import raises
from small_jobs import points

HARD = {"clients": 8, "per_round": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}}
RULES = ["fedavg,momentum=0.5", "scaffold", "fedbuff:3"]  # each keeps something else from round to round
OTHER_RULES = ["fedprox:0.1", "fedadam", "fedyogi"]


def lines(run: Run, *without: str) -> list[dict[str, Any]]:
    """The rounds' lines without their times."""
    times = {"time", "step_s", *(key for key in run.steps()[0] if key.endswith("_s"))}
    return [{key: value for key, value in line.items() if key not in times | set(without)} for line in run.steps()]


def weights(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    export(run.path, folder / f"{run.path.name}.safetensors")
    return load_file(folder / f"{run.path.name}.safetensors")


@pytest.mark.parametrize("rule", [*RULES, *(pytest.param(rule, marks=pytest.mark.slow) for rule in OTHER_RULES)])
def test_a_resumed_run_is_the_same_bit_for_bit(rule: str, tmp_path: Path) -> None:
    federate = {**HARD, "rule": rule, "simulate": {"drop_out": 0.2, "spread": 0.5}}
    whole = simulate(federated_job(federate, stop={"steps": 3}), tmp_path / "whole")
    simulate(federated_job(federate, stop={"steps": 2}), tmp_path / "parts")
    parts = simulate(federated_job(federate, stop={"steps": 3}), tmp_path / "parts", resume=True)
    assert lines(whole) == lines(parts)
    assert [event["step"] for event in parts.events() if event["event"] in ("start", "resume")] == [0, 2]
    expected, found = weights(whole, tmp_path), weights(parts, tmp_path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert not (whole.path / "clients.state").exists()


@pytest.mark.parametrize("rule", ["fedavg", "fedadam,lr=0.05", "scaffold"])
def test_rules_learn(rule: str, tmp_path: Path) -> None:
    run = simulate(federated_job({"rule": rule, "local_epochs": 3}, stop={"steps": 6}), tmp_path / "run")
    assert run.losses[-1] < 0.9 * run.losses[0]


def test_side_by_side_and_in_turn_are_the_same_run_to_rounding(tmp_path: Path) -> None:
    job = federated_job({**HARD, "rule": "scaffold", "held_out": 0.2}, data=points(held_out=0.2), metrics=["accuracy"])
    one = simulate(job, tmp_path / "one")
    other = simulate(job, tmp_path / "other", batched=False)
    assert [line["loss"] for line in one.steps()] == pytest.approx([line["loss"] for line in other.steps()], rel=1e-9)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-9)


def test_the_record_counts_clients_and_bytes(tmp_path: Path) -> None:
    job = federated_job({"clients": 10, "per_round": 8, "simulate": {"drop_out": 0.5}}, stop={"steps": 20})
    run = simulate(job, tmp_path / "run")
    sizes = 8 * Simulation(job).training.layout.numel
    for line in run.steps():
        assert line["clients"] + line["dropped"] == line["chosen"] == 8
        assert (line["down_bytes"], line["up_bytes"]) == (8 * sizes, line["clients"] * sizes)
    dropped = sum(line["dropped"] for line in run.steps())
    assert 40 < dropped < 120
    assert run.reason == "steps: 20 done"


def test_coded_updates_are_fewer_bytes_and_still_learn(tmp_path: Path) -> None:
    federate = {"compress": "int8", "compress_down": "bf16", "local_epochs": 2}
    coded = simulate(federated_job(federate, precision="fp32"), tmp_path / "coded")
    plain = simulate(federated_job({"local_epochs": 2}, precision="fp32"), tmp_path / "plain")
    one, other = coded.steps()[-1], plain.steps()[-1]
    assert one["down_bytes"] <= 0.55 * other["down_bytes"]
    assert one["up_bytes"] < other["up_bytes"]
    assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
    assert one["loss"] != other["loss"]


def test_late_clients_are_left_out_and_counted(tmp_path: Path) -> None:
    job = federated_job({"clients": 10, "simulate": {"spread": 1.0, "deadline": 1.0}})
    run = simulate(job, tmp_path / "run")
    late = {line["late"] for line in run.steps()}
    assert len(late) == 1  # the same clients are slow in every round
    assert 0 < late.pop() < 10


def test_a_median_withstands_poisoners_that_ruin_the_mean(tmp_path: Path) -> None:
    poison = {"clients": 10, "simulate": {"poisoners": 0.3}, "local_epochs": 2}
    clean = simulate(federated_job({"clients": 10, "local_epochs": 2}), tmp_path / "clean").losses[-1]
    ruined = simulate(federated_job(poison), tmp_path / "mean").losses[-1]
    robust = simulate(federated_job({**poison, "aggregate": "median"}), tmp_path / "median").losses[-1]
    assert 1 <= Simulation(federated_job(poison)).behaviour.poisons.sum() <= 4
    assert ruined > 1.5 * clean
    assert robust < 1.3 * clean


def test_clients_whose_data_is_nan_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    run = simulate(federated_job({"clients": 7}, data=points(nan_at=[3])), tmp_path / "run")
    assert all(line["refused"] == 1 and line["clients"] == 6 for line in run.steps())
    assert all(map(math.isfinite, run.losses))
    [first, *_] = [event for event in run.events() if event["event"] == "refused"]
    [reason] = first["reasons"].values()
    assert reason == "its update holds NaN or Inf"


def test_rounds_without_clients_end_the_run_with_the_reason(tmp_path: Path) -> None:
    job = federated_job({"least": 5, "simulate": {"drop_out": 0.9}, "max_failures": 2}, stop={"steps": 50})
    with raises(JobError, "federate.too_few_updates", least=5, round=2, rounds="2 rounds"):
        simulate(job, tmp_path / "run")
    failed = [event for event in Run(tmp_path / "run").events() if event["event"] == "round_failed"]
    assert [event["failures"] for event in failed][-2:] == [1, 2]
    assert Run(tmp_path / "run").steps()[-1]["loss"] is None


def test_a_client_with_two_samples_trains_and_one_without_any_is_never_chosen(tmp_path: Path) -> None:
    job = federated_job({"clients": 30, "partition": {"kind": "dirichlet", "alpha": 0.1}})
    simulation = Simulation(job)
    samples = simulation.deal.samples
    assert 0 in samples
    assert 1 <= samples[samples > 0].min() <= 2
    run = simulate(job, tmp_path / "run")
    [start] = [event for event in run.events() if event["event"] == "start"]
    assert start["clients_without_samples"] == int((samples == 0).sum()) == 30 - len(simulation.available)
    assert {line["chosen"] for line in run.steps()} == {len(simulation.available)}


def test_updates_that_arrive_late_are_stale_and_the_clock_goes_on(tmp_path: Path) -> None:
    federate = {"clients": 12, "per_round": 6, "rule": "fedbuff:2", "simulate": {"spread": 1.0}}
    run = simulate(federated_job(federate, stop={"steps": 15}), tmp_path / "run")
    assert max(line["staleness"] for line in run.steps()) > 0
    clock = [line["clock"] for line in run.steps()]
    assert clock == sorted(clock)
    assert {line["clients"] for line in run.steps()} == {2}


def test_figures_over_clients_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    federate = {"clients": 5, "held_out": 0.3, "personal": ["head.*"]}
    job = federated_job(federate, metrics=["accuracy"], model={"factory": "federated_jobs:two_parts"})
    run = simulate(job, tmp_path / "run", say=said.append)
    [event] = [event for event in run.events() if event["event"] == "clients"]
    assert (event["metric"], event["clients"], event["step"]) == ("accuracy", 5, 4)
    assert 0 <= event["worst"] <= event["tenth"] <= event["median"] <= event["best"] <= 1
    assert any("accuracy of 5 clients on their own samples: worst" in line for line in said)


def test_personal_heads_serve_clients_that_disagree_better_than_one_for_all(tmp_path: Path) -> None:
    data = {"kind": "dataset", "factory": "federated_jobs:Opposed", "held_out": 0}
    federate = {"partition": "user", "clients": 2, "held_out": 0.3, "local_epochs": 5}
    medians = []
    for personal in ([], ["head.*"]):
        changes = {"data": data, "metrics": ["accuracy"], "model": {"factory": "federated_jobs:two_parts"}}
        job = federated_job({**federate, "personal": personal}, stop={"steps": 12}, **changes)
        run = simulate(job, tmp_path / str(len(personal)))
        [event] = [event for event in run.events() if event["event"] == "clients"]
        medians.append(event["median"])
    assert medians[1] > medians[0] + 0.2


def test_the_worst_loss_is_the_highest() -> None:
    found = Fairness.of("loss", [1.0, 3.0, 2.0, math.nan])
    assert found is not None
    assert (found.worst, found.median, found.best, found.clients) == (3.0, 2.0, 1.0, 3)
    assert Fairness.of("loss", [math.nan]) is None


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    simulate(federated_job(stop={"steps": 1}), tmp_path / "run")
    with raises(RunError, "run.directory_in_use"):
        simulate(federated_job(), tmp_path / "run")
    with raises(JobError, "run.other_job", differences="federate.rule was fedavg, is fedprox"):
        simulate(federated_job({"rule": "fedprox"}), tmp_path / "run", resume=True)


def test_a_job_without_a_federated_part_is_refused(tmp_path: Path) -> None:
    with raises(JobError, "federate.no_section"):
        simulate(federated_job().model_copy(update={"federate": None}), tmp_path / "run")


def test_labels_that_the_model_has_no_class_for_are_named(tmp_path: Path) -> None:
    job = federated_job(model={"factory": "torch.nn:Linear", "args": {"in_features": 6, "out_features": 2}})
    with raises(DataError, "loss.label_out_of_range", label=2):
        simulate(job, tmp_path / "run")


def test_the_round_at_which_a_metric_is_reached_ends_the_run(tmp_path: Path) -> None:
    job = federated_job(
        {"local_epochs": 3},
        data=points(held_out=0.3),
        metrics=["accuracy"],
        evaluate={"every_steps": 2},
        stop={"steps": 100, "metric_above": {"accuracy": 0.6}},
    )
    run = simulate(job, tmp_path / "run")
    assert run.reason is not None
    assert run.reason.startswith("metric_above: accuracy")
    assert run.steps()[-1]["step"] < 100


def test_a_line_of_the_record_is_plain_json(tmp_path: Path) -> None:
    run = simulate(federated_job(stop={"steps": 1}), tmp_path / "run")
    [line] = (run.path / "steps" / "rank-0.jsonl").read_text().splitlines()
    parts = {key: value for key, value in json.loads(line).items() if key.endswith("_s") and key != "step_s"}
    assert sum(parts.values()) == pytest.approx(json.loads(line)["step_s"], abs=1e-5)


def test_the_example_learns_with_clients_of_few_classes(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "federated.yaml"
    values = Job.load(file).model_dump(mode="json", exclude_defaults=True)
    values |= {"stop": {"steps": 3}, "data": {"kind": "digits", "limit": 500}}
    run = simulate(Job(**values), tmp_path / "run")
    assert run.metrics["loss"] < math.log(10) - 0.02
