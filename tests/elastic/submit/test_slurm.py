"""A real Slurm with two nodes: submitted, followed, interrupted, queued again, resumed, cancelled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import (
    ended,
    events,
    in_a_process,
    losses,
    paceline,
    started,
    wait_for,
    wait_for_step,
    write_job,
    write_late_job,
)
from host_processes import own_address
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.needs_slurm, pytest.mark.timeout(600)]
STEPS = 1_000  # some seconds, in which a run is interrupted


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that is long enough to be interrupted."""
    return write_job(
        tmp_path / "job.yaml",
        data={"kind": "synthetic", "samples": 4_800, "held_out": 0},
        optimizer={"name": "sgd", "lr": 0.001},
        stop={"steps": STEPS},
    )


def environment(slurm: SlurmCluster, here: Path) -> dict[str, str]:
    """Variables of a test's commands. Names of nodes lead nowhere here, so host 0 has an address of this test alone."""
    own = {"PACELINE_COORDINATOR": own_address(), "PACELINE_HOST_DEVICES": "1"}
    return {**slurm.environment, "PACELINE_HOME": str(here / "home"), **own}


def undisturbed(job: Path, plan: str) -> dict[int, float]:
    alone = ("train", job, "--plan", f"{plan} transport=tcp", "--run", "alone")
    assert in_a_process(*alone, folder=job.parent).code == 0
    return losses(job.parent / "alone")


def test_a_submitted_run_ends_with_the_losses_of_one_process(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    options = ("--num-hosts", "2", "--plan", "dp=2", "--run", "run", "--scheduler-option", "cpus-per-task=1")
    variables = environment(slurm, tmp_path)
    shown = in_a_process("submit", job, "--on", "slurm", *options, folder=tmp_path, **variables)
    assert shown.says("is done, exit code 0")
    assert shown.code == 0
    assert paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=tmp_path).code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_interrupted_twice_has_the_losses_of_an_undisturbed_one(
    slurm: SlurmCluster, job: Path, tmp_path: Path
) -> None:
    two = ("--num-hosts", "2", "--plan", "dp=2 balance=off")
    arguments = ("submit", job, "--on", "slurm", *two, "--run", "run", "--scheduler-option", "cpus-per-task=2")
    variables = environment(slurm, tmp_path)
    with started("paceline", *arguments, folder=tmp_path, environment=variables) as followed:
        run = tmp_path / "run"
        wait_for_step(30, run, followed)
        number = slurm.ask("squeue", "--noheader", "--format=%i")
        slurm.ask("scancel", "--batch", "--signal=USR1", number)  # as before the time limit
        wait_for_resume(1, run, followed)
        slurm.ask("scontrol", "requeue", number)  # as for a job of higher priority
        wait_for_resume(2, run, followed)
        shown = ended(followed, 300)
    assert shown.code == 0, shown
    assert shown.says("the time limit is near; saving", "back into the queue", "is queued", "is done, exit code 0")
    assert losses(run) == undisturbed(job, "dp=2 balance=off")
    assert not list(tmp_path.glob("home/submitted/*.key"))


def wait_for_resume(count: int, run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run was resumed so often, and has gone on from there."""
    wait_for(lambda: len(events(run, "resume")) >= count, process)
    wait_for_step(max(losses(run)) + 10, run, process)


@pytest.mark.slow
def test_a_run_that_is_warned_before_its_first_step_starts_anew(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = write_late_job(tmp_path)
    options = ("--num-hosts", "2", "--plan", "dp=2", "--run", "run", "--scheduler-option", "cpus-per-task=2")
    variables = environment(slurm, tmp_path)
    with started("paceline", "submit", job, "--on", "slurm", *options, folder=tmp_path, environment=variables) as shown:
        wait_for((tmp_path / "importing").exists, shown)
        number = slurm.ask("squeue", "--noheader", "--format=%i")
        slurm.ask("scancel", "--batch", "--signal=USR1", number)
        wait_for(lambda: slurm.ask("squeue", "--noheader", "--format=%T") == "PENDING", shown)
        (tmp_path / "go").touch()
        found = ended(shown, 300)
    assert found.code == 0, found
    assert found.says("the time limit is near; saving", "SIGTERM", "back into the queue", "is done, exit code 0")
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_failed_run_ends_with_its_code_and_is_not_queued_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", model="nowhere:Model")
    arguments = ("submit", "job.yaml", "--on", "slurm", "--scheduler-option", "cpus-per-task=1")
    shown = in_a_process(*arguments, folder=tmp_path, **environment(slurm, tmp_path))
    assert shown.code == 1
    assert shown.says("nowhere", "is failed", "exit code 1")
    assert slurm.ask("squeue", "--noheader") == ""


@pytest.mark.slow
def test_a_cancelled_run_has_saved(slurm: SlurmCluster, job: Path, tmp_path: Path) -> None:
    write_job(job, data={"kind": "synthetic", "samples": 4_800, "held_out": 0}, stop={"steps": 1_000_000})
    arguments = (
        "submit",
        job,
        "--on",
        "slurm",
        "--plan",
        "dp=1",
        "--run",
        "run",
        "--scheduler-option",
        "cpus-per-task=2",
    )
    variables = environment(slurm, tmp_path)
    with started("paceline", *arguments, folder=tmp_path, environment=variables) as followed:
        wait_for_step(20, tmp_path / "run", followed)
        [record] = tmp_path.glob("home/submitted/*.json")
        assert in_a_process("runs", folder=tmp_path, **variables).says(record.stem, "running")
        assert in_a_process("cancel", record.stem, folder=tmp_path, **variables).says("was told to end")
        shown = ended(followed, 120)
    assert shown.code == 143
    assert shown.says("is cancelled")
    assert events(tmp_path / "run", "end")[-1]["reason"] == "SIGTERM"
