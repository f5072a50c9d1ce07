"""Trackers of `paceline train`: what they are told, after restarts too, and that none of them can harm a run."""

from __future__ import annotations

import json
import os
import signal
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import (
    ended,
    events,
    in_a_process,
    kill_rank,
    losses,
    paceline,
    started,
    wait_for,
    wait_for_step,
    write_job,
)
from noting_trackers import installed, noted
from paceline.engine.meter import PARTS
from paceline.run.trackers import TRACKERS, TrackerInfo
from paceline.run.trackers.follow import Follower
from small_jobs import new_run, small_job


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python has the trackers of `noting_trackers.py` installed."""
    return {"PYTHONPATH": os.pathsep.join([str(installed(tmp_path / "site")), os.environ["PYTHONPATH"]])}


@pytest.fixture
def installed_here(site: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and those that it starts, have the tracker `noting`."""
    monkeypatch.setitem(TRACKERS.installed, "noting", EntryPoint("noting", "noting_tracker:INFO", TRACKERS.group))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", site["PYTHONPATH"])


def a_job(folder: Path, *trackers: Any, **changes: Any) -> Path:
    return write_job(folder / "job.yaml", trackers=list(trackers), **changes)


def noting(file: str = "noted.jsonl", name: str = "noting", **more: Any) -> dict[str, Any]:
    return {"name": name, "args": {"file": file, **more}}


@pytest.mark.usefixtures("installed_here")
def test_a_tracker_is_told_of_all_of_a_run_and_a_resumed_one_goes_on_in_it(tmp_path: Path) -> None:
    data = {"kind": "synthetic", "samples": 64, "held_out": 0.25}
    job = a_job(tmp_path, noting(), data=data, metrics=["accuracy"])
    outcome = paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    begin, *logged, end = noted(tmp_path / "noted.jsonl")
    assert (begin["begin"], begin["project"], begin["id"]) == ("run", "small", "")
    config = begin["config"]
    assert config["job"]["optimizer"]["lr"] == 0.1
    assert config["plan"]["text"] == "dp=2"
    assert config["plan"]["dp"] == 2
    assert config["environment"]["torch"]
    assert not {"variables", "load_average"} & config["environment"].keys()
    assert "trackers" not in config["job"]
    steps = [entry["step"] for entry in logged]
    assert steps == sorted(steps)
    assert steps[-1] == 6
    values: dict[str, float] = {}
    for entry in logged:
        values |= entry["values"]
    assert values["train/loss"] == losses(tmp_path / "run")[6]
    assert values["val/accuracy"] == events(tmp_path / "run", "evaluation")[-1]["metrics"]["accuracy"]
    assert {"train/lr", "train/grad_norm", "train/epoch", "speed/samples_per_s", "step_s/compute"} <= values.keys()
    assert end["end"] == "finished"

    job = a_job(tmp_path, noting(), data=data, metrics=["accuracy"], stop={"steps": 9})
    again = paceline("train", job, "--plan", "dp=1", "--run", "run", "--resume", folder=tmp_path)
    assert again.code == 0, again.err
    told = noted(tmp_path / "noted.jsonl")
    assert [entry["id"] for entry in told if "begin" in entry] == ["", "the-run"]
    assert [entry["end"] for entry in told if "end" in entry] == ["finished", "finished"]
    assert [entry["step"] for entry in told if "step" in entry][-1] == 9
    assert sum(entry.get("step") == 6 for entry in told) == steps.count(6), "not told again"


