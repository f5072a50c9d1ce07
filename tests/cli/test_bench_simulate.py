"""`paceline bench simulate`: from the command to the table, the page and the figures; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Outcome, paceline, write_job

LLAMA = Path(__file__).parents[2] / "examples" / "plan" / "llama_8b.yaml"


def simulated(folder: Path, *arguments: object) -> Outcome:
    outcome = paceline("bench", "simulate", LLAMA, *arguments, folder=folder)
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_thousand_gpus_are_told_with_intervals_limits_and_published_curves(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "--cluster", "1024xH100", "--out", "s", "--json")
    assert outcome.says(
        "llama-8b on 128x8xH100  simulated, not measured",
        "It fits from 2 devices on, which speedups are against",
        "with a probability of 80 %",
        "The best plan changes",
        "Published curves of the same kind",
        "arXiv:2407.21783",
        "published curves lose",
        "assumed since the name gives no",
        "nothing was measured here",
        "page     s/simulated.html",
    )
    assert (tmp_path / "s" / "simulated.html").is_file()
    [simulation] = json.loads(outcome.out.splitlines()[-1])["simulations"]
    strong, weak = simulation["curves"]
    assert [point["devices"] for point in strong["points"]] == [2**n for n in range(11)]
    assert strong["points"][0]["plan"] is None
    assert strong["base_devices"] == weak["base_devices"] == 2
    assert [json.loads((tmp_path / "s" / "simulated.json").read_text())[0]["curves"][0]] == [strong]


def test_several_clusters_stand_on_one_page_and_weak_scaling_can_be_left_out(tmp_path: Path) -> None:
    outcome = simulated(
        tmp_path, "--cluster", "2x8xH100-SXM, 400gbit; 64xTPU-v5p", "--no-weak", "--out", "s", "--seed", 3
    )
    assert outcome.says("llama-8b on 2x8xH100-SXM, 400gbit", "llama-8b on 16x4xTPU-v5p")
    assert "Weak scaling" not in outcome.out
    page = (tmp_path / "s" / "simulated.html").read_text()
    assert 'id="cluster-1"' in page
    assert "seed 3" in page


def test_stragglers_and_failures_are_those_that_are_given(tmp_path: Path) -> None:
    outcome = simulated(
        tmp_path,
        "--cluster",
        "8x8xH100-SXM",
        "--straggler-sigma",
        "0.03",
        "--failures-per-host-day",
        "0",
        "--no-weak",
        "--out",
        "s",
    )
    assert outcome.says("normal with a standard deviation of 0.03, as given", "failures: none, as asked for")
    assert "goodput" not in outcome.out.replace("(goodput)", "")


def test_measured_runs_of_a_table_correct_it_and_are_named(tmp_path: Path) -> None:
    table = LLAMA.parents[2] / "benchmarks" / "tables" / "torchtitan_llama_given.csv"
    outcome = simulated(tmp_path, "--cluster", "2x8xH100-SXM", "--calibrate-on", table, "--no-weak", "--out", "s")
    assert outcome.says("measured runs of other software, hardware or precision")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cluster", "8xH100-SXM", "--repeat", "3"), "--repeat"),
        (("--cluster", "8xH100-SXM", "--devices", "1,2"), "--devices"),
        (("--seed", "3"), "--cluster"),
        (("--cluster", "8xH100-SXM", "--straggler-sigma", "2"), "below 1"),
        (("--cluster", "8xH100-SXM", "--out", "s3://bucket/s"), "not to a URL"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    outcome = paceline("bench", "simulate", LLAMA, *arguments, folder=tmp_path, columns=200)
    assert outcome.code == 2
    assert outcome.says(says)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "says"), [("1001xH100-SXM", "cannot be divided into hosts of 8"), ("8xH10000", "H100")]
)
def test_a_cluster_that_is_none_is_an_error_with_what_is_near(tmp_path: Path, name: str, says: str) -> None:
    assert says in paceline("bench", "simulate", LLAMA, "--cluster", name, folder=tmp_path).error


def test_a_job_that_fits_on_none_of_the_devices_is_an_error(tmp_path: Path) -> None:
    assert (
        "fits on"
        in paceline("bench", "simulate", LLAMA.with_name("llama_70b.yaml"), "--cluster", "T4", folder=tmp_path).error
    )


@pytest.mark.timeout(240)  # two runs of ranks, and two simulations
def test_a_benchmark_of_this_machine_corrects_the_same_device_and_no_other(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    measured = paceline(
        "bench",
        "scaling",
        job,
        "--devices",
        1,
        "--repeat",
        1,
        "--steps",
        30,
        "--no-weak",
        "--out",
        "b",
        folder=tmp_path,
    )
    assert measured.code == 0, measured.err
    from paceline.cluster.discover import discover
    from paceline.planning.machines import machines

    own = machines(discover()).device.name
    alike = paceline("bench", "simulate", job, "--cluster", f"2x2x{own}, 10gbit", "--out", "b", folder=tmp_path)
    assert alike.code == 0, alike.err
    told = " ".join(alike.out.split())  # lines are wrapped
    assert f"{own} is what is simulated, too, so 1 run of it correct the step times" in told
    assert "step times: 1 measured run of this software and hardware" in told
    [simulation] = json.loads((tmp_path / "b" / "simulated.json").read_text())
    one = simulation["curves"][0]["points"][0]["step_time_s"]
    measured_s = json.loads((tmp_path / "b" / "report.json").read_text())["settings"][0]["step_time_s"]["middle"]
    assert one["low"] < measured_s < one["high"], "what was measured is inside of what is said of it"
    other = paceline("bench", "simulate", job, "--cluster", "2xH100-SXM", "--out", "b", folder=tmp_path)
    told = " ".join(other.out.split())
    assert "That says nothing of H100-SXM, and nothing of the curve rests on it" in told
    assert "step times: the cost model alone" in told
    [run] = (tmp_path / "b" / "runs").iterdir()
    jittered = paceline(
        "bench", "simulate", job, "--cluster", "2xH100-SXM", "--straggler-sigma", run, "--out", "c", folder=tmp_path
    )
    assert jittered.says(f"measured in {run.name}")
