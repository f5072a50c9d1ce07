"""A real mpiexec of MPICH starts a run on two hosts, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import DEADLINE_S, checkpoints, losses, paceline, wait_for_step, write_job
from paceline.wire.key import RunKey, write_key
from ray_cluster import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.needs_engines, pytest.mark.timeout(300)]
# The program by which mpiexec reaches other hosts: here they are this machine, by other names.
AGENT = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n'


@contextmanager
def mpiexec(folder: Path, hosts: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`paceline ARGUMENTS…` on two processes of mpiexec, under way."""
    (folder / "agent").write_text(AGENT)
    (folder / "agent").chmod(0o700)
    if not (folder / "run.key").exists():
        write_key(RunKey.make(), folder / "run.key")
    about = {
        "PACELINE_KEY_FILE": str(folder / "run.key"),
        "PACELINE_COORDINATOR": "127.0.0.1",
        "PACELINE_HOST_DEVICES": "1",
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    place = ["-launcher", "ssh", "-launcher-exec", str(folder / "agent"), "-hosts", hosts, "-n", "2"]
    with subprocess.Popen(
        [ENGINES / "mpiexec.hydra", *place, sys.executable, "-m", "paceline", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **about},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_job_under_mpich_has_the_losses_of_one_process(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    with mpiexec(tmp_path, "localhost,other", "train", job, "--plan", "dp=2", "--run", "run") as process:
        shown, _ = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 0, shown
    assert paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_two_processes_on_one_host_are_refused_with_the_right_command(tmp_path: Path) -> None:
    with mpiexec(tmp_path, "localhost", "train", write_job(tmp_path / "job.yaml")) as process:
        shown, _ = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 1
    assert "mpirun started 2 processes on this host" in shown
    assert "mpiexec -ppn 1" in shown


def test_sigterm_at_mpiexec_has_the_run_saved(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 1_000_000})
    with mpiexec(tmp_path, "localhost,other", "train", job, "--plan", "dp=2", "--run", "run") as process:
        wait_for_step(10, tmp_path / "run", process)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=DEADLINE_S)
    assert checkpoints(tmp_path / "run"), shown
