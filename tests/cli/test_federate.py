"""`paceline federate simulate`: the result on screen, the run's directory, and errors in one line."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from commands import ended, paceline, started, wait_for_step
from federated_jobs import federated_job
from paceline.run.record.run import Run
from paceline_federated.section import federate_spec
from small_jobs import points


def test_a_simulated_run_is_summed_up_and_is_a_run_like_others(tmp_path: Path) -> None:
    job = federated_job({"clients": 6, "simulate": {"drop_out": 0.3}}, data=points(held_out=0.2), metrics=["accuracy"])
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    outcome = paceline("federate", "simulate", "job.yaml", "--clients", 7, "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    run = Run(tmp_path / "run")
    dropped = sum(line["dropped"] for line in run.steps())
    assert outcome.says(
        "7 clients with 8 samples each; rule fedavg",
        "stopped      steps: 4 done",
        f"validation   loss {run.metrics['loss']:.4f}, accuracy {run.metrics['accuracy']:.4f}",
        f"28 times chosen, {dropped} dropped out, 0 late, 0 refused, 0 clipped",
    )
    assert federate_spec(run.job).clients == 7
    again = paceline("federate", "simulate", "job.yaml", "--clients", 7, "--run", "run", "--resume", folder=tmp_path)
    assert again.says("stopped      steps: 4 done")
    assert len(Run(tmp_path / "run").steps()) == 4


@pytest.mark.slow
def test_a_simulated_run_is_reported_on_and_exported(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(federated_job().to_yaml())
    assert paceline("federate", "simulate", "job.yaml", "--run", "run", folder=tmp_path).code == 0
    assert paceline("report", "run", folder=tmp_path).says("run/report.html")
    assert paceline("export", "run", "model.safetensors", folder=tmp_path).says("model.safetensors: load it with")


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(federated_job({"per_round": 4}).to_yaml())
    outcome = paceline("federate", "simulate", "job.yaml", "--clients", 3, folder=tmp_path)
    assert "[federate.per_round]" in outcome.error
    (tmp_path / "plain.yaml").write_text(federated_job().model_copy(update={"federate": None}).to_yaml())
    outcome = paceline("federate", "simulate", "plain.yaml", folder=tmp_path)
    assert "[federate.no_section]" in outcome.error
    outcome = paceline("federate", "simulate", "plain.yaml", "--clients", 3, folder=tmp_path)
    assert "[federate.no_section]" in outcome.error
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_run_is_saved_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(federated_job(stop={"steps": 10_000_000}).to_yaml())
    command = ("paceline", "federate", "simulate", "job.yaml", "--run", "run")
    with started(*command, folder=tmp_path) as process:
        wait_for_step(3, tmp_path / "run", process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130
    assert outcome.says(
        "stopped      SIGINT", "continue     paceline federate simulate run/job.yaml --run run --resume"
    )
    run = Run(tmp_path / "run")
    assert run.checkpoints.joinpath(f"step-{run.steps()[-1]['step']:08d}").is_dir()
