"""A federated job that is deployed on Flower is the job that paceline simulates."""

from __future__ import annotations

import json
import os
import subprocess
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from commands import ended, paceline, started
from federate.flower_deployment import Deployment, deployment, kill
from paceline.errors import JobError, RunError
from paceline.job.job import Job
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline_federated.flower.app import write_app
from paceline_federated.simulation import simulate
from refusals import raises

ROUNDS, CLIENTS = 4, 4
DEPLOYED_S = 700.0  # each message of a deployment starts a process, which imports torch
FLOWER = Path(__file__).parents[2] / "build" / "flower" / "bin" / "python"


def job(rounds: int = ROUNDS, **federate: Any) -> Job:
    values = {
        "name": "A_job",
        "model": {"zoo": "mlp", "args": {"hidden": 16}},
        "data": "digits",
        "loss": "cross_entropy",
        "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"name": "cosine"},
        "global_batch": 32,
        "stop": {"steps": rounds},
        "federate": {
            "clients": CLIENTS,
            "partition": {"kind": "dirichlet", "alpha": 0.5},
            "deadline_s": 280,
            **federate,
        },
    }
    return Job.model_validate(values)


def flower(app: Path, *average: str) -> dict[str, torch.Tensor]:
    """Final weights of a Flower simulation of the app."""
    before = set(psutil.Process().children())
    script = Path(__file__).with_name("flower_run.py")
    command = [str(FLOWER), str(script), str(app), str(CLIENTS), *average]
    environment = os.environ | {"RAY_TMPDIR": "/tmp", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    shown = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=600)
    for child in set(psutil.Process().children()) - before:  # Ray's daemons, which end in their own time
        child.kill()
        child.wait(10)
    assert shown.returncode == 0, shown.stderr
    (file,) = app.rglob("final_model.safetensors")
    return load_file(file)


def simulated(job: Job, folder: Path) -> tuple[Run, dict[str, torch.Tensor]]:
    """The record and the final weights of our simulation."""
    run = simulate(job, folder / "simulated")
    export(run.path, folder / "simulated.safetensors")
    return run, load_file(folder / "simulated.safetensors")


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.steps()]


@pytest.mark.slow
@pytest.mark.needs_flower
@pytest.mark.parametrize(
    ("federate", "tolerance"),
    [
        ({"rule": "scaffold", "per_round": 3}, 1e-4),
        ({"rule": "fedadam,lr=0.05", "aggregate": "trimmed:0.3", "norm_bound": 2.0}, 1e-4),
        ({"rule": "scaffold", "weigh": "equal", "secure": {}}, 1e-3),
        ({"privacy": {"clip": 0.5, "noise": 0.00001}}, 1e-3),
        ({"privacy": {"clip": 0.5, "noise": 0.00001}, "secure": {}}, 1e-3),
    ],
)
def test_the_app_ends_with_the_weights_of_the_simulation(
    tmp_path: Path, federate: dict[str, Any], tolerance: float
) -> None:
    whole = job(**federate)
    write_app(whole, tmp_path / "app")
    found = flower(tmp_path / "app")
    run, expected = simulated(whole, tmp_path)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    (deployed,) = (tmp_path / "app" / "runs").iterdir()
    assert losses(Run(deployed)) == pytest.approx(losses(run), rel=1e-3)


@pytest.mark.slow
@pytest.mark.needs_flower
def test_a_secure_deployment_has_the_losses_of_the_simulation(tmp_path: Path) -> None:
    whole = job(rounds=2, secure={"max_weight": 600})
    (tmp_path / "job.yaml").write_text(whole.to_yaml())
    with (
        deployment(tmp_path, CLIENTS) as made,
        started("paceline", *deploy_command(made), folder=tmp_path) as process,
    ):
        outcome = ended(process, DEPLOYED_S)
    assert outcome.code == 0, outcome.err
    run, expected = simulated(whole, tmp_path)
    found = Run(tmp_path / "run")
    assert losses(found) == pytest.approx(losses(run), rel=1e-3)
    assert found.metrics == pytest.approx(run.metrics, rel=1e-2)
    weights = load_file(found.path / "final_model.safetensors")
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.needs_flower
def test_a_deployment_goes_on_without_a_client_that_was_killed(tmp_path: Path) -> None:
    whole = job(rounds=3, deadline_s=100)
    (tmp_path / "job.yaml").write_text(whole.to_yaml())
    with ExitStack() as held:
        made = held.enter_context(deployment(tmp_path, CLIENTS))
        process = held.enter_context(started("paceline", *deploy_command(made), folder=tmp_path))
        until = time.monotonic() + 400
        while not steps(tmp_path / "run"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until, "the first round does not end"
            time.sleep(0.1)
        kill({made.nodes[-1]})
        outcome = ended(process, DEPLOYED_S)
    assert outcome.code == 0, outcome.err
    run, _ = simulated(whole, tmp_path)
    found = Run(tmp_path / "run").steps()
    assert found[0]["loss"] == pytest.approx(run.steps()[0]["loss"], rel=1e-4)
    assert [line["clients"] for line in found][::2] == [CLIENTS, CLIENTS - 1]
    assert len(found) == 3


def deploy_command(made: Deployment) -> list[object]:
    where = ["--superlink", made.address, "--root-certificates", made.root_certificates]
    return ["federate", "deploy", "job.yaml", "app", *where, "--run", "run"]


def steps(run: Path) -> int:
    file = run / "steps" / "rank-0.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What server and clients say to each case of `flower_refusals.py`."""
    script = Path(__file__).with_name("flower_refusals.py")
    command = [str(FLOWER), str(script), str(tmp_path_factory.mktemp("refusals"))]
    environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout.splitlines()[-1])


