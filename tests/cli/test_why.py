"""`paceline why`: diagnoses of real runs of two ranks, and suggestions that are tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import paceline, write_job, write_slow_job


def test_a_slow_rank_makes_two_cores_slower_than_one_and_is_told(tmp_path: Path) -> None:
    job = write_slow_job(tmp_path, stop={"steps": 20})
    for plan, run in (("dp=2 balance=off", "two"), ("dp=1 threads=1", "one")):
        assert paceline("train", job, "--plan", plan, "--run", run, folder=tmp_path).code == 0
    shown = paceline("why", "two", "--one", "one", "--no-predict", folder=tmp_path)
    assert shown.code == 0
    assert shown.says(
        "Plan dp=2 balance=off takes", "on 2 cores", "That is slower than one core, which takes",
        "as one has measured", "waiting for the slowest rank", "what to try, with its gain in samples a second:",
        "balance=auto: a slow replica gets a smaller share of the batch",
    )  # fmt: skip
    lost = re.search(r"of what is lost, (\d+) % waiting for the slowest rank", shown.out)
    assert lost is not None
    assert int(lost[1]) > 50


def test_without_leave_to_predict_no_code_of_the_job_runs(tmp_path: Path) -> None:
    job = write_slow_job(tmp_path, stop={"steps": 12})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    (tmp_path / "slow.py").write_text("raise SystemExit('the code of the job ran')")
    shown = paceline("why", "run", "--no-predict", folder=tmp_path)
    assert shown.code == 0
    assert shown.says("By its own parts one rank would compute alone what all do in at most")


@pytest.mark.slow
def test_a_suggestion_is_predicted_and_then_tried_beside_the_run_s_plan(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 20})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    shown = paceline("why", "run", "--try", "1", folder=tmp_path)
    assert shown.code == 0
    *_, own, tried, alone = shown.out.splitlines()
    assert re.match(r"measured now: plan dp=2 [\d.]+ .s a step; the run has recorded", own.replace("(", " ("))
    suggested = [line.strip() for line in shown.out.splitlines() if line.startswith("  ")]
    assert re.search(r"(predicted (at most )?\+|not predicted).*measured [+−]", tried)
    assert any(line.endswith(tried.strip().partition(":")[0]) for line in suggested)
    assert re.match(r"  one device \(dp=1 threads=1\): the run's plan is [\d.]+ × ", alone)
    assert "95 % interval" in shown.err
    runs = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert runs == ["run"], "what is tried leaves nothing behind"


@pytest.mark.parametrize(
    ("plan", "error"), [("dp=2 sync=local:4", "exchanges less often than in every step"), (None, "was not")]
)
def test_what_cannot_be_tried_is_refused_with_the_reason(plan: str | None, error: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    if plan is None:
        shown = paceline("why", "run", "--try", "1", "--no-predict", folder=tmp_path, columns=200)
        assert shown.code == 2
        assert shown.says("it measures what was predicted")
        return
    assert paceline("train", job, "--plan", plan, "--run", "run", folder=tmp_path).code == 0
    assert error in paceline("why", "run", "--try", "1", folder=tmp_path).error
