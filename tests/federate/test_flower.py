"""A federated job on Flower is the job that paceline simulates."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import JobError, RunError
from paceline.job.job import Job
from paceline.run.checkpoint.convert import export
from paceline_federated.flower.export import write_app
from paceline_federated.simulation.run import simulate

ROUNDS, CLIENTS = 4, 4
FLOWER = Path(__file__).parents[2] / "build" / "flower" / "bin" / "python"


def job(**federate: Any) -> Job:
    values = {
        "name": "A_job",
        "model": {"zoo": "mlp", "args": {"hidden": 16}},
        "data": "digits",
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"name": "cosine"},
        "global_batch": 32,
        "stop": {"steps": ROUNDS},
        "federate": {
            "clients": CLIENTS,
            "partition": {"kind": "dirichlet", "alpha": 0.5},
            "deadline_s": 280,
            **federate,
        },
    }
    return Job.model_validate(values)


def flower(app: Path, *average: str) -> dict[str, torch.Tensor]:
    """Final weights of a Flower run of the app."""
    before = set(psutil.Process().children())
    script = Path(__file__).with_name("flower_run.py")
    command = [str(FLOWER), str(script), str(app), str(CLIENTS), *average]
    environment = os.environ | {"RAY_TMPDIR": "/tmp", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    shown = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=300)
    for child in set(psutil.Process().children()) - before:  # Ray's daemons, which end in their own time
        child.kill()
        child.wait(10)
    assert shown.returncode == 0, shown.stderr
    return load_file(app / "final_model.safetensors")


def simulated(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    run = simulate(job, folder / "run")
    export(run.path, folder / "ours.safetensors")
    return load_file(folder / "ours.safetensors")


@pytest.mark.slow
@pytest.mark.needs_flower
@pytest.mark.parametrize(
    "federate",
    [
        {"rule": "scaffold", "per_round": 3},
        {"rule": "fedadam,lr=0.05", "aggregate": "trimmed:0.3", "norm_bound": 2.0},
    ],
)
def test_the_exported_app_ends_with_the_weights_of_the_simulation(tmp_path: Path, federate: dict[str, Any]) -> None:
    whole = job(**federate)
    write_app(whole, tmp_path / "app")
    torch.testing.assert_close(flower(tmp_path / "app"), simulated(whole, tmp_path), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.needs_flower
def test_flowers_own_fedavg_trains_our_clients(tmp_path: Path) -> None:
    whole = job()
    write_app(whole, tmp_path / "app")
    found = flower(tmp_path / "app", "average", str(ROUNDS))
    torch.testing.assert_close(found, simulated(whole, tmp_path), rtol=1e-4, atol=1e-5)


def test_an_app_has_the_job_and_both_ends(tmp_path: Path) -> None:
    whole = job(rule="fedprox:0.01")
    assert write_app(whole, tmp_path / "app") == []
    assert Job.load(tmp_path / "app" / "federated_job" / "job.yaml") == whole
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "a-job-federated"
    for end, component in project["tool"]["flwr"]["app"]["components"].items():
        module, _, name = component.partition(":")
        file = tmp_path / "app" / f"{module.replace('.', '/')}.py"
        compile(text := file.read_text(), str(file), "exec")
        assert f"{name} = {end[:-3]}_app(" in text
    with pytest.raises(RunError, match="name another folder"):
        write_app(whole, tmp_path / "app")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"federate": {"secure": {}}}, "SecAgg"),
        ({"federate": {"compress": "int8"}}, "Leave them out"),
        ({"federate": {"rule": "fedbuff:2"}}, "Take another rule"),
        ({"stop": {"steps": 3, "metric_above": {"accuracy": 0.9}}}, "give stop.steps alone"),
    ],
)
def test_what_flowers_messages_cannot_carry_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    values = job().model_dump(mode="json", exclude_defaults=True)
    values["federate"] |= changes.pop("federate", {})
    with pytest.raises(JobError, match=said):
        write_app(Job.model_validate(values | changes), tmp_path / "app")
    assert not (tmp_path / "app").exists()