@pytest.mark.usefixtures("installed_here")
def test_the_newest_gradient_norm_is_logged_if_not_every_step_has_one(tmp_path: Path) -> None:
    file = tmp_path / "noted.jsonl"
    run = new_run(tmp_path / "run", small_job(trackers=[noting(str(file))]))
    parts: dict[str, Any] = {f"{part}_s": 0.0 for part in PARTS} | {"step_s": 0.0}
    norms = [2.0, None, 4.0, None]
    lines = [
        parts | {"step": step, "epoch": 0, "loss": 1.0, "lr": 0.1, "samples": 8, "grad_norm": norm}
        for step, norm in enumerate(norms, 1)
    ]
    (run.path / "steps" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Follower(run, 0).log_new()
    logged = [(entry["step"], entry["values"].get("train/grad_norm")) for entry in noted(file) if "step" in entry]
    assert logged == [(3, 4.0), (4, None)]


@pytest.mark.usefixtures("installed_here")
def test_the_end_of_a_run_that_fails_is_told_as_such(tmp_path: Path) -> None:
    job = a_job(tmp_path, noting(), optimizer={"name": "sgd", "lr": 1e30})
    outcome = paceline("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path)
    assert outcome.code != 0
    assert noted(tmp_path / "noted.jsonl")[-1]["end"] == "failed"


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.slow),
        (signal.SIGTERM, "interrupted"),
        (signal.SIGKILL, "failed"),
    ],
)
def test_the_end_of_a_run_that_is_stopped_or_killed_is_told(
    kind: signal.Signals, end: str, tmp_path: Path, site: dict[str, str]
) -> None:
    job = a_job(tmp_path, noting(), stop={"steps": 1_000_000})
    arguments = ("train", job, "--plan", "dp=1", "--run", "run")
    with started("paceline", *arguments, folder=tmp_path, environment=site) as process:
        wait_for(lambda: any("step" in entry for entry in noted(tmp_path / "noted.jsonl")), process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(kind)
        ended(process)
        psutil.wait_procs(children, timeout=60)
    told = noted(tmp_path / "noted.jsonl")
    assert told[-1]["end"] == end
    if end == "interrupted":
        assert told[-2]["step"] == max(losses(tmp_path / "run"))


@pytest.mark.slow
def test_a_rank_that_dies_ends_no_tracker(tmp_path: Path, site: dict[str, str]) -> None:
    job = a_job(tmp_path, noting(), stop={"steps": 3000})
    arguments = ("train", job, "--plan", "dp=2", "--run", "run")
    with started("paceline", *arguments, folder=tmp_path, environment=site) as process:
        wait_for_step(20, tmp_path / "run", process)
        kill_rank(0, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    told = noted(tmp_path / "noted.jsonl")
    assert len({entry["pid"] for entry in told}) == 1
    steps = [entry["step"] for entry in told if "step" in entry]
    assert steps == sorted(steps)
    assert steps[-1] == 3000


@pytest.mark.slow
def test_a_tracker_that_fails_or_dies_is_said_once_and_the_run_and_the_others_go_on(
    tmp_path: Path, site: dict[str, str]
) -> None:
    trackers = [noting("fails.jsonl", fails_at=1), noting("dies.jsonl", "dies"), noting("good.jsonl")]
    job = a_job(tmp_path, *trackers, noting("wrong.jsonl", colour="red"), stop={"steps": 2000})
    outcome = in_a_process("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path, **site)
    assert outcome.code == 0, outcome.err
    said = 'tracker "noting" failed: ConnectionError: no answer. Training goes on without it.'
    assert outcome.err.count(said) == 1
    assert "cannot be created" in outcome.err
    assert "colour" in outcome.err
    assert outcome.err.count('tracker "dies" ended by SIGABRT') == 1
    assert noted(tmp_path / "good.jsonl")[-1]["end"] == "finished"
    assert max(losses(tmp_path / "run")) == 2000
    assert len(events(tmp_path / "run", "tracker")) == 2


@pytest.mark.slow
def test_a_tracker_that_hangs_keeps_a_run_waiting_for_seconds_at_most(tmp_path: Path, site: dict[str, str]) -> None:
    job = a_job(tmp_path, noting(name="hangs"), stop={"steps": 2000})
    outcome = in_a_process("train", job, "--plan", "dp=1", "--run", "run", folder=tmp_path, **site)
    assert outcome.code == 0, outcome.err
    assert max(losses(tmp_path / "run")) == 2000
    pid = noted(tmp_path / "noted.jsonl")[-1]["pid"]
    assert f'tracker "hangs" still stores what it has, in process {pid}' in outcome.err
    psutil.Process(pid).kill()


@pytest.mark.slow
def test_under_torchrun_the_first_rank_alone_has_trackers(tmp_path: Path, site: dict[str, str]) -> None:
    job = a_job(tmp_path, noting())
    words = ("--nproc-per-node", 2, "-m", "paceline", "train", job, "--run-dir", "run")
    with started("torchrun", *words, folder=tmp_path, environment=site) as process:
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    told = noted(tmp_path / "noted.jsonl")
    assert [entry["project"] for entry in told if "begin" in entry] == ["small"]
    assert told[-1]["end"] == "finished"
    assert told[-2]["step"] == 6


@pytest.mark.parametrize(
    ("tracker", "code", "named"),
    [("wanbd", "extension.unknown", '"wandb"'), ("nothing", "tracker.not_installed", "a-package")],
)
def test_a_tracker_that_cannot_be_is_refused_before_training(
    tracker: str, code: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS.built_in, "nothing", TrackerInfo("noting_tracker:Noting", "a_package.that_is_not"))
    outcome = paceline("train", a_job(tmp_path, tracker), "--run", "run", folder=tmp_path)
    assert outcome.code == 1
    assert f"[{code}]" in outcome.error
    assert named in outcome.error
    assert not (tmp_path / "run").exists()
