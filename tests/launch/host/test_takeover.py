"""A run goes on when its coordinating host is lost: the next host continues it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from commands import (
    Outcome,
    checkpoints,
    events,
    losses,
    paceline,
    processes_of,
    wait_for,
    wait_for_step,
    write_job,
)
from host_processes import host_processes, outcomes

STEPS = 300
WHAT = Path(__file__).parents[2] / "faults" / "what_goes_wrong.py"


def slow_job(folder: Path) -> Path:
    """300 steps, each of 16 samples that take 2 ms."""
    points = {"kind": "dataset", "factory": f"{WHAT}:Points", "held_out": 0, "args": {"sleep_s": 0.002}}
    net = {"factory": f"{WHAT}:net"}
    return write_job(folder / "job.yaml", model=net, data=points, stop={"steps": STEPS}, checkpoint={"every_steps": 20})


def folders(root: Path, count: int) -> list[Path]:
    made = [root / f"host-{number}" for number in range(count)]
    for folder in made:
        folder.mkdir()
    return made


def kill_host(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a host process and all that it has started."""
    for one in [psutil.Process(process.pid), *processes_of(process)]:
        one.kill()


def assert_whole(run: Path, folder: Path, told: Outcome) -> None:
    """All steps are in the record, with the losses of an undisturbed run."""
    alone = paceline("train", folder / "job.yaml", "--plan", "dp=1", "--run", "alone", folder=folder)
    assert alone.code == 0, alone.err
    assert sorted(losses(run)) == list(range(1, STEPS + 1)), told.err
    assert losses(run) == pytest.approx(losses(folder / "alone"), rel=1e-4, abs=1e-6)
    assert checkpoints(run)[-1] == f"step-{STEPS:08d}"


@pytest.mark.slow
def test_when_the_coordinator_is_killed_the_next_host_continues_the_run_without_the_loss_of_a_step(
    tmp_path: Path,
) -> None:
    job, run = slow_job(tmp_path), tmp_path / "run"
    arguments = ("train", job, "--plan", "dp=3", "--run", run)
    with host_processes(*arguments, folders=folders(tmp_path, 3)) as hosts:
        wait_for_step(50, run, hosts[0])
        hosts[0].kill()
        one, two = outcomes(hosts)[1:]
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert one.says("(number 0) is lost", "(number 1) coordinates now with", "resumed at step")
    assert two.says("(number 1) coordinates now", "the run has ended on")
    assert_whole(run, tmp_path, one)
    [saved] = events(run, "resume")
    assert saved["step"] >= 50, "its ranks, without a launcher, have saved with the others"


@pytest.mark.slow
def test_when_one_of_two_hosts_dies_whole_the_other_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    job, run = slow_job(tmp_path), tmp_path / "run"
    arguments = ("train", job, "--plan", "dp=2", "--run", run)
    with host_processes(*arguments, folders=folders(tmp_path, 2)) as hosts:
        wait_for_step(50, run, hosts[0])
        kill_host(hosts[0])
        one = outcomes(hosts)[1]
    assert one.code == 0, one.err
    assert one.says("(number 1) coordinates now, alone", "resumed at step")
    assert_whole(run, tmp_path, one)


@pytest.mark.slow
def test_a_host_that_has_taken_over_may_be_lost_as_well(tmp_path: Path) -> None:
    job, run = slow_job(tmp_path), tmp_path / "run"
    arguments = ("train", job, "--plan", "dp=3", "--run", run)
    with host_processes(*arguments, folders=folders(tmp_path, 3)) as hosts:
        wait_for_step(50, run, hosts[0])
        hosts[0].kill()
        wait_for(lambda: events(run, "resume"), hosts[1])
        hosts[1].kill()
        two = outcomes(hosts)[2]
    assert two.code == 0, two.err
    assert [event["by"].partition(" (")[2] for event in events(run, "coordinator")] == ["number 1)", "number 1)"]
    assert_whole(run, tmp_path, two)


@pytest.mark.slow
def test_fewer_than_half_of_the_hosts_stop_and_say_so(tmp_path: Path) -> None:
    job, run = slow_job(tmp_path), tmp_path / "run"
    arguments = ("train", job, "--plan", "dp=3", "--run", run)
    with host_processes(*arguments, folders=folders(tmp_path, 3)) as hosts:
        wait_for_step(50, run, hosts[0])
        for host in hosts[:2]:
            kill_host(host)
        two = outcomes(hosts)[2]
    assert two.code == 1
    assert two.says("(number 1) is not reached either", "1 of 3 hosts have met", "continue with --resume")
    assert "Traceback" not in two.err
    assert not events(run, "coordinator")


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_run_that_was_on_the_lost_hosts_disk_alone_stops_and_says_what_is_lost(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    job = slow_job(first)
    arguments = ("train", job, "--plan", "dp=2", "--run", first / "run")
    with host_processes(*arguments, folders=[first, second], apart=True) as hosts:
        wait_for_step(50, first / "run", hosts[0])
        kill_host(hosts[0])
        one = outcomes(hosts)[1]
    assert one.code == 1
    assert one.says(f"the run's directory {first}/run with it", "continue there with --resume")
    assert "Traceback" not in one.err
