"""A job trains on hosts that ssh reaches as it does in one process."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from commands import (
    POINTS,
    checkpoints,
    ended,
    ended_well,
    events,
    losses,
    paceline,
    points,
    started,
    wait_for_events,
    wait_for_step,
    write_job,
)
from paceline.run.record.run import Run
from sshd import STRANGER, ssh_to

pytestmark = [pytest.mark.needs_sshd, pytest.mark.slow]
_DEADLINE_S = 100.0


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ssh_to(tmp_path_factory.mktemp("ssh"), {"b": "127.0.0.2", "c": "127.0.0.3"})


def test_a_job_on_two_hosts_has_the_losses_of_one_process(ssh: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    arguments = ("train", job, "--plan", "dp=2", "--run", "run", "--hosts", "localhost:1,b:1")
    with started("paceline", *arguments, folder=tmp_path, environment={"PACELINE_SSH": ssh}) as process:
        ended_well(process, _DEADLINE_S)
    assert paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_ctrl_c_at_the_starter_saves_the_run_on_all_hosts(ssh: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 1_000_000})
    arguments = ("paceline", "train", job, "--plan", "dp=2", "--run", "run", "--hosts", "b:1,localhost:1")
    with started(*arguments, folder=tmp_path, environment={"PACELINE_SSH": ssh}) as process:
        wait_for_step(3, tmp_path / "run", process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process, _DEADLINE_S)
    assert outcome.code == 130, outcome.err
    assert checkpoints(tmp_path / "run")
    assert events(tmp_path / "run", "end")[0]["reason"] == "SIGINT"


def host_process(number: int, folder: Path) -> psutil.Process:
    """Return the process that coordinates or serves the run in `folder` on a host."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_command = process.cmdline()[1:3] == ["-m", "paceline"] and process.cwd() == str(folder)
            if is_command and process.environ().get("PACELINE_HOST_NUMBER") == str(number):
                return process
    raise AssertionError(f"there is no process of host {number}")


def test_a_spare_host_replaces_a_host_with_a_notice(ssh: str, tmp_path: Path) -> None:
    model, data = {"factory": f"{POINTS}:net"}, points(sleep_s=0.003)
    job = write_job(tmp_path / "job.yaml", model=model, data=data, stop={"steps": 100_000})
    arguments = ("train", job, "--plan", "dp=2", "--run", "run", "--hosts", "localhost:1,b:1,c:1", "--spares", "1")
    with started("paceline", *arguments, folder=tmp_path, environment={"PACELINE_SSH": ssh}) as process:
        wait_for_step(3, tmp_path / "run", process)
        host_process(1, tmp_path).send_signal(signal.SIGTERM)
        wait_for_events(tmp_path / "run", "healed", 1, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process, _DEADLINE_S)
    assert outcome.code == 130, outcome.err
    kinds = ("host_left", "host_back")
    assert [[event["number"] for event in events(tmp_path / "run", kind)] for kind in kinds] == [[1], [1]]
    assert not events(tmp_path / "run", "lost")


@pytest.mark.parametrize("hosts", ["localhost:1,b:1", f"{STRANGER}:1,localhost:1"])
def test_a_spare_host_is_left_out_after_a_check(ssh: str, tmp_path: Path, hosts: str) -> None:
    job = write_job(tmp_path / "job.yaml")
    arguments = ("train", job, "--plan", "dp=1", "--run", "run", "--hosts", hosts, "--spares", "1")
    with started("paceline", *arguments, folder=tmp_path, environment={"PACELINE_SSH": ssh}) as process:
        ended_well(process, _DEADLINE_S)
    assert len(Run(tmp_path / "run").cluster.hosts) == 1
