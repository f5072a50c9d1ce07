"""What is wrong before the first step is told at once, in one error that says what, where and what to do."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from commands import checkpoints, ended, losses, paceline, started, wait_for, write_job
from paceline.cluster.discover import discover
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "job.yaml")


def refused(*arguments: object, folder: Path) -> str:
    """The error of a training that never began."""
    outcome = paceline("train", *arguments, folder=folder)
    assert outcome.code == 1
    return outcome.error


def test_every_mistake_in_a_job_is_named_with_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "model: mlp\n"
        "data: digits\n"
        "loss: cross_entropy\n"
        "optimiser: {name: adamw, lr: 0.001}\n"
        "global_batch: many\n"
        "stop:\n"
        "  epoch: 4\n"
        "  steps: 10\n"
    )
    assert refused("job.yaml", folder=tmp_path).splitlines() == [
        'job.yaml, line 4: unknown key "optimiser" in the job. Did you mean "optimizer"?  [file.unknown_key]',
        "job.yaml, line 5: global_batch should be a whole number, got 'many'  [file.wrong_type]",
        'job.yaml, line 7: unknown key "epoch" in stop. Did you mean "epochs"?  [file.unknown_key]',
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"model": {"hf": "config.json", "task": "causal_lm"}},
            r"job\.yaml, line 3: model\.hf: no such file or folder: .*/config\.json",
        ),
        ({"model": "nets.py:net"}, r"job\.yaml, line 2: model\.factory: no such file: .*/nets\.py"),
        ({"global_batch": 0}, r"global_batch should be at least 1, got 0"),
        ({"partition": {"weights": [1, 1, 1]}}, r"plan dp=2 has 2 replicas, but the job's partition has 3 weights"),
        (
            {"global_batch": 1},
            r"2 replicas for a global batch of 1.*Set dp to at most 1, or the job's global_batch to at least 2",
        ),
    ],
    ids=["no HF config", "no model file", "no batch", "weights", "batch below the replicas"],
)
def test_a_job_that_cannot_work_is_refused(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", **changes)
    assert re.search(error, refused("job.yaml", "--plan", "dp=2", folder=tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ("dp=2 precison=bf16", 'unknown key "precison". Did you mean "precision"?'),
        ("dp=two", 'dp must be a whole number, at least 1, not "two"'),
        ("dp=4096", "plan dp=4096 needs 4,096 ranks"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(plan: str, error: str, job: Path, tmp_path: Path) -> None:
    assert error in refused(job, "--plan", plan, folder=tmp_path)


def test_a_run_directory_that_cannot_be_made_is_named(job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refused(job, "--run", "file/run", folder=tmp_path)
    assert error.startswith("the run cannot be kept in file/run: Not a directory.")
    assert error.endswith("[run.directory_unwritable]\n")
    assert refused("nowhere.yaml", folder=tmp_path).startswith("nowhere.yaml: no such file")


def test_a_run_is_never_mixed_with_another(job: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "first", Job.load(job), discover(), Plan())
    assert refused(job, "--run", "first", folder=tmp_path).startswith(
        "first holds a run already. Continue it with --resume"
    )

    write_job(job, global_batch=24, optimizer={"name": "sgd", "lr": 0.2, "momentum": 0.9}, stop={"steps": 1000})
    error = refused(job, "--run", "first", "--resume", folder=tmp_path)
    assert error.startswith(
        "first belongs to another job: global_batch was 16, is 24; optimizer.lr was 0.1, is 0.2. Restore the values"
    )
    assert run.job.stop.steps == 6, "the run keeps its own job"

    write_job(job)
    error = refused(job, "--set", "optimizer.lr=0.2", "--run", "first", "--resume", folder=tmp_path)
    assert "optimizer.lr was 0.1, is 0.2" in error


def test_a_port_in_use_is_named_with_who_uses_it(job: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use by " in refused(job, "--port", port, folder=tmp_path)


def test_a_run_tells_how_it_ended_and_a_resumed_one_that_is_complete_trains_no_step_more(
    job: Path, tmp_path: Path
) -> None:
    """Piped output is plain lines; a failed start does not hide the run to be resumed."""
    words = ("train", job, "--plan", "dp=1", "--set", "optimizer.lr=3e-2")
    first = paceline(*words, folder=tmp_path)
    assert first.code == 0
    assert first.says(
        "stopped      steps: 6 done",
        "training     loss",
        "after 6 steps",
        "(synthetic data)",
        "plan dp=1",
        "run          runs/small-",
    )
    assert "\x1b" not in first.out + first.err
    [run] = (tmp_path / "runs").iterdir()
    before = losses(run), checkpoints(run)
    assert Run(run).job == Job.load(job, set={"optimizer.lr": 0.03}), "the run records the overridden job"

    Run.create(tmp_path / "runs" / "small-29991231-235959", Job.load(job), discover(), Plan())
    again = paceline(*words, "--resume", folder=tmp_path)
    assert again.code == 0
    assert again.says("resumed at step 6", "stopped      steps: 6 done", f"runs/{run.name}")
    assert (losses(run), checkpoints(run)) == before


def test_a_resume_with_nothing_to_resume_says_that_it_begins(job: Path, tmp_path: Path) -> None:
    write_job(job, model="nowhere:net")  # so that it ends before the first step
    outcome = paceline("train", job, "--plan", "dp=1", "--run", "new", "--resume", folder=tmp_path)
    assert outcome.says("note: there is no run to resume in new; a new run starts")
    outcome = paceline("train", job, "--plan", "dp=1", "--run", "new", "--resume", folder=tmp_path)
    assert outcome.says("note: there is no run to resume in new; a new run starts"), (
        "it has not begun, so it may be mended and tried again"
    )

    begun = Run.create(tmp_path / "begun", Job.load(job), discover(), Plan())
    (begun.path / "events.jsonl").write_text('{"event": "start", "step": 0}\n')
    outcome = paceline("train", job, "--plan", "dp=1", "--run", "begun", "--resume", folder=tmp_path)
    assert outcome.says("note: this run has no checkpoint; it starts from the beginning", "No module named 'nowhere'")
    assert (begun.path / "job.yaml").exists(), "a run that has begun stays one"


def test_the_summary_of_a_run_that_failed_in_between_says_what_that_cost(job: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", Job.load(job), discover(), Plan())
    summary = importlib.import_module("paceline.cli.train").summary

    def write(restarted: bool) -> None:
        late = {n: 2.0 if restarted and n > 50 else 0.0 for n in range(1, 101)}
        steps = [
            {"step": n, "time": 1e9 + 0.1 * n + late[n], "step_s": 0.1, "checkpoint_s": 0.0, "loss": 1.0, "samples": 8}
            for n in late
        ]
        (run.path / "steps" / "rank-0.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        events = [{"event": "launch", "time": 1e9}, {"event": "start", "time": 1e9, "synthetic": False}]
        if restarted:
            events.append({"event": "restart", "time": 1e9 + 6})
        events.append({"event": "end", "time": steps[-1]["time"], "reason": "steps", "step": 100, "elapsed_s": 1.0})
        text = "".join(json.dumps(event | {"interrupted": False}) + "\n" for event in events)
        (run.path / "events.jsonl").write_text(text)

    write(restarted=False)
    assert "goodput" not in summary(run)
    write(restarted=True)
    assert "goodput      83 % of 12.0 s; lost: restarts 2.00 s" in summary(run)


@pytest.mark.slow
def test_sigterm_during_start_ends_it_with_a_line_and_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n")
    job = write_job(tmp_path / "job.yaml", loss="late:loss")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    with started("paceline", "train", job, "--plan", "dp=2", folder=tmp_path, environment=environment) as process:
        wait_for((tmp_path / "importing").exists, process)
        process.send_signal(signal.SIGTERM)
        stopped = ended(process)
    assert stopped.code == 143
    assert stopped.says("SIGTERM")
    assert "Traceback" not in stopped.err
    assert not list(tmp_path.glob("runs/*"))
