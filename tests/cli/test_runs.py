"""`paceline runs` lists local and submitted runs, and `paceline logs NAME` follows one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from commands import ended, paceline, started, wait_for_step, write_job
from paceline.elastic.leadership import RunLock
from paceline.elastic.submit.scheduler import Submission, save
from paceline.run.record.brief import brief_of

NOW = time.time()
STEP = {"step": 7, "epoch": 0, "loss": 0.25, "samples": 4, "step_s": 0.1, "time": NOW}
START = {"event": "start", "time": NOW - 9, "plan": "dp=1", "total_steps": 20}
END = {"event": "end", "time": NOW, "step": 7, "reason": "steps: 7", "interrupted": False}


def run_at(folder: Path, *events: dict[str, Any], steps: tuple[dict[str, Any], ...] = (STEP,)) -> Path:
    (folder / "steps").mkdir(parents=True)
    (folder / "job.yaml").write_text("name: mine\n")
    (folder / "lock").write_text("")
    for name, lines in (("events.jsonl", events), ("steps/rank-0.jsonl", steps)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_run_is_training_only_while_the_process_that_holds_it_lives(tmp_path: Path) -> None:
    path = run_at(tmp_path / "mine", START)
    with RunLock(path):
        assert (brief_of(path).state, brief_of(path).step, brief_of(path).loss) == ("training", 7, 0.25)
    assert brief_of(path).state == "failed"


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        ((START, END), "ended", "steps: 7"),
        ((START, END | {"interrupted": True, "reason": "SIGINT"}), "interrupted", "SIGINT"),
        ((START, END, START | {"event": "resume"}), "failed", ""),
        ((), "failed", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_newest_event_of_its_life_is_the_state(
    events: tuple[dict[str, Any], ...], state: str, reason: str, tmp_path: Path
) -> None:
    found = brief_of(run_at(tmp_path / "mine", *events))
    assert (found.state, found.reason) == (state, reason)


def test_a_broken_run_hides_no_other(here: Path) -> None:
    run_at(here / "runs" / "good", START, END)
    run_at(here / "runs" / "odd", START, steps=({"step": 7, "loss": None, "time": "x"},))
    for name in ("cut", "folder", "pipe"):
        run_at(here / "runs" / name)
    (here / "runs" / "cut" / "events.jsonl").write_text('{"event": 3}\n[]\n{"event": "end", "rea')
    (here / "runs" / "folder" / "events.jsonl").unlink()
    (here / "runs" / "folder" / "events.jsonl").mkdir()
    (here / "runs" / "pipe" / "lock").unlink()
    os.mkfifo(here / "runs" / "pipe" / "lock")
    (here / "runs" / "none").mkdir()
    shown = paceline("runs", folder=here)
    assert shown.code == 0, shown.err
    rows = {line.split()[0]: line for line in shown.out.splitlines()[1:]}
    assert set(rows) == {"good", "odd", "cut", "folder", "pipe"}
    assert all(word in rows["good"] for word in ("ended: steps: 7", "0.25", "runs/"))


def test_local_and_submitted_runs_are_one_table_and_a_run_stands_there_once(here: Path) -> None:
    run_at(here / "runs" / "local", START, END)
    own = run_at(here / "runs" / "sent", START, END)
    settled: dict[str, Any] = {"hosts": 2, "job": "j", "since": NOW - 3 * 86_400}
    save(Submission(name="sent", engine="slurm", id="7", run=str(own), phase="done", code=0, **settled))
    save(Submission(name="away", engine="ray", id="8", run="s3://a/b", phase="failed", code=3, **settled))
    lines = paceline("runs", folder=here).out.splitlines()[1:]
    rows = {line.split()[0]: line for line in lines}
    assert (len(lines), set(rows)) == (3, {"local", "sent", "away"})
    assert rows["local"].rstrip().endswith("runs/")
    assert all(word in rows["sent"] for word in ("steps: 7", "0.25", "3d", "slurm 7, 2 hosts"))
    assert all(word in rows["away"] for word in ("failed, exit code 3", "ray 8", "s3://a/b"))


def test_only_the_newest_runs_are_listed_unless_all_are_wanted(here: Path) -> None:
    for number in range(35):
        run_at(here / "runs" / f"run-{number:02}", START, END)
    assert len(paceline("runs", folder=here).out.splitlines()) == 1 + 30 + 1
    assert len(paceline("runs", "--all", folder=here).out.splitlines()) == 1 + 35


def test_another_folder_of_runs_can_be_named(here: Path) -> None:
    run_at(here / "sweep" / "lr-1", START, END)
    assert paceline("runs", "sweep", folder=here).says("lr-1")
    assert paceline("runs", "none", folder=here).code == 2
    assert paceline("runs", folder=here).code == 0, "none is no error"


def test_the_log_of_a_run_that_has_ended_is_shown_to_its_end(here: Path) -> None:
    evaluation = {"event": "evaluation", "time": NOW, "step": 7, "metrics": {"loss": 0.5}}
    run_at(here / "runs" / "mine", START, evaluation, END)
    shown = paceline("logs", "mine", folder=here)
    assert shown.code == 0, shown.err
    assert shown.says("plan dp=1", "validation loss 0.5", "steps: 7")
    assert paceline("logs", "runs/mine", folder=here).out == shown.out


def test_the_exit_code_of_a_log_is_that_of_the_run(here: Path) -> None:
    run_at(here / "runs" / "gone", START)
    run_at(here / "runs" / "stopped", START, END | {"interrupted": True, "reason": "SIGTERM"})
    assert paceline("logs", "gone", folder=here).code == 1
    stopped = paceline("logs", "stopped", folder=here)
    assert stopped.code == 143
    assert stopped.says("--resume")


def test_a_name_that_no_run_has_is_told_with_the_nearest(here: Path) -> None:
    run_at(here / "runs" / "digits-1", START, END)
    assert 'Did you mean "digits-1"' in paceline("logs", "digits-2", folder=here).error


def test_a_run_that_trains_is_listed_and_followed_until_ctrl_c_ends_it(here: Path) -> None:
    job = write_job(here / "job.yaml", stop={"steps": 100_000})
    command = ("paceline", "train", job, "--plan", "dp=1", "--run", "runs/mine")
    with started(*command, folder=here) as training:
        wait_for_step(2, here / "runs" / "mine", training)
        assert brief_of(here / "runs" / "mine").state == "training"
        now = paceline("logs", "mine", "--no-follow", folder=here)
        assert (now.code, "plan dp=1" in now.out) == (0, True)
        with started("paceline", "logs", "mine", folder=here) as following:
            training.terminate()
            assert ended(training).code == 143
            assert ended(following).code == 143
    assert brief_of(here / "runs" / "mine").state == "interrupted"
