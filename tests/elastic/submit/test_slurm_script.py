"""Slurm's batch script, run by bash with stand-ins for srun, scancel and scontrol; a real Slurm is in test_slurm.py."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import checkpoints, ended, processes_of, started, wait_for, wait_for_step, write_job
from paceline.elastic.submit.scheduler import Request
from paceline.elastic.submit.slurm import Slurm
from paceline.errors import LaunchError
from refusals import raises


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def directives(**changes: object) -> dict[str, str]:
    """The `#SBATCH` lines of a script."""
    request = {"job": Path("/jobs/a b.yaml"), "hosts": 4, "name": "mine-1", "run": "/runs/mine", **changes}
    lines = Slurm().text(Request(**request)).splitlines()  # type: ignore[arg-type]
    found = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in found)}


def test_it_starts_one_process_a_node_and_is_warned_alone_before_the_limit() -> None:
    asked = directives(time_s=5_400)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["time"]) == ("4", "1", "90")
    assert asked["signal"] == "B:USR1@120"
    assert {"requeue", "exclusive", "open-mode"} <= asked.keys()


def test_a_short_limit_leaves_most_of_its_time_for_training() -> None:
    assert directives(time_s=60)["signal"] == "B:USR1@20"


def test_cores_of_a_node_instead_of_all_of_it() -> None:
    asked = directives(options={"cpus-per-task": "8", "partition": "gpu"})
    assert asked["cpus-per-task"] == "8"
    assert asked["partition"] == "gpu"
    assert "exclusive" not in asked


@pytest.mark.parametrize("value", ["a b", "a'b", "$(id)", "a;b", '"'])
def test_a_value_that_a_directive_cannot_hold_is_refused(value: str) -> None:
    with raises(LaunchError, "submit.slurm_value", name="partition"):
        directives(options={"partition": value})


def test_the_key_is_named_by_its_file_and_paths_are_quoted() -> None:
    script = Slurm().text(Request(Path("/jobs/a b; id.yaml"), 2, "mine-1", "/runs/$(id)"))
    assert "PRIVATE" not in script
    assert "'/jobs/a b; id.yaml'" in script
    assert "'/runs/$(id)'" in script


SRUN = """\
trap 'kill $!; exit {on_term}' TERM
echo $$ > {here}/step.part
mv {here}/step.part {here}/step
{then}
"""
SCANCEL = 'kill -TERM "$(cat {here}/step)"\n'
SCONTROL = 'echo "$@" > {here}/requeued\n'


@contextmanager
def batch(here: Path, *, on_term: int = 143, then: str) -> Iterator[subprocess.Popen[str]]:
    """The script under way, with a host process that ends after SIGTERM with `on_term`."""
    (here / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        file = here / "bin" / name
        file.write_text("#!/bin/bash\n" + text.format(here=here, on_term=on_term, then=then))
        file.chmod(0o700)
    script = here / "script"
    script.write_text(Slurm().text(Request(here / "job.yaml", 1, "mine", "run")))
    environment = os.environ | {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", script], env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process


def test_a_run_that_saved_at_the_limit_goes_back_into_the_queue(tmp_path: Path) -> None:
    with batch(tmp_path, then="sleep 60 & wait") as process:
        wait_for((tmp_path / "step").exists, process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 143
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert not (tmp_path / "home/submitted/mine.end").exists()


@pytest.mark.parametrize("code", [0, 1])
def test_one_that_finished_or_failed_after_the_warning_does_not(tmp_path: Path, code: int) -> None:
    with batch(tmp_path, on_term=code, then="sleep 60 & wait") as process:
        wait_for((tmp_path / "step").exists, process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == code
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / "home/submitted/mine.end").read_text() == f"{code}\n"


def test_one_that_was_cancelled_does_not(tmp_path: Path) -> None:
    with batch(tmp_path, then="sleep 60 & wait") as process:
        wait_for((tmp_path / "step").exists, process)
        os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)  # scancel signals the step
        assert process.wait(60) == 143
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_a_signal_to_every_process_of_a_run_has_it_saved_with_loader_processes_too(tmp_path: Path) -> None:
    data = {"kind": "synthetic", "samples": 48, "held_out": 0, "num_workers": 2}
    write_job(tmp_path / "job.yaml", data=data, stop={"steps": 1_000_000})
    arguments = ("train", "job.yaml", "--plan", "dp=1", "--run", "run")
    with started("paceline", *arguments, folder=tmp_path) as process:
        wait_for_step(10, tmp_path / "run", process)
        for pid in [*(one.pid for one in processes_of(process)), process.pid]:  # as Slurm does at a preemption
            os.kill(pid, signal.SIGTERM)
        assert ended(process).code == 143
    assert checkpoints(tmp_path / "run")
