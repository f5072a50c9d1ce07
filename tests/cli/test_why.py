"""`paceline why`: diagnoses of real runs of two ranks, and suggestions that are tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from commands import paceline, write_job, write_slow_job
from paceline.report.diagnosis import diagnosis_of
from paceline.run.record.run import Run


def test_a_slow_rank_makes_two_cores_slower_than_one_and_is_told(tmp_path: Path) -> None:
    job = write_slow_job(tmp_path, stop={"steps": 20})
    for plan, run in (("dp=2 balance=off", "two"), ("dp=1 threads=1", "one")):
        assert paceline("train", job, "--plan", plan, "--run", run, folder=tmp_path).code == 0
    shown = paceline("why", "two", "--one", "one", "--no-predict", folder=tmp_path)
    assert shown.code == 0
    assert shown.says(
        "Plan dp=2 balance=off takes", "on 2 cores", "This is slower than one core: ",
        "as measured in one", "waiting for slower ranks", "no change is certain to help",
        "may or may not help: balance=auto",
    )  # fmt: skip
    lost = re.search(r"Causes of the difference: (\d+) % waiting for slower ranks", shown.out)
    assert lost is not None
    assert int(lost[1]) > 50


def test_without_leave_to_predict_no_code_of_the_job_runs(tmp_path: Path) -> None:
    job = write_slow_job(tmp_path, stop={"steps": 12})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    (tmp_path / "slow.py").write_text("raise SystemExit('the code of the job ran')")
    shown = paceline("why", "run", "--no-predict", folder=tmp_path)
    assert shown.code == 0
    assert shown.says("By the measured parts, one rank alone would take at most")


@pytest.mark.slow
def test_a_suggestion_is_predicted_and_then_tried_beside_the_run_s_plan(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 20})
    assert paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path).code == 0
    shown = paceline("why", "run", "--try", "1", folder=tmp_path)
    assert shown.code == 0
    *_, own, tried, advice, alone = shown.out.splitlines()
    assert len(re.findall(r"[\d.]+ .s\b", own)) == 2, "measured now and recorded"
    assert "plan dp=2 " in own
    assert re.search(r"measured [+−].*: (faster|slower|no difference)", tried)
    assert advice.startswith("advice: none") == (not tried.endswith(": faster"))
    assert re.match(r"  one device \(dp=1 threads=1\): the run's plan is [\d.]+ × ", alone)
    assert "95 % interval" in shown.err
    runs = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert runs == ["run"], "what is tried leaves nothing behind"


@pytest.mark.parametrize(
    ("plan", "error"), [("dp=2 sync=local:4", "does not communicate in every step"), (None, "was not")]
)
def test_what_cannot_be_tried_is_refused_with_the_reason(plan: str | None, error: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    if plan is None:
        shown = paceline("why", "run", "--try", "1", "--no-predict", folder=tmp_path, columns=200)
        assert shown.code == 2
        assert shown.says("it measures predicted plans")
        return
    assert paceline("train", job, "--plan", plan, "--run", "run", folder=tmp_path).code == 0
    assert error in paceline("why", "run", "--try", "1", folder=tmp_path).error


MLP = {"model": {"zoo": "mlp", "args": {"hidden": 64}}, "data": "digits"}
CNN = {"model": "cifar_cnn", "data": "digits"}
GPT = {
    "model": {"zoo": "gpt", "args": {"vocab": 64, "layers": 2, "heads": 2, "hidden": 64, "context": 32}},
    "data": {"kind": "synthetic", "samples": 2000, "vocab": 64, "shape": [32]},
}
WIDE = {"model": {"zoo": "mlp", "args": {"hidden": 1024}}, "data": "digits"}


@pytest.mark.slow
@pytest.mark.parametrize(("job", "plan"), [(MLP, "fsdp=2"), (CNN, "fsdp=2"), (GPT, "dp=2"), (WIDE, "dp=1")])
def test_no_advice_slows_a_small_job(job: dict[str, Any], plan: str, tmp_path: Path) -> None:
    """Advice without `--try` is predicted; each advised change is then tried, and none is slower."""
    file = write_job(tmp_path / "job.yaml", metrics=[], global_batch=64, stop={"steps": 60}, **job)
    assert paceline("train", file, "--plan", plan, "--run", "run", folder=tmp_path).code == 0
    found = diagnosis_of(Run(tmp_path / "run"))
    advised = [one.what for one in found.advice if one.plan is not None and "sync=" not in one.what]
    shown = paceline("why", "run", "--try", str(len(found.suggestions)), folder=tmp_path)
    assert shown.code == 0, shown.err
    results = dict(
        re.findall(r"^  (.+?): (?:predicted .*, )?measured .*: (faster|slower|no difference)$", shown.out, re.M)
    )
    assert results
    assert [what for what in advised if results.get(what) == "slower"] == [], shown.out
    taken = re.search(r"^advice: (.*)$", shown.out, re.M)
    assert taken is not None
    assert results.get(taken[1]) == "faster" or taken[1].startswith("none"), shown.out
