"""A federated job as a Flower app: write it and run it.

torch is imported only when a client trains or the server starts. Only the ClientApp and the ServerApp need Flower
(`flwr`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError, RunError
from paceline.job.job import Job
from paceline_federated.flower.limits import must_fit_flower
from paceline_federated.section import federate_spec

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.serverapp import Grid


def client_app(job: str | Path) -> Any:
    """Make a Flower ClientApp that trains and evaluates clients of a job.

    The key `partition-id` of a node's configuration is its client number. The client trains on its part of the job's
    data, or on the file or folder that the key `data` names. Weights are exchanged as "arrays" under the names of the
    model's shared tensors, so every Flower strategy can be the server. If the job has `federate.secure`, clients send
    only updates that SecAgg+ has masked.

    Args:
        job: file of the job.
    """
    from flwr.app import Message
    from flwr.client.mod import secaggplus_mod
    from flwr.clientapp import ClientApp

    secure = federate_spec(Job.load(job)).secure is not None
    app: Any = ClientApp(mods=[secaggplus_mod] if secure else [])

    def clients() -> Any:
        from paceline_federated.flower.client import clients_of

        return clients_of(str(job))

    def train(message: Message, context: Context) -> Message:
        return Message(clients().trained(message.content, context), reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        return Message(clients().measured(message.content, context), reply_to=message)

    def query(message: Message, context: Context) -> Message:
        return Message(clients().described(context), reply_to=message)

    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(query)
    return app


def server_app(job: str | Path) -> Any:
    """Make a Flower ServerApp that trains a job with the job's own rule.

    The record is written to the directory `run` of the app's configuration, or to a new directory under `runs`. The
    final model is in `final_model.safetensors`.

    Args:
        job: file of the job.
    """
    from flwr.serverapp import ServerApp

    app: Any = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        from paceline_federated.flower.server import serve

        serve(Job.load(job), grid, context)

    app.main()(main)
    return app


PACKAGE = "federated_job"
_FILES = {
    "__init__.py": '"""A federated job of paceline as a Flower app."""\n',
    "client_app.py": '''\
"""The clients: what they do in a round is in job.yaml."""

from pathlib import Path

from paceline_federated.flower.app import client_app

app = client_app(Path(__file__).with_name("job.yaml"))
''',
    "server_app.py": '''\
"""The server: the job's own rule. Any other strategy of Flower can ask these clients, too."""

from pathlib import Path

from paceline_federated.flower.app import server_app

app = server_app(Path(__file__).with_name("job.yaml"))
''',
}
_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federated job of paceline"
license = "Apache-2.0"
dependencies = ["flwr>=1.42"]  # and paceline, installed beside it on every host

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "paceline"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
run = {run}  # directory of the record on the SuperLink's host; a new one under runs if empty
"""


def write_app(job: Job, folder: Path, run: Path | None = None) -> list[str]:
    """Write the app into a new folder.

    Returns the files and code to which the job refers, which every host needs.

    Args:
        run: directory of the record on the host of the SuperLink.

    Raises:
        JobError: the job has settings that Flower's messages do not support.
        RunError: the folder already exists, or cannot be written.
    """
    must_fit_flower(job)
    package = folder / PACKAGE
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-") or "job"
    try:
        package.mkdir(parents=True)
        for file, text in _FILES.items():
            (package / file).write_text(text)
        (package / "job.yaml").write_text(job.to_yaml())
        project = _PROJECT.format(
            name=f"{name}-federated", package=PACKAGE, run=json.dumps("" if run is None else str(run.absolute()))
        )
        (folder / "pyproject.toml").write_text(project)
    except FileExistsError as error:
        raise RunError(
            "federate.package_exists", "{package} already exists. Name another folder.", package=package
        ) from error
    except OSError as error:
        raise RunError(
            "federate.folder_unwritable", "{folder} cannot be written: {error}", folder=folder, error=error
        ) from error
    return _named(job)


@dataclass(frozen=True)
class SuperLink:
    """Connection to a SuperLink.

    Attributes:
        name: name of the connection in Flower's own configuration, or an address and port.
        root_certificates: file with the certificate authority for this address.
        insecure: True to connect to this address without TLS.
    """

    name: str
    root_certificates: Path | None = None
    insecure: bool = False

    @contextmanager
    def connection(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Return the connection's name for `flwr`, and environment variables that define it.

        Raises:
            JobError: TLS options are given for a named connection, whose options belong in Flower's configuration.
        """
        environment = dict(os.environ)
        if ":" not in self.name:
            if self.root_certificates is not None or self.insecure:
                raise JobError(
                    "federate.connection_unsecured",
                    "{name} is a connection in Flower's configuration, so set its TLS options in that configuration",
                    name=self.name,
                )
            yield self.name, environment
            return
        with tempfile.TemporaryDirectory(prefix="paceline-flower-") as home:
            lines = ["[superlink.deployment]", f"address = {json.dumps(self.name)}"]
            if self.insecure:
                lines.append("insecure = true")
            if self.root_certificates is not None:
                lines.append(f"root-certificates = {json.dumps(str(self.root_certificates.absolute()))}")
            Path(home, "config.toml").write_text("\n".join(lines) + "\n")
            yield "deployment", environment | {"FLWR_HOME": home}


def run_app(folder: Path, superlink: SuperLink) -> None:
    """Run an app on a SuperLink until it ends, and print its log.

    Raises:
        RunError: Flower is not installed, the SuperLink cannot be reached, or the run failed.
    """
    flwr = shutil.which("flwr", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if flwr is None:
        raise RunError(
            "federate.flwr_missing",
            "the command flwr was not found. Install Flower beside paceline (pip install 'flwr>=1.42').",
        )
    with superlink.connection() as (name, environment):

        def asked(*words: str) -> dict[str, Any]:
            done = subprocess.run([flwr, *words, "--format", "json"], env=environment, capture_output=True, text=True)
            try:
                answer: dict[str, Any] = json.loads(done.stdout)
            except ValueError:
                answer = {"error-message": (done.stderr or done.stdout).strip()}
            if not answer.get("success"):
                raise RunError(
                    "federate.flwr_failed",
                    "flwr {command} {superlink} failed: {error}",
                    command=words[0],
                    superlink=superlink.name,
                    error=answer.get("error-message", answer),
                )
            return answer

        number = str(asked("run", str(folder), name)["run-id"])
        subprocess.run([flwr, "log", number, name, "--stream"], env=environment)
        run = asked("list", name, "--run-id", number)["runs"][0]
        if run["status"] != "finished:completed":
            raise RunError(
                "federate.run_failed",
                "run {run} on {superlink} ended as {status}: {details}",
                run=number,
                superlink=superlink.name,
                status=run["status"],
                details=run["status-details"],
            )


def _named(job: Job) -> list[str]:
    data = (
        getattr(job.data, key, None)
        for key in ("path", "held_out_path", "factory", "held_out_factory", "collate", "collate_held_out")
    )
    model = (job.model.factory, job.model.hf, job.model.weights)
    return [str(named) for named in (*data, *model) if named is not None]
