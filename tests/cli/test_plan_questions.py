"""`paceline plan` asked for a whole training, for other machines, and for which cluster to take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from commands import paceline
from paceline.cli.plan import with_bundled

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


def test_the_training_and_the_answers_stand_on_the_screen_in_json_and_on_the_page(folder: Path) -> None:
    options = ["--tokens", "2B", "--spot-price", 1, "--preemptions-per-host-day", 1, "--what-if", "one more host"]
    shown = paceline("plan", "job.yaml", "--cluster", NAME, *options, "--json", "--page", "p.html", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("what the training takes", "2.00 billion tokens", "spot", "what if", "one more host")
    values = json.loads(shown.out.splitlines()[-1])
    assert values["training"]["amount"]["steps"] == 61036
    assert [bought["what"] for bought in values["training"]["purchases"]] == ["on demand", "spot"]
    assert values["what_if"][0]["question"] == "one more host"
    page = (folder / "p.html").read_text()
    assert "What the training takes" in page
    assert "one more host" in page


def test_which_cluster_names_the_fastest_and_cheapest_within_the_budget(folder: Path) -> None:
    offers = {"offers": [{"cluster": "4xA100-SXM-80", "price": 1.0, "hosts": 2}, {"cluster": "8xH100-SXM", "price": 3}]}
    (folder / "prices.yaml").write_text(yaml.safe_dump(offers))
    options = ["--catalogue", "prices.yaml", "--budget", 10_000, "--deadline", "30d", "--tokens", "2B"]
    shown = paceline("plan", "job.yaml", *options, "--json", "--page", "p.html", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("1 host of 8xH100-SXM", "the cheapest", "time against cost", "2.00 billion tokens")
    values = json.loads(shown.out.splitlines()[-1])
    assert values["fastest"]["offer"] == "8xH100-SXM"
    assert values["cheapest"]["cost"] <= values["fastest"]["cost"] <= 10_000
    assert "Which cluster" in (folder / "p.html").read_text()


def test_a_budget_that_is_too_small_says_what_the_cheapest_costs(folder: Path) -> None:
    shown = paceline("plan", "job.yaml", "--cluster", NAME, "--budget", 0.001, "--tokens", "2B", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("nothing on the list does it")


def test_the_catalogue_may_stand_without_a_file_wherever_it_stands() -> None:
    assert with_bundled(["job.yaml", "--catalogue"]) == ["job.yaml", "--catalogue", "examples"]
    assert with_bundled(["--catalogue", "--budget", "1"]) == ["--catalogue", "examples", "--budget", "1"]
    assert with_bundled(["--catalogue", "a.csv", "job.yaml"]) == ["--catalogue", "a.csv", "job.yaml"]


@pytest.mark.slow
def test_examples_of_prices_say_that_they_are_examples(folder: Path) -> None:
    shown = paceline("plan", "job.yaml", "--tokens", "2B", "--cheapest", "--catalogue", folder=folder)
    assert shown.code == 0, shown.err
    assert shown.says("examples, not offers to you", "the cheapest")


def test_a_budget_on_a_cluster_without_a_price_says_where_to_put_it(folder: Path) -> None:
    shown = paceline("plan", "job.yaml", "--cluster", "8xH100-SXM", "--budget", 100, folder=folder)
    assert shown.code == 1
    assert "/h" in shown.error


def test_a_spread_of_steps_is_a_number_or_a_run(folder: Path) -> None:
    command = ("plan", "job.yaml", "--cluster", NAME, "--straggler-sigma")
    shown = paceline(*command, "0.05", folder=folder)
    assert shown.says("slowest of 8 ranks"), shown.err
    missing = paceline(*command, "runs/none", folder=folder)
    assert missing.code == 1
    assert "runs/none" in missing.error


def test_no_job_is_an_error_of_the_command_line(folder: Path) -> None:
    shown = paceline("plan", "--cluster", NAME, folder=folder, columns=200)
    assert shown.code == 2
    assert shown.says("JOB")
