"""`paceline plan cost`, `plan explain` and `plan cluster`: a training, other machines, and which cluster to take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from commands import paceline

JOB = {
    "name": "gpt",
    "model": {"transformer": {"layers": 4, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32000}},
    "data": "synthetic",
    "loss": "cross_entropy",
    "optimizer": {"name": "adamw", "lr": 0.001},
    "global_batch": 32,
    "precision": "bf16",
    "stop": {"steps": 100},
}
NAME = "2x4xA100-SXM-80, 200gbit, 2.5/h"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def test_the_cost_of_a_training_stands_on_the_screen_in_json_and_on_the_page(folder: Path) -> None:
    options = ["--tokens", "2B", "--spot-price", 1, "--preemptions-per-host-day", 1]
    shown = paceline(
        "plan", "cost", "job.yaml", "--cluster", NAME, *options, "--json", "--out", "p.html", folder=folder
    )
    assert shown.code == 0, shown.err
    assert shown.says("what the training takes", "2.00 billion tokens", "spot")
    values = json.loads(shown.out.splitlines()[-1])
    assert values["training"]["amount"]["steps"] == 61036
    assert [bought["what"] for bought in values["training"]["purchases"]] == ["on demand", "spot"]
    assert "Time and cost of the training" in (folder / "p.html").read_text()


def test_the_cost_of_a_named_plan_is_that_of_its_step(folder: Path) -> None:
    command = ("plan", "cost", "job.yaml", "--cluster", NAME, "--json")
    best, slow = (
        json.loads(paceline(*command, *plan, folder=folder).out.splitlines()[-1]) for plan in ((), ("--plan", "dp=1"))
    )
    assert slow["plan"] == "dp=1"
    assert slow["training"]["amount"]["steps"] == best["training"]["amount"]["steps"] == 100
    assert slow["training"]["steps_s"] > best["training"]["steps_s"]


def test_a_question_is_answered_in_the_explanation(folder: Path) -> None:
    command = ("plan", "explain", "job.yaml", "--cluster", NAME, "--what-if", "one more host", "--json")
    shown = paceline(*command, "--out", "p.html", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("what if", "one more host")
    assert json.loads(shown.out.splitlines()[-1])["what_if"][0]["question"] == "one more host"
    assert "one more host" in (folder / "p.html").read_text()


def test_which_cluster_names_the_fastest_and_cheapest_within_the_budget(folder: Path) -> None:
    offers = {"offers": [{"cluster": "4xA100-SXM-80", "price": 1.0, "hosts": 2}, {"cluster": "8xH100-SXM", "price": 3}]}
    (folder / "prices.yaml").write_text(yaml.safe_dump(offers))
    options = ["--catalogue", "prices.yaml", "--budget", 10_000, "--deadline", "30d", "--tokens", "2B"]
    shown = paceline("plan", "cluster", "job.yaml", *options, "--json", "--out", "p.html", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("1 host of 8xH100-SXM", "the cheapest", "time against cost", "2.00 billion tokens")
    values = json.loads(shown.out.splitlines()[-1])
    assert values["fastest"]["offer"] == "8xH100-SXM"
    assert values["cheapest"]["cost"] <= values["fastest"]["cost"] <= 10_000
    assert "Which cluster" in (folder / "p.html").read_text()


def test_a_budget_that_is_too_small_says_what_the_cheapest_costs(folder: Path) -> None:
    shown = paceline(
        "plan", "cluster", "job.yaml", "--cluster", NAME, "--budget", 0.001, "--tokens", "2B", folder=folder
    )
    assert shown.code == 0, shown.err
    assert shown.says("no offer on the list meets the limits")


@pytest.mark.slow
def test_examples_of_prices_say_that_they_are_examples(folder: Path) -> None:
    shown = paceline("plan", "cluster", "job.yaml", "--tokens", "2B", "--cheapest", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("examples, not offers to you", "the cheapest")


def test_a_budget_on_a_cluster_without_a_price_says_where_to_put_it(folder: Path) -> None:
    shown = paceline("plan", "cluster", "job.yaml", "--cluster", "8xH100-SXM", "--budget", 100, folder=folder)
    assert shown.code == 1
    assert "/h" in shown.error


def test_a_spread_of_steps_is_a_number_or_a_run(folder: Path) -> None:
    command = ("plan", "cost", "job.yaml", "--cluster", NAME, "--straggler-sigma")
    shown = paceline(*command, "0.05", folder=folder)
    assert shown.says("slowest of 8 ranks"), shown.err
    missing = paceline(*command, "runs/none", folder=folder)
    assert missing.code == 1
    assert "runs/none" in missing.error


def test_no_job_is_an_error_of_the_command_line(folder: Path) -> None:
    shown = paceline("plan", "--cluster", NAME, folder=folder, columns=200)
    assert shown.code == 2
    assert shown.says("JOB")
