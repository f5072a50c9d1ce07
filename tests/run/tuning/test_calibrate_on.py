"""Runs that a user has correct predictions: tables, run directories; what cannot be used is told."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import paceline
from commands import paceline as command
from commands import write_job
from paceline.cluster.discover import discover
from paceline.errors import PlanError
from paceline.planning.cost.estimate import predict_layout, step_time_s
from paceline.planning.tables import layouts as tables
from paceline.planning.tables.layouts import Row
from paceline.run.tuning.calibrate import calibrate_on, read_runs
from refusals import raises

TABLE = Path(__file__).parents[3] / "benchmarks" / "tables" / "llmfoundry_mpt_h100_given.csv"
JOB = """
name: small
model: {transformer: {layers: 8, hidden: 1024, heads: 16, seq: 1024, vocab: 32000}}
data: synthetic
loss: cross_entropy
optimizer: {name: adamw, lr: 0.001}
global_batch: 64
precision: bf16
stop: {steps: 100}
"""


def slowed(rows: list[Row], times: float, file: Path) -> Path:
    """A table of rows that took so many times what is predicted of them."""
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0].cells))
        writer.writeheader()
        for row in rows:
            writer.writerow({**row.cells, "step_time_s": f"{times * predict_layout(row.layout).step_time_s:.6f}"})
    return file


@pytest.fixture(scope="module")
def published() -> list[Row]:
    return [row for row in tables.read([TABLE])[0] if row.layout.products == ""]


def test_rows_that_were_slowed_by_1_3_give_1_3_and_the_interval_holds_the_others(
    published: list[Row], tmp_path: Path
) -> None:
    said: list[str] = []
    factors = calibrate_on([slowed(published[::3], 1.3, tmp_path / "runs.csv")], say=said.append)
    assert len(said) == 1
    assert f"calibrated on {len(published[::3])} runs of runs" in said[0]
    for row in published:
        predicted = predict_layout(row.layout).step_time_s
        corrected = factors.factor(row.layout) * step_time_s(row.layout, factors.constants)
        assert corrected == pytest.approx(1.3 * predicted, rel=0.05)
        assert 1.3 * predicted in factors.interval(row.layout, corrected)


def test_rows_that_cannot_be_used_are_named_with_the_reason(published: list[Row], tmp_path: Path) -> None:
    file = slowed(published[:3], 1.1, tmp_path / "runs.csv")
    text = file.read_text().replace("h100_80gb", "an invented one", 1)
    file.write_text(text)
    said: list[str] = []
    calibrate_on([file], say=said.append)
    assert said[0].startswith("not used: runs:2: ")
    assert "2 runs" in said[1]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("runs.csv", "a,b\n1,2\n", "calibrate.no_usable_run"),
        ("notes.txt", "hello\n", "calibrate.no_usable_run"),
        ("run.bin", "\x00", "calibrate.no_usable_run"),
    ],
)
def test_what_holds_no_run_is_an_error_that_says_why(tmp_path: Path, name: str, text: str, code: str) -> None:
    (tmp_path / name).write_text(text)
    with raises(PlanError, code):
        calibrate_on([tmp_path / name])


def test_no_such_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with raises(PlanError, "calibrate.no_file", path=tmp_path / "none.csv"):
        calibrate_on([tmp_path / "none.csv"])
    with raises(PlanError, "calibrate.no_usable_run", files=[str(tmp_path)]):
        calibrate_on([tmp_path])


def test_a_run_of_paceline_corrects_predictions_of_its_machine(tmp_path: Path) -> None:
    """And a folder of runs is read with one that is too short, which is told."""
    job = write_job(tmp_path / "job.yaml", stop={"steps": 12})
    short = write_job(tmp_path / "short.yaml", stop={"steps": 2})
    for file, run in ((job, "runs/long"), (short, "runs/short")):
        shown = command("train", file, "--plan", "dp=1", "--run", run, folder=tmp_path)
        assert shown.code == 0, shown.err
    said: list[str] = []
    factors = calibrate_on([tmp_path / "runs"], say=said.append)
    assert "not used: short: it has no step with a time" in said[0]
    [row] = read_runs([tmp_path / "runs" / "long"]).rows
    predicted = paceline.estimate(paceline.Job.load(job), "dp=1", cluster=discover(), calibration=factors)
    before = predict_layout(row.layout).step_time_s
    assert row.seconds is not None
    assert predicted.step_time_s == pytest.approx(before * factors.factor(row.layout))
    assert (factors.factor(row.layout) - 1) * (row.seconds / before - 1) >= 0  # towards what was measured
    assert predicted.interval is not None
    assert "1 measured run of this software and hardware" in predicted.interval.rests_on


def test_the_screen_says_what_was_read_the_factor_and_what_the_interval_rests_on(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    shown = command("plan", "job.yaml", "--cluster", "8xH100-SXM", "--calibrate-on", TABLE, "--top", 3, folder=tmp_path)
    assert shown.code == 0, shown.err
    whole = " ".join(shown.out.split())
    for text in ("calibrated on 39 runs of llmfoundry_mpt_h100_given", "39 measured runs of other software", "80 %"):
        assert text in whole, whole
    refused = command("plan", "job.yaml", "--cluster", "8xH100-SXM", "--calibrate-on", "none.csv", folder=tmp_path)
    assert refused.code == 1
    assert "[calibrate.no_file]" in refused.error
