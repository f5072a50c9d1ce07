"""A Flower app of a federated job: a folder for `flwr run`."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import JobError, RunError
from paceline.job.job import Job
from paceline_federated.client import federated, rule_of

PACKAGE = "federated_job"
_FILES = {
    "__init__.py": '"""A federated job of paceline as a Flower app."""\n',
    "client_app.py": '''\
"""The clients: what they do in a round is in job.yaml."""

from pathlib import Path

from paceline_federated.flower.client import client_app

app = client_app(Path(__file__).with_name("job.yaml"))
''',
    "server_app.py": '''\
"""The server: the job's own rule. Any other strategy of Flower can ask these clients, too."""

from pathlib import Path

from paceline_federated.flower.strategy import server_app

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
final-model = "final_model.safetensors"
"""


def write_app(job: Job, folder: Path) -> list[str]:
    """Write the app into a new folder.

    Returns files and code that the job names, which every host needs.

    Raises:
        JobError: the job has something that is not for Flower's messages.
        RunError: the folder is there already, or cannot be written.
    """
    must_fit_flower(job)
    package = folder / PACKAGE
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-") or "job"
    try:
        package.mkdir(parents=True)
        for file, text in _FILES.items():
            (package / file).write_text(text)
        (package / "job.yaml").write_text(job.to_yaml())
        project = _PROJECT.format(name=f"{name}-federated", package=PACKAGE)
        (folder / "pyproject.toml").write_text(project)
    except FileExistsError as error:
        raise RunError(f"{package} is there already: name another folder") from error
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}") from error
    return _named(job)


def must_fit_flower(job: Job) -> int:
    """The number of rounds of a job that Flower's messages can carry.

    Raises:
        JobError: it has something that they cannot. Says what to leave out.
    """
    spec = federated(job)
    if spec.secure is not None:
        raise JobError("federate.secure: sums of paceline's own; Flower has SecAgg+ as a mod. Leave it out")
    if spec.compress != "none" or spec.compress_down != "none":
        raise JobError(
            "federate.compress and compress_down: Flower's strategies take numbers as they are. Leave them out"
        )
    if rule_of(job).buffer is not None:
        raise JobError(f"federate.rule {spec.rule} has no rounds, and Flower's strategies have. Take another rule")
    if job.stop.steps is None or len(job.stop.model_dump(exclude_defaults=True)) > 1:
        raise JobError("stop: a Flower app makes a number of rounds and knows no other end: give stop.steps alone")
    return job.stop.steps


def _named(job: Job) -> list[str]:
    data = (
        getattr(job.data, key, None)
        for key in ("path", "held_out_path", "factory", "held_out_factory", "collate", "collate_held_out")
    )
    model = (job.model.factory, job.model.hf, job.model.weights)
    return [str(named) for named in (*data, *model) if named is not None]
