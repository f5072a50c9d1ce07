"""What runs leave with wandb, MLflow, Prometheus and OpenTelemetry, read back by these packages themselves."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from commands import events, losses, wait_for, write_job

PYTHON = Path(__file__).parents[3] / "build" / "frameworks" / "bin" / "python"
pytestmark = [pytest.mark.slow, pytest.mark.needs_frameworks]
DATA = {"kind": "synthetic", "samples": 64, "held_out": 0.25}
DEADLINE_S = 300


@contextmanager
def under_way(job: Path, *options: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`paceline train` where the trackers' packages are; killed where the test leaves it running."""
    words = [str(PYTHON), "-m", "paceline", "train", str(job), "--plan", "dp=1", "--run", "run", *map(str, options)]
    place = {"TMPDIR": str(job.parent), "XDG_CACHE_HOME": str(job.parent / "cache"), "HOME": str(job.parent)}
    variables = {**os.environ, **place, "OMP_NUM_THREADS": "1", **environment}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=job.parent, env=variables, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def trained(job: Path, *options: object, fails: bool = False, **environment: str) -> str:
    """Train to the end; what was on the screen."""
    with under_way(job, *options, **environment) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode != 0) == fails, err
    assert "Training goes on without it" not in err
    return out + err


def read_back(tracker: str, where: object) -> Any:
    script = str(Path(__file__).with_name("read_back.py"))
    shown = subprocess.run(
        [str(PYTHON), script, tracker, str(where)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout.splitlines()[-1])


def a_job(folder: Path, tracker: str, stop: int = 6, **arguments: Any) -> Path:
    given = {"name": tracker, "args": arguments}
    return write_job(folder / "job.yaml", data=DATA, metrics=["accuracy"], trackers=[given], stop={"steps": stop})


def test_wandb_keeps_a_run_offline_and_goes_on_with_it(tmp_path: Path) -> None:
    trained(a_job(tmp_path, "wandb"), WANDB_MODE="offline")
    trained(a_job(tmp_path, "wandb", stop=9), "--resume", WANDB_MODE="offline")
    first, second = read_back("wandb", tmp_path / "run" / "trackers" / "wandb")
    assert first["id"] == second["id"]
    assert (first["name"], first["project"]) == ("run", "small")
    assert first["config"]["job"]["optimizer"]["lr"] == 0.1
    assert first["config"]["plan"]["text"] == "dp=1"
    assert first["config"]["environment"]["torch"]
    assert first["history"]["6"]["train/loss"] == losses(tmp_path / "run")[6]
    assert first["history"]["6"]["val/accuracy"] == events(tmp_path / "run", "evaluation")[1]["metrics"]["accuracy"]
    assert "9" in second["history"]
    assert (first["exit_code"], second["exit_code"]) == (0, 0)


def test_wandb_is_told_of_a_failure(tmp_path: Path) -> None:
    given = [{"name": "wandb", "args": {"mode": "offline"}}]
    job = write_job(tmp_path / "job.yaml", trackers=given, optimizer={"name": "sgd", "lr": 1e30})
    trained(job, fails=True)
    [run] = read_back("wandb", tmp_path / "run" / "trackers" / "wandb")
    assert run["exit_code"] == 1


def test_mlflow_keeps_a_run_in_its_database_and_goes_on_with_it(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    trained(a_job(tmp_path, "mlflow"), MLFLOW_TRACKING_URI=uri)
    [first] = read_back("mlflow", uri)
    assert (first["name"], first["status"]) == ("run", "FINISHED")
    assert first["params"]["job.optimizer.lr"] == "0.1"
    assert first["params"]["plan.text"] == "dp=1"
    assert first["metrics"]["train/loss"][-1] == [6, losses(tmp_path / "run")[6]]
    assert first["metrics"]["val/accuracy"][-1][0] == 6
    trained(a_job(tmp_path, "mlflow", stop=9), "--resume", MLFLOW_TRACKING_URI=uri)
    [again] = read_back("mlflow", uri)
    assert again["id"] == first["id"]
    assert again["status"] == "FINISHED"
    steps = [step for step, _ in again["metrics"]["train/loss"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 9


def test_mlflow_is_told_of_a_failure(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    given = [{"name": "mlflow", "args": {"tracking_uri": uri}}]
    job = write_job(tmp_path / "job.yaml", trackers=given, optimizer={"name": "sgd", "lr": 1e30})
    trained(job, fails=True)
    assert [run["status"] for run in read_back("mlflow", uri)] == ["FAILED"]


@pytest.fixture
def extended(tmp_path: Path) -> dict[str, str]:
    """An environment in which the extension examples are installed."""
    examples = Path(__file__).parents[3] / "examples" / "extend"
    points = tomllib.loads((examples / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "site" / "paceline_examples-0.1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: paceline-examples\nVersion: 0.1.0\n")
    named = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points.items()]
    info.joinpath("entry_points.txt").write_text("\n".join(named))
    return {"PYTHONPATH": f"{info.parent}:{examples}"}


def test_prometheus_scrapes_a_run(tmp_path: Path, extended: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = a_job(tmp_path, "prometheus", stop=1_000_000, port=port)
    with under_way(job, **extended) as process:
        # evaluations and steps are told apart, in either order
        wait_for(lambda: "paceline_train_loss{" in scraped(port), process)
        text = scraped(port)
    assert 'paceline_step{job="small",run="run"}' in text
    assert re.search(r'paceline_train_loss\{job="small",run="run"\} \d', text)


def scraped(port: int) -> str:
    """The metrics; "" while nothing listens."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
    return ""


def test_a_collector_gets_a_run_over_otlp(tmp_path: Path) -> None:
    bodies = tmp_path / "bodies"
    bodies.mkdir()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            (bodies / f"{len(list(bodies.iterdir())):04}").write_bytes(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            trained(
                a_job(tmp_path, "opentelemetry"),
                OTEL_EXPORTER_OTLP_ENDPOINT=address,
                OTEL_EXPORTER_OTLP_COMPRESSION="none",
                OTEL_RESOURCE_ATTRIBUTES="deployment.environment=tests",
            )
        finally:
            server.shutdown()
            thread.join()
    found = read_back("opentelemetry", bodies)
    assert found["resource"]["service.name"] == "paceline"
    assert found["resource"]["paceline.run"] == "run"
    assert found["resource"]["deployment.environment"] == "tests"
    values = found["values"]
    assert values["paceline.train.loss{} 1"] == losses(tmp_path / "run")[6]
    assert values["paceline.step{} {step}"] == 6
    assert values["paceline.step.duration{part=compute} s"] > 0
    assert values["paceline.run.end{status=finished} 1"] == 1


def test_a_collector_that_is_not_there_costs_a_run_nothing_but_its_log(tmp_path: Path) -> None:
    job = a_job(tmp_path, "opentelemetry")
    assert "stopped      steps: 6 done" in trained(job, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert max(losses(tmp_path / "run")) == 6
