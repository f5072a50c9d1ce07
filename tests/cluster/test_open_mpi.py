"""Processes that a real mpirun starts find their places."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import ended, losses, paceline, started, wait_for, write_job, write_late_job
from paceline.cluster.launch_engines import default_port
from paceline.wire.key import RunKey, write_key

pytestmark = pytest.mark.needs_mpirun
# The program by which mpirun reaches other hosts: here they are this machine, by other names. Each has a temporary
# folder of its own, as Open MPI's daemons fail where two of them make one at the same moment.
AGENT = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
export TMPDIR=$(mktemp -d)
exec sh -c "$*"
"""
PLACE = """
import dataclasses, json, os
from paceline.errors import LaunchError
from paceline.cluster.launch_engines import own_engine
try: told = dataclasses.asdict(own_engine().hosts())
except LaunchError as error: told = {"number": int(os.environ["OMPI_COMM_WORLD_RANK"]), "error": str(error)}
open(f"place-{told['number']}", "w").write(json.dumps(told))
"""


@contextmanager
def mpirun(folder: Path, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command on two hosts, started by mpirun."""
    (folder / "agent").write_text(AGENT)
    (folder / "agent").chmod(0o700)
    about = {
        "OMPI_MCA_plm_rsh_agent": str(folder / "agent"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    options = ("--oversubscribe", "--bind-to", "none", "-n", "2", *arguments)
    with started(str(shutil.which("mpirun")), *options, folder=folder, environment=about | environment) as process:
        yield process


def run_by_mpirun(folder: Path, *arguments: object, **environment: str) -> None:
    """Run a command on two hosts by mpirun, to its end."""
    with mpirun(folder, *arguments, **environment) as process:
        found = ended(process)
    assert found.code == 0, found


def places(folder: Path, *arguments: str, **environment: str) -> list[dict[str, str | int]]:
    """Place that each of two processes of mpirun found, by number."""
    run_by_mpirun(folder, *arguments, sys.executable, "-c", PLACE, **environment)
    return [json.loads((folder / f"place-{number}").read_text()) for number in range(2)]


@pytest.mark.slow
def test_one_process_per_host_makes_hosts_that_meet_where_mpirun_runs(tmp_path: Path) -> None:
    found = places(tmp_path, "--host", "localhost,other")
    assert [(place["number"], place["count"], place["engine"]) for place in found] == [(0, 2, "mpi"), (1, 2, "mpi")]
    assert found[0]["coordinator"] == found[1]["coordinator"]
    assert found[0]["run_name"] == found[1]["run_name"] != ""
    assert {place["port"] for place in found} == {default_port("mpi", str(found[0]["run_name"]))}


@pytest.mark.slow
def test_a_host_0_that_is_not_where_mpirun_runs_has_to_be_named(tmp_path: Path) -> None:
    first, _ = places(tmp_path, "--host", "one,other")
    assert "Set PACELINE_COORDINATOR=ADDRESS:PORT" in str(first["error"])
    named = places(tmp_path, "--host", "one,other", "-x", "PACELINE_COORDINATOR", PACELINE_COORDINATOR="10.0.0.7:4711")
    assert [(place["coordinator"], place["port"]) for place in named] == [("10.0.0.7", 4711)] * 2


@pytest.mark.slow
def test_two_processes_on_one_host_are_refused_with_the_right_command(tmp_path: Path) -> None:
    for place in places(tmp_path):
        assert "mpirun started 2 processes on this host" in str(place["error"])
        assert "mpirun --map-by ppr:1:node paceline" in str(place["error"])


def test_a_job_under_mpirun_has_the_losses_of_one_process(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    run_by_mpirun(tmp_path, *training(job), **own_key(tmp_path))
    assert paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
def test_a_sigterm_before_the_first_step_ends_all_hosts(tmp_path: Path) -> None:
    job = write_late_job(tmp_path)
    with mpirun(tmp_path, *training(job), **own_key(tmp_path)) as process:
        wait_for((tmp_path / "importing").exists, process)
        process.send_signal(signal.SIGTERM)
        found = ended(process)
    assert found.code != 0  # mpirun's own, whatever its processes ended with
    assert found.says("SIGTERM", "exit code 143")
    assert "Traceback" not in found.err


def training(job: Path) -> list[object]:
    """Words by which mpirun trains a job on two hosts, in the folder `run`."""
    hosts = ("--host", "localhost,other")
    return [*hosts, sys.executable, "-m", "paceline", "train", job, "--plan", "dp=2", "--run", "run"]


def own_key(folder: Path) -> dict[str, str]:
    """A key for the hosts, which have one device each."""
    write_key(RunKey.make(), folder / "run.key")
    return {"PACELINE_KEY_FILE": str(folder / "run.key"), "PACELINE_HOST_DEVICES": "1"}
