"""Manifests and tasks, held to the schemas of Kubernetes and to SkyPilot's own reader.

Both are in an environment of their own, `make engines`, as they need other versions of libraries than paceline.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from commands import write_job
from paceline.elastic.submit.kubernetes import KINDS, as_yaml, manifests
from paceline.elastic.submit.scheduler import Request
from paceline.elastic.submit.sky import Sky

PYTHON = Path(__file__).parent.parent.parent.parent / "build" / "engines" / "bin" / "python"
pytestmark = [pytest.mark.slow, pytest.mark.needs_engines]
OPTIONS = {"image": "registry/mine:1", "cpus": "8", "memory": "64Gi", "gpus": "4", "namespace": "team", "user": "1000"}
VALIDATE = """
import sys, kubernetes_validate, yaml
for document in yaml.safe_load_all(sys.stdin):
    if document["apiVersion"] in ("v1", "batch/v1"):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        print(document["kind"])
"""
READ = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.num_nodes, task.name, sorted(task.secrets))
"""


def says(script: str, *arguments: str, text: str = "", folder: Path) -> str:
    """Output of a script in that environment."""
    ended = subprocess.run(
        [PYTHON, "-c", script, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("kind", "core"), [("trainjob", ["Secret"]), ("jobset", ["Secret"]), ("job", ["Secret", "Service", "Job"])]
)
def test_core_kinds_are_valid_without_an_unknown_key(kind: str, core: list[str], tmp_path: Path) -> None:
    assert kind in KINDS
    request = Request(write_job(tmp_path / "job.yaml"), 4, "mine-1", "s3://a/b", options=OPTIONS)
    text = as_yaml(manifests(kind, request, "KEY"))
    assert says(VALIDATE, text=text, folder=tmp_path).split() == core


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    options = {"accelerators": "H100:8", "spot": "yes", "infra": "aws/us-east-1", "memory": "64+"}
    task = Sky().text(Request(write_job(tmp_path / "job.yaml"), 4, "mine-1", "s3://a/b", options=options))
    (tmp_path / "task.yaml").write_text(task.replace("PACELINE_KEY: null", "PACELINE_KEY: value"))
    assert says(READ, str(tmp_path / "task.yaml"), folder=tmp_path).splitlines()[-1] == "4 mine-1 ['PACELINE_KEY']"