@pytest.mark.needs_flower
@pytest.mark.parametrize(
    "case",
    [
        "weights that are not finite",
        "weights of another shape",
        "weights without a name",
        "weights of another model",
        "nothing",
        "more samples than it has",
        "no samples",
        "no steps",
        "no tensors of the rule",
        "tensors of the rule of another shape",
        "tensors of the rule that are not finite",
        "an error",
    ],
)
def test_a_bad_update_is_refused_with_its_reason_and_the_others_count(case: str, refusals: Any) -> None:
    assert refusals["server"]["proper"] == {"clients": 4, "refused": 0, "reasons": []}
    found = refusals["server"][case]
    assert (found["clients"], found["refused"]) == (3, 1)
    (reasons,) = found["reasons"]
    assert reasons.keys() == {"3"}
    assert reasons["3"]


@pytest.mark.needs_flower
def test_two_nodes_that_are_one_client_end_the_run(refusals: Any) -> None:
    assert refusals["server"]["two nodes are one client"]["error"]


@pytest.mark.needs_flower
@pytest.mark.parametrize(
    "case",
    [
        "weights that are not finite",
        "weights of another shape",
        "weights without a name",
        "a server without the rule",
        "a node without a number",
        "a client that the job does not have",
        "another number of nodes",
    ],
)
def test_a_client_refuses_what_is_no_task_of_its_job(case: str, refusals: Any) -> None:
    assert refusals["client"]["proper"] == ""
    assert refusals["client"][case]


@pytest.mark.needs_flower
def test_a_node_trains_on_the_data_of_its_configuration(refusals: Any) -> None:
    assert refusals["own data"] == {"number": 1, "num-examples": 6}


@pytest.mark.slow
@pytest.mark.needs_flower
def test_flowers_own_fedavg_trains_our_clients(tmp_path: Path) -> None:
    whole = job()
    write_app(whole, tmp_path / "app")
    found = flower(tmp_path / "app", "average", str(ROUNDS))
    torch.testing.assert_close(found, simulated(whole, tmp_path)[1], rtol=1e-4, atol=1e-5)


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
    with raises(RunError, "federate.package_exists"):
        write_app(whole, tmp_path / "app")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"federate": {"compress": "int8"}}, "federate.flower_compress"),
        ({"federate": {"rule": "fedbuff:2"}}, "federate.flower_no_rounds"),
        ({"federate": {"rule": "fedadam", "privacy": {"clip": 1, "noise": 1}}}, "federate.flower_privacy"),
        ({"federate": {"rule": "scaffold", "secure": {}}}, "federate.secure_weights"),
        ({"federate": {"per_round": 2, "secure": {}}}, "federate.secure_too_few"),
        ({"stop": {"steps": 3, "metric_above": {"accuracy": 0.9}}}, "federate.flower_stop"),
    ],
)
def test_what_a_deployment_cannot_do_is_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    values = job().model_dump(mode="json", exclude_defaults=True)
    values["federate"] |= changes.pop("federate", {})
    with raises(JobError, code):
        write_app(Job.model_validate(values | changes), tmp_path / "app")
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize("key", ["clip", "group", "most_samples", "phase_s"])
def test_keys_that_secagg_has_no_meaning_for_are_refused(key: str) -> None:
    with pytest.raises(JobError, match=key):
        job(secure={key: 5})


def test_a_deployment_without_flower_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(job().to_yaml())
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = paceline("federate", "deploy", "job.yaml", "app", "--superlink", "127.0.0.1:9", folder=tmp_path)
    assert outcome.code == 1
    assert outcome.error.endswith("[federate.flwr_missing]\n")
    assert "pip install 'flwr>=1.42'" in outcome.error


def test_without_a_superlink_the_app_is_written_only(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job().to_yaml())
    outcome = paceline("federate", "deploy", "job.yaml", "app", folder=tmp_path)
    assert outcome.says("run it       flwr run app --stream")
    assert (tmp_path / "app" / "pyproject.toml").is_file()
