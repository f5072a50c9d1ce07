"""Hosts with a part of a model's only replica are lost: the others wait, and go on from copies in memory."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from commands import ended, events, losses, paceline, processes_of, started, wait_for, wait_for_step, write_job
from hosts import cut_of

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2, pytest.mark.slow]
STEPS, PLAN = 60, "fsdp=4"


def options_in(folder: Path, plan: str = PLAN) -> tuple[object, ...]:
    (folder / "cluster.yaml").write_text("emulate: {hosts: 2}\n")
    checkpoint = {"every_steps": 1000, "memory_every_steps": 4}
    job = write_job(folder / "job.yaml", stop={"steps": STEPS}, checkpoint=checkpoint, deadline_s=60)
    return "train", job, "--cluster", "cluster.yaml", "--plan", plan, "--run", "run"


@contextmanager
def training(folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run on two emulated hosts, once it has copies of all parts."""
    with started("paceline", *options_in(folder), folder=folder, environment=environment) as process:
        wait_for_step(14, folder / "run", process)
        yield process, folder / "run"


def host_process(launcher: subprocess.Popen[str]) -> psutil.Process:
    [found] = [process for process in processes_of(launcher) if process.cmdline()[:1] == ["paceline host process"]]
    return found


def test_a_lost_host_is_waited_for_and_its_parts_come_back_from_the_memory_of_the_others(tmp_path: Path) -> None:
    with training(tmp_path) as (process, run):
        host_process(process).kill()
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert outcome.says(
        "host host-1 (number 1), which had ranks 2, 3, is lost",
        "the others wait for it, 300 s at most. It is started again.",
    )
    assert outcome.says("going on from step ", "kept in memory", "rank 3 is back")
    assert not events(run, "resume"), "nothing was read from the disk"
    assert not events(run, "restart"), "the other ranks kept their processes"
    alone = tmp_path / "alone"
    alone.mkdir()
    undisturbed = paceline(*options_in(alone), folder=alone)
    assert undisturbed.code == 0, undisturbed.err
    assert losses(run) == losses(alone / "run")


def test_a_host_that_may_not_come_back_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with training(tmp_path, PACELINE_LOSSES_PER_HOUR="1") as (process, run):
        host_process(process).kill()
        outcome = ended(process)
    assert outcome.code == 1
    assert outcome.says(
        "the run cannot go on without it. It is left out: ", "host host-1 (number 1), which had ranks 2, 3, is lost"
    )
    assert max(losses(run)) < STEPS


def test_ctrl_c_while_a_host_is_waited_for_ends_the_run(tmp_path: Path) -> None:
    with training(tmp_path) as (process, run):
        cut_of(process.pid, host=1)
        wait_for(lambda: events(run, "host_lost"), process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code != 0
    assert outcome.says("host host-1 (number 1), which had ranks 2, 3, is lost", "the ranks were stopped")
