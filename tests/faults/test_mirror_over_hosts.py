"""Hosts with a part of a model's only replica are lost: the others wait, and go on from copies in memory."""

from __future__ import annotations

import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from commands import ended, ended_well, events, losses, paceline, wait_for, write_job
from host_processes import emulated_host_processes, on_emulated_hosts
from hosts import cut_of

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2, pytest.mark.slow]
STEPS, PLAN = 60, "fsdp=4"


def job_in(folder: Path) -> Path:
    checkpoint = {"every_steps": 1000, "memory_every_steps": 4}
    return write_job(folder / "job.yaml", stop={"steps": STEPS}, checkpoint=checkpoint, deadline_s=60)


def training(folder: Path, **environment: str) -> AbstractContextManager[tuple[subprocess.Popen[str], Path]]:
    """A run on two emulated hosts, once it has copies of all parts."""
    return on_emulated_hosts(job_in(folder), 2, PLAN, from_step=14, environment=environment)


def test_a_lost_host_is_waited_for_and_its_parts_come_back_from_the_memory_of_the_others(tmp_path: Path) -> None:
    with training(tmp_path) as (process, run):
        emulated_host_processes(process)[0].kill()
        ended_well(process)
    [lost] = events(run, "host_lost")
    assert (lost["host"], lost["number"], lost["ranks"]) == ("host-1", 1, [2, 3])
    assert (lost["waits_s"], lost["revived"]) == (300, True)
    assert events(run, "went_back"), "it continues from copies in memory"
    assert 3 in [event["rank"] for event in events(run, "healed")]
    assert not events(run, "resume"), "nothing was read from the disk"
    assert not events(run, "restart"), "the other ranks kept their processes"
    again = ("--cluster", "cluster.yaml", "--plan", PLAN, "--run", "alone")
    undisturbed = paceline("train", job_in(tmp_path), *again, folder=tmp_path)
    assert undisturbed.code == 0, undisturbed.err
    assert losses(run) == losses(tmp_path / "alone")


def test_a_host_that_may_not_come_back_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with training(tmp_path, PACELINE_LOSSES_PER_HOUR="1") as (process, run):
        emulated_host_processes(process)[0].kill()
        outcome = ended(process)
    assert outcome.code == 1
    assert [(event["host"], event["ranks"], event["again"]) for event in events(run, "host_lost")] == [
        ("host-1", [2, 3], False)
    ]
    assert "host-1" in outcome.error
    assert max(losses(run)) < STEPS


def test_ctrl_c_while_a_host_is_waited_for_ends_the_run(tmp_path: Path) -> None:
    with training(tmp_path) as (process, run):
        cut_of(process.pid, host=1)
        wait_for(lambda: events(run, "host_lost"), process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code != 0
    assert [(event["host"], event["ranks"]) for event in events(run, "host_lost")] == [("host-1", [2, 3])]
