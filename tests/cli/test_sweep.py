"""A sweep checks every run first, goes on after failures and signals, and says which combination is best."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import POINTS, ended, losses, paceline, points, started, wait_for_step, write_job
from paceline.job.job import Job
from paceline.run.record.run import Run

DATA = {"kind": "synthetic", "samples": 48, "shape": [4], "classes": 3, "held_out": 0.25}


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep over two learning rates, of which one makes the loss infinite; and its screen."""
    folder = tmp_path_factory.mktemp("sweep")
    write_job(folder / "job.yaml", model={"factory": f"{POINTS}:net"}, data=DATA, metrics=["accuracy"])
    words = ("sweep", "job.yaml", "--plan", "dp=1", "--set", "stop.steps=4", "--grid", "optimizer.lr=0.1,3e38")
    outcome = paceline(*words, "--out", "out", "--json", folder=folder)
    assert outcome.code == 0, outcome.err
    return folder, outcome.out


def test_each_run_trains_its_own_job(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    first = Run(folder / "out" / "runs" / "1")
    assert first.job == Job.load(folder / "job.yaml", set={"stop.steps": 4, "optimizer.lr": 0.1})
    assert sorted(losses(first.path)) == [1, 2, 3, 4]


def test_a_failed_run_is_recorded_and_the_others_are_compared(swept: tuple[Path, str]) -> None:
    folder, screen = swept
    found = content(folder / "out")
    assert [run["state"] for run in found["runs"]] == ["finished", "failed"]
    assert found["runs"][0]["metric"] == Run(folder / "out" / "runs" / "1").metrics["accuracy"]
    assert found["runs"][1]["error"]
    assert found["verdict"]["best"] == [1]
    assert found["verdict"]["is_clear"] is False
    assert json.loads(screen.splitlines()[-1])["runs"] == found["runs"]


def test_the_page_shows_the_table_without_a_script(swept: tuple[Path, str]) -> None:
    page = (swept[0] / "out" / "sweep.html").read_text()
    assert "<script" not in page
    assert page.count("<tr>") == 3
    for text in ("accuracy", "3e+38", "failed", "finished", "runs/1"):
        assert text in page


def test_the_same_command_repeats_no_finished_run_and_another_one_is_refused(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    before = content(folder / "out")["runs"][0]
    words = ("sweep", "job.yaml", "--plan", "dp=1", "--set", "stop.steps=4", "--out", "out")
    other = paceline(*words, "--grid", "optimizer.lr=0.1,0.2", folder=folder)
    assert other.code == 1
    assert "[sweep.another_sweep]" in other.error
    marked = folder / "out" / "runs" / "1" / "mark"
    marked.touch()
    assert paceline(*words, "--grid", "optimizer.lr=0.1,3e38", folder=folder).code == 0
    assert marked.exists()
    assert content(folder / "out")["runs"][0] == before


def test_more_repeats_go_on_in_the_same_directory_and_fewer_are_refused(tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", model={"factory": f"{POINTS}:net"}, data=DATA, metrics=["accuracy"])
    words = ("sweep", "job.yaml", "--plan", "dp=1", "--set", "stop.steps=2", "--out", "out", "--grid", "optimizer.lr=1")
    assert paceline(*words, folder=tmp_path).code == 0
    first = content(tmp_path / "out")["runs"][0]
    outcome = paceline(*words, "--repeat", "2", folder=tmp_path)
    assert outcome.code == 0, outcome.error
    runs = content(tmp_path / "out")["runs"]
    assert runs[0] == first
    assert [(run["seed"], run["state"]) for run in runs] == [(0, "finished"), (1, "finished")]
    assert len({run["run"] for run in runs}) == 2
    assert "[sweep.another_sweep]" in paceline(*words, folder=tmp_path).error


@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        (
            ["--grid", "optimizer.lr=0.1,-1", "--grid", "seed=1,2"],
            ["optimizer.lr=-1, seed=1", "optimizer.lr=-1, seed=2"],
        ),
        (["--grid", "optimizer.lr=0.1,1e-1"], ["[sweep.refused]"]),
        (["--grid", "optimizer.lr=a,b,0.1"], ["2 of 3", "[sweep.refused]"]),
        (["--grid", "optimizer.lrr=0.1"], ["optimizer.lrr", '"lr"']),
        (["--grid", "model.args.hiden=3,4"], ["hiden"]),
        (["--grid", "global_batch=16,1", "--plan", "dp=2"], ["global_batch=1"]),
        (["--grid", "optimizer.lr=0.1,0.2", "--set", "optimizer.lr=1"], ["optimizer.lr"]),
        (["--grid", "optimizer.lr=uniform(0,1)"], ["[sweep.range_in_grid]"]),
        (["--grid", "seed=1,2", "--repeat", "2"], ["[sweep.seed_and_repeat]"]),
        (["--grid", "seed=1,2", "--metric", "f1"], ["[sweep.metric_not_measured]"]),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_run(words: list[str], blamed: list[str], tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", data={"kind": "synthetic", "samples": 48}, metrics=["accuracy"])
    outcome = paceline("sweep", "job.yaml", "--out", "out", *words, folder=tmp_path)
    assert outcome.code == 1
    for text in blamed:
        assert text in outcome.error
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_job_itself_is_reported_once(tmp_path: Path) -> None:
    error = paceline("sweep", "none.yaml", "--grid", "optimizer.lr=0.1,0.2,0.3", folder=tmp_path).error
    assert "[file.absent]" in error
    assert len(error.splitlines()) == 1


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    data = points(held_out=0.25, sleep_s=0.003, until=str(tmp_path / "go"))
    write_job(tmp_path / "job.yaml", model={"factory": f"{POINTS}:net"}, data=data, stop={"steps": 300})
    words = ("sweep", "job.yaml", "--plan", "dp=1", "--grid", "optimizer.lr=0.1,0.01", "--out", "out")
    with started("paceline", *words, folder=tmp_path) as process:
        wait_for_step(3, tmp_path / "out" / "runs" / "1", process)
        process.send_signal(signal.SIGINT)
        stopped = ended(process)
    assert stopped.code == 130
    assert [run["state"] for run in content(tmp_path / "out")["runs"]] == ["interrupted", "waiting"]
    trained = len(losses(tmp_path / "out" / "runs" / "1"))
    assert 3 <= trained < 300

    (tmp_path / "go").touch()
    outcome = paceline(*words, folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert [run["state"] for run in content(tmp_path / "out")["runs"]] == ["finished", "finished"]
    first = Run(tmp_path / "out" / "runs" / "1")
    assert [event["step"] for event in first.events() if event["event"] == "resume"] == [trained]
    assert len(first.steps()) == 300
